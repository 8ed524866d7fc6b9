"""Calls that travel through the coordinator: it dies, falls silent, is late, or can't reach a member that is well.

A round that trains is ended by the death of a worker, so that the coordinator lives and has Prepare and Assign to pass
on.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from simulation.parts import operators
from simulation.parts.clock import Violation
from simulation.parts.operators import OperatorProcess
from simulation.runs.schedule import Strike
from simulation.runs.world import World

HERE = "tests/simulation/stories/test_coordinator_path.py"
GATE, MORE = range(8), range(8, 80)
AT = 6.0
LATE_ANSWER = 21
"""Seed with which an answer to a call of an earlier claim arrives during a call of a later one."""
ENOUGH_ROUNDS = 6
"""Maximum number of rounds: the first one, growing to full size, and two for each of two failures."""


def seeds(case: str) -> pytest.MarkDecorator:
    """Return the parameter `seeds` of a test, of which `case` runs in the gate."""
    more = pytest.param(MORE, id="more", marks=pytest.mark.long(law=f"{HERE}::{case}"))
    return pytest.mark.parametrize("seeds", [pytest.param(GATE, id="gate"), more])


def played(seed: int, *faults: Strike, arrange: Callable[[World], object] = lambda world: None) -> World:
    """Run a job to its end with these faults, of which the last one ends its round.

    Raises:
        Violation: If it does not hold.
    """
    world = World(seed, schedule=(*faults, Strike(AT, "kill_worker", seed)))
    world.clock.after(AT - 0.01, arrange, world)
    world.run()
    if world.status.rounds > ENOUGH_ROUNDS:
        raise Violation(f"{world.status.rounds} rounds\n{world.story()}")
    return world


def passed_on(world: World) -> int:
    return sum(operator.passed_on for operator in world.operators)


@seeds("test_whenever_the_coordinator_dies_while_it_passes_calls_on_the_job_goes_on[gate]")
def test_whenever_the_coordinator_dies_while_it_passes_calls_on_the_job_goes_on(seeds: range) -> None:
    """Let it die before the first Prepare, between two, or before an Assign. The next coordinator takes its place."""
    died = 0
    for seed in seeds:
        world = played(seed, Strike(AT - 0.1, "die_passing_on", seed))
        died += any("dies before it passes a" in text for _, text in world.clock.story)
    assert died >= len(seeds) // 3


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_a_round_of_each_size_begins_through_the_coordinator(replicas: int) -> None:
    """The operator itself calls the coordinator alone, over its stream."""
    calls: list[str] = []
    seed = next(seed for seed in range(100) if World(seed).replicas == replicas)

    def count(world: World) -> None:
        operator = world.operators[-1]
        call = operator._call
        operator._call = lambda action, heard: (calls.append(action.replica), call(action, heard))[1]  # type: ignore[func-returns-value, method-assign]

    world = played(seed, arrange=count)
    members = {member.replica for member in world.status.world.members}
    assert len(members) == replicas
    assert passed_on(world) >= 2 * (replicas - 1), "a Prepare and an Assign to each of the others"
    assert set(calls) == {world.status.world.coordinator}


def cut_off_a_member(world: World) -> str:
    """Cut the link between the coordinator and one member, both of which the operator reaches.

    Return the member, or an empty text if the round is too small.
    """
    pods, members = world.cluster.pods, world.status.world.members
    if len(members) < 3:
        return ""
    a, b = (pods[member.replica].node for member in (members[0], members[-1]))
    world.network.cut(a, b, 5.0)
    return members[-1].replica


def asked_members(seeds: range) -> list[bool]:
    """Return, for each job with a member that its coordinator can't reach, whether that member was asked all the same.

    Raises:
        Violation: If it does not hold.
    """
    asked: list[bool] = []

    def look(world: World, replica: str, seen: tuple[int, str]) -> None:
        asked.append(world.agents[replica].core.seen > seen)

    def arrange(world: World) -> None:
        if replica := cut_off_a_member(world):
            world.clock.after(4.0, look, world, replica, world.agents[replica].core.seen)

    for seed in seeds:
        world = played(seed, arrange=arrange)
        assert not any(entry.action == "RecreatePod" for entry in world.status.restarts.recent), world.story()
    return asked


@seeds("test_a_member_that_only_the_coordinator_can_not_reach_is_asked_by_the_operator[gate]")
def test_a_member_that_only_the_coordinator_can_not_reach_is_asked_by_the_operator(seeds: range) -> None:
    asked = asked_members(seeds)
    assert asked
    assert all(asked)


def test_the_coordinators_silence_taken_for_the_members_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: what the coordinator does not pass back counts as a call without an answer."""

    def gives_up(self: OperatorProcess, action: object, heard: tuple[object, str, object]) -> None:
        self._answered(*heard, None, "timed out")  # type: ignore[arg-type]

    through = OperatorProcess._send_through

    def mistaken(self: OperatorProcess, *arguments: object) -> None:
        self._call = gives_up.__get__(self)  # type: ignore[method-assign]
        through(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(OperatorProcess, "_send_through", mistaken)
    with pytest.raises((Violation, AssertionError)):
        assert all(asked_members(GATE))


def standing_coordinator(world: World) -> None:
    """Stop the coordinator's agent once it has the Prepare; it passes the Prepare on when it runs again, much later."""
    process = world.agents[world.status.world.coordinator or ""]
    pass_on = process.pass_on

    def stands(*arguments: object) -> None:
        process.pass_on = pass_on  # type: ignore[method-assign]
        world.tell(f"the agent {process.replica} is stopped for 8.0 s before it passes a message on")
        world.trouble(process.host, 8.0)
        world.clock.freeze(process, 8.0)
        process.pass_on(*arguments)  # type: ignore[arg-type]

    process.pass_on = stands  # type: ignore[method-assign]


@seeds("test_what_a_replaced_coordinator_passes_on_late_changes_nothing[gate]")
def test_what_a_replaced_coordinator_passes_on_late_changes_nothing(seeds: range) -> None:
    late = 0
    for seed in seeds:
        world = played(seed, arrange=standing_coordinator)
        late += any("before it passes a message on" in text for _, text in world.clock.story)
    assert late >= len(seeds) // 3


def test_a_coordinator_that_is_waited_for_forever_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: the operator trusts that the coordinator passes everything on."""
    monkeypatch.setattr(operators, "relay_seconds", lambda replicas: 1e6)
    with pytest.raises(Violation, match="not complete"):
        asked_members(GATE)


def test_an_answer_for_another_claim_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: the first answer that arrives counts, also that to an earlier call of the same kind."""
    unruly = Strike(0.0, "unruly_network", LATE_ANSWER)
    played(LATE_ANSWER, unruly, arrange=standing_coordinator)
    monkeypatch.setattr(operators, "is_same_call", lambda viewed, sent: viewed is not None)
    with pytest.raises(Violation, match="counts for"):
        played(LATE_ANSWER, unruly, arrange=standing_coordinator)
