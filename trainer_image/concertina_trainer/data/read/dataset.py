"""One data set: its order, and its shards as they are opened, ahead of their use and by several threads."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from concertina_state.errors import BadInput
from concertina_state.objects.prefix import parts_of
from concertina_trainer.config import DocumentMode
from concertina_trainer.data import packing
from concertina_trainer.data.manifest import NAME, DataManifest, parse
from concertina_trainer.data.order import WINDOW, Order
from concertina_trainer.data.read.cache import Cache, OnWait, documents_file, tokens_file
from concertina_trainer.data.sequence_plan import PLANNERS, SequencePlan
from concertina_trainer.data.tokenizer import TYPES


@dataclass(frozen=True)
class Opened:
    tokens: NDArray[np.unsignedinteger]
    plan: SequencePlan | None
    """None where sequences are cut without regard to documents."""


class DataSet:
    """Sequences of `length` tokens of the data at one URI."""

    def __init__(
        self, uri: str, mode: DocumentMode, length: int, seed: int, cache: Cache, pool: Executor, most_bytes: int,
        on_wait: OnWait,
    ) -> None:  # fmt: skip
        """`most_bytes`: of shards kept open. `on_wait`: while the store is waited for, now. Raises BadInput."""
        scheme, _, path = parts_of(uri)
        if scheme in ("", "file") and not Path(path).is_dir():
            raise BadInput(f"{uri} does not exist: build the data there, or correct trainer.data.uri.")
        self._folder = cache.folder(uri)
        text = cache.get(self._folder, NAME, on_wait)
        if text is None:
            raise BadInput(f"{uri} has no {NAME}: build the data there, or correct trainer.data.uri.")
        self.manifest: DataManifest = parse(text, uri)
        self._mode, self._length = mode, length
        self._cache, self._pool, self._most = cache, pool, most_bytes
        self._counts = self._sequences(on_wait)
        if not sum(self._counts):
            raise BadInput(f"no shard of {uri} is as long as one sequence of {length} tokens.")
        self.order = Order(self._counts, seed)
        self._open: OrderedDict[int, Future[Opened]] = OrderedDict()
        self._open_bytes = 0

    def _sequences(self, on_wait: OnWait) -> list[int]:
        """Of each shard."""
        if self._mode in (DocumentMode.joined, DocumentMode.masked):
            return self.manifest.sequences(self._length)
        text = self._cache.get(self._folder, packing.name(self._length), on_wait)
        found = packing.read(text, self._folder.uri, self.manifest, self._length)
        return list(found.packed if self._mode is DocumentMode.packed else found.bucketed)

    def shard(self, index: int) -> Opened:
        """Waits where it is not there yet. Raises what opening it raised; the next call tries again."""
        future = self._opening(index)
        try:
            return future.result()
        except BaseException:
            del self._open[index]
            self._open_bytes -= self.manifest.shards[index].size
            raise

    def expect(self, place: int) -> None:
        """Begin to open what sequences from `place` on will need, as far as there is room."""
        room = self._most
        for index in self.order.nearby(place):
            room -= self.manifest.shards[index].size
            if room < 0:
                return
            self._opening(index)

    def _opening(self, index: int) -> Future[Opened]:
        if index in self._open:
            self._open.move_to_end(index)
            return self._open[index]
        self._open_bytes += self.manifest.shards[index].size
        while self._open and (self._open_bytes > self._most or len(self._open) >= 3 * WINDOW):
            oldest, _ = self._open.popitem(last=False)
            self._open_bytes -= self.manifest.shards[oldest].size
        self._open[index] = self._pool.submit(self._opened, index)
        return self._open[index]

    def _opened(self, index: int) -> Opened:
        shard = self.manifest.shards[index]
        tokens = self._cache.open(self._folder, tokens_file(shard)).view(TYPES[self.manifest.token_bytes])
        if self._mode is DocumentMode.joined:
            return Opened(tokens, None)
        begins = self._cache.open(self._folder, documents_file(shard)).view("<u8").astype(np.int64)
        plan = PLANNERS[self._mode](begins, shard.tokens, self._length)
        if len(plan) != self._counts[index]:
            raise BadInput(
                f"{self._folder.uri}/{shard.file} gives {len(plan)} sequences, and {self._counts[index]} were planned: "
                f"run `concertina data pack {self._folder.uri} --length {self._length}` again."
            )
        return Opened(tokens, plan)
