"""Reader of sequences of tokens by the sequence's number, from one data set or a mixture of several."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concertina_data.data_manifest import Field, TokenizerFacts, digest_of
from concertina_data.opening import FETCH_THREADS
from concertina_data.order import classes
from concertina_data.places import PATIENCE_SECONDS, CacheSettings, OnWait
from concertina_data.threads import Threads
from concertina_state.errors import InvalidInput
from concertina_trainer.config.data_config import DataConfig, DocumentMode
from concertina_trainer.data.batch_order import Skipped, by_group
from concertina_trainer.data.elements import empty_rows
from concertina_trainer.data.read.dataset import DataSet
from concertina_trainer.data.read.mixture import Interleave
from concertina_trainer.data.read.transforms import transforms
from concertina_trainer.data.sample import Sample
from concertina_trainer.data.sequence_plan import SequencePlan

_Numbers = NDArray[np.int64]
_BLOCK = 4096


@dataclasses.dataclass(frozen=True)
class SequenceBatch:
    """Sequences of tokens, with the document to which each token belongs."""

    tokens: _Numbers
    """Tokens of each sequence, padded with 0, `[count, length + 1]`.

    The inputs are all tokens of a sequence except the last one. The targets are all tokens except the first one.
    """
    document_ids: NDArray[np.int32] | None = None
    """Number of each input's document, counted within the sequence, `[count, length]`.

    Padding counts as one more document. None means that documents are not distinguished, so that every token is
    predicted.
    """
    predicted: NDArray[np.bool_] | None = None
    """True if the loss of the prediction after an input counts, `[count, length]`.

    The loss counts if the next token is of the same document as the input.
    """
    fields: Mapping[str, NDArray[Any]] = dataclasses.field(default_factory=dict)
    """Values of the other fields, `[count, length + 1]` or `[count, length + 1, width]`, by name, padded with 0."""
    weights: NDArray[np.uint8] | None = None
    """Weight of the prediction after each input, `[count, length]`; 0 where `predicted` is False.

    None means that the weight is 1 where `predicted` is True.
    """


class Reader:
    """Reader of a run's data.

    Each sequence that the run consumes has a number n. The n-th sequence depends only on the configuration, the seed
    and the skipped positions.
    """

    def __init__(
        self, config: DataConfig, sequence_length: int, seed: int, skipped: Sequence[tuple[int, int]] = (),
        on_wait: OnWait = lambda reason, seconds: None, begun: bool = False, threads: int = FETCH_THREADS,
        patience: int = PATIENCE_SECONDS, evaluates: bool = False,
    ) -> None:  # fmt: skip
        """Open the data sets.

        Args:
            config: `spec.trainer.data`.
            sequence_length: Number of tokens of a sequence to predict.
            seed: Seed of the order.
            skipped: Positions to skip (see batch_order.Skipped).
            on_wait: Function that is called repeatedly while the reader waits for a store.
            begun: Whether an earlier round of this run has read these data from the store. If so, refused requests are
                repeated.
            threads: Number of threads that fetch shards.
            patience: Seconds for which a request is repeated if the store does not answer.
            evaluates: Whether the sequences are for an evaluation. `config.transform` then gets no random numbers.

        Raises:
            InvalidInput: When the data can't be used.
            StorageError: When the store can't be reached.
        """
        cache, opening = CacheSettings(config.cache_bytes, patience, begun), Threads(threads)
        sources, self.length, self.mode = config.sources, sequence_length, config.documents
        self._interleave = Interleave([source.weight for source in sources], config.groups)
        self._sets = [
            DataSet(
                source.uri, config.documents, sequence_length, seed + (i << 32), cache, opening,
                config.cache_bytes // len(sources), on_wait, self._interleave.turns(i),
            )
            for i, source in enumerate(sources)
        ]  # fmt: skip
        self._transform, self._seed = config.transform, None if evaluates else seed
        self.leave_out(skipped)
        self._stride = min(data_set.order.stride for data_set in self._sets)
        self._check()
        weights = [source.weight for source in sources]
        self.digests = tuple(data_set.manifest.digest for data_set in self._sets)
        """Digest of the manifest of each data set."""
        self.digest = digest_of(config.documents.name, self.digests, weights)
        """Digest of the data sets, their weights, and the way in which documents become sequences.

        If the digest differs, the sequence at a position differs too.
        """

    def leave_out(self, skipped: Sequence[tuple[int, int]]) -> None:
        """Skip these positions (see batch_order.Skipped), and no others.

        Call this method before anything is read in a round.
        """
        self._skipped = Skipped(skipped)
        self._expected: tuple[int, tuple[int, ...]] | None = None
        self._expected_plans = -1
        self._last: tuple[bytes, _Numbers] = b"", np.empty((4, 0), dtype=np.int64)
        """Numbers of sequences, and the columns of `_places` for them."""
        # The function is bound to the parts rather than to this object, because a reference cycle would keep files and
        # threads open.
        self._block = functools.lru_cache(maxsize=4)(
            functools.partial(_places, self._sets, self._interleave, self._skipped)
        )

    def _check(self) -> None:
        """Check that the data sets of a mixture are compatible.

        Raises:
            InvalidInput: When the data sets have different tokenizers or fields.
        """
        tokenizers = {data_set.manifest.tokenizer.digest: data_set.manifest.tokenizer.name for data_set in self._sets}
        if len(tokenizers) > 1:
            raise InvalidInput(
                "the data sets of data.mixture must have the same tokenizer, or the same fields and vocabulary "
                f"size, but they differ ({', '.join(tokenizers.values())}): build them again in the "
                "same way."
            )

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary. Every token id is less than this."""
        return max(data_set.manifest.vocab_size for data_set in self._sets)

    @property
    def transform(self) -> str | None:
        """Name of the function that transforms each sample (`trainer.data.transform`), or None."""
        return self._transform

    @property
    def tokenizer(self) -> TokenizerFacts:
        """Tokenizer of all data sets, or, for data without tokens, facts that stand for their fields."""
        return self._sets[0].manifest.tokenizer

    @property
    def fields(self) -> tuple[Field, ...]:
        """Fields that the elements of all data sets have beside the token and its weight."""
        return self._sets[0].manifest.more_fields

    @property
    def epoch_size(self) -> int:
        """Total number of sequences of all data sets."""
        return sum(data_set.order.epoch_size for data_set in self._sets)

    @property
    def waiting_for(self) -> str:
        """Sentence for users about why a read of training data waits for a store, or "" if no read waits."""
        return next((data.waiting_for for data in self._sets if data.waiting_for), "")

    def places(self, consumed: _Numbers) -> tuple[_Numbers, _Numbers, _Numbers]:
        """Return the data set, the shard, and the index within the shard of each sequence, given its number."""
        _, sets, shards, indexes = self._table(consumed)
        return sets, shards, indexes

    def _table(self, consumed: _Numbers) -> _Numbers:
        """Return the columns of `_places` for these sequences, as `[4, sequences]`.

        A batch asks several times for the same sequences in a row, so the last result is kept.
        """
        key = consumed.tobytes()
        last = self._last  # Another thread may replace it.
        if key != last[0]:
            last = self._last = key, self._columns(consumed)
        return last[1]

    def _columns(self, consumed: _Numbers) -> _Numbers:
        if not len(consumed):
            return np.empty((4, 0), dtype=np.int64)
        first, last = int(consumed.min()) // _BLOCK, int(consumed.max()) // _BLOCK
        if first == last:
            return self._block(first)[:, consumed - first * _BLOCK]
        blocks, inside = np.divmod(consumed, _BLOCK)
        table = np.empty((4, len(consumed)), dtype=np.int64)
        for block in range(first, last + 1):
            of_block = blocks == block
            if of_block.any():
                table[:, of_block] = self._block(block)[:, inside[of_block]]
        return table

    def positions(self, consumed: _Numbers) -> _Numbers:
        """Return the positions of these sequences in the run's order.

        The count includes skipped positions, so the position of a sequence never changes.
        """
        return self._skipped.position_of(consumed)

    def groups(self, consumed: _Numbers) -> _Numbers:
        """Return the group of shards of each sequence."""
        groups: _Numbers = self._table(consumed)[0]
        return groups

    def batch(self, start: int, size: int) -> _Numbers:
        """Return the numbers of `size` sequences from `start` on, in the order in which ranks share them.

        The order is the same for all numbers of ranks.
        """
        numbers = np.arange(start, start + size, dtype=np.int64)
        batch: _Numbers = numbers[by_group(self.groups(numbers), classes(size, self._interleave.groups))]
        return batch

    def tokens(self, start: int, stop: int) -> int:
        """Return the number of tokens that count as trained in the sequences from `start` to `stop` - 1.

        In the mode `bucketed`, only predicted tokens count. In all other modes, padding counts too.
        """
        if self.mode is DocumentMode.bucketed:
            return int(self.predicted(start, stop).sum())
        return (stop - start) * self.length

    def read(self, start: int, stop: int) -> _Numbers:
        """Return the tokens of the sequences from `start` to `stop` - 1, as `[stop - start, sequence_length + 1]`."""
        numbers = np.arange(start, stop)
        self.expect(start, numbers)
        return self.sequences(numbers).tokens

    def sequences(self, consumed: _Numbers, rows: int = 0) -> SequenceBatch:
        """Return the sequences with the numbers `consumed`, and the document to which each of their tokens belongs.

        If `rows` is greater than the number of sequences, the arrays have `rows` rows, and the additional rows are
        zeros.
        """
        count, length = len(consumed), self.length
        rows = max(count, rows)
        new = np.empty if self.mode is DocumentMode.joined else np.zeros
        tokens, fields = new((rows, length + 1), dtype=np.int64), empty_rows(self.fields, rows, length + 1)
        tokens[count:] = 0
        if self.mode is DocumentMode.joined:
            for data, shard, which, indexes in self._by_shard(consumed):
                opened = data.shard(shard)
                for values, out in [(opened.tokens, tokens), *((opened.fields[name], fields[name]) for name in fields)]:
                    for i, index in zip(which, indexes, strict=True):
                        begin = index * length
                        out[i] = values[begin : begin + length + 1]
            return SequenceBatch(tokens, fields=fields)
        document_ids = np.zeros((rows, length + 1), dtype=np.int32)
        predicted = np.zeros((rows, length), dtype=bool)
        weights = np.zeros((rows, length), dtype=np.uint8) if self._weighted else None
        for data, shard, which, indexes in self._by_shard(consumed):
            opened, plan = data.shard(shard), data.plan(shard)
            for i, index in zip(which, indexes, strict=True):
                _lay_out(opened.tokens, plan, index, tokens[i], document_ids[i], predicted[i])
                for offset, begin, size in plan.segments(index):
                    for name, values in opened.fields.items():
                        fields[name][i, offset : offset + size] = values[begin : begin + size]
                    if weights is not None:
                        targets = 1 if opened.weights is None else opened.weights[begin + 1 : begin + size]
                        weights[i, offset : offset + size - 1] = targets
        return SequenceBatch(tokens, document_ids[:, :-1], predicted, fields, weights)

    def transformed(
        self, batches: Sequence[SequenceBatch], positions: Sequence[Sequence[int]]
    ) -> Sequence[SequenceBatch]:
        """Return the sequences at these positions, after `trainer.data.transform`.

        Pass all batches of a step at once, so that their samples are divided among the processes that run the
        transform.

        Raises:
            InvalidInput: When the transform can't be used.
            TransformEnded: When a process that transforms has ended.
        """
        if self._transform is None:
            return batches
        samples = [
            Sample(batch.tokens[row], {name: values[row] for name, values in batch.fields.items()}, position)
            for batch, some in zip(batches, positions, strict=True)
            for row, position in enumerate(some)
        ]
        results = iter(transforms(self._transform).apply(samples, self._seed, self.vocab_size) if samples else ())
        return [
            _replaced(batch, list(itertools.islice(results, len(some))))
            for batch, some in zip(batches, positions, strict=True)
        ]

    def predicted(self, start: int, stop: int) -> _Numbers:
        """Return the number of predicted tokens in each of the sequences from `start` to `stop` - 1.

        Predicted tokens are those for which a loss is computed. The method reads only the lengths of documents.
        """
        counts = np.full(stop - start, self.length, dtype=np.int64)
        if self.mode is not DocumentMode.joined:
            for data, shard, which, indexes in self._by_shard(np.arange(start, stop)):
                counts[which] = data.plan(shard).predicted[indexes]
        return counts

    def weight_sums(self, start: int, stop: int) -> _Numbers:
        """Return the sum of the weights of the predicted tokens, for each of the sequences from `start` to `stop` - 1.

        A weight is 1 unless the data contain weights. Every rank computes the sums of the whole global batch, because
        the loss of the batch is divided by the total of the sums. If the data contain weights, every rank therefore
        reads the whole batch.
        """
        if not self._weighted:
            return self.predicted(start, stop)
        sums = np.empty(stop - start, dtype=np.int64)
        for data, shard, which, indexes in self._by_shard(np.arange(start, stop)):
            opened = data.shard(shard) if data.manifest.weighted else None
            weighted = opened.sums if opened else None
            sums[which] = data.plan(shard).predicted[indexes] if weighted is None else weighted[indexes]
        return sums

    def text_bytes(self, start: int, stop: int) -> float | None:
        """Return the number of bytes of text that the predicted tokens of sequences `start` to `stop` - 1 represent.

        Each predicted token, including a token that ends a document, counts as the mean bytes per token of its shard.

        The result is None in three cases: the documents are chats or are not text, the data set was built without this
        information, or a transform can change tokens.
        """
        if self._transform is not None:
            return None
        predicted, total = self.predicted(start, stop), 0.0
        for data, shard, which, _ in self._by_shard(np.arange(start, stop)):
            facts = data.manifest.shards[shard]
            if not facts.text_bytes:
                return None
            total += int(predicted[which].sum()) * facts.text_bytes / facts.tokens
        return total

    @property
    def _weighted(self) -> bool:
        return any(data_set.manifest.weighted for data_set in self._sets)

    def _by_shard(self, consumed: _Numbers) -> Iterator[tuple[DataSet, int, list[int], list[int]]]:
        """Yield the data set and the number of each shard that contains sequences with the numbers `consumed`.

        With each shard, also yield two lists about these sequences: their indices in `consumed`, and their indices in
        the shard.
        """
        by_shard: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        _, *places = self._table(consumed).tolist()
        for i, (data_set, shard, index) in enumerate(zip(*places, strict=True)):
            which, indexes = by_shard.setdefault((data_set, shard), ([], []))
            which.append(i)
            indexes.append(index)
        for (data_set, shard), found in by_shard.items():
            yield self._sets[data_set], shard, *found

    def expect(self, start: int, consumed: _Numbers) -> None:
        """Begin to open the shards that a rank needs from sequence number `start` on.

        The call takes little time if the batch needs the same shards as the previous one.

        `consumed` are the numbers of the rank's next sequences.
        """
        every = range(self._interleave.groups)
        groups = tuple(every) if self._weighted else tuple(sorted(set(self.groups(consumed).tolist())))
        expected = start // self._stride, groups
        if expected != self._expected:
            for data, position in self._next(start):
                data.expect(position, groups)
            self._expected = expected

    def expect_plans(self, start: int) -> None:
        """Begin to open the plans that every rank needs from number `start` on.

        The call takes little time if the batch needs the same plans as the previous one.
        """
        expected = start // self._stride
        if self.mode is not DocumentMode.joined and expected != self._expected_plans:
            self._expected_plans = expected
            for data, position in self._next(start):
                data.expect_plans(position)

    def _next(self, start: int) -> Iterator[tuple[DataSet, int]]:
        """Yield each data set, with the position in its order from number `start` on."""
        [position] = self.positions(np.array([start], dtype=np.int64)).tolist()
        yield from zip(self._sets, self._interleave.before(position), strict=True)


