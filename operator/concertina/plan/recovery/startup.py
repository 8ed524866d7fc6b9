"""Replicas that do not start, and containers that are restarted in place.

If no replica can start (because of its image, a missing setting, or the Python in the image), the job is Stalled until
a person fixes that. If a replica can't start while others do, or other replicas can't reach it, this is a separate
failure, and the replica is replaced on another node. There is no fast loop: each symptom has its own timeout, and a
node that keeps replicas from starting is avoided afterwards.

A container may restart in its pod (decision "Containers start again in place"): on cgroup v2 a container that runs out
of memory also loses its agent. The round has continued without the member by then. This module gives the restart its
reason and counts it as the job's own failure.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from concertina.api.restarts import LONGEST_MESSAGE, Restart, Restarts
from concertina.api.status import rfc3339
from concertina.plan.actions import Event
from concertina.plan.facts import constants, sizes
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Decision, Pods, Reason, stalled
from concertina.plan.facts.replicas import RECREATE_POD
from concertina.plan.observed import PodPhase, PodView
from concertina.plan.pods import bad_nodes
from concertina.plan.pods.pod_backoff import OUTSIDE, shortage
from concertina.plan.pods.pod_plan import number_at, packed
from concertina.plan.recovery import escalation, repeats
from concertina_protocol import EXIT_OLD_PYTHON, FailureReason
from concertina_protocol.messages.reports import OUT_OF_MEMORY

WAITING = {
    "ErrImagePull": Reason.IMAGE_UNAVAILABLE,
    "ImagePullBackOff": Reason.IMAGE_UNAVAILABLE,
    "InvalidImageName": Reason.IMAGE_UNAVAILABLE,
    "ErrImageNeverPull": Reason.IMAGE_UNAVAILABLE,
    "CreateContainerConfigError": "ContainerConfigError",
    "CreateContainerError": "ContainerConfigError",
}
"""Reason of the condition Stalled by the reason for which a container waits.

The job continues by itself after a fix.
"""
NOT_STARTED = frozenset({"StartError", "ContainerCannotRun", "RunContainerError"})
NOT_THERE = re.compile(r"executable file not found|no such file or directory|permission denied|exec format error")
"""Messages of a container runtime that mean that the program is at fault, not the node."""
AGAIN = "Then set spec.suspend to true, change the template, and set it to false"


def waiting(ctx: JobContext) -> Decision | None:
    """Stall the job if no replica can start for a reason that Kubernetes retries."""
    live = ctx.replicas.live.values()
    reasons = [WAITING.get(pod.waiting, "") for pod in live]
    if not reasons or not all(reasons):
        return None
    return stalled(reasons[0], shortage(ctx), Pods.WANTED)


def refused(ctx: JobContext) -> Decision | None:
    """Stall the job if its image can't run what it is asked to run.

    The next pod would fail in the same way. The pods stay, so that a person can inspect them. A pod that is being
    deleted, or was created from another template, says nothing about the image that the job has now.
    """
    if ctx.world.members:
        return None
    for pod in ctx.observed.pods:
        if pod.deleting or pod.name in ctx.replicas.outdated:
            continue
        if pod.phase is PodPhase.FAILED and (fault := _fault(ctx, pod)):
            return stalled(*fault, Pods.KEPT)
    return None


def _fault(ctx: JobContext, pod: PodView) -> tuple[str, str] | None:
    trainer = ctx.spec.template.trainer
    if pod.exit_code == EXIT_OLD_PYTHON and pod.exit_message:
        return "PythonTooOld", f"image {trainer.image}: {pod.exit_message[:500]}. {AGAIN}"
    if pod.exit_reason in NOT_STARTED and NOT_THERE.search(pod.exit_message):
        python = next((entry.value for entry in trainer.env if entry.name == "CONCERTINA_PYTHON"), None) or "python3"
        return "NoPython", (
            f"replica {pod.name} can't start {python}, in which the agent runs, in image {trainer.image}: give the "
            "container trainer an environment variable CONCERTINA_PYTHON with the path of the image's Python (3.9 or "
            f"newer), or use an image that has one. {AGAIN}. The runtime says: {pod.exit_message[:300]}"
        )
    return None


# --- some replicas that do not start while others do

IMAGE_PATIENCE = 60.0
"""Seconds for an image that can't be pulled: the kubelet retries by itself."""
CLAIMS = 3
"""Number of failed claims, about 7 s in all, before a replica that can't reach the other replicas is replaced."""


