"""What the warm parent imports."""

from . import uploader, worker  # noqa: F401
