"""Status fields that come from the coordinator's report: progress, saved state, and explanatory sentences.

There are three sentences: why workers do not start warm (from a process that has imported their modules), why the
tracker accepts no data, and that replicas train separately instead of together. The status shows a sentence while it
applies, and an event reports each change of the sentence. The coordinator (the agent of rank 0) reports the first two
sentences for all replicas, because these have the same image and command.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import concertina_protocol as protocol
from concertina.api.launchers import REMEDY
from concertina.api.loss_history import LossHistory, Point, unpacked
from concertina.api.spec import Launcher
from concertina.api.status import (
    BestCheckpointMark,
    CheckpointEvery,
    CheckpointMark,
    ConditionType,
    EvaluationMark,
    EvaluationSetMark,
    JobProgress,
    JobStatus,
    SettingMark,
    ShareMark,
    SnapshotEvery,
    SnapshotMark,
    rfc3339,
)
from concertina.plan.actions import Event
from concertina.plan.facts import constants
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Decision, Phase
from concertina.plan.state import restore

MOST_SHARES = 16
MOST_SETS = 8


def progress(ctx: JobContext) -> JobProgress | None:
    """Return the training progress that rank 0 last reported.

    If it has reported none, return the progress in the status.
    """
    reported = ctx.round.report.progress if ctx.round.report else None
    if reported is None or reported.step < 0 or not reported.at:
        return ctx.status.progress
    steps = reported.steps
    # a script may continue beyond its planned number of steps
    steps_left = max(0, steps - reported.step) if steps else 0
    percent, reported_at = (
        round(100 * min(1.0, reported.step / steps), 2) if steps else None,
        rfc3339(round(reported.at, 3)),
    )
    if reported.first_step_at is None:  # This round has measured nothing yet: keep the numbers of the last round.
        last_progress = ctx.status.progress or JobProgress(step=reported.step, at=reported_at)
        return last_progress.model_copy(
            update={"step": reported.step, "steps": steps, "percent": percent, "at": reported_at}
        )
    return JobProgress(
        step=reported.step,
        optimizer=reported.optimizer[:64] or None,
        steps=steps,
        percent=percent,
        eta_seconds=round(steps_left * reported.step_seconds, 1) if steps and reported.step_seconds else None,
        loss=_finite(reported.loss),
        step_seconds=round(reported.step_seconds, 6) or None,
        tokens=reported.tokens,
        tokens_per_second=round(reported.tokens_per_second, 1) or None,  # a custom script may not report this
        mfu=_share(reported.mfu),
        mfu_full_attention=_share(reported.mfu_full_attention),
        evaluation=_evaluation(ctx, reported),
        at=reported_at,
    )


def _share(value: float | None) -> float | None:
    return None if value is None else round(value, 4) or None


def _evaluation(ctx: JobContext, reported: protocol.Progress) -> EvaluationMark | None:
    """Return the last evaluation of the model, unless a rollback has undone the evaluated step.

    If this round has not evaluated the model yet, the result is the evaluation of an earlier round.
    """
    old = ctx.status.progress.evaluation if ctx.status.progress else None
    if (evaluated := reported.evaluated) is not None:
        return EvaluationMark(
            step=max(0, evaluated.step),
            loss=_finite(evaluated.loss),
            perplexity=_finite(evaluated.perplexity),
            token_accuracy=_finite(evaluated.token_accuracy),
            bits_per_byte=_finite(evaluated.bits_per_byte),
            sets=tuple(
                EvaluationSetMark(
                    name=name[:32],
                    loss=_finite(loss),
                    token_accuracy=_finite(evaluated.set_token_accuracies.get(name)),
                    bits_per_byte=_finite(evaluated.set_bits_per_byte.get(name)),
                )
                for name, loss in itertools.islice(evaluated.sets.items(), MOST_SETS)
            ),
            best_step=None if evaluated.best_step is None else max(0, evaluated.best_step),
            best_loss=_finite(evaluated.best_loss),
            without_improvement=max(0, evaluated.without_improvement),
            stop_reason=evaluated.stop_reason[:1024],
        )
    return old if old is not None and old.step <= reported.step else None


def _finite(value: float | None) -> float | None:
    return round(value, 6) if value is not None and math.isfinite(value) else None


def history(ctx: JobContext, now: JobProgress | None) -> str | None:
    """Return the packed loss history.

    If there is new progress and the time for a new point has come, the history contains a new point.
    """
    packed = ctx.status.history
    # steps counted in the process have no place on the curve
    if now is None or now == ctx.status.progress or now.optimizer:
        return packed
    last_history = unpacked(packed) if packed else LossHistory()
    new_history = last_history.with_point(Point(int(ctx.now), now.step, _short(now.loss), ctx.world.replicas))
    return packed if new_history is last_history else new_history.packed()


def _short(loss: float | None) -> float | None:
    """Return a loss rounded to four digits, which is enough for a curve of the loss."""
    return None if loss is None else float(f"{loss:.4g}")


def settings(ctx: JobContext) -> tuple[SettingMark, ...]:
    """Return the new value of `status.settings`: the settings that the trainer chose.

    The old value stays until the round has reported a step.
    """
    reported = ctx.round.report.progress if ctx.round.report else None
    if reported is None or reported.first_step_at is None:
        return ctx.status.settings
    marks = sorted(reported.settings.items())[:MOST_SHARES]
    return tuple(SettingMark(field=field[:253], value=value[:1024]) for field, value in marks)


def shares(ctx: JobContext) -> tuple[ShareMark, ...]:
    """Return the new value of `status.batchAssignment`: each replica's share of the batch, the smallest share first.

    Without a report of the coordinator (the agent of rank 0), the value stays unchanged.
    """
    if ctx.round.report is None:
        return ctx.status.batch_assignment if ctx.round.committed else ()
    reported = ctx.round.report.progress.shares if ctx.round.report.progress else ()
    if len(reported) != ctx.world.workers or min(reported, default=-1) < 0 or not sum(reported):
        return ()
    ranks, even = iter(reported), sum(reported) / len(reported)
    sequences_by_replica = []
    for member in ctx.world.members:
        sequences = sum(itertools.islice(ranks, member.workers))
        sequences_by_replica.append((round(sequences / (even * member.workers), 3), sequences, member.replica))
    return tuple(
        ShareMark(replica=replica, node=ctx.node_of(replica), sequences=sequences, factor=factor)
        for factor, sequences, replica in sorted(sequences_by_replica, key=lambda share: share[0])[:MOST_SHARES]
    )


def interval(ctx: JobContext) -> CheckpointEvery | None:
    reported = ctx.round.report.progress.interval if ctx.round.report and ctx.round.report.progress else None
    if reported is None:
        return ctx.status.checkpoint_interval
    return CheckpointEvery(
        seconds=round(reported.seconds or 0.0),
        suggested_seconds=round(reported.suggested),
        save_seconds=round(reported.save_seconds, 3),
        failure_seconds=round(reported.failure_seconds),
    )


def snapshot_interval(ctx: JobContext) -> SnapshotEvery | None:
    """Return how often rank 0 takes snapshots; the value in the status if rank 0 has not reported it."""
    reported = ctx.round.report.progress.snapshots if ctx.round.report and ctx.round.report.progress else None
    if reported is None:
        return ctx.status.snapshot_interval
    return SnapshotEvery(steps=reported.steps, overhead=round(reported.overhead, 4))


def replayed(ctx: JobContext) -> int:
    """Return the number of steps that a custom command trains again. The command must report its steps.

    A custom command decides by itself from which state it continues. The number is therefore taken from the first
    report of a round, and is 0 for later reports.
    """
    reported, old = ctx.round.report.progress if ctx.round.report else None, ctx.status
    if ctx.spec.bundled or reported is None or ctx.round.report is None:
        return 0
    if reported.restored_step is None or old.progress is None or old.progress.optimizer:
        return 0
    return (
        max(0, old.progress.step - reported.restored_step)
        if old.internal.round_waits.round != ctx.round.report.round
        else 0
    )


def last_snapshot(ctx: JobContext) -> SnapshotMark | None:
    reported = ctx.round.report.progress if ctx.round.report else None
    old = ctx.status.last_snapshot
    if reported is None or reported.snapshot_step is None or (old and old.step == reported.snapshot_step):
        return old
    return SnapshotMark(step=reported.snapshot_step, at=rfc3339(round(reported.at, 3)))


def last_checkpoint(ctx: JobContext) -> CheckpointMark | None:
    """Return the newest durable checkpoint of this job, as known from agents and from the status.

    Agents read it from the file LATEST in storage.
    """
    old, uid = ctx.status.last_checkpoint, ctx.observed.job.uid
    if old and restore.is_undone(old.round, old.step, ctx.status):
        old = None
    ours = (durable for durable in _durables(ctx) if durable.uid == uid)
    newest = max(ours, key=lambda durable: (durable.round, durable.step), default=None)
    if newest is None or (old and (old.round, old.step) >= (newest.round, newest.step)):
        return old
    saved_at = rfc3339(round(ctx.now if newest.at is None else newest.at, 3))
    return CheckpointMark(step=newest.step, round=newest.round, complete=newest.complete, uri=newest.uri, at=saved_at)


def _durables(ctx: JobContext) -> Iterator[protocol.Durable]:
    """Yield the checkpoint that each agent has read from the file LATEST, without those that a rollback has undone."""
    uid = ctx.observed.job.uid
    for view in ctx.observed.agents.values():
        storage = view.report.storage if view.report else None
        durable = storage.latest if storage and storage.state == protocol.StorageHealth.READY else None
        if durable is None or (durable.uid == uid and restore.is_undone(durable.round, durable.step, ctx.status)):
            continue
        yield durable


def best_checkpoint(ctx: JobContext) -> BestCheckpointMark | None:
    """Return the checkpoint with the lowest evaluation loss, which agents read from the file LATEST in storage.

    If agents differ, the agent that knows the newest checkpoint decides.
    """
    if ctx.spec.checkpoint is None or not ctx.spec.checkpoint.keep_best:
        return None
    uid = ctx.observed.job.uid
    newest = max(_durables(ctx), key=lambda durable: (durable.uid == uid, durable.round, durable.step), default=None)
    if newest is None:
        return ctx.status.best_checkpoint
    if newest.best is None or not math.isfinite(newest.best.loss):
        return None
    return BestCheckpointMark(
        step=max(0, newest.best.step), loss=round(newest.best.loss, 6), uri=newest.best_uri[:2048]
    )


def seconds_left(ctx: JobContext) -> float:
    """Return the seconds until the operator may write a status in which only numbers and sentences have changed.

    The rate of such writes is limited. Other changes are written at once.
    """
    written_at = ctx.status.goodput.at or ctx.status.start_time  # the first status write sets the start time
    every = ctx.observed.progress_every if ctx.round.committed else ctx.observed.words_every
    return 0.0 if written_at is None else max(0.0, every - ctx.elapsed(written_at))


def uncounted_seconds_left(ctx: JobContext, phase: Phase) -> float | None:
    """Return the seconds until a running job's time must be added up even if nothing else in its status changes.

    The result is None for a job that does not train. Its time is added up at its next event.
    """
    if phase is not Phase.TRAINING or ctx.status.goodput.at is None:
        return None
    every = max(constants.COUNT_TIME, ctx.observed.progress_every)
    return max(0.0, every - ctx.elapsed(ctx.status.goodput.at))


# --- sentences from the coordinator's report


@dataclass(frozen=True)
class SentenceEvent:
    """Event that reports a new sentence in a status field, with text to put before and after the sentence."""

    type: str
    reason: str
    before: str
    after: str = ""


SENTENCES: Mapping[str, SentenceEvent] = {
    "warm_start_disabled_reason": SentenceEvent("Normal", "WarmStartDisabled", "workers start cold"),
    "warm_start_skipped_modules": SentenceEvent(
        "Normal", "WarmStartIncomplete", "each worker imports modules by itself"
    ),
    "world_mismatch": SentenceEvent(
        "Warning", "WorldMismatch", "each replica trains alone", f". To train together, {REMEDY}"
    ),
    "tracking": SentenceEvent(
        "Warning", "TrackerUnreachable", "training continues; the records for the tracker stay on the node"
    ),
}
"""Events that report a sentence, by the name of the field in the report and in the status."""
LONGEST_EVENT = 1000
"""Maximum length of an event's message, in characters."""
WORLD_MISMATCH = "world_mismatch"
UNDER_WAY = (Phase.STARTING, Phase.TRAINING, Phase.DRAINING, Phase.RECOVERING)
"""Phases in which a job whose replicas train separately is reported as Degraded."""


