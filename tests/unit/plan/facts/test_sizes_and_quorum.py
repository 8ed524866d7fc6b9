"""Valid sizes, and the largest set of candidates that can reach each other."""

from __future__ import annotations

import pytest

from builders import jobs
from concertina.plan.facts import quorum, sizes
from concertina_protocol import Prepared


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
    elastic = {"minReplicas": least, "growAfterSeconds": 1} if least else None
    spec = jobs.command_spec(
        replicas=replicas, elastic=elastic, workersPerReplica=workers, parallelism={"tensor": block}
    )
    assert sizes.fitting(available, spec) == size


def test_a_size_that_is_rounded_down_says_why() -> None:
    spec = jobs.command_spec(replicas=7, elastic={"minReplicas": 1}, parallelism={"tensor": 4})
    assert sizes.most(spec) == 4
    assert sizes.least(spec) == 4
    assert "multiples of 4" in sizes.rounding(spec)
    assert sizes.rounding(jobs.spec()) == ""


def replies(**reachable: str) -> dict[str, Prepared]:
    """a="abc": a reaches a, b and c."""
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
        ({"a": "a", "b": "b"}, "ab", ""),
    ],
    ids=["all", "one alone", "one deaf", "one link", "one too many", "two halves", "nobody"],
)
def test_members_reach_each_other_and_old_ones_stay(links: dict[str, str], members: str, chosen: str) -> None:
    assert "".join(quorum.choose(replies(**links), set(members), jobs.spec())) == chosen
