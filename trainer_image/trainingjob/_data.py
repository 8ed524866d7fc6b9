"""`trainingjob.data`: this rank's rows of each step's batch, read ahead by a thread.

The sequences of a step depend only on the number of sequences consumed before it, not on the number of ranks. The
number of ranks decides which of these sequences this rank gets.
"""

from __future__ import annotations

import concurrent.futures
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from concertina_data.order import MOST_GROUPS, by_group
from concertina_data.places import CacheSettings
from concertina_data.sequences import Sequences
from concertina_data.threads import Threads
from concertina_protocol.stderr import write_line
from concertina_state.errors import DataChanged, InvalidInput
from trainingjob import _connection, _storage
from trainingjob._counted import SampleCounter
from trainingjob._refusals import faults_reported
from trainingjob._world import world

if TYPE_CHECKING:
    from torch import Tensor

AHEAD = 2
"""Batches that are read before they are needed."""
_DESCRIPTIONS = {"data": "digest of data", "length": "length", "seed": "seed", "groups": "groups"}
"""Names in messages of the settings that determine the order of sequences, keyed by the setting."""
REPORT_SECONDS = 1.0
"""Seconds between two reports of a wait for data."""


class Data(SampleCounter):
    """Endless iterator over this rank's rows of each step's batch, which `trainingjob.data` returns.

    Each item is an int64 tensor of shape `[rows, length + 1]` on the CPU, or a memoryview of that shape without torch.
    """

    def __init__(
        self, uri: str, length: int, batch: int, seed: int, groups: int, rank: int, size: int, cache_mebibytes: int
    ) -> None:
        """Open the training data. See `trainingjob.data` for the arguments and errors."""
        _storage.find_client()
        self._uri, self._length, self._batch, self._seed, self._groups = uri, length, batch, seed, groups
        self._begin, self._end = batch * rank // size, batch * (rank + 1) // size
        self.weight = (self._end - self._begin) * size / batch
        """Factor to multiply this rank's mean loss by, so that the mean over the ranks is the mean over the batch.

        It is 1.0 if the batch divides evenly by the number of ranks.
        """
        self.samples = 0
        """Sequences that all ranks together have consumed since the run began."""
        has_read_before = world().round > 1
        with faults_reported():
            _check(length, batch, groups, rank, size)
            cache = CacheSettings(cache_mebibytes << 20, begun=has_read_before)
            self._sequences = Sequences(uri, length, seed, cache, groups)
        self._threads = Threads(1)
        self._ahead: deque[concurrent.futures.Future[Tensor]] = deque()
        self._logged_reason = ""
        self._closed = False
        _live.add(self)

    @property
    def digest(self) -> str:
        """Digest of the data's content. It does not depend on where the data are stored."""
        return self._sequences.digest

    @property
    def epoch_size(self) -> int:
        """Number of sequences in the data. After this many sequences, the next epoch begins in another order."""
        return self._sequences.epoch_size

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary. Every token id is less than this."""
        return self._sequences.vocab_size

    def __iter__(self) -> Data:
        return self

    def __next__(self) -> Tensor:
        """Return this rank's rows of the next step's batch: int64 `[rows, length + 1]`, on the CPU.

        If torch is not installed, the rows are a memoryview, which `numpy.asarray` takes without a copy.

        Raises:
            concertina_state.errors.InvalidInput: The data are damaged.
            concertina_state.objects.prefix.StorageError: The store has not answered for ten minutes.
            RuntimeError: The data were opened in an earlier round (`trainingjob.run`).
        """
        if self._closed:
            raise RuntimeError("these data were opened in an earlier round: open them within the function of run()")
        while len(self._ahead) <= AHEAD:
            start = self.samples + len(self._ahead) * self._batch
            self._ahead.append(self._threads.submit(self._reader(start)))
        try:
            with faults_reported():
                rows = self._wait(self._ahead.popleft())
        except BaseException:
            self._discard_ahead()
            raise
        self.samples += self._batch
        return rows

    def close(self) -> None:
        """Stop reading. In the next round, this rank has other rows of the batches."""
        self._closed = True
        self._discard_ahead()
        self._threads.end()

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, and the settings that determine which sequence is at each position."""
        settings = {"data": self.digest, "length": self._length, "seed": self._seed, "groups": self._groups}
        return {"samples": self.samples, **settings}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the sequences that the saved run has consumed.

        The number of ranks and the batch size may differ from those of the saved run.

        Args:
            state: The result of `state_dict`.

        Raises:
            concertina_state.errors.InvalidInput: The data, `length`, `seed` or `groups` differ from the saved run, so
                the sequences are in another order.
        """
        with faults_reported():
            self._check_same(state)
        self.samples = int(state["samples"])
        self._discard_ahead()

    def _check_same(self, state: Mapping[str, Any]) -> None:
        own = self.state_dict()
        for name, description in _DESCRIPTIONS.items():
            if state[name] != own[name]:
                error = DataChanged if name == "data" else InvalidInput
                raise error(
                    f"the saved state read its data with the {description} {state[name]}, but {self._uri} "
                    f"is now opened with the {description} {own[name]}, which gives other sequences: use "
                    "the saved value, or start another run."
                )

    def _reader(self, start: int) -> Callable[[], Tensor]:
        """Return a function that reads this rank's rows of the batch whose first sequence has the number `start`."""
        sequences, groups = self._sequences, self._groups
        batch, begin, end = range(start, start + self._batch), self._begin, self._end
        return lambda: sequences.rows(by_group(batch, groups)[begin:end])

    def _discard_ahead(self) -> None:
        """Drop the batches that a thread has read in advance, because the position has changed."""
        for future in self._ahead:
            future.cancel()
        self._ahead.clear()

    def _wait(self, future: concurrent.futures.Future[Tensor]) -> Tensor:
        """Wait for a batch that a thread reads. If the wait is long, report the reason to the agent."""
        channel, began = _connection.agent_channel(), time.perf_counter()
        while not concurrent.futures.wait([future], REPORT_SECONDS).done:
            reason = self._sequences.waiting_for
            if reason and reason != self._logged_reason:
                write_line(f"trainingjob: waiting for data: {reason}")
                self._logged_reason = reason
            if reason and channel:
                channel.report_stall(reason, time.perf_counter() - began)
        if channel:
            channel.add_stall(time.perf_counter() - began)
        return future.result()


_live: weakref.WeakSet[Data] = weakref.WeakSet()


def end_round() -> None:
    """Close the data that the script has opened in this round. A process calls this when it leaves a round.

    The next round of `trainingjob.run` opens the data again.
    """
    while _live:
        _live.pop().close()


def _check(length: int, batch: int, groups: int, rank: int, size: int) -> None:
    """Refuse a batch that the ranks can't share.

    Raises:
        InvalidInput: A number is out of range, or there are fewer sequences in a batch than ranks.
    """
    if length < 1 or batch < 1 or not 0 <= rank < size:
        raise InvalidInput(
            f"there is no rank {rank} among {size} ranks, with sequences of {length} tokens in batches of {batch}."
        )
    if not 1 <= groups <= MOST_GROUPS:
        raise InvalidInput(f"groups must be from 1 to {MOST_GROUPS}, but is {groups}.")
    if batch < size:
        raise InvalidInput(
            f"a batch of {batch} sequences is too small for {size} ranks, because each needs at least one: "
            "use a larger batch or fewer ranks (spec.replicas)."
        )
