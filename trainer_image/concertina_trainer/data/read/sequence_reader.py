"""Reader of sequences of tokens by position, from one data set or a mixture of several."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concertina_data.data_manifest import FrameFacts, digest_of
from concertina_data.opening import FETCH_THREADS, Threads
from concertina_data.places import PATIENCE_SECONDS, CacheSettings, OnWait
from concertina_state.errors import InvalidInput
from concertina_trainer.config.data_config import DataConfig, DocumentMode
from concertina_trainer.data.batch_order import Skipped
from concertina_trainer.data.frames import FLOATS
from concertina_trainer.data.read.dataset import DataSet, Opened
from concertina_trainer.data.read.mixture import Interleave
from concertina_trainer.data.sequence_plan import SequencePlan

_Numbers = NDArray[np.int64]
_BLOCK = 4096


@dataclasses.dataclass(frozen=True)
class SequenceBatch:
    """Sequences and what tells their documents apart."""

    tokens: _Numbers
    """`[count, length + 1]`: inputs, and shifted by one the predicted tokens, padded with 0."""
    document_ids: NDArray[np.int32] | None = None
    """`[count, length]`: document of each input, counted within its sequence, with padding as one more document.

    None: documents are not distinguished, and every token is predicted.
    """
    predicted: NDArray[np.bool_] | None = None
    """`[count, length]`: whether the token after an input is of the same document, so that predicting it counts."""
    features: NDArray[np.floating[Any]] | None = None
    """`[count, length + 1, width]` if the data are frames. `tokens` are then their targets."""


class Reader:
    """Reader of a run's data.

    The n-th sequence that a run consumes, for any n, is a function of the configuration, the seed and `skipped`.
    """

    def __init__(
        self, config: DataConfig, sequence_length: int, seed: int, skipped: Sequence[tuple[int, int]] = (),
        on_wait: OnWait = lambda reason, seconds: None, begun: bool = False, threads: int = FETCH_THREADS,
        patience: int = PATIENCE_SECONDS,
    ) -> None:  # fmt: skip
        """Open the data.

        Args:
            config: `spec.trainer.data`.
            sequence_length: Tokens of a sequence to predict.
            seed: Seed of the order.
            skipped: See batch_order.Skipped.
            on_wait: Called while a store is waited for.
            begun: Whether the run has read these data in an earlier round, so that a refusal is a reason to wait.
            threads: Threads that fetch shards.
            patience: Seconds for which requests to a store that does not answer are retried.

        Raises:
            InvalidInput: When the data can't be used.
            StorageError: When the store can't be reached.
        """
        cache, opening = CacheSettings(config.cache_bytes, patience, begun), Threads(threads)
        sources, self.length, self.mode = config.sources, sequence_length, config.documents
        self._sets = [
            DataSet(
                source.uri, config.documents, sequence_length, seed + (i << 32), cache, opening,
                config.cache_bytes // len(sources), on_wait,
            )
            for i, source in enumerate(sources)
        ]  # fmt: skip
        self._interleave = Interleave([source.weight for source in sources])
        self.leave_out(skipped)
        self._check()
        weights = [source.weight for source in sources]
        self.digests = tuple(data_set.manifest.digest for data_set in self._sets)
        """Digest of each data set."""
        self.digest = digest_of(config.documents.name, self.digests, weights)
        """Digest of the data and of how sequences are made of them.

        A position under another digest is another sequence.
        """

    def leave_out(self, skipped: Sequence[tuple[int, int]]) -> None:
        """Skip these positions (see batch_order.Skipped). Call this once they are known and before anything is read."""
        self._skipped = Skipped(skipped)
        # Bound to the parts, not to this object: a reference cycle would keep files and threads open after their use.
        self._block = functools.lru_cache(maxsize=4)(
            functools.partial(_places, self._sets, self._interleave, self._skipped)
        )

    def _check(self) -> None:
        """Check that the data sets of a mixture are compatible.

        Raises:
            InvalidInput: When they have different tokenizers or frames.
        """
        tokenizers = {data_set.manifest.tokenizer.digest: data_set.manifest.tokenizer.name for data_set in self._sets}
        if len(tokenizers) > 1:
            raise InvalidInput(
                "the data sets of data.mixture were built with different tokenizers, or of different frames "
                f"({', '.join(tokenizers.values())}): build them again alike."
            )

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary: all tokens are below it."""
        return max(data_set.manifest.vocab_size for data_set in self._sets)

    @property
    def frames(self) -> FrameFacts | None:
        """Format of the frames of all data sets; None if the data are tokens."""
        return self._sets[0].manifest.frames

    @property
    def epoch_size(self) -> int:
        """Number of sequences of all data sets together."""
        return sum(data_set.order.epoch_size for data_set in self._sets)

    @property
    def waiting_for(self) -> str:
        """Sentence about why reading waits for a store; "" if it does not."""
        return next((data.waiting_for for data in self._sets if data.waiting_for), "")

    def places(self, consumed: _Numbers) -> tuple[_Numbers, _Numbers, _Numbers]:
        """Return the data set, the shard, and the index in the shard of each n-th consumed sequence."""
        blocks, inside = np.divmod(consumed, _BLOCK)
        places = np.empty((3, len(consumed)), dtype=np.int64)
        for block in np.unique(blocks).tolist():
            of_block = blocks == block
            places[:, of_block] = self._block(block)[:, inside[of_block]]
        return places[0], places[1], places[2]

    def positions(self, consumed: _Numbers) -> _Numbers:
        """Return the positions of these sequences in the run's order, which is the same whatever is skipped."""
        return self._skipped.position_of(consumed)

    def tokens(self, start: int, stop: int) -> int:
        """Return the number of tokens that the sequences [start, stop) train on.

        All tokens count, padding too, except if each sequence is as long as its document.
        """
        if self.mode is DocumentMode.bucketed:
            return int(self.predicted(start, stop).sum())
        return (stop - start) * self.length

    def read(self, start: int, stop: int) -> _Numbers:
        """Return the tokens `[stop - start, sequence_length + 1]` of the sequences [start, stop)."""
        self.expect(start)
        return self.sequences(np.arange(start, stop)).tokens

    def sequences(self, consumed: _Numbers) -> SequenceBatch:
        """Return these sequences, with what tells their documents apart."""
        count, length = len(consumed), self.length
        tokens, features = np.zeros((count, length + 1), dtype=np.int64), None
        if self.frames is not None:
            features = np.zeros((count, length + 1, self.frames.width), FLOATS[self.frames.number_bytes])
        if self.mode is DocumentMode.joined:
            for opened, which, indexes in self._opened(consumed):
                for i, begin in zip(which.tolist(), (indexes * length).tolist(), strict=True):
                    tokens[i] = opened.tokens[begin : begin + length + 1]
                    if features is not None and opened.features is not None:
                        features[i] = opened.features[begin : begin + length + 1]
            return SequenceBatch(tokens, features=features)
        document_ids = np.empty((count, length + 1), dtype=np.int32)
        predicted = np.zeros((count, length), dtype=bool)
        for opened, which, indexes in self._opened(consumed):
            assert opened.plan is not None
            for i, index in zip(which.tolist(), indexes.tolist(), strict=True):
                _lay_out(opened.tokens, opened.plan, index, tokens[i], document_ids[i], predicted[i])
                if features is not None and opened.features is not None:
                    for offset, begin, size in _segments(opened.plan, index):
                        features[i, offset : offset + size] = opened.features[begin : begin + size]
        return SequenceBatch(tokens, document_ids[:, :-1], predicted, features)

    def predicted(self, start: int, stop: int) -> _Numbers:
        """Return how many tokens count in each of the sequences [start, stop), from the documents' lengths."""
        counts = np.full(stop - start, self.length, dtype=np.int64)
        if self.mode is not DocumentMode.joined:
            for opened, which, indexes in self._opened(np.arange(start, stop)):
                assert opened.plan is not None
                counts[which] = opened.plan.predicted(indexes)
        return counts

    def _opened(self, consumed: _Numbers) -> Iterator[tuple[Opened, _Numbers, _Numbers]]:
        """Yield each shard that is needed, which of the sequences are in it, and their indices there."""
        sets, shards, indexes = self.places(consumed)
        for index, data in enumerate(self._sets):
            of_set = np.flatnonzero(sets == index)
            for shard in np.unique(shards[of_set]).tolist():
                which = of_set[shards[of_set] == shard]
                yield data.shard(shard), which, indexes[which]

    def expect(self, start: int) -> None:
        """Begin to fetch what the sequences from `start` on need."""
        [position] = self._skipped.position_of(np.array([start], dtype=np.int64)).tolist()
        for data, next_position in zip(self._sets, self._interleave.before(position), strict=True):
            data.expect(next_position)