@dataclass(frozen=True)
class Symptom:
    reason: str
    detect: Callable[[JobContext, PodView], str]
    """Function that returns what has been wrong for long enough; empty if nothing is."""
    elsewhere: bool
    """Whether only another node can help: if there is none to spare, the pod is left to its kubelet."""


def _image(ctx: JobContext, pod: PodView) -> str:
    late = ctx.age(pod) >= IMAGE_PATIENCE
    unavailable = WAITING.get(pod.waiting) == Reason.IMAGE_UNAVAILABLE
    return f"{pod.waiting}: {pod.waiting_message}" if unavailable and late else ""


def _never_started(ctx: JobContext, pod: PodView) -> str:
    view = ctx.agent(pod.name)
    if (
        pod.phase is not PodPhase.RUNNING
        or view.alive
        or view.lost_at is not None
        or (silent_for := view.silent_for(ctx.now)) is None
        or ctx.health.no_agent_reachable
    ):
        return ""
    return "its agent was never heard of" if silent_for >= constants.AGENT_START else ""


def _cannot_start(ctx: JobContext, pod: PodView) -> str:
    report = ctx.agent(pod.name).report
    return report.startup_error if report else ""


def _partitioned(ctx: JobContext, pod: PodView) -> str:
    """Return a sentence if a pod answers the operator but not the other pods, which are too few without it.

    The pod counts as partitioned only after several claims have failed.
    """
    if ctx.round.claim is None or ctx.round.claim.round - ctx.world.round <= CLAIMS:
        return ""
    if ctx.replicas.all_done_at is None or ctx.replicas.uninformed:  # it is not known yet whom the pod can't reach
        return ""
    connected = ctx.replicas.connected
    if pod.name not in ctx.replicas.answers or pod.name in connected or sizes.fitting(len(connected), ctx.spec):
        return ""
    return "the other replicas and it can't reach each other"


SYMPTOMS = (
    Symptom(Reason.IMAGE_UNAVAILABLE, _image, elsewhere=True),
    Symptom(Reason.AGENT_NEVER_STARTED, _never_started, elsewhere=False),
    Symptom(Reason.AGENT_CANNOT_START, _cannot_start, elsewhere=True),
    Symptom(Reason.NETWORK_PARTITION, _partitioned, elsewhere=True),
)


def stuck(ctx: JobContext) -> tuple[Restart, ...]:
    """Return entries for status.restarts of replicas that do not start; empty if no replica has started yet.

    In that case it is not the replica's fault (decision "Replicas that don't get to start").
    """
    members = ctx.round.members.keys() if ctx.round.committed else ()
    outside = [pod for name, pod in ctx.replicas.live.items() if name not in members and pod.node]
    if not outside or not (ctx.replicas.ready or ctx.round.members):
        return ()
    has_spare_node = len(bad_nodes.avoided(ctx)) < bad_nodes.spare(ctx)
    symptoms = ((pod, _symptom(ctx, pod, has_spare_node)) for pod in outside)
    return tuple(
        Restart(
            at=rfc3339(ctx.now),
            replica=pod.name,
            node=pod.node,
            reason=symptom[0],
            step=ctx.round.step,
            counted=False,
            action=RECREATE_POD,
            message=symptom[1][:LONGEST_MESSAGE],
            error=repeats.normalised(symptom[1]),
        )
        for pod, symptom in symptoms
        if symptom
    )


def _symptom(ctx: JobContext, pod: PodView, has_spare_node: bool) -> tuple[str, str] | None:
    return next(
        (
            (symptom.reason, why)
            for symptom in SYMPTOMS
            if (has_spare_node or not symptom.elsewhere) and (why := symptom.detect(ctx, pod))
        ),
        None,
    )


