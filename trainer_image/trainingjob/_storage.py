"""Access to the client library of object stores, obstore."""

from __future__ import annotations

import importlib.util
import os
import sys


def find_client() -> None:
    """Make obstore importable, from the job's image or from the copy that the agent's image provides.

    A missing obstore is no error here, because a `file://` folder needs no client library.
    """
    if importlib.util.find_spec("obstore") is None:
        sys.path.append(os.path.join(os.environ.get("CONCERTINA_VOLUME") or "/concertina", "storage"))