def _places(datasets: Sequence[DataSet], interleave: Interleave, skipped: Skipped, block: int) -> _Numbers:
    """Return the data set, shard and index of the sequences of a block, int64 `[3, _BLOCK]`.

    Computed alone, each sequence would cost as much as a hundred.
    """
    sets, nth = interleave.at(skipped.position_of(np.arange(block * _BLOCK, (block + 1) * _BLOCK)))
    places = np.empty((3, _BLOCK), dtype=np.int64)
    places[0] = sets
    for index, data in enumerate(datasets):
        inside = sets == index
        if inside.any():
            places[1:, inside] = data.order.at(nth[inside])
    return places


def _lay_out(
    shard: NDArray[np.unsignedinteger], plan: SequencePlan, index: int,
    tokens: _Numbers, document_ids: NDArray[np.int32], predicted: NDArray[np.bool_],
) -> None:  # fmt: skip
    """Write the segments of a sequence, one after the other."""
    end = count = 0
    for offset, begin, size in _segments(plan, index):
        tokens[offset : offset + size] = shard[begin : begin + size]
        document_ids[offset : offset + size] = count
        predicted[offset : offset + size - 1] = True
        end, count = offset + size, count + 1
    document_ids[end:] = count


def _segments(plan: SequencePlan, index: int) -> Iterator[tuple[int, int, int]]:
    """Yield each segment of a sequence: its offset in the sequence, its offset in the shard, and its length.

    All are in elements.
    """
    offset = 0
    for segment in range(int(plan.first[index]), int(plan.first[index + 1])):
        size = int(plan.lengths[segment])
        yield offset, int(plan.begins[segment]), size
        offset += size
