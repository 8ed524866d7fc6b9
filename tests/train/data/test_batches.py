"""What is consumed, whatever happens: the same sequences in the same order, each counted once, in equal shapes."""

import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from builders.until import until
from concertina_state.errors import InvalidInput
from concertina_trainer import cli
from concertina_trainer.config.data_config import DataConfig
from concertina_trainer.data.build.build import build
from concertina_trainer.data.read import batches as prepared
from concertina_trainer.data.read.batch import plan_batch
from concertina_trainer.data.read.batches import AHEAD, AHEAD_OF_SHARES, Batches, microbatches
from concertina_trainer.data.read.sequence_reader import Reader
from concertina_trainer.model import attention
from concertina_trainer.model.attention import _blocks, _pairs
from concertina_trainer.training.balance import WINDOW

LENGTH = 24
BLOCK_TENSORS = [f"{full}{name}" for full in ("", "full_") for name in
                 ("kv_num_blocks", "kv_indices", "q_num_blocks", "q_indices")]  # fmt: skip
MODES = ["Joined", "Masked", "Packed", "Bucketed"]


@pytest.fixture(scope="module")
def uris(tmp_path_factory):
    """Two data sets of documents of all lengths: each token tells which document it is of."""
    folder = tmp_path_factory.mktemp("batches")
    generator = np.random.default_rng(3)
    found = []
    for name in "ab":
        (folder / name).mkdir()
        for i in range(60):
            size = int(generator.integers(1, 70))
            (folder / name / f"{i:02}").write_bytes(generator.integers(1, 128, size, dtype=np.uint8).tobytes())
        list(build(sorted((folder / name).iterdir()), str(folder / f"{name}-data"), shard_bytes=300))
        assert cli.main(["data", "pack", str(folder / f"{name}-data"), "--length", str(LENGTH)]) == 0
        found.append(str(folder / f"{name}-data"))
    return found


@pytest.fixture(scope="module", params=[*((mode, 16) for mode in MODES), ("Joined", 1), ("Masked", 3)])
def reader(request, uris):
    documents, groups = request.param
    mixture = [{"uri": uri, "weight": weight} for uri, weight in zip(uris, (2, 1), strict=True)]
    config = DataConfig.model_validate({"mixture": mixture, "documents": documents, "groups": groups})
    return Reader(config, LENGTH, 5, skipped=[(3, 9), (40, 47)])


def consumed(batch):
    """Return the rows of one rank's microbatches that are not padding."""
    return [
        (part.tokens[row].numpy()[: int(np.flatnonzero(weights)[-1]) + 2].tolist(), (weights > 0).tolist())
        for part in batch
        for row, weights in enumerate(part.weights.numpy())
        if weights.any()
    ]


def cut(tokens, counts):
    size = int(np.flatnonzero(counts)[-1]) + 2
    return tokens[:size].tolist()


def reference(reader, start, stop):
    """Return the sequences of this batch, read by one reader alone."""
    found = reader.sequences(reader.batch(start, stop - start))
    predicted = np.ones_like(found.tokens[:, 1:]) if found.predicted is None else found.predicted
    return [cut(*row) for row in zip(found.tokens, predicted, strict=True)]


def of_all_ranks(reader, plan, at):
    """Return what all ranks consume of the global batch at this position.

    The rows are in the order of the batch. With buckets they can be in any order.
    """
    ranks = [microbatches(reader, plan, rank, at) for rank in range(plan.world)]
    shapes = {tuple(tuple(part.tokens.shape) for part in batch) for batch in ranks}
    assert len(shapes) == 1, "all ranks run the same shapes"
    total = sum(float(part.weights.sum()) for batch in ranks for part in batch)
    assert total == pytest.approx(1, abs=1e-5)
    in_turn = zip(*ranks, strict=True) if plan.fixed else ranks
    rows = [row for some in in_turn for part in some for row, _ in consumed([part])]
    return sorted(rows) if reader.mode == "Bucketed" else rows


def in_its_order(reader, rows):
    return sorted(rows) if reader.mode == "Bucketed" else rows


@settings(max_examples=30, deadline=None)
@given(
    size=st.integers(1, 20), micro=st.integers(1, 5), world=st.integers(1, 9), at=st.integers(0, 700),
    fixed=st.booleans(),
)  # fmt: skip
def test_slices_of_the_ranks_in_order_are_the_batch_for_every_world(reader, size, micro, world, at, fixed):
    plan = plan_batch(size, micro, world, fixed and reader.mode != "Bucketed")
    assert of_all_ranks(reader, plan, at) == in_its_order(reader, reference(reader, at, at + size))


ROUNDS = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 4), st.integers(0, 6)), min_size=1, max_size=6)
"""Of each round: workers, steps until it is killed, and how many of the run's steps that costs: more than the round has
made, where only an older checkpoint is left."""


