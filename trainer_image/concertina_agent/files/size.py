"""Size of a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Union


def size_of(path: Union[str, Path]) -> int:
    """Return the size of a file in bytes, or 0 if there is no such file."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
