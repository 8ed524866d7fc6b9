"""Checks of what is saved, and of what training has come to."""

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
"""Lines of steps before the last one, to know what its loss usually is."""


def checkpoint_old(seen: JobEvidence) -> Finding | None:
    """Of a job that trains: since its newest checkpoint, without a suspension after that where steps say when the next
    is due; or without one since it trains. Where the store refuses, that is said instead."""
    interval, trouble = checkpoint_interval(seen.spec, seen.status), seen.status.trouble
    refused = trouble is not None and trouble.reason == "StorageUnavailable"
    if interval is None or not seen.trains or refused:
        return None
    newest, since = seen.status.last_checkpoint, seen.status.world.since
    waited = unsaved_seconds(seen.spec, seen.status, seen.at)
    if waited is None:
        waited = seen.age(since) if since else 0.0
    if waited < problems.CHECKPOINT_INTERVALS * interval:
        return None
    progress = seen.status.progress
    behind = f", {amount(progress.step - newest.step, 'step')} behind" if progress and newest else ""
    old = f"the newest checkpoint is {duration(seen.age(newest.at))} old{behind}" if newest else ""
    return critical(
        Problem.CHECKPOINT_OLD,
        f"{old or 'there is no checkpoint yet'}; one is due every {interval:.3g} s, and training has gone on for "
        f"{waited / interval:.0f} times that",
        "see the condition Degraded and concertina_checkpoint_storage_failures_total; without failures the store is "
        "slow: concertina_checkpoint_ship_seconds_total over _shards_shipped_total says how long a shard takes",
        lost=0.0,
    )


def tracker_unreachable(seen: JobEvidence) -> Finding | None:
    if not seen.status.tracking or seen.ended:
        return None
    return warning(
        Problem.TRACKER_UNREACHABLE,
        f"the tracker takes nothing, and what it is to be told waits on the node: {seen.status.tracking}",
        "training does not notice; bring the tracker back, or correct spec.tracking while the job is suspended",
    )


def storage_refuses(seen: JobEvidence) -> Finding | None:
    """Asked now it fails, though no condition says so yet; or the last failure was for want of room."""
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    for agent in seen.agents:
        if agent.storage_failures is not None:
            first.setdefault(agent.replica, agent.storage_failures)
            last[agent.replica] = agent.storage_failures
    failures = sum(last.values()) - sum(first.values())
    if failures > 0:
        sentence = f"durable storage did not do what it was asked {failures:.0f} times in {seen.window.of}"
        return critical(Problem.STORAGE_REFUSES, sentence, ADVICE[Problem.STORAGE_REFUSES], lost=0.0)
    return _by_last_failure(seen, Problem.STORAGE_REFUSES)


def corrupt(seen: JobEvidence) -> Finding | None:
    return _by_last_failure(seen, Problem.CORRUPT_STATE)


def data_mismatch(seen: JobEvidence) -> Finding | None:
    return _by_last_failure(seen, Problem.DATA_DIGEST_MISMATCH)


def loss_nan(seen: JobEvidence) -> Finding | None:
    """Now, by rank 0's own word; or that was what the last failure or rollback was for."""
    told = [agent.finite_loss for agent in seen.agents if agent.finite_loss is not None]
    now = (told and not told[-1]) or (seen.steps and seen.steps[-1].loss is None)
    if now and not seen.ended:
        step = seen.status.progress.step if seen.status.progress else 0
        sentence = f"the loss is not finite at step {step}: what is trained from there on is worth nothing"
        return critical(Problem.LOSS_NAN, sentence, ADVICE[Problem.LOSS_NAN])
    return _by_rollback(seen, "LossNotFinite", Problem.LOSS_NAN) or _by_last_failure(seen, Problem.LOSS_NAN)


def loss_spike(seen: JobEvidence) -> Finding | None:
    before = [line.loss for line in seen.steps[:-1] if line.loss is not None]
    if len(before) >= FEWEST_STEPS and (loss := seen.steps[-1].loss) is not None:
        usual = statistics.median(before)
        if loss > problems.LOSS_SPIKE * usual > 0:
            sentence = f"the loss is {loss:.4g} at step {seen.steps[-1].step}, {loss / usual:.1f} times what it was in "
            return warning(
                Problem.LOSS_SPIKE,
                f"{sentence}the {len(before)} steps before ({usual:.4g})",
                ADVICE[Problem.LOSS_SPIKE],
            )
    return _by_rollback(seen, "LossSpike", Problem.LOSS_SPIKE)


def _by_rollback(seen: JobEvidence, reason: str, problem: Problem) -> Finding | None:
    back = seen.status.rollback
    if back is None or back.reason != reason or seen.age(back.at) > RECENT_SECONDS:
        return None
    sentence = f"{duration(seen.age(back.at))} ago training went back to step {back.step}: {back.message}"
    return warning(problem, sentence, ADVICE[problem])


def _by_last_failure(seen: JobEvidence, problem: Problem) -> Finding | None:
    """Of the last hour. The end of the job is another check's."""
    failure = seen.status.last_failure
    if failure is None or seen.ended or seen.age(failure.at) > RECENT_SECONDS:
        return None
    if words.problem_of(failure.reason, failure.message, *failure.last_lines) is not problem:
        return None
    who = f"replica {failure.replica} failed" if failure.replica else "the round failed"
    sentence = f"{duration(seen.age(failure.at))} ago {who} for it ({failure.reason}): {failure.message}"
    return critical(problem, sentence, ADVICE[problem], lost=0.0)
