"""Imports of the warm parent."""

from . import uploader, warm_up, worker  # noqa: F401
