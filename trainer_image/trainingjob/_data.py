"""`trainingjob.data`: this rank's rows of each step's batch, read ahead by a thread.

Which sequences a step has is told by how many were consumed before it, and by nothing of the world; the world only says
which of them are this rank's."""

from __future__ import annotations

import concurrent.futures
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from torch import Tensor

import trainingjob
from concertina_data.opening import Threads
from concertina_data.places import CacheSettings
from concertina_data.sequences import Sequences
from concertina_protocol.stderr import log
from concertina_state.errors import BadInput, DataChanged
from trainingjob import _storage
from trainingjob._counted import Counted
from trainingjob._refusals import told

AHEAD = 2
"""Batches that are read before they are asked for."""
TELL_SECONDS = 1.0
"""Between two words of why data are waited for."""


class Data(Counted):
    def __init__(
        self, uri: str, length: int, batch: int, seed: int, rank: int, size: int, cache_mebibytes: int
    ) -> None:
        """See `trainingjob.data`."""
        _storage.find_client()
        self._uri, self._length, self._batch, self._seed = uri, length, batch, seed
        self._begin, self._end = batch * rank // size, batch * (rank + 1) // size
        self.weight = (self._end - self._begin) * size / batch
        """By which the mean over this rank's rows is multiplied, so that the mean over all ranks is that over the
        batch; 1.0 where the batch divides evenly."""
        self.samples = 0
        """Sequences that all ranks together have consumed since the run began."""
        begun = trainingjob.world().round > 1
        with told():
            _check(length, batch, rank, size)
            self._sequences = Sequences(uri, length, seed, CacheSettings(cache_mebibytes << 20, begun=begun))
        self._threads = Threads(1)
        self._ahead: deque[concurrent.futures.Future[Tensor]] = deque()
        self._told = ""

    @property
    def digest(self) -> str:
        """Names the data: the same wherever they lie."""
        return self._sequences.digest

    @property
    def epoch_size(self) -> int:
        """Sequences of the data; after so many another epoch begins, in another order."""
        return self._sequences.epoch_size

    @property
    def vocab_size(self) -> int:
        """Tokens are below this."""
        return self._sequences.vocab_size

    def __iter__(self) -> Data:
        return self

    def __next__(self) -> Tensor:
        """This rank's rows of the next step: int64 [rows, length + 1], on the CPU."""
        while len(self._ahead) <= AHEAD:
            start = self.samples + len(self._ahead) * self._batch
            self._ahead.append(self._threads.submit(self._reading(start)))
        try:
            with told():
                rows = self._wait(self._ahead.popleft())
        except BaseException:
            self._begin_anew()
            raise
        self.samples += self._batch
        return rows

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples, "data": self.digest, "length": self._length, "seed": self._seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on behind what was consumed, in whatever world and batch. Raises BadInput where a position there is
        another sequence here."""
        with told():
            self._check_same(state)
        self.samples = int(state["samples"])
        self._begin_anew()

    def _check_same(self, state: Mapping[str, Any]) -> None:
        mine = self.state_dict()
        for name, what in (("data", "digest of data"), ("length", "length"), ("seed", "seed")):
            if state[name] != mine[name]:
                refused = DataChanged if name == "data" else BadInput
                raise refused(
                    f"the saved state has consumed sequences of the {what} {state[name]}, and {self._uri} is read "
                    f"with the {what} {mine[name]}, by which they are others: give what the run began with, or "
                    "begin another run."
                )

    def _reading(self, start: int) -> Any:
        sequences, begin, end = self._sequences, start + self._begin, start + self._end
        return lambda: sequences.rows(begin, end)

    def _begin_anew(self) -> None:
        for future in self._ahead:
            future.cancel()
        self._ahead.clear()

    def _wait(self, future: concurrent.futures.Future[Tensor]) -> Tensor:
        channel, began = trainingjob.connection(), time.perf_counter()
        while not concurrent.futures.wait([future], TELL_SECONDS).done:
            reason = self._sequences.waiting_for
            if reason and reason != self._told:
                log(f"trainingjob: waiting for data: {reason}")
                self._told = reason
            if reason and channel:
                channel.stalled(reason, time.perf_counter() - began)
        if channel:
            channel.waited(time.perf_counter() - began)
        return future.result()


def _check(length: int, batch: int, rank: int, size: int) -> None:
    if length < 1 or batch < 1 or not 0 <= rank < size:
        raise BadInput(f"there is no rank {rank} of {size} with sequences of {length} tokens in batches of {batch}.")
    if batch < size:
        raise BadInput(
            f"a batch of {batch} sequences can't be shared by {size} ranks, each of which needs one at least: make the "
            "batch larger, or the world smaller (spec.replicas)."
        )
