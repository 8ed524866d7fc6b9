"""Agents that lie: invalid content of valid protocol types, as it arrives through `agents.bounds`.

The operator believes what a round's coordinator says about the round, except for claims that no round could recover
from. Left out are lies that end the job as they would if they were true (docs/limitations.md): those of an agent about
durable storage, and those of a coordinator that the round has succeeded, that a failure is permanent, or that training
has to be undone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

import concertina_protocol as p

if TYPE_CHECKING:
    from simulation.parts.agents import AgentProcess
    from simulation.runs.world import World

LIE = "as a liar says"
"""Part of every text that a liar makes up."""
FAR = 10**6
"""Number of steps that no run reaches."""
ODD = (math.nan, math.inf, -math.inf, -1.0, 0.0, 1e300)
WHOLE = (-(2**70), -1, 0, 2**31, 2**63, 2**70)
REASONS = (
    p.FailureReason.WORKER_FAILED,
    p.FailureReason.OUT_OF_MEMORY,
    p.FailureReason.MEMBER_LOST,
    p.FailureReason.COORDINATOR_LOST,
    p.FailureReason.RESTORE_FAILED,
    p.FailureReason("Nonsense"),
)


@dataclasses.dataclass(frozen=True)
class Liar:
    world: World
    process: AgentProcess
    random: Random
    lies: tuple[Lie, ...]

    def __call__(self, report: p.Report) -> p.Report:
        self.world.invariants.lied(self.process)
        for lie in self.lies:
            report = lie(self, report)
        return report

    def anybody(self) -> str:
        """Return the name of a replica, usually not the liar's own, and perhaps of one that does not exist."""
        return self.random.choice([*sorted(self.world.cluster.pods), "job-77-0", "", "x" * 500])


Lie = Callable[[Liar, p.Report], p.Report]


def boasts(liar: Liar, report: p.Report) -> p.Report:
    """Report steps beyond the end of the run, and numbers that are not finite."""
    odd, whole = liar.random.choice, liar.random.choice
    progress = p.Progress(
        step=FAR + liar.random.randrange(FAR),
        steps=whole((None, *WHOLE)),
        loss=odd(ODD),
        tokens_per_second=odd(ODD),
        step_seconds=odd(ODD),
        position=whole(WHOLE),
        phase=LIE,
        at=odd(ODD),
        first_step_at=odd(ODD),
        snapshot_step=whole(WHOLE),
        checkpoint_seconds=odd(ODD),
        stalled_seconds=odd(ODD),
        mfu=odd(ODD),
        save_seconds=odd(ODD),
        interval=p.CheckpointInterval(odd(ODD), odd(ODD), odd(ODD), odd(ODD)),
        evaluated=p.Evaluated(whole(WHOLE), odd(ODD), odd(ODD), {LIE: odd(ODD)}),
        shares=tuple(whole(WHOLE) for _ in range(liar.random.randrange(4))),
    )
    return dataclasses.replace(report, progress=progress)


def tells_of_nobody(liar: Liar, report: p.Report) -> p.Report:
    """Report members that do not exist, and none of those that do."""
    states = list(p.State)
    names = {liar.anybody() for _ in range(3)}
    members = {
        name: p.MemberState(
            name,
            LIE,
            liar.random.choice(WHOLE),
            LIE,
            liar.random.choice(states),
            step=liar.random.choice(WHOLE),
            notice=liar.random.choice((None, *ODD)),
        )
        for name in sorted(names)
    }
    return dataclasses.replace(report, coordinator=True, members=members)


def accuses(liar: Liar, report: p.Report) -> p.Report:
    """Accuse other replicas of failures of all kinds.

    The words differ each time, because the operator would otherwise take the failure for a bug in the script.
    """
    random = liar.random
    message = LIE + ": " + "".join(random.choices("ghijklmnopqrstuvwxyz", k=12))
    failure = p.Failure(
        liar.anybody(),
        random.choice(REASONS),
        message,
        last_lines=(message,),
        rank=random.choice((None, *WHOLE)),
        exit_code=random.choice(WHOLE),
        step=random.choice((None, *WHOLE)),
        secondary=random.random() < 0.3,
        at=random.choice((None, *ODD)),
    )
    hang = p.Hang(liar.anybody(), random.choice(WHOLE), random.choice(WHOLE), message, message, random.choice(ODD))
    straggler = p.Straggler(liar.anybody(), random.choice(WHOLE), random.choice(ODD), random.choice(ODD))
    words: dict[str, Any] = random.choice(({"failures": (failure,)}, {"hang": hang}, {"stragglers": (straggler,)}))
    return dataclasses.replace(report, coordinator=True, **words)


def contradicts_itself(liar: Liar, report: p.Report) -> p.Report:
    """Report a state that is not the agent's own, or that all is done although the agent does not decide that."""
    world, claim = liar.world, liar.world.status.world.claim
    others = world.status.world.coordinator not in (None, liar.process.replica)
    if claim is not None and claim.committed and others and liar.random.random() < 0.3:
        done = {"state": p.State.SUCCEEDED, "round": claim.round, "claim": claim.claim_id}
        return dataclasses.replace(report, coordinator=True, **done)
    states = [state for state in p.State if state is not p.State.SUCCEEDED]
    return dataclasses.replace(
        report,
        ready=liar.random.random() < 0.5,
        coordinator=liar.random.random() < 0.5,
        state=liar.random.choice(states),
    )


def is_of_another_round(liar: Liar, report: p.Report) -> p.Report:
    """Report a round that ended long ago, or one that is far ahead."""
    round = liar.random.choice((-1, 0, max(0, report.round - 1), report.round + 1, report.round + 1000, 2**53, 2**70))
    return dataclasses.replace(report, round=round, claim=liar.random.choice(("", LIE, report.claim)))


def means_to_go(liar: Liar, report: p.Report) -> p.Report:
    """Report a termination notice, or that the agent can never start."""
    if liar.random.random() < 0.5:
        return dataclasses.replace(report, notice=liar.random.choice(ODD))
    return dataclasses.replace(report, ready=False, startup_error=LIE)


LIES: tuple[Lie, ...] = (boasts, tells_of_nobody, accuses, contradicts_itself, is_of_another_round, means_to_go)


def lying_agent(world: World, random: Random) -> None:
    """Make an agent lie for a while, often the coordinator of the round."""
    alive = [process for process in world.agents.values() if process.alive]
    coordinator = world.agents.get(world.status.world.coordinator or "")
    if not alive:
        return
    process = (
        coordinator if coordinator is not None and coordinator.alive and random.random() < 0.4 else random.choice(alive)
    )
    lies = tuple(random.sample(LIES, random.randint(1, 2)))
    seconds = random.uniform(1, 15)
    world.tell(f"{process.replica} lies for {seconds:.1f} s: it {' and '.join(lie.__name__ for lie in lies)}")
    process.lie = Liar(world, process, Random(random.random()), lies)
    _speak(world, process, random, world.clock.now + seconds)


def _speak(world: World, process: AgentProcess, random: Random, until: float) -> None:
    """Lie from time to time, and tell the truth at the end."""
    if world.mended or world.clock.now >= until:
        process.lie = None
    if process.alive:
        process.tell_operators()
    if process.lie is not None and process.alive:
        world.clock.after(min(random.uniform(0.2, 2.0), until - world.clock.now), _speak, world, process, random, until)
