"""Durable storage (s3:// and file://): reading and writing objects, and errors as sentences that say what to do."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import LocalStore, S3Store

PATIENCE = timedelta(seconds=20)
"""How long one request is tried again before it is an error."""
IMPATIENCE = timedelta(seconds=3)


class StorageError(Exception):
    """A sentence for a person: what happened and what to do."""


class Changed(Exception):
    """A conditional write found another version than it named."""


class Folder:
    """The objects below one URI. Keys are relative to it; every method raises StorageError with a sentence."""

    def __init__(self, uri: str, patience: timedelta = PATIENCE, create: bool = False) -> None:
        self.uri = uri.rstrip("/")
        parts = urlsplit(self.uri)
        self._directory: Path | None = None
        self._bucket = ""
        if parts.scheme == "s3":
            self._bucket = parts.netloc
            self._store: S3Store | LocalStore = S3Store(
                parts.netloc,
                prefix=parts.path.strip("/") or None,
                client_options={"allow_http": True, "connect_timeout": timedelta(seconds=3)},
                retry_config={"max_retries": 50, "retry_timeout": patience},
            )
        elif parts.scheme in ("file", ""):
            self._directory = Path(parts.path)
            if not create and not self._directory.is_dir():
                raise StorageError(f"The folder {self._directory} does not exist: make it, or correct the URI.")
            with self._sentences("open"):
                self._store = LocalStore(self._directory, mkdir=create)
        else:
            raise StorageError(f"{uri} can't be used: its scheme must be s3:// or file://.")

    def get(self, key: str) -> bytes | None:
        """None where there is no such object."""
        found = self.get_version(key)
        return None if found is None else found[0]

    def get_version(self, key: str) -> tuple[bytes, str] | None:
        """With the version that `put_if` takes."""
        try:
            with self._sentences(f"read {key}"):
                result = obstore.get(self._store, key)
                return bytes(result.bytes()), result.meta["e_tag"] or ""
        except FileNotFoundError:
            return None

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """The bytes [begin, end) of each range."""
        with self._sentences(f"read {key}", missing_is_error=True):
            starts, ends = [begin for begin, _ in ranges], [end for _, end in ranges]
            return [memoryview(data) for data in obstore.get_ranges(self._store, key, starts=starts, ends=ends)]

    def put(self, key: str, value: bytes | Path) -> None:
        with self._sentences(f"write {key}", missing_is_error=True):
            obstore.put(self._store, key, value)

    def put_if(self, key: str, value: bytes, version: str | None) -> None:
        """Write only over this version (None: only where there is nothing); else raises Changed."""
        with self._sentences(f"write {key}", missing_is_error=True):
            try:
                if self._directory is not None:
                    self._put_if_local(self._directory / key, value, version)
                else:
                    obstore.put(self._store, key, value, mode="create" if version is None else {"e_tag": version})
            except (AlreadyExistsError, PreconditionError) as error:
                raise Changed(key) from error

    def _put_if_local(self, path: Path, value: bytes, version: str | None) -> None:
        """obstore has no conditional overwrite of files: a lock beside the file makes one, on this file system."""
        with path.with_name(path.name + ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = self.get_version(path.name)
            if (found and found[1]) != version:
                raise Changed(path.name)
            obstore.put(self._store, path.name, value)

    def list(self, prefix: str) -> dict[str, int]:
        """Sizes by key, of the objects below `prefix` (a whole folder name)."""
        with self._sentences(f"list {prefix}"):
            return {item["path"]: item["size"] for batch in obstore.list(self._store, prefix) for item in batch}

    def delete(self, keys: Sequence[str]) -> None:
        """Those that are not there any more are no error."""
        with self._sentences("delete old checkpoints"), contextlib.suppress(FileNotFoundError):
            for key in keys:
                obstore.delete(self._store, key)

    @contextlib.contextmanager
    def _sentences(self, doing: str, missing_is_error: bool = False) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            if missing_is_error or "NoSuchBucket" in str(error):
                raise StorageError(self._sentence(doing, error)) from error
            raise
        except (BaseError, OSError, ValueError) as error:
            raise StorageError(self._sentence(doing, error)) from error

    def _sentence(self, doing: str, error: Exception) -> str:
        text = str(error)
        where = os.environ.get("AWS_ENDPOINT_URL", "AWS") if self._bucket else "this file system"
        if "NoSuchBucket" in text:
            return f"The bucket {self._bucket} does not exist at {where}: create it, or correct the URI {self.uri}."
        if self._bucket and (
            isinstance(error, (PermissionDeniedError, UnauthenticatedError)) or "403 Forbidden" in text
        ):
            return (
                f"{where} refused the credentials for {self.uri} ({doing}): put an access key that may read and write "
                "it into the Secret that checkpoint.secretName names."
            )
        if isinstance(error, PermissionError) or "Permission denied" in text:
            return f"{self.uri} may not be written by this user ({doing}): correct its permissions or the URI."
        if any(sign in text for sign in ("error sending request", "onnect", "dns error", "timed out")):
            return f"{where} can't be reached for {self.uri} ({doing}): check the endpoint and the network."
        return f"Could not {doing} below {self.uri}: {text.splitlines()[0][:300]}."
