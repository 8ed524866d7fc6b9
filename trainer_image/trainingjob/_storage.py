"""The client library of object stores."""

from __future__ import annotations

import importlib.util
import os
import sys


def find_client() -> None:
    """Make obstore importable: the one in this image, or else the one that the agent's image brings.

    A folder needs no client, so a missing obstore is no error here.
    """
    if importlib.util.find_spec("obstore") is None:
        sys.path.append(os.path.join(os.environ.get("CONCERTINA_VOLUME") or "/concertina", "storage"))