def _places(datasets: Sequence[DataSet], interleave: Interleave, skipped: Skipped, block: int) -> _Numbers:
    """Return the group, data set, shard and index of each sequence of block number `block`, as int64 `[4, _BLOCK]`.

    A block consists of _BLOCK consecutive sequences. numpy computes the entries of a whole block in about the time of a
    single sequence.
    """
    positions = skipped.position_of(np.arange(block * _BLOCK, (block + 1) * _BLOCK))
    sets, nth = interleave.at(positions)
    places = np.empty((4, _BLOCK), dtype=np.int64)
    places[:2] = interleave.group(positions), sets
    for index, data in enumerate(datasets):
        inside = sets == index
        if inside.any():
            places[2:, inside] = data.order.at(nth[inside])
    return places


def _replaced(batch: SequenceBatch, samples: Sequence[Sample]) -> SequenceBatch:
    """Return the batch with the samples `samples` in its first rows. All further rows are padding."""
    if not samples:
        return batch
    tokens = np.concatenate([np.stack([sample.tokens for sample in samples]), batch.tokens[len(samples) :]])
    fields = {
        name: np.concatenate([np.stack([sample.fields[name] for sample in samples]), values[len(samples) :]])
        for name, values in batch.fields.items()
    }
    return dataclasses.replace(batch, tokens=tokens, fields=fields)


def _lay_out(
    shard: NDArray[np.unsignedinteger], plan: SequencePlan, index: int,
    tokens: _Numbers, document_ids: NDArray[np.int32], predicted: NDArray[np.bool_],
) -> None:  # fmt: skip
    """Copy the segments of a sequence into `tokens`, one after the other, and fill `document_ids` and `predicted`."""
    end = count = 0
    for offset, begin, size in plan.segments(index):
        tokens[offset : offset + size] = shard[begin : begin + size]
        document_ids[offset : offset + size] = count
        predicted[offset : offset + size - 1] = True
        end, count = offset + size, count + 1
    document_ids[end:] = count