@settings(max_examples=25, deadline=None)
@given(size=st.integers(1, 13), micro=st.integers(1, 5), fixed=st.booleans(), rounds=ROUNDS)
def test_any_schedule_of_kills_and_resizes_consumes_what_an_uninterrupted_run_does(reader, size, micro, fixed, rounds):
    step, history = 0, {}
    for world, made, lost in rounds:
        plan = plan_batch(size, micro, world, fixed and reader.mode != "Bucketed")
        for at in range(step, step + made):
            found = of_all_ranks(reader, plan, at * size)
            assert history.setdefault(at, found) == found, "what is trained again is the same"
        step = max(0, step + made - lost)
    for at, found in history.items():
        assert found == in_its_order(reader, reference(reader, at * size, (at + 1) * size))


STRETCHES = st.lists(st.integers(1, 40), max_size=12).map(
    lambda gaps: [(int(b), int(e)) for b, e in np.cumsum(gaps[: len(gaps) // 2 * 2]).reshape(-1, 2)]
)


def test_what_is_skipped_is_not_consumed_and_everything_else_is_in_its_order(uris):
    mixture = [{"uri": uri, "weight": weight} for uri, weight in zip(uris, (2, 1), strict=True)]
    config = DataConfig.model_validate({"mixture": mixture})
    whole = Reader(config, LENGTH, 5).sequences(np.arange(400)).tokens

    @settings(max_examples=20, deadline=None)
    @given(skipped=STRETCHES)
    def law(skipped):
        kept = [at for at in range(400) if not any(begin <= at < end for begin, end in skipped)]
        assert (Reader(config, LENGTH, 5, skipped).sequences(np.arange(len(kept))).tokens == whole[kept]).all()

    law()


def test_grains_elastic_iterator_gives_every_step_the_same_sequences(uris):
    """An outside oracle: over our order as its source, 12 sequences a step, resized as we are."""
    import grain
    from grain.experimental import ElasticIterator

    reader, batch = Reader(DataConfig(uri=uris[0]), LENGTH, 5), 12
    order = [bytes(row.tolist()).hex() for row in reader.sequences(np.arange(300)).tokens]
    position, state, steps = 0, None, 0
    for world in (4, 3, 1, 2, 4):
        options = [grain.sharding.ShardOptions(shard_index=rank, shard_count=world) for rank in range(world)]
        theirs = [iter(ElasticIterator(grain.MapDataset.source(order), batch, each)) for each in options]
        for each in theirs if state is not None else ():
            each.set_state(state)
        for _ in range(5):
            plan = plan_batch(batch, 2, world)
            ours = [row for rank in range(world) for row, _ in consumed(microbatches(reader, plan, rank, position))]
            assert sorted(bytes(row).hex() for row in ours) == sorted(str(row) for each in theirs for row in next(each))
            position, steps = position + batch, steps + 1
        state = theirs[0].get_state()
    assert (steps, len(set(order))) == (25, reader.epoch_size)


def test_shares_move_the_edges_between_ranks_and_nothing_else(reader):
    """Shares change from the fourth batch on that is taken: as each rank was ahead by now, or was not."""
    if reader.mode == "Bucketed":
        pytest.skip("it counts no sequences")
    plan, found, count = plan_batch(7, 2, 2), [], AHEAD + 7
    for rank in range(2):
        batches = Batches(reader, plan, rank, 21, torch.device("cpu"))
        for index in range(count):
            while rank and batches._ready.qsize() < AHEAD:
                time.sleep(0.001)
            if index == 3:
                batches.change(plan.shared_out((5, 2), 2))
            found.append([row for row, _ in consumed(batches.next(lambda *_: None))])
    each = [found[index] + found[count + index] for index in range(count)]
    assert each == [reference(reader, at, at + 7) for at in range(21, 21 + 7 * count, 7)]
    assert [len(found[index]) for index in range(count)] == [3] * (3 + AHEAD + 1) + [5] * 3


def test_a_change_of_shares_is_in_effect_before_the_next_one():
    assert AHEAD_OF_SHARES + 1 < WINDOW


@pytest.mark.parametrize(("batch_sizes", "ready"), [(0.5, 2), (3.5, 3), (100, AHEAD)])
def test_batches_that_are_ready_are_bounded_by_their_size(uris, monkeypatch, batch_sizes, ready):
    reader, plan, cpu = Reader(DataConfig(uri=uris[0]), LENGTH, 1), plan_batch(7, 2, 1), torch.device("cpu")
    size = sum(part.bytes for part in microbatches(reader, plan, 0, 0))
    monkeypatch.setattr(prepared, "AHEAD_BYTES", int(batch_sizes * size))
    batches = Batches(reader, plan, 0, 0, cpu)
    for at in range(0, 7 * 12, 7):
        until(
            lambda: batches._room._waiters or batches._ready.full(), "wait for room", batches._ready.qsize, pause=0.01
        )
        assert batches._ready.qsize() == ready
        assert [row for row, _ in consumed(batches.next(lambda *_: None))] == reference(reader, at, at + 7)
    batches.close()


def test_only_time_without_a_ready_batch_counts_as_a_wait(uris, monkeypatch):
    allowed = threading.Semaphore(5)
    monkeypatch.setattr(prepared, "microbatches", lambda *args: allowed.acquire() and microbatches(*args))
    monkeypatch.setattr(prepared, "_STALL_REPORT_SECONDS", 0.01)
    monkeypatch.setattr(Reader, "waiting_for", "the store is slow")
    batches = Batches(Reader(DataConfig(uri=uris[0]), LENGTH, 1), plan_batch(7, 2, 1), 0, 0, torch.device("cpu"))
    until(lambda: batches._ready.qsize() == 5, "wait for the batches", batches._ready.qsize, pause=0.01)
    for _ in range(5):
        batches.next(lambda *_: None)
        assert batches.stalled_seconds == 0.0
    batches.next(lambda *_: allowed.release())
    assert batches.stalled_seconds > 0.0
    allowed.release(100)
    batches.close()


def test_buckets_waste_less(uris):
    packed = {}
    for documents in ("Packed", "Bucketed"):
        reader = Reader(DataConfig.model_validate({"uri": uris[0], "documents": documents}), LENGTH, 1)
        batch = microbatches(reader, plan_batch(32, 4, 1), 0, 0)
        packed[documents] = sum(part.weights.numel() for part in batch) / int(reader.predicted(0, 32).sum())
    whole = Reader(DataConfig.model_validate({"uri": uris[0], "documents": "Bucketed"}), LENGTH, 1).predicted(0, 32)
    assert packed["Packed"] < 1.5
    assert packed["Bucketed"] < 32 * LENGTH / whole.sum()


def test_tokens_of_a_batch_are_those_of_its_documents_where_a_sequence_is_one(reader):
    batches = Batches(reader, plan_batch(7, 2, 1), 0, 21, torch.device("cpu"))
    for at in (21, 28):
        batches.next(lambda *_: None)
        documents = reader.mode == "Bucketed"
        assert batches.tokens == (int(reader.predicted(at, at + 7).sum()) if documents else 7 * LENGTH)


def test_a_sequence_is_called_the_same_whatever_is_left_out(uris):
    """A round that goes on after a batch that it has left out, and one that begins there and knows of it."""
    config = DataConfig.model_validate({"uri": uris[0]})
    goes_on = Batches(Reader(config, LENGTH, 1), plan_batch(4, 4, 1), 0, 0, torch.device("cpu"))
    for _ in range(2):
        goes_on.next(lambda *_: None)
    begins = Batches(Reader(config, LENGTH, 1, ((4, 8),)), plan_batch(4, 4, 1), 0, 4, torch.device("cpu"))
    [one], [other] = goes_on.next(lambda *_: None), begins.next(lambda *_: None)
    assert (one.tokens == other.tokens).all()
    assert one.samples == other.samples == (8, 9, 10, 11)


def test_memory_that_cannot_be_pinned_is_said_to_who_waits(uris):
    if torch.cuda.is_available():
        pytest.skip("here it can be pinned")
    reader = Reader(DataConfig.model_validate({"uri": uris[0]}), LENGTH, 1)
    batches = Batches(reader, plan_batch(4, 4, 1), 0, 0, torch.device("cuda"))
    with pytest.raises((RuntimeError, AssertionError), match=r"CUDA|NVIDIA|accelerator"):
        batches.next(lambda *_: None)


@pytest.mark.parametrize("at_once", [1 << 26, 1])
def test_blocks_are_those_of_create_block_mask(monkeypatch, at_once):
    monkeypatch.setattr(attention, "PAIRS_AT_ONCE", at_once)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 4, (2, 700), generator=generator, dtype=torch.int32).sort()[0]
    for document_ids, length in ((None, 300), (None, 512), (ids, 700)):
        keys = torch.arange(length)
        for queries in (keys, keys[::2]):
            found = _blocks(document_ids, queries, keys, length)
            rows = None if document_ids is None else len(document_ids)
            theirs = create_block_mask(found.mask_mod, rows, None, len(queries), length, device="cpu")
            assert (found.shape, found.BLOCK_SIZE) == (theirs.shape, theirs.BLOCK_SIZE)
            for name in BLOCK_TENSORS:
                assert torch.equal(getattr(found, name), getattr(theirs, name)), name


def test_both_kinds_of_mask_say_the_same():
    document_ids = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1]], dtype=torch.int32)
    place = torch.arange(6)
    pairs = _pairs(document_ids, place, place, len(place))
    assert pairs[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]  # fmt: skip
    visible = _blocks(document_ids, place, place, len(place)).mask_mod
    for b in range(2):
        blocks = visible(torch.tensor(b), torch.tensor(0), place[:, None], place[None, :])
        assert (blocks == pairs[b, 0]).all()


def test_data_that_were_not_packed_for_this_length_are_refused(uris):
    config = DataConfig.model_validate({"uri": uris[0], "documents": "Packed"})
    with pytest.raises(InvalidInput, match=rf"concertina data pack {uris[0]} --length 25"):
        Reader(config, 25, 1)
