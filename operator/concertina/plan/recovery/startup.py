"""Replicas that can't start, and containers that are restarted in their pod.

If no replica can start, the job is Stalled until a person fixes the cause: the image, a missing setting, or the Python
in the image. If only some replicas can't start, or can't reach the others, the operator replaces each of them on
another node. Each symptom has its own timeout, which limits how quickly replacements follow each other. New pods avoid
a node on which replicas can't start.

On cgroup v2, if a container runs out of memory, the kernel also kills the agent in it. The kubelet then restarts the
container in the same pod (decision "Containers restart within their pod"). Meanwhile, the round has continued without
that member. This module finds the reason of such a restart, and counts it as a failure of the job.

A round is a period in which a fixed set of replicas trains.
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
from concertina.plan.pods.pod_backoff import OUTSIDE, shortage, too_large
from concertina.plan.pods.pod_plan import number_at, packed
from concertina.plan.recovery import escalation, hardware, repeats
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
"""Reason of the Stalled condition, by the reason in a container's `waiting` state.

The job continues by itself once the cause is fixed.
"""
NOT_STARTED = frozenset({"StartError", "ContainerCannotRun", "RunContainerError"})
NOT_THERE = re.compile(r"executable file not found|no such file or directory|permission denied|exec format error")
"""Error messages of a container runtime that mean that the program to run is at fault and not the node."""
AGAIN = "Then set spec.suspend to true, change the template, and set spec.suspend to false"


def waiting(ctx: JobContext) -> Decision | None:
    """Stall the job if the containers of all its replicas are in the state `Waiting` because of an error.

    An example is `ImagePullBackOff`: the kubelet tries to pull the image again and again.
    """
    live = ctx.replicas.live.values()
    reasons = [WAITING.get(pod.waiting, "") for pod in live]
    if not reasons or not all(reasons):
        return None
    return stalled(reasons[0], shortage(ctx), Pods.WANTED)


def refused(ctx: JobContext) -> Decision | None:
    """Stall the job if its image can't run the agent.

    A new pod would fail in the same way. The operator keeps the pods, so that a person can inspect them. Pods that are
    being deleted, or that have an outdated template, are no evidence about the present image.
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


# --- replicas that can't start while others can

IMAGE_PATIENCE = 60.0
"""Seconds for which an image pull must fail before the replica is replaced. The kubelet retries in that time."""
CLAIMS = 3
"""Number of failed claims (attempts to begin a round) before a replica that can't reach the others is replaced.

They take about 7 seconds.
"""


@dataclass(frozen=True)
class Symptom:
    reason: str
    detect: Callable[[JobContext, PodView], str]
    """Function that describes what has been wrong with a pod for long enough to act; empty if nothing is wrong."""
    elsewhere: bool
    """True if only another node can help. If no other node is available, the operator leaves the pod unchanged."""
    of_node: bool = False
    """True if the cause is the node even if no replica of the job has started yet."""


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
    return "the operator never reached its agent" if silent_for >= constants.AGENT_START else ""


def _cannot_start(ctx: JobContext, pod: PodView) -> str:
    report = ctx.agent(pod.name).report
    return report.startup_error if report else ""


def _partitioned(ctx: JobContext, pod: PodView) -> str:
    """Return a sentence if a pod that the job needs is reachable for the operator, but not for the job's other pods.

    The result is empty otherwise. A pod counts as unreachable for the others only after the operator has tried several
    times to form a round.
    """
    if ctx.round.claim is None or ctx.round.claim.round - ctx.world.round <= CLAIMS:
        return ""
    # the operator does not know yet which replicas the pod can't reach
    if ctx.replicas.all_done_at is None or ctx.replicas.uninformed:
        return ""
    connected = ctx.replicas.connected
    if pod.name not in ctx.replicas.answers or pod.name in connected or sizes.fitting(len(connected), ctx.spec):
        return ""
    return "it and the other replicas can't reach each other"


SYMPTOMS = (
    Symptom(Reason.HARDWARE_FAULT, hardware.keeps_out, elsewhere=True, of_node=True),
    Symptom(Reason.IMAGE_UNAVAILABLE, _image, elsewhere=True),
    Symptom(Reason.AGENT_NEVER_STARTED, _never_started, elsewhere=False),
    Symptom(Reason.AGENT_CANNOT_START, _cannot_start, elsewhere=True),
    Symptom(Reason.NETWORK_PARTITION, _partitioned, elsewhere=True),
)


