"""Workers whose processes outlive their round: the step that each ends by itself, when it is out, and its late words.

A survivor reads the snapshot that the next round chooses. The weights that it still has may be those of another step,
or half changed, and the next round must not use them.
"""

from __future__ import annotations

import copy
import enum
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import concertina_protocol as p
from concertina_agent.core import events as e
from concertina_agent.core.agent_state import AgentState
from concertina_protocol import worker_channel as w
from concertina_protocol.messages.ranges import united
from simulation.parts.clock import Violation
from simulation.parts.lineage import FRESH, Lineage, steps_of

if TYPE_CHECKING:
    from simulation.parts.agents import AgentProcess
    from simulation.parts.collective import Collective
    from simulation.runs.world import World

LOST = ("Connection closed by peer",)
SLOW = 0.3
"""Probability that a survivor does not leave its round at once."""
WORDS_AFTER = 3.0
"""Maximum seconds from the time at which a survivor is out of its round to the arrival of what it has said there."""


class Stay(enum.Enum):
    """Behavior of a job's workers when their round ends. The value is the delay of a slow survivor in seconds."""

    ENDS = (0.0, 0.0)
    """Their processes end."""
    SOON = (0.3, 1.0)
    LATE = (0.6, 4.5)
    """They stay, and a slow one takes longer than the operator waits for any answer, and less time than it waits for an
    answer with the newest state."""

    @classmethod
    def of(cls, seed: int) -> Stay:
        """Return what the workers of a seed's job do."""
        return Random(f"workers of {seed}").choice((cls.ENDS, cls.ENDS, cls.SOON, cls.LATE))


class Weights(enum.Enum):
    """Weights of a worker whose step is broken off."""

    BEFORE = "those of the last step"
    TORN = "half changed"
    AFTER = "those of the next step"


MIXES = ((3, 1, 1), (1, 1, 1), (0, 1, 8))
"""Weight of each of Weights: early in the step, in the middle, and at its end."""


class Broken(NamedTuple):
    """Step that was in progress when its round broke."""

    id: p.SnapshotId
    """Id of the snapshot that follows the step."""
    before: Lineage
    after: Lineage
    torn: Lineage
    """Parts of both states. No such state is valid, because it has more samples than steps."""
    saves: bool
    """Whether workers save the state after this step."""
    durable: bool


