"""Workers that outlive their round: some finish their step and others don't, they leave late, and speak too late."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from concertina_agent.core import events as e
from concertina_agent.core import machine
from concertina_agent.core.agent_state import AgentState
from concertina_agent.core.steps import worker_steps
from concertina_protocol import Progress, SnapshotId
from concertina_protocol import worker_channel as w
from simulation import mutations
from simulation.faults.table import FAULTS
from simulation.parts import agents, operators
from simulation.parts.agents import AgentProcess
from simulation.parts.clock import Violation
from simulation.parts.collective import LOST
from simulation.parts.lineage import steps_of
from simulation.runs.schedule import Strike
from simulation.runs.world import World

HERE = "tests/simulation/stories/test_survivors.py"
SOON, LATE = (0.3, 1.0), (0.6, 4.5)
"""Seconds that a survivor takes to leave its round, and thus to answer the operator, if it does not leave at once.

LATE is longer than the operator waits for any answer, and shorter than it waits for one with the newest state.
"""
Patch = pytest.MonkeyPatch


def known(core: AgentState) -> tuple[object, ...]:
    """Return what an agent says, holds and ships."""
    r = core.round
    return core.report(), core.held, core.latest, r and copy.copy(r.saved), copy.deepcopy(vars(core.uploads))


def survive(patch: Patch, seed: int, delays: tuple[float, float] = SOON) -> list[str]:
    """Workers live across rounds. Returns what they have said too late, as they say it."""
    draw, said = random.Random(seed), list[str]()

    def leave(self: AgentProcess, effect: e.KillWorkers) -> None:
        run, ranks = self.collective, self.ranks
        late = draw.uniform(*delays) if draw.random() < 0.3 else draw.uniform(0.002, 0.03)
        if run is not None and run.lineage is not None and self.replica in run.here and steps_of(run.lineage):
            step, round = steps_of(run.lineage), run.round
            id = SnapshotId(round, step, f"{run.shards} shards", run.shards)
            for rank in ranks:
                if draw.random() < 0.5:  # the step ends in this survivor; in another it is torn
                    self.pod.keep(id, rank, run.lineage)
                words: list[tuple[int, w.Message]] = [
                    (round, Progress(step + 1, 1000, 1.0, 1.0, 1.0, step + 1, "training", 0.0)),
                    (round, w.Committed(id, rank, "")),
                    (effect.round, w.Committed(id, rank, "")),
                    (effect.round, w.WantDurable(id, rank, "", complete=True)),
                ]
                for of, word in words:
                    self.clock.after(late + draw.uniform(0.0, 3.0), tell, self, e.WorkerMessage(of, rank, word))
                ended = e.WorkerExited(round, rank, 1, LOST)
                self.clock.after(late + draw.uniform(0.0, 3.0), tell, self, ended)
        self._end_round()
        self.clock.after(late, self._gone, effect.round)

    def tell(self: AgentProcess, event: e.WorkerMessage | e.WorkerExited) -> None:
        r = self.core.round
        if r is None or event.rank not in r.workers.ranks or self.clock.stands(self):
            return
        said.append(type(event.message if isinstance(event, e.WorkerMessage) else event).__name__)
        before = known(self.core)
        self.handle(event)
        if known(self.core) != before:
            raise Violation(f"{self.replica} has taken in what was said too late: {event}")

    patch.setitem(agents.EFFECTS, e.KillWorkers, leave)
    return said


def play(seed: int, patch: Patch, others: Iterable[Strike] = (), delays: tuple[float, float] = SOON) -> list[str]:
    """Play a run to its end, in which a worker is killed, and return what was said too late.

    Raises:
        Violation: When the run breaks a rule.
    """
    said = survive(patch, seed, delays)
    world = World(seed, schedule=(Strike(5.0 + seed % 4, "kill_worker", seed), *others))
    world.run()
    if not others and world.status.restarts.total > 1:
        raise Violation(f"what was said too late ended a round\n{world.story()}")
    return said


@pytest.mark.parametrize(
    "seeds",
    [
        range(10),
        pytest.param(range(10, 200), marks=pytest.mark.long(law=f"{HERE}::test_survivors_spoil_no_round[seeds0]")),
    ],
)
def test_survivors_spoil_no_round(seeds: range, monkeypatch: Patch) -> None:
    said = [word for seed in seeds for word in play(seed, monkeypatch)]
    assert {"Progress", "Committed", "WantDurable", "WorkerExited"} <= set(said)


@pytest.mark.parametrize(
    "seeds",
    [
        range(8),
        pytest.param(range(8, 200), marks=pytest.mark.long(law=f"{HERE}::test_a_second_failure_meets_them[seeds0]")),
    ],
)
def test_a_second_failure_meets_them(seeds: range, monkeypatch: Patch) -> None:
    """At any moment of the recovery."""
    for seed in seeds:
        moment = 5.0 + seed % 4 + 0.2 * (seed % 7)
        play(seed, monkeypatch, [Strike(moment, FAULTS[seed % len(FAULTS)], seed)])


@pytest.mark.parametrize(
    "seeds",
    [
        range(6),
        pytest.param(range(6, 100), marks=pytest.mark.long(law=f"{HERE}::test_a_late_answer_costs_no_state[seeds0]")),
    ],
)
def test_a_late_answer_costs_no_state(seeds: range, monkeypatch: Patch) -> None:
    """The operator waits for the answer of a survivor that may hold the newest state."""
    _play_all(seeds, monkeypatch, LATE)


LATE_FAULTS: dict[str, Callable[[Patch], None]] = {
    "the operator does not wait": mutations.late_members_are_left_out,
    "an answer counts for a later call": lambda patch: patch.setattr(
        operators, "is_same_call", lambda viewed, sent: viewed is not None
    ),
}


@pytest.mark.parametrize("fault", LATE_FAULTS)
def test_with_a_fault_it_does(fault: str, monkeypatch: Patch) -> None:
    LATE_FAULTS[fault](monkeypatch)
    with pytest.raises(Violation, match=r"begins from step \d+; .* hold"):
        _play_all(range(2, 12), monkeypatch, LATE)


def _takes(patch: Patch, kind: type) -> None:
    """Let the core take such events of any round."""
    step = machine.HANDLERS[kind]

    def taken(agent: AgentState, event: Any, t: e.Moment) -> list[e.Effect]:
        return step(agent, dataclasses.replace(event, round=agent.seen[0]), t)

    patch.setitem(machine.HANDLERS, kind, taken)


FENCES: dict[str, Callable[[Patch], None]] = {
    "messages of another round": lambda patch: _takes(patch, e.WorkerMessage),
    "ends of workers of another round": lambda patch: _takes(patch, e.WorkerExited),
    "snapshots of another round": lambda patch: patch.setattr(worker_steps, "is_of_round", lambda message, round: True),
}


@pytest.mark.parametrize("fence", FENCES)
def test_without_a_fence_they_do(fence: str, monkeypatch: Patch) -> None:
    FENCES[fence](monkeypatch)
    with pytest.raises(Violation, match="too late"):
        _play_all(range(30), monkeypatch)


def _play_all(seeds: Iterable[int], patch: Patch, delays: tuple[float, float] = SOON) -> None:
    for seed in seeds:
        play(seed, patch, delays=delays)
