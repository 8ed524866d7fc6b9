"""Imports of the warm parent."""

from . import uploader, worker  # noqa: F401
