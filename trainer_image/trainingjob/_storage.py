"""The client of object stores."""

from __future__ import annotations

import importlib.util
import os
import sys


def find_client() -> None:
    """Of this image, or what the agent's has brought along; folders need none."""
    if importlib.util.find_spec("obstore") is None:
        sys.path.append(os.path.join(os.environ.get("CONCERTINA_VOLUME") or "/concertina", "storage"))
