"""Records of the run for a tracking tool, derived from the events that the agent processes.

If the model is evaluated after a step, the step's record includes the evaluation. The record is therefore written only
at the next step, or when the worker exits. The module has no side effects.
"""

from __future__ import annotations

import dataclasses
import itertools
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
    """Facts about one round that have already been recorded for the tracking tool.

    A round is a period in which a fixed set of replicas trains.
    """

    round: int
    restored: bool = False
    """True if the beginning of the round's training has been recorded."""
    step: int = -1
    """Newest step whose progress was processed."""
    waiting: Optional[t.StepDone] = None
    """Record of the newest step, which is written only at the next step. None if there is none."""
    failures: set[str] = dataclasses.field(default_factory=set)
    notices: set[str] = dataclasses.field(default_factory=set)
    durable: int = -1
    """Step of the newest checkpoint that was recorded."""
    ended: bool = False


class TrackingRecorder:
    """Writer of the records of a run for a tracking tool.

    The coordinator is the agent of rank 0. A round is a period in which a fixed set of replicas trains. Only the agent
    of the round's coordinator records the steps.
    """

    def __init__(self, every_steps: int) -> None:
        """Prepare to record every `every_steps`-th step, and each step after which the model is evaluated."""
        self._every_steps = every_steps
        self._round_record = RoundRecord(-1)

    def records(self, agent: AgentState, event: e.Event, effects: Iterable[e.Effect], at: float) -> list[t.Record]:
        """Return the records to write for an event.

        `agent` is the state after the event, `effects` are the event's effects, and `at` is the Unix time in seconds.
        """
        r, round_record = agent.round, self._round_record
        records: list[t.Record] = []
        if r is None or r.assign.round != round_record.round:
            records += _flush(round_record)
            if r is None:
                round_record.waiting = None
                return records
            round_record = self._round_record = RoundRecord(r.assign.round)
            if r.coordinator is None and _knows_where_it_begins(agent, r):
                records.append(t.RoundBegan(round_record.round, _restored(r.assign.restore), at, coordinates=False))
        if r.coordinator is None:
            return records
        if isinstance(event, e.WorkerMessage) and isinstance(event.message, p.Progress):
            if event.round == round_record.round:
                records += self._progress(r, round_record, event.message, at)
        elif not r.workers.alive(0):
            records += _flush(round_record)
        records += _notes(r.coordinator, round_record, at)
        durable = agent.latest
        if durable is not None and durable.round == round_record.round and durable.step > round_record.durable:
            round_record.durable = durable.step
            records.append(t.Checkpointed(round_record.round, durable.step, durable.at or at, durable.uri))
        if not round_record.ended:
            succeeded = agent.reported is OwnState.SUCCEEDED if not r.workers.alive(0) else False
            if succeeded or any(isinstance(effect, e.Exit) for effect in effects):
                round_record.ended = True
                outcome = t.RunOutcome.SUCCEEDED if succeeded else t.RunOutcome.STOPPED
                records += [*_flush(round_record), t.RunEnded(round_record.round, at, outcome)]
        return records

    def _progress(self, r: Membership, round_record: RoundRecord, progress: p.Progress, at: float) -> list[t.Record]:
        records: list[t.Record] = []
        if progress.restored_step is not None and not round_record.restored:
            round_record.restored, round_record.step = True, progress.restored_step
            workers = sum(member.workers for member in r.assign.members)
            source, replicas = progress.restored_from, len(r.assign.members)
            records.append(t.RoundBegan(round_record.round, round_record.step, at, True, source, replicas, workers))
        if not round_record.restored:
            return records
        evaluated = progress.evaluated
        if evaluated is not None and evaluated.step == round_record.step:
            # If a round begins with an evaluation, the evaluation is reported with the round's first step. The metrics
            # of that step do not belong to the evaluated step.
            step_done = round_record.waiting or t.StepDone(
                round_record.round,
                round_record.step,
                progress.at,
                _metrics(progress) if progress.step == round_record.step else {},
            )
            metrics = {**step_done.metrics, **_validation_metrics(evaluated)}
            round_record.waiting = dataclasses.replace(step_done, metrics=metrics)
        if progress.step > round_record.step and progress.phase == WorkerPhase.TRAINING:
            records += _flush(round_record)
            round_record.step = progress.step
            last = progress.step == progress.steps
            if progress.step % self._every_steps == 0 or last:
                round_record.waiting = _record(round_record.round, progress, progress.step)
        return records


