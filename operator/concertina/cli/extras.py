"""Optional dependencies (extras) of concertina-cli, and the error that says how to install a missing one."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator


class Extra(enum.Enum):
    """Names of the extras of concertina-cli that some commands need, such as `storage` in `concertina-cli[storage]`."""

    STORAGE = "storage"
    DATA = "data"
    TORCH = "torch"
    DATA_AND_TORCH = "data,torch"


class ExtraMissing(Exception):
    """Error: an optional package is not installed. The message contains the command that installs the extra."""


@contextlib.contextmanager
def needing(extra: Extra) -> Iterator[None]:
    """Context manager that names the extra to install if a package is missing.

    Raises:
        ExtraMissing: When a package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ExtraMissing(
            f"This command needs {error.name}, which is not installed: pip install 'concertina-cli[{extra.value}]'"
        ) from error
