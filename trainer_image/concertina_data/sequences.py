"""Sequences of one data set, given their positions, as rows of tokens."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from concertina_data.data_manifest import TOO_SHORT, DataManifest
from concertina_data.files import tokens_file
from concertina_data.opening import FETCH_THREADS, OpenShards, open_place, read_manifest
from concertina_data.order import Order
from concertina_data.places import CacheSettings, DataPlace
from concertina_data.rows import Rows, installed
from concertina_data.threads import Threads
from concertina_state.errors import InvalidInput

PIECE = 1 << 14
"""Number of tokens to copy at once. With twice as many, torch would start threads, which take cores from training."""


class Sequences:
    """Sequences of a data set, in the order that a seed determines.

    Each sequence is cut out of the stream of documents. It has `length` tokens as inputs, and one more token, which is
    only predicted.
    """

    def __init__(self, uri: str, length: int, seed: int, cache: CacheSettings, groups: int) -> None:
        """Open a data set in a folder or a store, and read its manifest.

        Raises:
            InvalidInput: When the data set can't be used.
            StorageError: When the store can't be reached.
        """
        self._place, self._length = open_place(uri, cache), length
        self._manifest = read_manifest(self._place)
        if not self._manifest.only_tokens:
            fields = ", ".join(map(str, self._manifest.fields))
            raise InvalidInput(
                f"{uri} has elements of several fields ({fields}), but rows of tokens are needed here: train on these "
                "data with the bundled trainer."
            )
        self.digest = self._manifest.digest
        counts = self._manifest.sequences(length)
        if not sum(counts):
            raise InvalidInput(TOO_SHORT.format(uri=uri, length=length))
        self._order, self._groups = Order(counts, seed, range(groups)), groups
        self.epoch_size = self._order.epoch_size
        self._expected: tuple[int, list[int]] | None = None
        sizes = [shard.size for shard in self._manifest.shards]
        self._rows = installed()
        open_one = functools.partial(_open, self._place, self._manifest, self._rows)
        most_shards = 3 * self._order.window * groups
        self._shards = OpenShards(sizes, cache.limit, open_one, Threads(FETCH_THREADS), most_shards)

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary. Every token id is less than this."""
        return self._manifest.vocab_size

    @property
    def waiting_for(self) -> str:
        """Sentence for users about why a read of training data waits for a store, or "" if none waits."""
        return self._place.waiting_for

    def rows(self, positions: Sequence[int]) -> Any:
        """Return the sequences at `positions`, as int64 `[len(positions), length + 1]`.

        The result is a tensor if torch is installed, otherwise a memoryview.

        Raises:
            InvalidInput: When a file is missing or damaged.
            StorageError: When the store can't be reached.
        """
        groups = sorted({position % self._groups for position in positions})
        expected = min(positions) // self._order.stride, groups
        if expected != self._expected:
            self._shards.expect(self._order.nearby(min(positions), groups))
            self._expected = expected
        rows = self._rows(len(positions), self._length + 1)
        for row, position in enumerate(positions):
            shard, index = self._order.find(position)
            tokens, begin = self._shards.get(shard), index * self._length
            for offset in range(0, self._length + 1, PIECE):
                piece_end = min(offset + PIECE, self._length + 1)
                rows.put(row, offset, tokens[begin + offset : begin + piece_end])
        return rows.result


def _open(place: DataPlace, manifest: DataManifest, rows: type[Rows], index: int) -> Any:
    return rows.tokens(place.open(tokens_file(manifest.shards[index])), manifest.element_bytes)
