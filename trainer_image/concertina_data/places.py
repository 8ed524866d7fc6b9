"""Data sets by URI: in a folder of this machine, or in a store whose files are copied to a cache folder."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from concertina_data.files import Content, ManifestFile, mapped
from concertina_state.errors import InvalidInput

OnWait = Callable[[str, float], None]
"""Function that is called during a wait, with the reason as a sentence and the seconds waited so far."""
PATIENCE_SECONDS = 600
"""Seconds that training waits for a store that is slow or unreachable.

After that, the round fails and the next round waits again. spec.failurePolicy limits the number of such rounds.
"""


def folder_on_node() -> Path:
    """Return the node's cache folder for copies of stored files. Each user of the machine has a separate one."""
    return Path(os.environ.get("CONCERTINA_CACHE", Path(tempfile.gettempdir(), f"concertina-data-{_user()}")))


def _user() -> int:
    """Return the user id of this process as the host sees it, outside of any user namespace.

    Within a user namespace, a user without privileges can appear with the id 0.
    """
    user = os.getuid()
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/uid_map").read_text().splitlines():
            inside, outside, count = map(int, line.split())
            if inside <= user < inside + count:
                return outside + user - inside
    return user


@dataclass(frozen=True)
class CacheSettings:
    """Settings of the folder with copies of stored files."""

    limit: int
    """Maximum size of the folder in bytes, for all data sets and rounds together."""
    patience: float = PATIENCE_SECONDS
    """Seconds for which a request is repeated if the store does not answer."""
    begun: bool = False
    """True if an earlier round of this run has read data from the store.

    If so, a request that the store refuses is retried.
    """
    folder: Path = field(default_factory=folder_on_node)


class DataPlace(Protocol):
    """Data set in a folder or a store."""

    uri: str

    @property
    def waiting_for(self) -> str:
        """Sentence for users about why a thread waits for a store at this moment, or "" if no thread waits."""
        ...

    def get(self, name: str, on_wait: OnWait = ...) -> bytes | None:
        """Return the contents of a small file, or None if the file does not exist.

        While a store does not answer, `on_wait` is called repeatedly with the reason.
        """
        ...

    def open(self, file: ManifestFile) -> Content:
        """Return the verified contents of the whole file.

        Raises:
            InvalidInput: When the file is missing or damaged.
        """
        ...


@contextlib.contextmanager
def _readable(path: str) -> Iterator[None]:
    try:
        yield
    except (PermissionError, NotADirectoryError, IsADirectoryError) as error:
        raise InvalidInput(
            f"{path} can't be read ({error.strerror}): let user {os.getuid()} read it, or correct the URI of the data."
        ) from error


class InPlace:
    """Data set in a folder, from which files are read without copying them."""

    waiting_for = ""

    def __init__(self, uri: str) -> None:
        self.uri = uri.removeprefix("file://").rstrip("/") or "/"
        with _readable(self.uri):
            exists = Path(self.uri).is_dir()
        if not exists:
            raise InvalidInput(f"{uri} does not exist: build the data there, or correct the URI of the data.")

    def get(self, name: str, on_wait: OnWait = lambda reason, seconds: None) -> bytes | None:
        with contextlib.suppress(FileNotFoundError), _readable(f"{self.uri}/{name}"):
            return Path(self.uri, name).read_bytes()
        return None

    def open(self, file: ManifestFile) -> Content:
        with _readable(f"{self.uri}/{file.file}"):
            content = mapped(Path(self.uri, file.file))
        if content is None:
            raise file.missing(self.uri)
        if not file.matches(content):
            raise file.damaged(self.uri, len(content))
        return content