class Survivors:
    """Workers of one job, and whether they outlive their rounds."""

    def __init__(self, world: World, stay: Stay, seed: int, salt: int) -> None:
        self.world, self.clock, self.stay = world, world.clock, stay
        self._random = Random(f"survivors of {seed}/{salt}")
        self.said: list[str] = []
        """Kinds of the messages that reached an agent in a later round."""
        self.apart = 0
        """Number of steps that survivors have ended one step apart."""
        self.torn = 0
        """Number of survivors with torn weights."""

    @property
    def any(self) -> bool:
        return self.stay is not Stay.ENDS

    # --- the step that is broken off

    def end_step(self, run: Collective, dying: AgentProcess | None = None) -> None:
        """End the step in progress on each worker by itself. Call this when the round breaks.

        A second call has no effect. Some workers have received everything that the step needs. They change their
        weights, and begin to save them. Workers of `dying` end now. They may have been the first to save.
        """
        if run.parted:
            return
        run.parted, broken = True, self._broken_step(run)
        if broken is None:
            return
        ends, mix = set[Weights](), self._random.choice(MIXES)
        for process in run.here.values():
            weights = dict(
                zip(process.ranks, self._random.choices(tuple(Weights), mix, k=len(process.ranks)), strict=True)
            )
            ends.update(weights.values())
            process.live = self._together(set(weights.values()), broken)
            self.torn += Weights.TORN in weights.values()
            if broken.saves:
                for rank in [rank for rank in weights if weights[rank] is Weights.AFTER]:
                    self._save(run, process, rank, broken)
        self.apart += len(ends) > 1
        if dying is not None and broken.saves and mix is MIXES[-1]:
            for rank in dying.ranks:
                self._saved(run, dying, rank, broken)

    def _broken_step(self, run: Collective) -> Broken | None:
        """Return the step in progress, or None if no worker can have ended it."""
        if not self.any or not run.stepping or run.delayed or run.held_up:
            return None
        before = run.lineage or FRESH
        after = run.trained_ahead()
        if after is None:
            return None
        step = steps_of(after)
        durable = step >= self.world.steps or step % self.world.checkpoint_every == 0
        torn = before._replace(trained=united(before.trained, after.trained))
        return Broken(run.id_of(step), before, after, torn, durable or run.slot_free, durable)

    @staticmethod
    def _together(weights: set[Weights], broken: Broken) -> Lineage:
        """Return the weights of one replica's workers."""
        if weights == {Weights.AFTER}:
            return broken.after
        return broken.before if weights == {Weights.BEFORE} else broken.torn

    def _save(self, run: Collective, process: AgentProcess, rank: int, broken: Broken) -> None:
        """Begin to write the snapshot. Some writes are finished later, if the worker is still in its round then."""
        if self._random.random() < 0.2:
            return
        process.pod.begin(broken.id, rank, broken.torn)
        if self._random.random() < 0.7:
            self.clock.after(self._random.uniform(0.0, 0.6), self._saved, run, process, rank, broken)

    def _saved(self, run: Collective, process: AgentProcess, rank: int, broken: Broken) -> None:
        in_round = process.collective is run
        if not process.alive or not (in_round or (process.inside is run and self.clock.now < process.out_at)):
            return
        process.pod.keep(broken.id, rank, broken.after)
        if in_round:
            complete = steps_of(broken.after) >= self.world.steps
            process.handle(e.WorkerMessage(run.round, rank, w.Committed(broken.id, rank, "")))
            if broken.durable:
                process.handle(e.WorkerMessage(run.round, rank, w.WantDurable(broken.id, rank, "", complete)))
            run.copy_soon(process, broken.id)

    # --- the way out of the round

    def leave(self, process: AgentProcess, run: Collective, round: int) -> float:
        """Leave the round `run` for the round `round`, and return the seconds that this takes in addition."""
        is_killed = max(run.stopped.get(process.replica, 0.0), run.hung.get(process.replica, 0.0)) > self.clock.now
        if not self.any or is_killed or process.replica not in run.here:
            process.live = None
            return 0.0
        self.end_step(run)
        process.live = process.live or run.lineage
        late = self._random.uniform(*self.stay.value) if self._random.random() < SLOW else 0.0
        step = steps_of(run.lineage or FRESH)
        if step:
            for rank in process.ranks:
                for event in self._random.sample(words(run.round, run.id_of(step), rank, round), 2):
                    after = late + self._random.uniform(0.0, WORDS_AFTER)
                    self.clock.after(after, self._says, process, event)
        return late

    def _says(self, process: AgentProcess, event: e.WorkerMessage | e.WorkerExited) -> None:
        """Tell an agent what a worker has said in an earlier round.

        Raises:
            Violation: If the agent takes it in.
        """
        r = process.core.round
        if not process.alive or r is None or event.rank not in r.workers.ranks or self.clock.stands(process):
            return
        self.said.append(type(event.message if isinstance(event, e.WorkerMessage) else event).__name__)
        before = known(process.core)
        process.handle(event)
        if known(process.core) != before:
            raise Violation(f"{process.replica} has taken in what was said too late: {event}")


def words(round: int, id: p.SnapshotId, rank: int, later: int) -> list[e.WorkerMessage | e.WorkerExited]:
    """Return what a worker of `round` may still say when its agent is in the round `later`."""
    step = id.step + 1
    return [
        e.WorkerMessage(round, rank, p.Progress(step, 1000, 1.0, 1.0, 1.0, step, "training", 0.0)),
        e.WorkerMessage(round, rank, w.Committed(id, rank, "")),
        e.WorkerMessage(later, rank, w.Committed(id, rank, "")),
        e.WorkerMessage(later, rank, w.WantDurable(id, rank, "", complete=True)),
        e.WorkerExited(round, rank, 1, LOST),
    ]


def known(core: AgentState) -> tuple[object, ...]:
    """Return what an agent says, holds and ships."""
    r = core.round
    return core.report(), core.held, core.latest, r and copy.copy(r.saved), copy.deepcopy(vars(core.uploads))
