"""Source files that fsspec reads. Its drivers support the URIs `hdfs://`, `https://`, `hf://`, `sftp://` and others.

Stores that obstore supports (`s3://`, `gs://`, `az://`) are not read by fsspec.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from importlib.metadata import metadata
from typing import Any

import fsspec
from fsspec.core import url_to_fs

from concertina_state.errors import InvalidInput
from concertina_state.objects.prefix import ObjectEntry, StorageError

_TIMES = ("mtime", "LastModified", "last_modified", "updated")
"""Names by which drivers report the time of the last change."""
_UNKNOWN = datetime.datetime.fromtimestamp(0, datetime.UTC)
_ADVICE = {
    "hdfs": "HDFS needs Java and Hadoop's client: set JAVA_HOME, HADOOP_HOME, and CLASSPATH to the output of "
    "`hadoop classpath --glob`",
}
"""Advice for the case that a driver can't open its file system, if the driver's own message is not enough."""


def listed(uri: str) -> dict[str, ObjectEntry]:
    """Return the size and time of each file below a URI, keyed by the file's path relative to the URI.

    The key is "" if the URI is itself a file. If the driver does not report a file's time, the result is a time in
    1970.

    Raises:
        InvalidInput: When the driver is not installed, or the URI does not exist.
        StorageError: When the files can't be listed.
    """
    with _as_messages(uri):
        system, root = _opened(uri)
        whole = system.info(root)
        if whole["type"] == "file":
            return {"": _entry(uri, whole)}
        found = system.find(root, detail=True)
    return {path.removeprefix(root).lstrip("/"): _entry(f"{uri}: {path}", info) for path, info in found.items()}


def read_range(uri: str, begin: int, end: int) -> bytes:
    """Return the bytes from `begin` to `end` - 1 of the file at a URI.

    Raises:
        InvalidInput: When the driver is not installed, or the file does not exist.
        StorageError: When the file can't be read.
    """
    with _as_messages(uri):
        system, path = _opened(uri)
        return bytes(system.cat_file(path, start=begin, end=end))


def _opened(uri: str) -> tuple[Any, str]:
    """Return the file system of a URI, and the path in it.

    Raises:
        InvalidInput: When there is no driver for the URI, or the driver is not installed.
        StorageError: When the driver can't open its file system.
    """
    protocol = uri.partition("://")[0].rpartition("::")[2]
    try:
        return url_to_fs(uri)  # type: ignore[no-any-return]
    except ImportError as error:
        missing = error.__cause__.name if isinstance(error.__cause__, ModuleNotFoundError) else None
        extras = metadata("fsspec").get_all("Provides-Extra") or []
        package = f"fsspec[{protocol}]" if protocol in extras else missing or f"the driver of {protocol}"
        raise InvalidInput(f"{uri} needs fsspec's driver for {protocol}: pip install '{package}'") from error
    except (OSError, ValueError) as error:
        if protocol not in fsspec.available_protocols():
            raise InvalidInput(f"{uri} can't be used: fsspec has no driver for {protocol}://.") from error
        advice = f" {_ADVICE[protocol]}." if protocol in _ADVICE else ""
        raise StorageError(f"{uri} can't be opened ({_first_line(error)}).{advice}") from error


@contextlib.contextmanager
def _as_messages(uri: str) -> Iterator[None]:
    """Convert errors that drivers raise in the `with` block, which may be of any class.

    Raises:
        InvalidInput: When a file does not exist.
        StorageError: When the driver failed for another reason.
    """
    try:
        yield
    except (InvalidInput, StorageError):
        raise
    except FileNotFoundError as error:
        raise InvalidInput(f"{uri} does not exist: correct the URI.") from error
    except Exception as error:
        raise StorageError(f"{uri} can't be read ({_first_line(error)}): try again, or copy the files.") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:300].rstrip(".")


def _entry(where: str, info: dict[str, Any]) -> ObjectEntry:
    """Return the size and time of a file, which drivers report in different ways.

    Raises:
        InvalidInput: When the driver reports no size.
    """
    if not isinstance(info.get("size"), int):
        raise InvalidInput(f"{where} has no known size: copy the file, or name a server that reports its size.")
    time = next((info[name] for name in _TIMES if info.get(name) is not None), _UNKNOWN)
    if isinstance(time, str):
        with contextlib.suppress(ValueError):
            time = datetime.datetime.fromisoformat(time)
    if isinstance(time, int | float):
        time = datetime.datetime.fromtimestamp(time, datetime.UTC)
    return ObjectEntry(info["size"], time if isinstance(time, datetime.datetime) else _UNKNOWN)
