"""Hangs, stragglers and notices, each without other faults: the named replica, the reaction, and its cost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from concertina_protocol import RestoreSource
from simulation.parts.clock import START
from simulation.runs.schedule import SPAN, Strike
from simulation.runs.world import World

HERE = "tests/simulation/stories/test_verdicts.py"


def runs(fault: str, seeds: range, at: float = 6.0) -> Iterator[World]:
    for seed in seeds:
        world = World(seed, schedule=(Strike(at, fault, seed),))
        world.run()
        yield world


def told(world: World, words: str) -> list[str]:
    return [text for _, text in world.clock.story if words in text]


def test_a_hang_is_found_and_its_replica_replaced_or_only_reported() -> None:
    """The invariants check that the replica is the right one."""
    replaced = reported = 0
    for world in runs("hang_worker", range(20)):
        verdicts = [entry for entry in world.status.restarts.recent if entry.reason == "Hang"]
        if world.cluster.spec.failure_policy.on_hang == "Report":
            assert not world.status.restarts.total, world.story()
            reported += bool(told(world, ": Hang: "))
        elif told(world, "hangs"):
            if world.replicas == 1 and any(entry.action == "RestartWorkers" and entry.step for entry in verdicts):
                continue  # No other member holds its state, and nothing was in storage yet.
            assert [entry.action for entry in verdicts] == ["RecreatePod"], world.story()
            pod = world.cluster.pods.get(verdicts[0].replica)
            assert pod is None or pod.deleting, world.story()
            replaced += 1
    assert replaced >= 5
    assert reported >= 1


def test_a_straggler_is_found_and_replaced_where_that_is_wanted() -> None:
    """A straggler is replaced without losing a step."""
    named = replaced = 0
    for world in runs("ever_slow_node", range(3, 203, 8), at=0.0):
        named += bool(told(world, ": Straggler: "))
        deleted = told(world, "is a straggler")
        replaced += any(" deletes " in text for text in deleted)
        assert not world.status.steps_replayed, world.story()
        assert world.cluster.spec.failure_policy.on_straggler == "Replace" or not world.cluster.deletes
    assert named >= 5
    assert replaced >= 2


@pytest.mark.parametrize(
    "fault",
    [
        "preempt_all",
        *(
            pytest.param(fault, marks=pytest.mark.long(law=f"{HERE}::test_a_notice_costs_no_step_where_there_is_time"))
            for fault in ("shut_down", "spot_notice")
        ),
    ],
)
def test_a_notice_costs_no_step_where_there_is_time(fault: str) -> None:
    """If one node or all nodes get a notice, all state that they hold is in storage before they end."""
    some = 0
    for world in runs(fault, range(15)):
        hasty = any(told(world, f"with {grace} s") for grace in ("0.3", "0.5"))
        assert hasty or not world.status.steps_replayed, world.story()
        some += not hasty and world.status.rounds > 1
    assert some >= 5


@pytest.mark.parametrize("how", ["moves", "leaves"])
def test_a_round_of_one_hands_its_state_over(how: str) -> None:
    """A round of one replica hands over its state to a successor on another node, or to a standby without storage."""
    handed = 0
    for seed in (2, 14, 43, 49, 55):
        world = World(seed, schedule=())
        world.clock.after(8.0, _ends_its_stay, world, how)
        world.run()
        assert not world.status.steps_replayed, world.story()
        later = [run.assign for run in world.collectives.values() if run.assign.round > 1]
        handed += any(one.outside and one.restore.source is RestoreSource.MEMORY for one in later)
    assert handed >= (3 if how == "moves" else 1)


def _ends_its_stay(world: World, how: str) -> None:
    members = world.status.world.members
    if len(members) != 1 or world.over() or (how == "leaves" and not world.cluster.spec.standby_replicas):
        return
    world.trouble(members[0].node, SPAN)
    if how == "moves":
        world.cluster.mark_node(members[0].node, cordoned=True)
    else:
        world.storage.down_until = world.clock.now + SPAN
        world.cluster.remove(members[0].replica, grace=20.0)


def test_replicas_that_are_not_wanted_any_more_go_once_their_state_is_held_elsewhere() -> None:
    """Replicas with the only copy of the state leave once it is held elsewhere, before the end of their grace."""
    grace_seconds, handed = 90.0, 0
    for seed in range(120):
        world = World(seed, schedule=())
        if world.replicas < 4 or world.steps * world.step_seconds < 20.0:
            continue
        world.cluster.grace = grace_seconds
        world.clock.after(8.0, lambda world=world: world.cluster.edit(replicas=1))
        world.clock.run(START + 8.0 + grace_seconds / 3, lambda world=world: world.over() or _is_alone(world))
        assert _is_alone(world), world.story()
        assert not world.status.steps_replayed, world.story()
        handed += any(run.assign.outside for run in world.collectives.values())
    assert handed >= 3


def _is_alone(world: World) -> bool:
    return len(world.status.world.members) == len(world.cluster.pods) - world.cluster.spec.standby_replicas == 1
