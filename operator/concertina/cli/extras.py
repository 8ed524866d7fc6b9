"""Extras of the distribution concertina-cli, and the command that installs the one that is missing."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator


class Extra(enum.Enum):
    """Packages that a part of the commands needs beside the base install."""

    STORAGE = "storage"
    DATA = "data"


class ExtraMissing(Exception):
    """A package is not installed. The message has the command that installs it."""


@contextlib.contextmanager
def needing(extra: Extra) -> Iterator[None]:
    """Name the extra if the block lacks a package.

    Raises:
        ExtraMissing: When the package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ExtraMissing(
            f"This command needs {error.name}, which is not installed: pip install 'concertina-cli[{extra.value}]'"
        ) from error
