"""What a coordinator tells its tracker of the run: watches the core's events, and says what is to be recorded. Pure.

A step's record waits for the next step, or the end of the worker: what is evaluated after a step belongs to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Optional

import concertina_protocol as p
from concertina_agent.core import events as e
from concertina_agent.core.agent_state import AgentState
from concertina_agent.core.round.coordinator import Coordinator
from concertina_agent.core.round.membership import Membership
from concertina_agent.core.states import OwnState
from concertina_protocol.heartbeat import WorkerPhase
from concertina_protocol.tracking import tracking_records as t


@dataclasses.dataclass
class RoundRecord:
    """What has been recorded of one round."""

    round: int
    restored: bool = False
    """That it trains, and after which step."""
    step: int = -1
    """The newest one that was looked at."""
    waiting: Optional[t.StepDone] = None
    """Until the next step."""
    failures: set[str] = dataclasses.field(default_factory=set)
    notices: set[str] = dataclasses.field(default_factory=set)
    durable: int = -1
    """Step of the newest checkpoint."""
    ended: bool = False


class TrackingRecorder:
    def __init__(self, every_steps: int) -> None:
        """Every so many steps are recorded, and those with an evaluation."""
        self._every_steps = every_steps
        self._told = RoundRecord(-1)

    def records(self, agent: AgentState, event: e.Event, effects: Iterable[e.Effect], at: float) -> list[t.Record]:
        """After an event and with the effects that followed from it. `at`: Unix seconds."""
        r, told = agent.round, self._told
        found: list[t.Record] = []
        if r is None or r.assign.round != told.round:
            found += _flush(told)
            if r is None:
                told.waiting = None
                return found
            told = self._told = RoundRecord(r.assign.round)
            if r.coordinator is None and _knows_where_it_begins(agent, r):
                found.append(t.RoundBegan(told.round, _restored(r.assign.restore), at, coordinates=False))
        if r.coordinator is None:
            return found
        if isinstance(event, e.WorkerMessage) and isinstance(event.message, p.Progress):
            found += self._progress(r, told, event.message, at)
        elif not r.workers.alive(0):
            found += _flush(told)
        found += _happened(r.coordinator, told, at)
        durable = agent.latest
        if durable is not None and durable.round == told.round and durable.step > told.durable:
            told.durable = durable.step
            found.append(t.Checkpointed(told.round, durable.step, durable.at or at, durable.uri))
        if not told.ended:
            succeeded = agent.reported is OwnState.SUCCEEDED if not r.workers.alive(0) else False
            if succeeded or any(isinstance(effect, e.Exit) for effect in effects):
                told.ended = True
                outcome = t.RunOutcome.SUCCEEDED if succeeded else t.RunOutcome.STOPPED
                found += [*_flush(told), t.RunEnded(told.round, at, outcome)]
        return found

    def _progress(self, r: Membership, told: RoundRecord, progress: p.Progress, at: float) -> list[t.Record]:
        found: list[t.Record] = []
        if progress.restored_step is not None and not told.restored:
            told.restored, told.step = True, progress.restored_step
            workers = sum(member.workers for member in r.assign.members)
            source, replicas = progress.restored_from, len(r.assign.members)
            found.append(t.RoundBegan(told.round, told.step, at, True, source, replicas, workers))
        if not told.restored:
            return found
        evaluated = progress.evaluated
        if evaluated is not None and evaluated.step == told.step:
            # A round may begin with an evaluation, of which is heard with its first step: what that one took is not
            # the evaluated step's.
            known = told.waiting or t.StepDone(
                told.round, told.step, progress.at, _metrics(progress) if progress.step == told.step else {}
            )
            validation = {"validation_loss": evaluated.loss}
            told.waiting = dataclasses.replace(known, metrics={**known.metrics, **validation})
        if progress.step > told.step and progress.phase == WorkerPhase.TRAINING:
            found += _flush(told)
            told.step = progress.step
            last = progress.step == progress.steps
            if progress.step % self._every_steps == 0 or last:
                told.waiting = _record(told.round, progress, progress.step)
        return found


def _flush(told: RoundRecord) -> list[t.Record]:
    waiting, told.waiting = told.waiting, None
    return [] if waiting is None else [waiting]


def _happened(coordinator: Coordinator, told: RoundRecord, at: float) -> list[t.Record]:
    """Failures of the round once their cause is known, and who was told to leave."""
    found: list[t.Record] = []
    for failure in coordinator.failures() if coordinator.settled else ():
        if failure.replica not in told.failures and not failure.secondary:
            text = f"{failure.reason}: {failure.message}"
            found.append(_note(told, failure.at or at, t.NoteKind.FAILURE, text, failure.step))
        told.failures.add(failure.replica)
    for replica, grace in coordinator.noticed().items() if len(coordinator.noticed()) > len(told.notices) else ():
        if replica not in told.notices:
            found.append(_note(told, at, t.NoteKind.NOTICE, f"{replica} was told to leave within {grace:g} s."))
            told.notices.add(replica)
    return found


def _note(told: RoundRecord, at: float, kind: t.NoteKind, text: str, step: Optional[int] = None) -> t.Noted:
    return t.Noted(told.round, at, kind, text[: t.MOST_TEXT], told.step if step is None else step)


def _record(round: int, progress: p.Progress, step: int) -> t.StepDone:
    return t.StepDone(round, step, progress.at, _metrics(progress))


def _metrics(progress: p.Progress) -> Mapping[str, float]:
    known = {
        "loss": progress.loss,
        "tokens_per_second": progress.tokens_per_second,
        "step_seconds": progress.step_seconds,
        "samples": float(progress.position),
        "tokens": progress.tokens,
        "mfu": progress.mfu,
        "mfu_full_attention": progress.mfu_full_attention,
    }
    said = dict(list(progress.metrics.items())[: p.MOST_METRICS])
    return {**said, **{name: float(value) for name, value in known.items() if value is not None}}


def _knows_where_it_begins(agent: AgentState, r: Membership) -> bool:
    """A script without a state of ours begins where it likes."""
    return agent.bundled or r.assign.restore.source != p.RestoreSource.FRESH


def _restored(restore: p.Restore) -> int:
    if restore.source == p.RestoreSource.STORAGE and restore.durable is not None:
        return restore.durable.step
    return restore.step
