"""Ranks of replicas in a world of blocks: laws of an order that keeps groups within domains of nodes."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from concertina.plan.state.rank_order import Blocks, choose, order

SIZES = st.sampled_from([(2,), (4,), (2, 4), (2, 6), (2, 4, 8), (3, 6)])
NODES = st.tuples(st.sampled_from("ab"), st.sampled_from("xyz"), st.sampled_from(["", "1", "2"]))


def placed(*domains: str) -> dict[str, tuple[str, ...]]:
    """Return the domains of replicas; placed("aab") has 0 and 1 in domain a, 2 in domain b.

    Of two strings, the first is the wider domain.
    """
    return {f"r{at}": tuple(path) for at, path in enumerate(zip(*domains, strict=True))}


@st.composite
def worlds(draw: st.DrawFn, most: int = 5) -> Blocks:
    sizes = draw(SIZES)
    count = draw(st.integers(1, most)) * sizes[-1]
    return Blocks(sizes, {f"r{at}": draw(NODES) for at in range(count)})


@given(worlds(), st.data())
def test_a_permutation_and_the_same_again(blocks: Blocks, data: st.DataObject) -> None:
    before = data.draw(st.permutations([*blocks.domains, "gone-0", "gone-1"]))
    ordered = order([*blocks.domains], blocks, before)
    assert sorted(ordered) == sorted(blocks.domains)
    assert ordered == order([*blocks.domains], blocks, before)


@given(worlds())
def test_no_tensor_group_is_split_where_all_can_be_whole(blocks: Blocks) -> None:
    """Otherwise as few groups as possible are split: those left over in each domain, at each depth."""
    found, size = order([*blocks.domains], blocks), blocks.sizes[0]
    for level in (1, 2, 3):
        counts = Counter(path[:level] for path in blocks.domains.values())
        fewest = (len(found) - sum(count - count % size for count in counts.values())) // size
        assert blocks.split(found)[level - 1] == fewest


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([(2,), (3,), (2, 4), (2, 6)]), st.lists(NODES, min_size=6, max_size=6))
def test_nobody_finds_a_better_order(sizes: tuple[int, ...], nodes: list[tuple[str, str, str]]) -> None:
    count = 6 // sizes[-1] * sizes[-1]
    blocks = Blocks(sizes, {f"r{at}": nodes[at] for at in range(count)})
    assert blocks.split(order([*blocks.domains], blocks)) == min(map(blocks.split, permutations(blocks.domains)))


@given(worlds(), st.data())
def test_who_stays_keeps_the_rank(blocks: Blocks, data: st.DataObject) -> None:
    """The order stays for the same members, and the other members keep their ranks if one is replaced on its node.

    If there are more blocks, the old blocks come first.
    """
    before = order([*blocks.domains], blocks)
    assert order(sorted(blocks.domains), blocks, before) == before
    gone = data.draw(st.sampled_from(before))
    domains = {**blocks.domains, "new": blocks.domains[gone]}
    replaced = [("new" if name == gone else name) for name in before]
    assert order(sorted(replaced), Blocks(blocks.sizes, domains), before) == tuple(replaced)


def test_a_lost_member_takes_its_block_out_and_the_others_keep_their_ranks() -> None:
    names = [f"r{at}" for at in range(12)]
    blocks = Blocks((2, 4), dict.fromkeys(names, ("zone",)))
    live = [name for name in names if name != "r5"]
    chosen = choose(live, 8, blocks, names)
    assert chosen == ("r0", "r1", "r2", "r3", "r8", "r9", "r10", "r11"), "those of the broken block are not needed"
    assert order(chosen, blocks, names) == chosen, "the last block takes the place of the lost one"
    grown = order([*chosen, "r4", "r6", "r7", "new"], Blocks((2, 4), {**blocks.domains, "new": ("zone",)}), chosen)
    assert grown[:8] == chosen


def test_members_of_a_broken_block_fill_the_gaps_of_another() -> None:
    names = [f"r{at}" for at in range(8)]
    blocks = Blocks((4,), dict.fromkeys(names, ("zone",)))
    live = [name for name in names if name not in ("r1", "r4", "r6", "r7")]
    assert order(choose(live, 4, blocks, names), blocks, names) == ("r0", "r5", "r2", "r3")


def test_who_joins_goes_where_the_gap_is() -> None:
    """r1 and r2 are lost, and a new replica in the domain of each of them waits."""
    domains = placed("aabbba")
    before = ["r0", "r1", "r2", "r3"]
    assert order(["r0", "r3", "r4", "r5"], Blocks((2,), domains), before) == ("r0", "r5", "r4", "r3")


def test_a_spare_of_the_right_domain_is_chosen() -> None:
    blocks = Blocks((2,), placed("aabbba"))
    live = ["r0", "r2", "r3", "r4", "r5"]
    assert choose(live, 4, blocks, ["r0", "r1", "r2", "r3"]) == ("r0", "r2", "r3", "r5")


def test_where_another_order_is_better_as_many_as_possible_keep_their_ranks() -> None:
    """Nodes were labelled late, so pairs are across domains although every pair can be whole."""
    blocks = Blocks((2,), placed("abbacc"))
    assert order([*blocks.domains], blocks, [*blocks.domains]) == ("r0", "r3", "r2", "r1", "r4", "r5")


@pytest.mark.parametrize("count", [1, 1000])
def test_of_a_thousand_members_that_are_new(count: int) -> None:
    names = [f"r{at}" for at in range(1024)]
    blocks = Blocks((2, 8, 16), {name: (f"z{at % 3}", f"n{at % 96}") for at, name in enumerate(names)})
    ordered = order(names, blocks, [f"gone-{at}" for at in range(count)] + names[count:])
    assert len(set(ordered)) == 1024
