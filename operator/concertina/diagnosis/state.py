"""Checks of checkpoints, storage and the loss."""

from __future__ import annotations

import statistics

from concertina.amounts import amount
from concertina.api.checkpoint_interval import checkpoint_interval, unsaved_seconds
from concertina.diagnosis import problems, words
from concertina.diagnosis.evidence import RECENT_SECONDS, JobEvidence
from concertina.diagnosis.failure_checks import ADVICE
from concertina.diagnosis.finding import Finding, critical, warning
from concertina.diagnosis.problems import Problem
from concertina.durations import duration

FEWEST_STEPS = 32
"""Minimum number of earlier steps from which the usual loss is computed."""


def checkpoint_old(evidence: JobEvidence) -> Finding | None:
    """Check whether the newest checkpoint of a job that trains is too old.

    Without a checkpoint, the age counts from the start of training. If the next checkpoint is due at a step number, the
    age does not include time in which the job was suspended. This check reports nothing if storage does not accept
    checkpoints, because another check covers that.
    """
    interval, trouble = checkpoint_interval(evidence.spec, evidence.status), evidence.status.trouble
    refused = trouble is not None and trouble.reason == "StorageUnavailable"
    if interval is None or not evidence.trains or refused:
        return None
    newest, since = evidence.status.last_checkpoint, evidence.status.world.since
    waited = unsaved_seconds(evidence.spec, evidence.status, evidence.at)
    if waited is None:
        waited = evidence.age(since) if since else 0.0
    if waited < problems.CHECKPOINT_INTERVALS * interval:
        return None
    progress = evidence.status.progress
    distance = f", {amount(progress.step - newest.step, 'step')} behind" if progress and newest else ""
    statement = f"the newest checkpoint is {duration(evidence.age(newest.at))} old{distance}" if newest else ""
    return critical(
        Problem.CHECKPOINT_OLD,
        f"{statement or 'there is no checkpoint yet'}; a checkpoint is due every {interval:.3g} s, and training "
        f"has continued for {waited / interval:.0f} times as long",
        "see the condition Degraded and the metric concertina_checkpoint_storage_failures_total. If there are "
        "no failures, the store is slow: concertina_checkpoint_ship_seconds_total divided by "
        "concertina_checkpoint_shards_shipped_total is the time for one shard",
        lost=0.0,
    )


def tracker_unreachable(evidence: JobEvidence) -> Finding | None:
    if not evidence.status.tracking or evidence.ended:
        return None
    return warning(
        Problem.TRACKER_UNREACHABLE,
        f"the tracker accepts no records, so they wait on the node: {evidence.status.tracking}",
        "training is not affected. Restore the tracker, or suspend the job and correct spec.tracking",
    )


def storage_refuses(evidence: JobEvidence) -> Finding | None:
    """Check whether requests to storage fail.

    There are two cases. In the first case, a request failed between the two readings, although the job's status may not
    report a problem yet. In the second case, storage that is full or unreachable caused the last failure of the job.
    """
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    for agent in evidence.agents:
        if agent.storage_failures is not None:
            first.setdefault(agent.replica, agent.storage_failures)
            last[agent.replica] = agent.storage_failures
    failures = sum(last.values()) - sum(first.values())
    if failures > 0:
        sentence = f"{failures:.0f} requests to durable storage failed in {evidence.window.of}"
        return critical(Problem.STORAGE_REFUSES, sentence, ADVICE[Problem.STORAGE_REFUSES], lost=0.0)
    return _by_last_failure(evidence, Problem.STORAGE_REFUSES)


def corrupt(evidence: JobEvidence) -> Finding | None:
    return _by_last_failure(evidence, Problem.CORRUPT_STATE)


def hang(evidence: JobEvidence) -> Finding | None:
    """Check whether a hang ended a round within the last hour. The condition Stalled reports a hang that continues."""
    return _by_last_failure(evidence, Problem.HANG)


def data_mismatch(evidence: JobEvidence) -> Finding | None:
    return _by_last_failure(evidence, Problem.DATA_DIGEST_MISMATCH)


def loss_nan(evidence: JobEvidence) -> Finding | None:
    """Check whether the current loss is not finite, or whether such a loss caused the last failure or rollback.

    Rank 0 reports the loss.
    """
    finite_flags = [agent.finite_loss for agent in evidence.agents if agent.finite_loss is not None]
    is_nonfinite = (finite_flags and not finite_flags[-1]) or (evidence.steps and evidence.steps[-1].loss is None)
    if is_nonfinite and not evidence.ended:
        step = evidence.status.progress.step if evidence.status.progress else 0
        sentence = f"the loss is not finite at step {step}: training after this step is useless"
        return critical(Problem.LOSS_NAN, sentence, ADVICE[Problem.LOSS_NAN])
    return _by_rollback(evidence, "LossNotFinite", Problem.LOSS_NAN) or _by_last_failure(evidence, Problem.LOSS_NAN)


def loss_spike(evidence: JobEvidence) -> Finding | None:
    earlier_losses = [line.loss for line in evidence.steps[:-1] if line.loss is not None]
    if len(earlier_losses) >= FEWEST_STEPS and (loss := evidence.steps[-1].loss) is not None:
        usual_loss = statistics.median(earlier_losses)
        if loss > problems.LOSS_SPIKE * usual_loss > 0:
            step, ratio = evidence.steps[-1].step, loss / usual_loss
            sentence = f"the loss is {loss:.4g} at step {step}, {ratio:.1f} times the loss in "
            return warning(
                Problem.LOSS_SPIKE,
                f"{sentence}the {len(earlier_losses)} steps before ({usual_loss:.4g})",
                ADVICE[Problem.LOSS_SPIKE],
            )
    return _by_rollback(evidence, "LossSpike", Problem.LOSS_SPIKE)


def _by_rollback(evidence: JobEvidence, reason: str, problem: Problem) -> Finding | None:
    rollback = evidence.status.rollback
    if rollback is None or rollback.reason != reason or evidence.age(rollback.at) > RECENT_SECONDS:
        return None
    sentence = (
        f"{duration(evidence.age(rollback.at))} ago, training was rolled back to step {rollback.step}: "
        f"{rollback.message}"
    )
    return warning(problem, sentence, ADVICE[problem])


def _by_last_failure(evidence: JobEvidence, problem: Problem) -> Finding | None:
    """Return a finding if `problem` caused the last failure and this failure is at most an hour old.

    For a job that has ended, the result is None, because the check `failed` covers such jobs.
    """
    failure = evidence.status.last_failure
    if failure is None or evidence.ended or evidence.age(failure.at) > RECENT_SECONDS:
        return None
    if words.problem_of(failure.reason, failure.message, *failure.last_lines) is not problem:
        return None
    subject = f"replica {failure.replica} failed" if failure.replica else "the round failed"
    sentence = f"{duration(evidence.age(failure.at))} ago {subject} for it ({failure.reason}): {failure.message}"
    return critical(problem, sentence, ADVICE[problem], lost=0.0)
