"""Checks for jobs that have failed, are stalled, or fail too often."""

from __future__ import annotations

from concertina.api.accounting import MOST_INCIDENTS, Incident
from concertina.api.status import Condition, ConditionType
from concertina.diagnosis import problems, words
from concertina.diagnosis.evidence import RECENT_SECONDS, JobEvidence
from concertina.diagnosis.finding import Finding, critical, warning
from concertina.diagnosis.problems import Problem
from concertina.durations import duration

STALLS = {
    "StorageUnavailable": Problem.STORAGE_REFUSES,
    "DataUnavailable": Problem.INPUT_BOTTLENECK,
    "AgentsUnreachable": Problem.OPERATOR_ISOLATED,
}
"""Problem for each reason in the conditions Stalled and Degraded."""
ADVICE = {
    Problem.STORAGE_REFUSES: "make room, or correct the URI, the credentials or the permissions, as the message says. "
    "The job then continues by itself",
    Problem.INPUT_BOTTLENECK: "check that the data of trainer.data.uri exist and that the pods may read them. The job "
    "then continues by itself",
    Problem.OPERATOR_ISOLATED: "check that no NetworkPolicy or firewall blocks the operator from port 29400 of the "
    "pods",
    Problem.JOB_FAILED: "look at the last lines of `concertina status JOB` and at the logs, and fix the cause. Then "
    "delete the job and create it again. With checkpoint.uri, it continues from its newest checkpoint",
    Problem.JOB_STALLED: "do what the message says. The job then continues by itself",
    Problem.CORRUPT_STATE: "run `concertina checkpoint verify URI` to list all damaged files. Delete the folder of "
    "that checkpoint or set checkpoint.resumeFrom to an older one, and create the job again. If a data file is "
    "damaged, copy it again from its source. Check the disk or store for faults",
    Problem.DATA_DIGEST_MISMATCH: "set trainer.data.uri to the data with which the run began. To train on other data, "
    "start a new run",
    Problem.MEMORY_GROWS: "find out what the script accumulates from step to step (losses with their graphs, lists of "
    "batches, unbounded caches), for example with tracemalloc or torch.cuda.memory_summary(). Until you fix it, a "
    "larger resources.limits.memory delays the failure",
    Problem.HANG: "if a rank did not call a collective, find out why: its stack is in the message, and the log of its "
    "pod has all stacks and collectives. If all ranks called the collective, check the network between the nodes. "
    "Search the script for collectives that only some ranks call, for example in an `if rank == 0`",
    Problem.LOSS_NAN: "lower optimizer.learningRate or set optimizer.maxGradNorm, and look at the named samples. Or "
    "set trainer.anomalies.nonFinite: Skip to skip them",
    Problem.LOSS_SPIKE: "look at the samples of that step. To skip such samples, set trainer.anomalies.spike to Skip "
    "or RollBack. To avoid further spikes, lower the learning rate or set maxGradNorm",
}
"""Advice for the problems for which all checks give the same advice."""
FEWEST_INCIDENTS = 2
"""Minimum number of interruptions for which the check `frequent` reports a finding."""


def failed(evidence: JobEvidence) -> Finding | None:
    """Check whether the job has failed.

    If the job's last messages show a more specific problem, the finding reports that problem.
    """
    condition = evidence.status.true_condition(ConditionType.FAILED)
    if condition is None:
        return None
    problem = words.problem_at_end(evidence) or Problem.JOB_FAILED
    sentence = f"the job has failed ({condition.reason}): {_message(condition)}"
    return critical(problem, sentence, ADVICE.get(problem, ADVICE[Problem.JOB_FAILED]))


def stalled(evidence: JobEvidence) -> Finding | None:
    """Check whether the job can't continue until a person acts.

    If the job trains in the meantime, the finding has no cost in time.
    """
    condition = evidence.status.trouble
    if condition is None or evidence.ended:
        return None
    problem = STALLS.get(condition.reason) or words.REASONS.get(condition.reason, Problem.JOB_STALLED)
    lost = 0.0 if evidence.trains and problem is not Problem.INPUT_BOTTLENECK else 1.0
    sentence = f"the job is {condition.type.lower()} ({condition.reason}): {_message(condition)}"
    return critical(problem, sentence, ADVICE[problem], lost)


