"""Readers that a process keeps from round to round, so that their shards stay open and verified."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from concertina_data.places import OnWait
from concertina_trainer.config.data_config import DataConfig
from concertina_trainer.data.read.sequence_reader import Reader


class Readers:
    """Readers of a process, by what they read.

    A round is a period in which a fixed set of replicas trains. A process that stays for the next round would otherwise
    open and verify again, beside the first steps of the round, all shards that it had open.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[str, int, int, bool], Reader] = {}
        self._earlier: dict[tuple[str, int, int, bool], Reader] = {}

    @contextlib.contextmanager
    def of_next_round(self) -> Iterator[None]:
        """Context manager for a round's calls of `open`.

        At its end, the readers of earlier rounds that this round has not opened are dropped.
        """
        self._earlier, self._open = self._open, {}
        try:
            yield
        finally:
            self._earlier = {}

    def open(
        self, config: DataConfig, length: int, seed: int, begun: bool,
        on_wait: OnWait = lambda reason, seconds: None, evaluates: bool = False,
    ) -> Reader:  # fmt: skip
        """Return the reader of the previous round for the same arguments, or otherwise a new one. See `Reader`.

        `begun` and `on_wait` are for a new reader only.

        Raises:
            InvalidInput: When the data can't be used.
            StorageError: When the store can't be reached.
        """
        key = config.model_dump_json(), length, seed, evaluates
        reader = self._open.get(key) or self._earlier.get(key)
        if reader is None:
            reader = Reader(config, length, seed, on_wait=on_wait, begun=begun, evaluates=evaluates)
        self._open[key] = reader
        return reader
