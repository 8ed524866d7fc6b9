"""Valid sizes, and the largest set of candidates that can reach each other."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from builders import jobs
from concertina.plan.facts import sizes
from concertina_agent.core.round import probes
from concertina_protocol import Candidate, Prepared


@pytest.mark.parametrize(
    ("replicas", "least", "workers", "block", "available", "size"),
    [
        (4, 2, 1, 1, 4, 4),
        (4, 2, 1, 1, 9, 4),
        (4, 2, 1, 1, 3, 3),
        (4, 2, 1, 1, 1, 0),
        (4, None, 1, 1, 3, 0),
        (4, None, 1, 1, 4, 4),
        (8, 2, 1, 4, 7, 4),
        (8, 2, 1, 4, 3, 0),
        (6, 2, 2, 4, 5, 4),
        (7, 1, 2, 4, 7, 6),
        (3, 1, 1, 4, 3, 0),
    ],
)
def test_sizes_are_whole_blocks(
    replicas: int, least: int | None, workers: int, block: int, available: int, size: int
) -> None:
    elastic = {"minReplicas": least, "scaleUp": {"stabilizationWindowSeconds": 1}} if least else None
    spec = jobs.command_spec(
        replicas=replicas, elastic=elastic, workersPerReplica=workers, parallelism={"tensor": block}
    )
    assert sizes.fitting(available, spec) == size


def test_a_size_that_is_rounded_down_says_why() -> None:
    spec = jobs.command_spec(replicas=7, elastic={"minReplicas": 1}, parallelism={"tensor": 4})
    assert sizes.most(spec) == 4
    assert sizes.least(spec) == 4
    assert "a multiple of 4" in sizes.rounding(spec)
    assert sizes.rounding(spec).endswith("the nearest are: 4 and 8")
    assert sizes.rounding(jobs.spec()) == ""


def replies(**reachable: str) -> dict[str, Prepared]:
    """Return replies; a="abc" means that a reaches a, b and c."""
    return {name: Prepared(name, f"i-{name}", 1, "c", 1, "s", tuple(found)) for name, found in reachable.items()}


@pytest.mark.parametrize(
    ("links", "members", "chosen"),
    [
        ({"a": "abc", "b": "abc", "c": "abc"}, "abc", "abc"),
        ({"a": "ab", "b": "ab", "c": "c"}, "abc", "ab"),
        ({"a": "abc", "b": "abc", "c": "c"}, "abc", "ab"),
        ({"a": "abc", "b": "abc", "c": "bc"}, "bc", "bc"),
        ({"a": "abcd", "b": "abcd", "c": "abcd", "d": "abcd"}, "d", "dab"),
        ({"a": "ab", "b": "ab", "c": "cd", "d": "cd"}, "cd", "cd"),
        ({"a": "ab", "b": "ab", "c": "cd", "d": "cd"}, "acd", "cd"),
        ({"a": "a", "b": "b"}, "ab", ""),
    ],
    ids=["all", "one alone", "one deaf", "one link", "one too many", "two halves", "more members", "nobody"],
)
def test_members_reach_each_other_and_old_ones_stay(links: dict[str, str], members: str, chosen: str) -> None:
    mutual = sizes.mutually_reachable(replies(**links), set(members))
    assert "".join(mutual[: sizes.fitting(len(mutual), jobs.spec())]) == chosen


def probed(count: int, there: Callable[[int, int], bool]) -> dict[str, Prepared]:
    """Return the replies of a large world, in which each replica pinged only some.

    `there` says whether one reaches another.
    """
    candidates = tuple(Candidate(f"r{i}", f"r{i}:1") for i in range(count))
    found = {}
    for me, candidate in enumerate(candidates):
        asked = [(int(other.replica[1:]), other.replica) for other in probes.chosen(candidates, candidate.replica)]
        reached = tuple(name for i, name in asked if there(me, i))
        missed = tuple(name for i, name in asked if not there(me, i))
        found[candidate.replica] = Prepared(candidate.replica, "i", 1, "c", 1, "s", reached, unreachable=missed)
    return found


@pytest.mark.parametrize("first", [600, 500, 400], ids=["more", "as many", "fewer"])
def test_of_a_large_world_that_is_cut_in_two_the_larger_side_goes_on(first: int) -> None:
    """Of two sides of the same size, that of the old members continues, without replicas of the other side."""
    found = probed(1000, lambda me, other: me == other or (me < first) == (other < first))
    members = {f"r{i}" for i in range(first)}
    side = range(first) if first >= 500 else range(first, 1000)
    assert sizes.mutually_reachable(found, members) == tuple(f"r{i}" for i in side)


def test_of_a_large_world_only_those_are_left_out_whom_the_others_cannot_reach() -> None:
    deaf = {17, 500, 999}
    found = probed(1000, lambda me, other: me == other or not {me, other} & deaf)
    kept = sizes.mutually_reachable(found, set(found))
    assert kept == tuple(f"r{i}" for i in range(1000) if i not in deaf)
