"""Where the local cluster keeps things: binaries are shared between checkouts, a cluster's state is its own."""

import hashlib
import os
import re
from pathlib import Path


def checkout() -> Path:
    """The folder that holds operator/, tools/ and charts/ (of a source checkout or an editable install)."""
    return Path(__file__).resolve().parents[4]


def cache() -> Path:
    """The folder of everything that can be made again: $XDG_CACHE_HOME/concertina."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "concertina"


def clusters() -> Path:
    """The folder with one state folder per cluster."""
    return cache() / "clusters"


def default_name() -> str:
    """A cluster name that differs between checkouts, so that two of them never meet."""
    folder = checkout()
    if not (folder / "pyproject.toml").exists():
        return "default"
    stem = re.sub(r"[^a-z0-9]+", "-", folder.name.lower()).strip("-") or "checkout"
    return f"{stem}-{hashlib.sha256(str(folder).encode()).hexdigest()[:6]}"
