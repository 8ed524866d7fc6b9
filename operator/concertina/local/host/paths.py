"""Folders of the local cluster. Checkouts share the binaries, but each cluster has its own state."""

import hashlib
import os
import re
from pathlib import Path


def checkout() -> Path:
    """Return the folder that contains operator/, tools/ and charts/ (of a source checkout or an editable install)."""
    return Path(__file__).resolve().parents[4]


def cache() -> Path:
    """Return the folder of everything that can be recreated: $XDG_CACHE_HOME/concertina."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "concertina"


def clusters() -> Path:
    """Return the folder with one state folder per cluster."""
    return cache() / "clusters"


def default_name() -> str:
    """Return a cluster name that differs between checkouts, so that their clusters never conflict."""
    folder = checkout()
    if not (folder / "pyproject.toml").exists():
        return "default"
    stem = re.sub(r"[^a-z0-9]+", "-", folder.name.lower()).strip("-") or "checkout"
    return f"{stem}-{hashlib.sha256(str(folder).encode()).hexdigest()[:6]}"
