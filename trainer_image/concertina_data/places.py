"""Where data lie: a folder of this machine, or a store, of which a bounded folder of this machine keeps copies."""

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
"""Why something is waited for, in a sentence, and for how many seconds now."""
PATIENCE_SECONDS = 600
"""For which a store that is slow or away only stalls the training. Then the round fails and the next one waits anew:
how long in all is failurePolicy's to say."""


def folder_on_node() -> Path:
    """Return the folder that keeps what stores give: one for each user of the machine."""
    return Path(os.environ.get("CONCERTINA_CACHE", Path(tempfile.gettempdir(), f"concertina-data-{_user()}")))


def _user() -> int:
    """Return this user's id outside of its user namespace, in which an ordinary user may have root's."""
    user = os.getuid()
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/uid_map").read_text().splitlines():
            inside, outside, count = map(int, line.split())
            if inside <= user < inside + count:
                return outside + user - inside
    return user


@dataclass(frozen=True)
class CacheSettings:
    """Of the folder that keeps what stores give."""

    limit: int
    """Bytes, for all data sets and rounds."""
    patience: float = PATIENCE_SECONDS
    """Seconds for which a store that doesn't answer is asked again."""
    begun: bool = False
    """The run has read its data before, in an earlier round, so that a store that refuses now is waited for."""
    folder: Path = field(default_factory=folder_on_node)


class DataPlace(Protocol):
    uri: str

    @property
    def waiting_for(self) -> str:
        """Why a thread is waiting for a store right now: a sentence; "" where none is."""
        ...

    def get(self, name: str, on_wait: OnWait = ...) -> bytes | None:
        """A small file; None where there is no such one. `on_wait`: why it is waited for, again and again."""
        ...

    def open(self, wanted: ManifestFile) -> Content:
        """The whole file, checked. Raises InvalidInput where it is missing or damaged."""
        ...


@contextlib.contextmanager
def _readable(what: str) -> Iterator[None]:
    try:
        yield
    except (PermissionError, NotADirectoryError, IsADirectoryError) as error:
        raise InvalidInput(
            f"{what} can't be read ({error.strerror}): let user {os.getuid()} read it, or correct the URI of the data."
        ) from error


class InPlace:
    """A folder, whose files are read where they lie."""

    waiting_for = ""

    def __init__(self, uri: str) -> None:
        self.uri = uri.removeprefix("file://").rstrip("/") or "/"
        with _readable(self.uri):
            there = Path(self.uri).is_dir()
        if not there:
            raise InvalidInput(f"{uri} does not exist: build the data there, or correct the URI of the data.")

    def get(self, name: str, on_wait: OnWait = lambda reason, seconds: None) -> bytes | None:
        with contextlib.suppress(FileNotFoundError), _readable(f"{self.uri}/{name}"):
            return Path(self.uri, name).read_bytes()
        return None

    def open(self, wanted: ManifestFile) -> Content:
        with _readable(f"{self.uri}/{wanted.file}"):
            content = mapped(Path(self.uri, wanted.file))
        if content is None:
            raise wanted.missing(self.uri)
        if not wanted.matches(content):
            raise wanted.damaged(self.uri, len(content))
        return content
