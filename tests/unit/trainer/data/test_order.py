"""Order of the data: a permutation that is computed for any position by itself, and that never changes."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from concertina_data import order as integers
from concertina_data.order import WINDOW
from concertina_trainer.data.batch_order import BatchOrder, by_group, permute
from concertina_trainer.data.read.batch import plan_batch
from concertina_trainer.data.read.mixture import Interleave

counts = st.lists(st.integers(0, 40), min_size=1, max_size=2 * WINDOW + 3).filter(any)


@settings(max_examples=50, deadline=None)
@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_permute_is_a_permutation_and_the_same_in_integers(size, key):
    permuted = permute(np.arange(size), size, key).tolist()
    assert sorted(permuted) == list(range(size))
    assert [integers.Permutation(size, key).at(value) for value in range(min(size, 20))] == permuted[:20]


@settings(deadline=None)
@given(size=st.integers(1, 2**50), key=st.integers(0, 2**64 - 1), data=st.data())
def test_permute_is_the_same_in_integers_for_any_size(size, key, data):
    values = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=5))
    permutation = integers.Permutation(size, key)
    assert [permutation.at(value) for value in values] == permute(np.array(values), size, key).tolist()


@st.composite
def turns(draw):
    """Draw a pattern in which groups take turns, as a mixture has them."""
    weights = draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    return Interleave(weights, draw(st.integers(1, 20))).turns(draw(st.integers(0, len(weights) - 1)))


@settings(max_examples=50, deadline=None)
@given(counts=counts, seed=st.integers(0, 2**63 - 1), start=st.integers(0, 5000), turns=turns())
def test_the_order_is_the_same_in_integers(counts, seed, start, turns):
    """A script and the bundled trainer read the same order."""
    one, many = integers.Order(counts, seed, turns.tolist()), BatchOrder(counts, seed, turns)
    shards, indexes = many.locate(start, start + 50)
    assert [one.find(place) for place in range(start, start + 50)] == list(zip(shards, indexes, strict=True))
    assert one.nearby(start) == many.nearby(start)
    assert one.epoch_size == many.epoch_size


@settings(max_examples=50, deadline=None)
@given(counts=counts, seed=st.integers(0, 2**31 - 1), epoch=st.integers(0, 5), turns=turns())
def test_an_epoch_has_every_sequence_once(counts, seed, epoch, turns):
    order = BatchOrder(counts, seed, turns)
    shards, indexes = order.locate(epoch * order.epoch_size, (epoch + 1) * order.epoch_size)
    visited = sorted(zip(shards.tolist(), indexes.tolist(), strict=True))
    assert visited == [(shard, index) for shard, count in enumerate(counts) for index in range(count)]


@settings(max_examples=50, deadline=None)
@given(counts=counts, seed=st.integers(0, 2**31 - 1), turns=turns(), data=st.data())
def test_any_position_is_found_by_itself(counts, seed, turns, data):
    order = BatchOrder(counts, seed, turns)
    start = data.draw(st.integers(0, 2 * order.epoch_size))
    shards, indexes = order.locate(start, start + 50)
    for offset in data.draw(st.lists(st.integers(0, 49), min_size=1, max_size=5)):
        shard, index = BatchOrder(counts, seed, turns).locate(start + offset, start + offset + 1)
        assert (shards[offset], indexes[offset]) == (shard.item(), index.item())


@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(st.integers(1, 40), min_size=WINDOW + 1, max_size=60),
    seed=st.integers(0, 2**31 - 1),
    groups=st.sampled_from([1, 2, 3, 16, 20]),
)
def test_a_reader_needs_no_more_than_a_window_of_shards_at_once(counts, seed, groups):
    """A reader of one group needs that group's part of the window."""
    order = BatchOrder(counts, seed, range(groups))
    shards, _ = order.locate(0, order.epoch_size)
    for group in range(groups):
        own = shards[group::groups]
        in_use = np.zeros(len(own) + 1, dtype=int)
        for shard in set(own.tolist()):
            [places] = np.nonzero(own == shard)
            in_use[places[0]] += 1
            in_use[places[-1] + 1] -= 1
        assert in_use.cumsum().max() <= max(1, WINDOW // groups)


@settings(max_examples=50, deadline=None)
@given(counts=counts, seed=st.integers(0, 2**31 - 1), turns=turns(), data=st.data())
def test_shards_are_expected_before_they_are_needed(counts, seed, turns, data):
    """A reader of some groups is told all shards that it needs next, and no shard that it never needs."""
    order = BatchOrder(counts, seed, turns)
    start = data.draw(st.integers(0, 2 * order.epoch_size))
    groups = sorted(data.draw(st.sets(st.integers(0, order.groups - 1), min_size=1)))
    expected = order.nearby(start, groups)
    begin = start // order.epoch_size * order.epoch_size
    positions = np.arange(begin, begin + 2 * order.epoch_size)
    own = positions[np.isin(turns[positions % len(turns)], groups)]
    shards, following = order.at(own)[0], np.flatnonzero(own >= start)
    if len(following):
        assert shards[following[0]] in expected
    assert set(expected) <= set(shards.tolist())


class Counted(list):
    """Pattern of turns that counts how many turns are read."""

    read = 0

    def __getitem__(self, which):
        found = super().__getitem__(which)
        self.read += len(found) if isinstance(which, slice) else 1
        return found


def test_what_is_needed_next_is_found_without_the_whole_pattern_of_turns():
    """A reader asks for it in each step, and a mixture of large weights has a pattern of millions of turns."""
    turns = Counted(Interleave([9973, 27], 16).turns(0).tolist())
    order = integers.Order([1000] * 40, 1, turns)
    turns.read = 0
    assert [len(order.nearby(position)) for position in (0, 9000, 39_000)] == [32, 32, 26]
    assert turns.read < 100


@given(weights=st.lists(st.integers(1, 12), min_size=1, max_size=4), groups=st.integers(1, 40))
def test_each_group_has_its_part_of_each_source_and_of_each_batch(weights, groups):
    mixture = Interleave(weights, groups)
    positions = np.arange(2 * groups * sum(weights))
    of_position = mixture.group(positions)
    assert (np.sort(of_position.reshape(-1, groups)) == np.arange(groups)).all(), "of each batch"
    sources, nth = mixture.at(positions)
    for source in range(len(weights)):
        turns = mixture.turns(source)
        assert len(set(np.bincount(turns, minlength=groups))) == 1, "of each source"
        own = sources == source
        assert (of_position[own] == turns[nth[own] % len(turns)]).all(), "both say the same"


@given(groups=st.integers(1, 40), batch=st.integers(1, 100), start=st.integers(0, 10_000))
def test_ranks_share_a_batch_by_classes_of_groups(groups, batch, start):
    """The order within a batch is the same in integers, and each class has its own stretch of each batch."""
    positions = np.arange(start, start + batch)
    modulus = integers.classes(batch, groups)
    found = positions[by_group(positions % groups, modulus)]
    assert found.tolist() == integers.by_group(range(start, start + batch), groups)
    assert (found % groups % modulus == np.arange(modulus).repeat(batch // modulus)).all()


def test_epochs_and_seeds_differ():
    order = BatchOrder([500, 500], seed=1)
    epochs = [order.locate(epoch * 1000, epoch * 1000 + 1000)[1].tolist() for epoch in range(3)]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert BatchOrder([500, 500], seed=2).locate(0, 1000)[1].tolist() != epochs[0]


def test_neighbours_are_spread():
    """No run of neighbours remains: of 10,000 neighbours in a good shuffle, about one keeps its successor."""
    _, indexes = BatchOrder([10_000], seed=3).locate(0, 10_000)
    assert np.count_nonzero(np.diff(indexes) == 1) < 10


def test_the_order_never_changes():
    """A run that is resumed by a newer version continues in the same order, so this hash may never change."""
    shards, indexes = BatchOrder([1000 + 37 * i for i in range(40)], seed=42).locate(0, 10_000)
    golden = hashlib.sha256(np.stack([shards, indexes]).astype("<i8").tobytes()).hexdigest()
    assert golden == "8df34e72ec5d7c88ff079a5ae8ae81aaa950187676003d817e7bbca54468486d"


@settings(max_examples=300, deadline=None)
@given(size=st.integers(1, 500), micro=st.integers(1, 64), world=st.integers(1, 64), fixed=st.booleans())
def test_the_parts_of_all_ranks_are_the_batch_in_equal_shapes(size, micro, world, fixed):
    plan = plan_batch(size, micro, world, fixed)
    slices = [plan.slices(rank) for rank in range(world)]
    assert {len(mine) for mine in slices} == {plan.microbatches}
    in_order = zip(*slices, strict=True) if fixed else slices
    assert [sequence for some in in_order for cut in some for sequence in cut] == list(range(size))
    assert all(len(cut) <= plan.rows <= micro for mine in slices for cut in mine)
    if not fixed:
        assert plan.microbatches * plan.rows < -(-size // world) + plan.microbatches, "no more filling than must be"


@given(size=st.integers(1, 500), micro=st.integers(1, 64), worlds=st.lists(st.integers(1, 64), min_size=2, max_size=4))
def test_a_fixed_plan_cuts_the_batch_alike_in_every_world(size, micro, worlds):
    cuts = []
    for world in worlds:
        plan = plan_batch(size, micro, world, fixed=True)
        dealt = [cut for turn in zip(*map(plan.slices, range(world)), strict=True) for cut in turn]
        assert not any(dealt[plan.cuts :]), "what is beyond the cuts is filling"
        cuts.append(dealt[: plan.cuts])
    assert all(some == cuts[0] for some in cuts)


def test_no_sequence_at_all_is_an_error():
    with pytest.raises(ValueError, match="no shard is as long as one sequence"):
        BatchOrder([0, 0], 1)
