"""How large a file is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Union


def size_of(path: Union[str, Path]) -> int:
    """Bytes; 0 where there is no such file."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
