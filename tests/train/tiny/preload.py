"""What the warm parent imports."""

import tiny.uploader
import tiny.worker  # noqa: F401
