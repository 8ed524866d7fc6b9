"""One data set of a run: the order of its sequences, and its shards, which threads open before they are needed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concertina_data.data_manifest import TOKEN, TOO_SHORT, WEIGHT, ChatFacts, DataManifest
from concertina_data.files import documents_file, tokens_file
from concertina_data.opening import OpenShards, open_place, read_manifest
from concertina_data.places import CacheSettings, DataPlace, OnWait
from concertina_data.threads import Threads
from concertina_state.errors import InvalidInput
from concertina_trainer.config.data_config import DocumentMode
from concertina_trainer.data import elements, packing
from concertina_trainer.data.batch_order import BatchOrder
from concertina_trainer.data.sequence_plan import PLANNERS, SequencePlan


@dataclass(frozen=True)
class Opened:
    """Shard of a data set whose file is open."""

    tokens: NDArray[np.unsignedinteger]
    fields: Mapping[str, NDArray[Any]] = dataclasses.field(default_factory=dict)
    """Values of the other fields of each element, `[tokens]` or `[tokens, width]`, keyed by field name."""
    weights: NDArray[np.uint8] | None = None
    """Weight of each token in the loss, or None if all tokens have weight 1."""
    sums: NDArray[np.int64] | None = None
    """Sum of the weights of the predicted tokens of each sequence, or None without `weights`."""


class DataSet:
    """Sequences of `length` tokens from the data set at one URI."""

    def __init__(
        self, uri: str, mode: DocumentMode, length: int, seed: int, cache: CacheSettings, threads: Threads,
        most_bytes: int, on_wait: OnWait, turns: NDArray[np.int64],
    ) -> None:  # fmt: skip
        """Open the data set at `uri`.

        `most_bytes` limits the total size of open shards. `on_wait` is called if this method has to wait for a store.
        `turns` is the pattern in which groups of shards take turns.

        Raises:
            InvalidInput: When the data can't be used.
        """
        self._place = open_place(uri, cache)
        self.manifest = read_manifest(self._place, on_wait)
        if self.manifest.chats is not None:
            _check_chats(uri, self.manifest.chats, mode, length)
        if self.manifest.weighted and mode is DocumentMode.joined:
            raise InvalidInput(
                f"{uri} has weights of tokens, and data.documents Joined does not support them: set "
                "trainer.data.documents to Masked, Packed or Bucketed."
            )
        self._mode, self._length = mode, length
        self._counts = self._sequences(on_wait)
        if not sum(self._counts):
            raise InvalidInput(TOO_SHORT.format(uri=uri, length=length))
        self.order = BatchOrder(self._counts, seed, turns)
        shards, most_shards = self.manifest.shards, 3 * self.order.window * self.order.groups
        plan_one = functools.partial(_plan, self._place, self.manifest, mode, length, self._counts)
        open_one = functools.partial(_open, self._place, self.manifest, plan_one)
        self._shards = OpenShards([shard.size for shard in shards], most_bytes, open_one, threads, most_shards)
        planned = [documents_file(shard).size for shard in shards]
        self._plans = OpenShards(planned, most_bytes, plan_one, threads, most_shards)

    @property
    def waiting_for(self) -> str:
        return self._place.waiting_for

    def _sequences(self, on_wait: OnWait) -> list[int]:
        """Return the number of sequences in each shard of the data set."""
        if self._mode in (DocumentMode.joined, DocumentMode.masked):
            return self.manifest.sequences(self._length)
        text = self._place.get(packing.name(self._length), on_wait)
        stored_packing = packing.read(text, self._place.uri, self.manifest, self._length)
        return list(stored_packing.packed if self._mode is DocumentMode.packed else stored_packing.bucketed)

    def shard(self, index: int) -> Opened:
        """Return a shard, after waiting until it is open.

        If opening the shard fails, this method raises the error, and the next call tries again.
        """
        return self._shards.get(index)

    def plan(self, index: int) -> SequencePlan:
        """Return the plan that assigns tokens of a shard to sequences, without reading the tokens."""
        return self._plans.get(index)

    def expect(self, position: int, groups: tuple[int, ...]) -> None:
        """Begin to open the shards of `groups` from `position` on, until the size limit is reached."""
        self._shards.expect(self.order.nearby(position, groups))

    def expect_plans(self, position: int) -> None:
        """Begin to open the plans of all shards from `position` on.

        A plan assigns a shard's tokens to sequences. Every rank needs the plans of all groups of shards, because it
        computes the lengths of all sequences of a batch.
        """
        self._plans.expect(self.order.nearby(position))


def _open(place: DataPlace, manifest: DataManifest, plan_one: Callable[[int], SequencePlan], index: int) -> Opened:
    shard = manifest.shards[index]
    fields = elements.parts(place.open(tokens_file(shard)), manifest.fields)
    tokens = fields.pop(TOKEN, np.broadcast_to(np.uint8(0), shard.tokens))
    weights = fields.pop(WEIGHT, None)
    return Opened(tokens, fields, weights, None if weights is None else plan_one(index).sums(weights))


def _plan(
    place: DataPlace, manifest: DataManifest, mode: DocumentMode, length: int, counts: Sequence[int], index: int
) -> SequencePlan:
    shard = manifest.shards[index]
    begins = np.frombuffer(place.open(documents_file(shard)), "<u8").astype(np.int64)
    plan = PLANNERS[mode](begins, shard.tokens, length)
    if len(plan) != counts[index]:
        raise InvalidInput(
            f"{place.uri}/{shard.file} gives {len(plan)} sequences, but {counts[index]} were planned: run "
            f"`concertina data pack {place.uri} --length {length}` again."
        )
    return plan


def _check_chats(uri: str, chats: ChatFacts, mode: DocumentMode, length: int) -> None:
    """Check that no boundary between two sequences cuts a chat.

    If a chat were cut, its second part would be trained without the messages before it.

    Raises:
        InvalidInput: When chats would be cut.
    """
    if mode not in (DocumentMode.packed, DocumentMode.bucketed):
        raise InvalidInput(
            f"{uri} holds chats, and data.documents {mode} cuts them: set trainer.data.documents to Packed or Bucketed."
        )
    if length < chats.length:
        raise InvalidInput(
            f"{uri} holds chats of up to {chats.length} predicted tokens, and sequences of {length} would cut them: "
            f"set trainer.model.sequenceLength to {chats.length} or more, or build with --length {length}."
        )
