"""State from which a round continues: the newest complete snapshot that is not void, a checkpoint, or the beginning."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import jobs
from concertina.api.status import CheckpointMark, JobStatus, rfc3339
from concertina.api.world import Base, World
from concertina.plan.state import restore
from concertina_protocol import Durable, HeldSnapshot, Prepared, SnapshotId, Storage

UID = jobs.UID
READY = Storage("Ready", None)
WITH_STORAGE = jobs.spec(checkpoint={"uri": "s3://bucket/run"})


def id_of(round: int, step: int, shards: int = 2) -> SnapshotId:
    return SnapshotId(round, step, "layout", shards)


def holding(*held: tuple[int, int, tuple[int, ...]]) -> Prepared:
    """Return a reply of a replica that holds (round, step, shards) each."""
    snapshots = tuple(HeldSnapshot(id_of(round, step), shards) for round, step, shards in held)
    return Prepared("", "i", 9, "c", 1, "s", (), snapshots)


def durable(round: int, step: int, uid: str = UID) -> Durable:
    return Durable(uid, round, step, f"s3://bucket/{round}/{step}")


def base(round: int, step: int) -> JobStatus:
    return JobStatus(world=World(round=round, base=Base(round=round, step=step)))


@pytest.mark.parametrize(
    ("held", "latest", "status", "source", "step"),
    [
        ({}, None, JobStatus(), "Fresh", 0),
        ({"a": [(1, 5, (0, 1))]}, None, JobStatus(), "Memory", 5),
        ({"a": [(1, 5, (0,))], "b": [(1, 5, (1,))]}, None, JobStatus(), "Memory", 5),
        ({"a": [(1, 6, (0,)), (1, 5, (0,))], "b": [(1, 5, (1,))]}, None, JobStatus(), "Memory", 5),
        ({"a": [(1, 6, (0,))], "b": [(1, 5, (1,))]}, None, JobStatus(), "Fresh", 0),
        ({"a": [(1, 6, (0,))], "b": [(2, 6, (1,))]}, None, JobStatus(), "Fresh", 0),
        ({"a": [(1, 9, (0, 1)), (2, 6, (0, 1))]}, None, base(2, 5), "Memory", 6),
        ({"a": [(1, 9, (0, 1))]}, None, base(2, 5), "Fresh", 0),
        ({"a": [(1, 9, (0, 1))]}, durable(2, 6), base(2, 5), "Storage", 6),
        ({"a": [(1, 5, (0, 1))]}, durable(1, 4), JobStatus(), "Memory", 5),
        ({"a": [(1, 4, (0, 1))]}, durable(1, 4), JobStatus(), "Memory", 4),
        ({"a": [(1, 4, (0, 1))]}, durable(1, 5), JobStatus(), "Storage", 5),
        ({"a": [(2, 6, (0, 1))]}, durable(1, 9), base(2, 5), "Memory", 6),
        ({}, durable(1, 9), base(2, 5), "Storage", 9),
        ({"a": [(1, 4, (0, 1))]}, durable(7, 90, "another"), JobStatus(), "Memory", 4),
        ({}, durable(7, 90, "another"), JobStatus(), "Storage", 90),
    ],
)
def test_the_newest_whole_state_that_is_not_void(
    held: dict[str, Any], latest: Durable | None, status: JobStatus, source: str, step: int
) -> None:
    replies = {name: holding(*snapshots) for name, snapshots in held.items()}
    choice = restore.choose(replies, [Storage("Ready", latest)], status, UID, WITH_STORAGE)
    assert not isinstance(choice, restore.Unknown)
    assert (choice.source, choice.step) == (source, step)


STATES = st.tuples(st.integers(1, 3), st.integers(0, 9))
"""States as (round, step)."""
HELD = st.dictionaries(STATES, st.sets(st.integers(0, 2), min_size=1).map(lambda some: tuple(sorted(some))), max_size=4)


@settings(max_examples=300)
@given(
    replies=st.dictionaries(st.sampled_from("abc"), HELD), latest=st.none() | STATES, foreign=st.booleans(),
    start=st.none() | STATES,
)  # fmt: skip
def test_a_round_goes_on_from_the_newest_whole_state_and_never_mixes_two(
    replies: dict[str, dict[tuple[int, int], tuple[int, ...]]], latest: Any, foreign: bool, start: Any
) -> None:
    named = durable(*latest, "another" if foreign else UID) if latest else None
    status = base(*start) if start else JobStatus()
    prepared = {
        name: Prepared(
            "", "i", 9, "c", 1, "s", (), tuple(HeldSnapshot(id_of(*at, 3), shards) for at, shards in held.items())
        )
        for name, held in replies.items()
    }
    choice = restore.choose(prepared, [Storage("Ready", named)], status, UID, WITH_STORAGE)
    assert not isinstance(choice, restore.Unknown)

    good = lambda at: not start or at[0] >= start[0] or at[1] <= start[1]  # noqa: E731
    every = {at for held in replies.values() for at in held}
    shards = {at: {shard for held in replies.values() for shard in held.get(at, ())} for at in every}
    whole = {at for at in every if shards[at] == {0, 1, 2} and good(at)}
    stored = named is not None and (foreign or good(latest))
    if whole and not (stored and not foreign and latest > max(whole)):
        assert (choice.source, choice.id) == ("Memory", id_of(*max(whole), 3))
        holders = {str(s): tuple(name for name in replies if s in replies[name].get(max(whole), ())) for s in range(3)}
        assert choice.holders == holders, "those and no others"
    elif named:
        assert (choice.source, choice.durable) == ("Storage", named)
    else:
        assert choice.source == "Fresh"


def test_the_holders_of_each_shard_are_named() -> None:
    replies = {"a": holding((1, 5, (0, 1))), "b": holding((1, 5, (1,)))}
    choice = restore.choose(replies, [READY], JobStatus(), UID, WITH_STORAGE)
    assert not isinstance(choice, restore.Unknown)
    assert choice.holders == {"0": ("a",), "1": ("a", "b")}


@pytest.mark.parametrize("storages", [[], [None], [Storage("Unknown")], [Storage("Error", None, "no such bucket")]])
def test_nothing_starts_while_the_state_is_not_known(storages: list[Storage | None]) -> None:
    assert isinstance(restore.choose({}, storages, JobStatus(), UID, WITH_STORAGE), restore.Unknown)
    replies = {"a": holding((1, 5, (0, 1)))}
    choice = restore.choose(replies, storages, JobStatus(), UID, WITH_STORAGE)
    assert not isinstance(choice, restore.Unknown), "what is in memory is enough to go on"
    assert choice.source == "Memory"


@pytest.mark.parametrize(
    ("held", "learnt", "source"),
    [
        ({}, (2,), None),
        ({}, (2, 3), "Storage"),
        ({}, (None,), "Storage"),
        ({"a": [(2, 3, (0, 1))]}, (2,), None),
        ({"a": [(2, 3, (0, 1))]}, (3,), "Storage"),
        ({"a": [(3, 9, (0, 1))]}, (2,), "Memory"),
    ],
    ids=["nothing else", "one has looked", "says nothing of it", "older memory", "older memory, looked", "memory"],
)
def test_who_was_not_of_the_last_round_has_to_look_at_storage_again(
    held: dict[str, Any], learnt: tuple[int | None, ...], source: str | None
) -> None:
    """The round may have continued without these members, to its end perhaps, and no member that knows is left."""
    replies = {name: holding(*snapshots) for name, snapshots in held.items()}
    looks = [Storage("Ready", durable(3, 6), round=round) for round in learnt]
    choice = restore.choose(replies, looks, base(3, 5), UID, WITH_STORAGE)
    assert (None if isinstance(choice, restore.Unknown) else choice.source) == source


def test_the_status_remembers_a_checkpoint_that_agents_have_not_seen() -> None:
    mark = CheckpointMark(step=8, round=3, uri="s3://bucket/3/8", at=rfc3339(jobs.T0))
    status = JobStatus(last_checkpoint=mark)
    choice = restore.choose({}, [Storage("Ready", durable(1, 4))], status, UID, WITH_STORAGE)
    assert not isinstance(choice, restore.Unknown)
    assert choice.durable == Durable(UID, 3, 8, "s3://bucket/3/8", at=jobs.T0)


def test_a_command_of_ones_own_starts_from_its_beginning() -> None:
    choice = restore.choose({}, [None], JobStatus(), UID, jobs.command_spec(checkpoint={"uri": "s3://bucket/run"}))
    assert not isinstance(choice, restore.Unknown)
    assert choice.source == "Fresh"