def missing(ctx: JobContext) -> tuple[str, ...]:
    """Return the replicas that a round continues without, each with what keeps it from starting."""
    outside = (
        (name, pod)
        for name, pod in ctx.replicas.live.items()
        if name not in ctx.round.members and name not in ctx.replicas.ready
    )
    return tuple(
        f"{name} does not start{f' on node {pod.node}' if pod.node else ''}: {why[:300]}"
        for name, pod in outside
        if (why := _cannot_start(ctx, pod) or (f"{pod.waiting} ({pod.waiting_message})" if pod.waiting else ""))
    )


# --- containers that restart

UNKNOWN_EXIT = 255
"""Exit code that the kubelet reports for a container whose end it did not observe: its node was restarted."""


def _restarted(ctx: JobContext) -> tuple[PodView, ...]:
    """Return the pods whose container was restarted since the last pass."""
    counts, attempts = ctx.status.internal.container_restarts, ctx.status.internal.attempts
    return tuple(
        pod
        for pod in ctx.observed.pods
        if pod.restarts
        and pod.attempt == number_at(attempts, pod.index)
        and pod.restarts > number_at(counts, pod.index)
    )


def container_restarts(ctx: JobContext, attempts: tuple[int, ...]) -> tuple[int, ...]:
    """Return status.internal.containerRestarts: the restarts by replica index, of the pod of the current attempt."""
    pods = ctx.observed.pods
    return packed(
        {
            pod.index: pod.restarts
            for pod in pods
            if pod.index is not None and pod.restarts and pod.attempt == number_at(attempts, pod.index)
        }
    )


def with_container_restarts(ctx: JobContext, restarts: Restarts) -> Restarts:
    """Add an entry for each container that was restarted, or correct the entry for the loss of its member."""
    pods = _restarted(ctx)
    if not pods:
        return restarts
    entries, new = list(restarts.recent), 0
    position_by_replica = {entry.replica: entry_index for entry_index, entry in enumerate(entries)}
    for pod in pods:
        position = position_by_replica.get(pod.name)
        changes = {"reason": _restart_reason(pod), "counted": _own(pod)}
        if position is not None and entries[position].reason in LOST_BY_CONTAINER:
            entries[position] = entries[position].model_copy(update=changes)
        else:
            new += 1
            entries.append(
                Restart(
                    at=rfc3339(ctx.now),
                    replica=pod.name,
                    node=pod.node,
                    reason=_restart_reason(pod),
                    step=ctx.round.step,
                    counted=_own(pod),
                    action=escalation.EXCLUDE_REPLICA,
                    message=_restart_sentence(pod)[:LONGEST_MESSAGE],
                )
            )
    spent = sum(entry.counted for entry in entries)
    return restarts.model_copy(
        update={
            "in_window": spent,
            "budget": max(0, ctx.spec.failure_policy.max_restarts - spent),
            "total": restarts.total + new,
            "recovery_actions": escalation.uses(ctx.spec, tuple(entries)),
            "recent": tuple(entries[-1000:]),
        }
    )


LOST_BY_CONTAINER = frozenset({FailureReason.MEMBER_LOST, FailureReason.COORDINATOR_LOST, Reason.AGENT_RESTARTED})
"""Reasons for which the round reported the loss of a member whose container had ended."""


def _restart_reason(pod: PodView) -> str:
    return FailureReason.OUT_OF_MEMORY if pod.last_exit_reason == "OOMKilled" else Reason.CONTAINER_RESTARTED


def _own(pod: PodView) -> bool:
    return pod.last_exit_code != UNKNOWN_EXIT and pod.last_exit_reason not in OUTSIDE


def container_events(ctx: JobContext) -> tuple[Event, ...]:
    return tuple(Event("Warning", _restart_reason(pod), _restart_sentence(pod)) for pod in _restarted(ctx)[:5])


def _restart_sentence(pod: PodView) -> str:
    prefix = f"replica {pod.name} on node {pod.node} was started again in its place"
    if _restart_reason(pod) == FailureReason.OUT_OF_MEMORY:
        return f"{prefix}: {OUT_OF_MEMORY}"
    code = "" if pod.last_exit_code is None else f" with exit code {pod.last_exit_code}"
    return f"{prefix}: its container ended{code} ({pod.last_exit_reason or 'no reason'})"
