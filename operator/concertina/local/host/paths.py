"""Folders that the local cluster uses. All checkouts share the programs, but each cluster has its own state."""

import hashlib
import os
import re
from pathlib import Path


def checkout() -> Path:
    """Return the root folder of the source checkout, which contains operator/, tools/ and charts/."""
    return Path(__file__).resolve().parents[4]


def cache() -> Path:
    """Return the folder for files that can be created again: $XDG_CACHE_HOME/concertina."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "concertina"


def clusters() -> Path:
    """Return the folder that contains a state folder for each cluster."""
    return cache() / "clusters"


def default_name() -> str:
    """Return the default cluster name. It is different for each checkout, so that their clusters do not conflict."""
    folder = checkout()
    if not (folder / "pyproject.toml").exists():
        return "default"
    stem = re.sub(r"[^a-z0-9]+", "-", folder.name.lower()).strip("-") or "checkout"
    return f"{stem}-{hashlib.sha256(str(folder).encode()).hexdigest()[:6]}"