def stuck(ctx: JobContext) -> tuple[Restart, ...]:
    """Return entries for `status.restarts` of replicas that can't start, so that their pods are replaced.

    If no replica has started yet, only replicas with faulty hardware are replaced. Any other cause then probably
    concerns the whole job (decision "Replicas that fail to start").
    """
    members = ctx.round.members.keys() if ctx.round.committed else ()
    outside = [pod for name, pod in ctx.replicas.live.items() if name not in members and pod.node]
    some_started = bool(ctx.replicas.ready or ctx.round.members)
    can_be_left = bad_nodes.can_be_left(ctx, {pod.node for pod in outside})
    symptoms = ((pod, _symptom(ctx, pod, pod.node in can_be_left, some_started)) for pod in outside)
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


def _symptom(ctx: JobContext, pod: PodView, has_other_node: bool, some_started: bool) -> tuple[str, str] | None:
    return next(
        (
            (symptom.reason, why)
            for symptom in SYMPTOMS
            if (has_other_node or not symptom.elsewhere)
            and (some_started or symptom.of_node)
            and (why := symptom.detect(ctx, pod))
        ),
        None,
    )


def missing(ctx: JobContext) -> tuple[str, ...]:
    """Return a sentence for each replica that the round lacks, with the reason why the replica has not started."""
    outside = (
        (name, pod)
        for name, pod in ctx.replicas.live.items()
        if name not in ctx.round.members and name not in ctx.replicas.ready
    )
    return tuple(
        f"{name} does not start{f' on node {pod.node}' if pod.node else ''}: {why[:300]}"
        for name, pod in outside
        if (
            why := ctx.replicas.gpu_faults.get(name)
            or _cannot_start(ctx, pod)
            or too_large(ctx, pod)
            or (f"{pod.waiting} ({pod.waiting_message})" if pod.waiting else "")
        )
    )


# --- containers that are restarted in their pod

UNKNOWN_EXIT = 255
"""Exit code that the kubelet reports for a container whose end it did not observe, because the node was restarted."""


def _restarted(ctx: JobContext) -> tuple[PodView, ...]:
    """Return the pods with a container that was restarted since the last planning pass."""
    counts, attempts = ctx.status.internal.container_restarts, ctx.status.internal.attempts
    return tuple(
        pod
        for pod in ctx.observed.pods
        if pod.restarts
        and pod.attempt == number_at(attempts, pod.index)
        and pod.restarts > number_at(counts, pod.index)
    )


def container_restarts(ctx: JobContext, attempts: tuple[int, ...]) -> tuple[int, ...]:
    """Return the new value of `status.internal.containerRestarts`.

    The value contains the number of restarts in the current pod of each replica index.
    """
    pods = ctx.observed.pods
    return packed(
        {
            pod.index: pod.restarts
            for pod in pods
            if pod.index is not None and pod.restarts and pod.attempt == number_at(attempts, pod.index)
        }
    )


def with_container_restarts(ctx: JobContext, restarts: Restarts) -> Restarts:
    """Add an entry to `status.restarts` for each pod with a restarted container.

    If there already is an entry for the loss of that replica, the function corrects that entry instead.
    """
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
"""Reasons of failures with which a round reports the loss of a member whose container has ended."""


def _restart_reason(pod: PodView) -> str:
    return FailureReason.OUT_OF_MEMORY if pod.last_exit_reason == "OOMKilled" else Reason.CONTAINER_RESTARTED


def _own(pod: PodView) -> bool:
    return pod.last_exit_code != UNKNOWN_EXIT and pod.last_exit_reason not in OUTSIDE


def container_events(ctx: JobContext) -> tuple[Event, ...]:
    return tuple(Event("Warning", _restart_reason(pod), _restart_sentence(pod)) for pod in _restarted(ctx)[:5])


def _restart_sentence(pod: PodView) -> str:
    prefix = f"replica {pod.name} on node {pod.node} was restarted in place"
    if _restart_reason(pod) == FailureReason.OUT_OF_MEMORY:
        return f"{prefix}: {OUT_OF_MEMORY}"
    code = "" if pod.last_exit_code is None else f" with exit code {pod.last_exit_code}"
    return f"{prefix}: its container ended{code} ({pod.last_exit_reason or 'no reason'})"
