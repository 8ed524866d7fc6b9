"""Order of turns among the jobs that wait for room."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from concertina.plan.lifecycle.line import EMPTY, Line, Waiting, worked_out
from concertina.plan.observed import BlockedBy, QueuePlace

CPU = {"cpu": Decimal(1), "pods": Decimal(1)}
JOB = Waiting(
    namespace="a",
    name="job",
    priority=0,
    trained=False,
    created=10.0,
    least=3,
    held=1,
    away=False,
    turn=False,
    passed=0.0,
    passed_fitting=False,
    newest_pod=10.0,
    requests=CPU,
)


def job(name: str, **fields: Any) -> Waiting:
    return replace(JOB, name=name, **fields)


def line(*jobs: Waiting, before: Line = EMPTY) -> Line:
    return worked_out({one.name: one for one in jobs}, before)


def turns(*jobs: Waiting) -> set[str]:
    return {name for name, place in line(*jobs).places.items() if place.turn}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"priority": 5, "created": 20.0}, {"trained": True}),
        ({"trained": True, "created": 20.0}, {}),
        ({"created": 20.0}, {"passed": 5.0, "passed_fitting": True}),
        ({"least": 9, "passed": 5.0, "created": 20.0}, {"least": 9, "passed": 6.0, "priority": 9}),
        ({"turn": True, "created": 20.0}, {}),
        ({"turn": True, "passed": 6.0}, {"passed": 5.0}),
        ({"priority": 5}, {"turn": True}),
        ({"least": 2, "created": 20.0}, {"least": 9}),
        ({"least": 2, "created": 20.0, "passed": 5.0}, {"least": 9}),
        ({"least": 9}, {"least": 2, "passed": 5.0, "passed_fitting": True}),
        ({"priority": 5, "least": 9}, {"least": 2}),
        ({"turn": True, "least": 9}, {"least": 2}),
        ({"created": 20.0}, {"hindrance": BlockedBy.TOO_LARGE, "priority": 9}),
    ],
    ids=[
        "a higher priority",
        "it has trained",
        "it has had no turn",
        "its turn is longer ago",
        "its turn is under way",
        "its second turn is under way",
        "a higher priority than that of the job whose turn is under way",
        "the room that is held is enough for it",
        "the room has become enough since its turn",
        "the room seemed enough and was not",
        "a higher priority, though the room is not enough",
        "its turn is under way, though the room is not enough",
        "room does not help the other",
    ],
)
def test_which_of_two_has_the_turn(first: dict[str, Any], second: dict[str, Any]) -> None:
    third = job("third", created=30.0, hindrance=BlockedBy.EXCLUDED)
    places = line(job("first", **first), job("second", **second), third).places
    if second.get("hindrance"):
        assert (places["first"], places["second"]) == (QueuePlace(), QueuePlace(hindrance=BlockedBy.TOO_LARGE)), (
            "it waits alone"
        )
        return
    assert places["first"].turn
    assert places["second"].ahead == ("a", "first")
    assert places["third"] == QueuePlace(hindrance=BlockedBy.EXCLUDED)


def test_turns_go_round_by_namespace() -> None:
    many = [job(f"a{number}", created=number, passed=5.0 * (number < 2), passed_fitting=True) for number in range(9)]
    assert turns(*many) == {"a2"}
    assert turns(*many, job("b", namespace="b", created=99.0)) == {"b"}


def test_there_are_no_turns_while_nothing_is_held_or_released() -> None:
    """A thousand jobs wait without any write if a cluster is full."""
    jobs = [job(f"{number}", held=0) for number in range(3)]
    assert turns(*jobs) == set()
    assert turns(*jobs, job("holds")) == {"0"}
    assert turns(*jobs, job("away", held=0, away=True)) == {"0"}
    assert turns(job("alone")) == set()


def test_room_that_has_just_been_released_counts_until_the_turn_begins() -> None:
    large, small = job("large", created=1.0, least=9, held=4, turn=True), job("small", least=4, held=0)
    other = job("other", created=2.0, least=9, held=0)
    before = line(large, other, small)
    assert before.places["large"].turn
    large = replace(large, turn=False, passed=120.0, held=0, away=True)
    after = line(large, other, small, before=before)
    assert after.places["small"] == QueuePlace(turn=True, fits=True)
    later = line(large, replace(other, held=1), small, before=after)
    assert later.places["small"] == QueuePlace(turn=True, fits=False), "it keeps its turn"


def test_a_job_whose_quota_is_used_up_has_turns_in_its_namespace_only() -> None:
    quota = job("quota", hindrance=BlockedBy.QUOTA, created=1.0)
    near, far = job("near", created=5.0), job("far", namespace="b")
    places = line(quota, near).places
    assert (places["quota"], places["near"]) == (QueuePlace(turn=True, fits=False), QueuePlace(ahead=("a", "quota")))
    places = line(quota, near, far).places
    assert places["quota"] == QueuePlace(turn=True, fits=True, hindrance=BlockedBy.QUOTA)
    assert places["near"].ahead == ("a", "quota")
    assert places["far"].ahead == ("a", "near")
    places = line(quota, far).places
    assert (places["quota"], places["far"]) == (QueuePlace(hindrance=BlockedBy.QUOTA), QueuePlace())
    places = line(replace(quota, created=99.0), far).places
    assert places["quota"] == QueuePlace(ahead=("b", "far"), hindrance=BlockedBy.QUOTA)
    assert line(quota).places["quota"] == QueuePlace()


@pytest.mark.parametrize("hindrance", [BlockedBy.EXCLUDED, BlockedBy.TOO_LARGE, BlockedBy.BEYOND_QUOTA])
def test_no_job_waits_for_one_that_room_does_not_help(hindrance: BlockedBy) -> None:
    useless = job("useless", priority=9, hindrance=hindrance)
    places = line(useless, job("able", namespace="b")).places
    assert (places["able"], places["useless"]) == (QueuePlace(), QueuePlace(hindrance=hindrance))
    assert line(useless, replace(useless, name="another")).places == {}, "neither has to make way"
