"""Reading sequences of tokens: shards mapped where they lie on disk, or fetched whole into a cache on the node."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import tempfile
from collections import OrderedDict
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from concertina_trainer.config import DataConfig
from concertina_trainer.data.manifest import NAME, Manifest, Shard, parse
from concertina_trainer.data.order import WINDOW, Order
from concertina_trainer.data.tokenizer import TYPES
from concertina_trainer.errors import BadInput
from concertina_trainer.storage import Folder


class Reader:
    """Sequences by position. Each shard's checksum is verified once per node and version of the file."""

    def __init__(self, config: DataConfig, sequence_length: int, seed: int) -> None:
        parts = urlsplit(config.uri)
        if parts.scheme != "s3" and not Path(parts.path).is_dir():
            raise BadInput(f"{config.uri} does not exist: build the data there, or correct trainer.data.uri.")
        self._folder = Folder(config.uri)
        self._directory = None if parts.scheme == "s3" else Path(parts.path)
        text = self._folder.get(NAME)
        if text is None:
            raise BadInput(f"{config.uri} has no {NAME}: build the data there, or correct trainer.data.uri.")
        self.manifest: Manifest = parse(text, config.uri)
        self._length = sequence_length
        counts = self.manifest.sequences(sequence_length)
        if not sum(counts):
            raise BadInput(f"no shard of {config.uri} is as long as one sequence of {sequence_length} tokens.")
        self.order = Order(counts, seed)
        root = Path(os.environ.get("CONCERTINA_CACHE", Path(tempfile.gettempdir(), f"concertina-data-{os.getuid()}")))
        self._cache = Cache(root / self.manifest.digest, config.cache_mebibytes * 2**20)
        self._open: OrderedDict[int, NDArray[np.generic]] = OrderedDict()

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens [stop - start, sequence_length + 1] of the positions [start, stop)."""
        shards, rows = self.order.locate(start, stop)
        result = np.empty((stop - start, self._length + 1), dtype=np.int64)
        for i, (shard, row) in enumerate(zip(shards.tolist(), rows.tolist(), strict=True)):
            begin = row * self._length
            result[i] = self._tokens(shard)[begin : begin + self._length + 1]
        return result

    def _tokens(self, index: int) -> NDArray[np.generic]:
        if index in self._open:
            self._open.move_to_end(index)
            return self._open[index]
        shard = self.manifest.shards[index]
        path = self._directory / shard.file if self._directory else self._cache.fetch(self._folder, shard)
        self._cache.verify(path, shard, f"{self._folder.uri}/{shard.file}")
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        self._open[index] = np.frombuffer(mapped, dtype=TYPES[self.manifest.token_bytes])
        if len(self._open) > 2 * WINDOW:
            self._open.popitem(last=False)
        return self._open[index]


class Cache:
    """A folder on the node, shared by its workers and by the rounds, of at most `limit` bytes of shards."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit
        folder.mkdir(parents=True, exist_ok=True)

    def fetch(self, source: Folder, shard: Shard) -> Path:
        """The shard's file, brought here if it is not; files that were not used for longest give way."""
        path = self._folder / shard.file
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the node's other workers want the same one
            if path.exists():
                path.touch()
                return path
            self._make_room(shard.size)
            [content] = source.get_ranges(shard.file, [(0, shard.size)])
            draft = path.with_suffix(".new")
            draft.write_bytes(content)
            draft.replace(path)
        return path

    def _make_room(self, needed: int) -> None:
        held = sorted(self._folder.glob("*.bin"), key=_used_at)
        total = needed + sum(_size(path) for path in held)
        for path in held:
            if total <= self._limit:
                return
            total -= _size(path)
            path.unlink(missing_ok=True)  # whoever has it mapped keeps it

    def verify(self, path: Path, shard: Shard, name: str) -> None:
        """Raises BadInput with a sentence where the content is not what the manifest says."""
        try:
            status = path.stat()
        except FileNotFoundError:
            raise BadInput(f"{name} is missing though the manifest names it: bring it back, or build again.") from None
        cached = path.parent == self._folder  # there the time of change is the time of last use
        changed = 0 if cached else status.st_mtime_ns
        identity = f"{path.resolve()} {status.st_size} {changed} {status.st_ino} {shard.sha256}"
        mark = self._folder / f"{hashlib.sha256(identity.encode()).hexdigest()[:16]}.verified"
        if mark.exists():
            return
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != shard.sha256:
            if cached:
                path.unlink(missing_ok=True)
            raise BadInput(
                f"{name} is damaged: the manifest says sha256 {shard.sha256} and {shard.size} bytes, the file has "
                f"{found} and {status.st_size} bytes. Copy it again, or build the data again."
            )
        mark.touch()


def _used_at(path: Path) -> float:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_mtime
    return 0.0


def _size(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return 0