def coordinator_sentence(ctx: JobContext, field: str) -> str | None:
    """Return the sentence in a field of the coordinator's last report, such as why workers do not start warm.

    The result is None with torchrun, which has no coordinator.

    The coordinator is the agent of rank 0.
    """
    if ctx.spec.launcher is Launcher.TORCHRUN:
        return None
    report = ctx.round.report
    sentence: str | None = getattr(ctx.status if report is None else report, field)
    return sentence[:1024] if sentence else None


def sentence_events(old: JobStatus, new: JobStatus) -> tuple[Event, ...]:
    """Return an event for each status field whose sentence is new or has changed.

    An example is the sentence that says why workers do not start warm.
    """
    events = []
    for field, announced in SENTENCES.items():
        now = getattr(new, field)
        if now is not None and now != getattr(old, field):
            events.append(Event(announced.type, announced.reason, _event_message(field, now)))
    return tuple(events)


def annotate_world_mismatch(ctx: JobContext, decision: Decision) -> Decision:
    """Report that each replica trains separately: as Degraded, and in the message when the job completes."""
    mismatch = coordinator_sentence(ctx, WORLD_MISMATCH)
    if mismatch is None:
        return decision
    message = _event_message(WORLD_MISMATCH, mismatch)
    if decision.phase is Phase.COMPLETE and not ctx.status.is_true(ConditionType.COMPLETE):
        return replace(decision, message=f"{decision.message}; {message}")
    if decision.stalled or decision.phase not in UNDER_WAY:
        return decision
    return replace(decision, stalled=SENTENCES[WORLD_MISMATCH].reason, stalled_message=message, goes_on=True)


def _event_message(field: str, now: str) -> str:
    """Return the message of the event about a status field whose sentence has changed.

    Args:
        field: Status field that contains the sentence, for example why workers do not start warm.
        now: New text of the field; empty if the sentence no longer applies.
    """
    prefix, suffix = f"{SENTENCES[field].before}: ", SENTENCES[field].after
    return prefix + now[: LONGEST_EVENT - len(prefix) - len(suffix)] + suffix