def _flush(round_record: RoundRecord) -> list[t.Record]:
    waiting, round_record.waiting = round_record.waiting, None
    return [] if waiting is None else [waiting]


def _notes(coordinator: Coordinator, round_record: RoundRecord, at: float) -> list[t.Record]:
    """Return notes about the round's failures, once their cause is known, and about termination notices of members."""
    records: list[t.Record] = []
    for failure in coordinator.failures() if coordinator.settled else ():
        if failure.replica not in round_record.failures and not failure.secondary:
            text = f"{failure.reason}: {failure.message}"
            records.append(_note(round_record, failure.at or at, t.NoteKind.FAILURE, text, failure.step))
        round_record.failures.add(failure.replica)
    for replica, grace in (
        coordinator.noticed().items() if len(coordinator.noticed()) > len(round_record.notices) else ()
    ):
        if replica not in round_record.notices:
            records.append(
                _note(
                    round_record,
                    at,
                    t.NoteKind.NOTICE,
                    f"{replica} received a termination notice and must leave within {grace:g} s.",
                )
            )
            round_record.notices.add(replica)
    return records


def _note(round_record: RoundRecord, at: float, kind: t.NoteKind, text: str, step: Optional[int] = None) -> t.Noted:
    return t.Noted(round_record.round, at, kind, text[: t.MOST_TEXT], round_record.step if step is None else step)


def _record(round: int, progress: p.Progress, step: int) -> t.StepDone:
    return t.StepDone(round, step, progress.at, _metrics(progress))


def _metrics(progress: p.Progress) -> Mapping[str, float]:
    standard_metrics = {
        "loss": progress.loss,
        "tokens_per_second": progress.tokens_per_second,
        "step_seconds": progress.step_seconds,
        "samples": float(progress.position),
        "tokens": progress.tokens,
        "mfu": progress.mfu,
        "mfu_full_attention": progress.mfu_full_attention,
    }
    own_metrics = dict(list(progress.metrics.items())[: p.MOST_METRICS])
    return {**own_metrics, **{name: float(value) for name, value in standard_metrics.items() if value is not None}}


def _validation_metrics(evaluated: p.Evaluated) -> Mapping[str, float]:
    of_first = {
        "loss": evaluated.loss,
        "perplexity": evaluated.perplexity,
        "accuracy": evaluated.token_accuracy,
        "bits_per_byte": evaluated.bits_per_byte,
    }
    of_sets = {
        "loss": evaluated.sets,
        "accuracy": evaluated.set_token_accuracies,
        "bits_per_byte": evaluated.set_bits_per_byte,
    }
    return {f"validation_{figure}": value for figure, value in of_first.items() if value is not None} | {
        f"validation_{figure}_{name}": value
        for figure, sets in of_sets.items()
        for name, value in itertools.islice(sets.items(), p.MOST_METRICS)
    }


def _knows_where_it_begins(agent: AgentState, r: Membership) -> bool:
    """Return whether the step from which this round continues is known.

    A script that restores its own state may begin at any step.
    """
    return agent.bundled or r.assign.restore.source != p.RestoreSource.FRESH


def _restored(restore: p.Restore) -> int:
    if restore.source == p.RestoreSource.STORAGE and restore.durable is not None:
        return restore.durable.step
    return restore.step