def frequent(evidence: JobEvidence) -> Finding | None:
    """Check how much time interruptions have cost within the last hour.

    If the status no longer lists all incidents of that hour, the period begins at the oldest listed incident.
    """
    if evidence.ended:
        return None
    incidents = (*evidence.status.incidents, *filter(None, (evidence.status.internal.incident,)))
    since = min(RECENT_SECONDS, evidence.at - evidence.created)
    if len(incidents) >= MOST_INCIDENTS:
        since = min(since, evidence.age(incidents[0].at))
    recent_incidents = [incident for incident in incidents if evidence.age(incident.at) <= since]
    lost = sum(map(_seconds, recent_incidents)) / max(1.0, since)
    if len(recent_incidents) < FEWEST_INCIDENTS or lost < problems.FREQUENT_FAILURES:
        return None
    worst = max(recent_incidents, key=_seconds)
    replicas = {incident.replica for incident in recent_incidents if incident.replica}
    nodes = sorted({incident.node for incident in recent_incidents if incident.node})
    location = f", all of them on node {nodes[0]}" if len(nodes) == 1 and len(replicas) > 1 else ""
    at_least = "at least " if any(incident.at_least for incident in recent_incidents) else ""
    return warning(
        Problem.FREQUENT_FAILURES,
        f"{len(recent_incidents)} interruptions took {at_least}{lost:.0%} of the last {duration(since)}{location}; the "
        f"longest, {worst.cause}{_origin(worst)}, took {at_least}{_seconds(worst):.1f} s",
        "run `concertina status JOB` for the causes by cost, and see status.restarts.recent for each failure "
        "and its node. Standby replicas (elastic.standbyReplicas) and a snapshot at each step make each "
        "interruption cheaper",
        lost,
    )


def restarts_nearly_used(evidence: JobEvidence) -> Finding | None:
    restarts = evidence.status.restarts
    max_restarts = evidence.spec.failure_policy.max_restarts if evidence.spec else None
    if evidence.ended or max_restarts is None or max_restarts <= problems.RESTARTS_REMAINING or not restarts.in_window:
        return None
    if restarts.budget > problems.RESTARTS_REMAINING:
        return None
    return critical(
        Problem.RESTARTS_NEARLY_USED,
        f"{restarts.in_window} failures in the last {duration(_window(evidence))} count against maxRestarts, and "
        f"{restarts.budget} more are allowed",
        "fix the causes in status.restarts.recent, or raise failurePolicy.maxRestarts if you expect so many failures",
        lost=0.0,
    )


def world_below_minimum(evidence: JobEvidence) -> Finding | None:
    """Check whether the job has spent most of the observed time waiting for pods."""
    window = evidence.recent or evidence.lifetime
    waiting = window.seconds.get("waiting", 0.0)
    if (
        evidence.status.phase != "Waiting"
        or waiting < window.total / 2
        or evidence.status.is_true(ConditionType.STALLED)
    ):
        return None
    min_replicas = evidence.spec.min_replicas if evidence.spec else 1
    ready, failure = evidence.status.condition(ConditionType.READY), evidence.status.last_failure
    sentence = (
        f"the job needs {min_replicas} replicas and waits for them ({waiting:.0f} s of {window.of}): "
        f"{ready.message if ready else ''}"
    )
    advice = (
        "run `kubectl describe pod` for the pending pods and check nodes, quota and taints"
        + (". With a smaller elastic.minReplicas, the job continues with fewer replicas" if min_replicas > 1 else "")
    )  # fmt: skip
    if failure is not None and evidence.age(failure.at) <= RECENT_SECONDS:
        sentence += f". The last failure, {duration(evidence.age(failure.at))} ago: {failure.reason}: {failure.message}"
        advice = f"fix the cause of the last failure. If pods are pending, {advice}"
    return critical(Problem.WORLD_BELOW_MINIMUM, sentence, advice)


def operator_down(evidence: JobEvidence) -> Finding | None:
    counted = evidence.status.goodput.at
    if not evidence.live or evidence.ended:
        return None
    silent = evidence.age(counted) if counted else evidence.at - evidence.created
    if silent < problems.OPERATOR_SILENT_SECONDS or not (evidence.trains or counted is None):
        return None
    return critical(
        Problem.OPERATOR_DOWN,
        f"no operator has written the job's status for {duration(silent)}",
        "check that a pod of the operator runs and holds the Lease (`kubectl -n NAMESPACE get pods,leases`). "
        "Training continues without the operator, but nothing responds to failures",
        lost=0.0,
    )


def _seconds(incident: Incident) -> float:
    return incident.seconds + incident.replayed_seconds


def _origin(incident: Incident) -> str:
    if not incident.replica:
        return ""
    return f" of {incident.replica}" + (f" on {incident.node}" if incident.node else "")


def _window(evidence: JobEvidence) -> float:
    return evidence.spec.failure_policy.window_seconds if evidence.spec else 0.0


def _message(condition: Condition) -> str:
    return condition.message or "no more is said"
