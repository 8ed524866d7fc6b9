"""Members that can't take part in the next round: they are stopped, cut off, or still import after their own start."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from concertina.plan.facts.replicas import Replicas
from simulation.parts.agents import AgentProcess
from simulation.parts.clock import START
from simulation.runs.world import World

HERE = "tests/simulation/stories/test_absent_members.py"
GATE, MORE = range(12), range(12, 120)
AT, LATER = 6.0, 5.0
"""Second at which a member is struck, and seconds until the next round has begun."""
IMPORT_SECONDS = 15.0


def seeds(case: str) -> pytest.MarkDecorator:
    """Return the parameter `seeds` of a test, of which `case` runs in the gate."""
    more = pytest.param(MORE, id="more", marks=pytest.mark.long(law=f"{HERE}::{case}"))
    return pytest.mark.parametrize("seeds", [pytest.param(GATE, id="gate"), more])


def struck(seeds: range, strike: Callable[[World, AgentProcess, AgentProcess], object]) -> Iterator[tuple[World, str]]:
    """Strike a member, and yield each world with the member's name once the next round has begun.

    `strike` gets the member and the coordinator. Jobs whose minimum does not allow a round without the member are left
    out. After the caller's checks, the job is run to its end.
    """
    for seed in seeds:
        world = World(seed, schedule=())
        least = world.cluster.spec.min_replicas
        world.clock.run(START + AT, lambda world=world: False)
        members = [world.agents[member.replica] for member in world.status.world.members]
        if len(members) < 3 or least == len(members) or world.over():
            continue
        coordinator, member = members[0], members[1]
        world.trouble(member.host, 20.0)
        before = world.status.world.round
        strike(world, member, coordinator)
        world.clock.run(START + AT + LATER, lambda world=world, before=before: world.status.world.round > before)
        world.clock.run(world.clock.now + 0.5, lambda: False)
        assert world.status.world.round == before + 1, world.story()
        yield world, member.replica
        world.run()


def asked(world: World) -> set[str]:
    """Return the replicas that the coordinator of the current round was told to be candidates for it."""
    preparation = world.agents[world.status.world.coordinator or ""].core.preparation
    assert preparation is not None
    return {candidate.replica for candidate in preparation.prepare.candidates}


def takes_part(world: World) -> set[str]:
    return {member.replica for member in world.status.world.members}


def stop(world: World, member: AgentProcess, coordinator: AgentProcess) -> None:
    world.clock.freeze(member, 20.0)


def cut(world: World, member: AgentProcess, coordinator: AgentProcess) -> None:
    world.trouble(coordinator.host, 20.0)
    world.network.cut(member.host, coordinator.host, 20.0)


def kill_with_operator(world: World, member: AgentProcess, coordinator: AgentProcess) -> None:
    """Kill the member and the operator. Both come back, the member first, and it imports for a long time."""
    world.operators[-1].kill()
    world.clock.after(1.5, world.start_operator)
    world.warm_up = lambda: IMPORT_SECONDS  # type: ignore[method-assign]
    world.cluster.restart_agent(member.pod)


@seeds("test_a_stopped_member_is_not_asked[gate]")
def test_a_stopped_member_is_not_asked(seeds: range) -> None:
    """So neither the operator nor any member waits for its answer."""
    count = 0
    for world, name in struck(seeds, stop):
        assert name not in asked(world), world.story()
        count += 1
    assert count >= len(seeds) // 6


@seeds("test_a_member_that_only_the_coordinator_can_not_reach_is_asked[gate]")
def test_a_member_that_only_the_coordinator_can_not_reach_is_asked(seeds: range) -> None:
    count = 0
    for world, name in struck(seeds, cut):
        assert name in asked(world), world.story()
        count += 1
    assert count >= len(seeds) // 6


def test_without_its_own_evidence_the_operator_would_leave_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replicas, "_unanswered", lambda self, name: True)
    assert any(name not in asked(world) for world, name in struck(GATE, cut))


@seeds("test_a_member_that_was_killed_with_the_operator_and_still_imports_is_left_out[gate]")
def test_a_member_that_was_killed_with_the_operator_and_still_imports_is_left_out(seeds: range) -> None:
    """The new operator has not seen the restart of the container; the agent's answer shows it."""
    count = 0
    for world, name in struck(seeds, kill_with_operator):
        assert name in asked(world), world.story()
        assert name not in takes_part(world), world.story()
        count += 1
    assert count >= len(seeds) // 6
