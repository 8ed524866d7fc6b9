"""Containers that were started again in their pod: on cgroup v2 a container that runs out of memory loses its agent too
(decision "Containers start again in place"). The round has gone on by then (its lead told of a lost member); here it is
named, and counted as the job's own."""

from __future__ import annotations

from concertina.api.restarts import LONGEST_MESSAGE, Restart, Restarts
from concertina.api.status import rfc3339
from concertina.plan.actions import Event
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Reason
from concertina.plan.observed import PodView
from concertina.plan.pods.backoff import OUTSIDE
from concertina.plan.pods.pod_plan import number_at, packed
from concertina.plan.recovery import escalation
from concertina_protocol import FailureReason
from concertina_protocol.messages.reports import OUT_OF_MEMORY

UNKNOWN_EXIT = 255
"""What the kubelet says of a container whose end it did not see: its node was started again."""


def restarted(ctx: JobContext) -> tuple[PodView, ...]:
    """Pods whose container was started again since the last pass."""
    known, attempts = ctx.status.internal.container_restarts, ctx.status.internal.attempts
    return tuple(
        pod
        for pod in ctx.observed.pods
        if pod.restarts and pod.attempt == number_at(attempts, pod.index) and pod.restarts > number_at(known, pod.index)
    )


def seen(ctx: JobContext, attempts: tuple[int, ...]) -> tuple[int, ...]:
    """status.internal.containerRestarts: by replica index, of the pod of its present attempt."""
    pods = ctx.observed.pods
    return packed(
        {
            pod.index: pod.restarts
            for pod in pods
            if pod.index is not None and pod.restarts and pod.attempt == number_at(attempts, pod.index)
        }
    )


def counted(ctx: JobContext, restarts: Restarts) -> Restarts:
    """With an entry for each; where its loss stands there already, that is the entry."""
    pods = restarted(ctx)
    if not pods:
        return restarts
    entries, new = list(restarts.recent), 0
    places = {entry.replica: place for place, entry in enumerate(entries)}
    for pod in pods:
        known = places.get(pod.name)
        changes = {"reason": reason(pod), "counted": _own(pod)}
        if known is not None and entries[known].reason in LOST:
            entries[known] = entries[known].model_copy(update=changes)
        else:
            new += 1
            entries.append(
                Restart(
                    at=rfc3339(ctx.now),
                    replica=pod.name,
                    node=pod.node,
                    reason=reason(pod),
                    step=ctx.round.step,
                    counted=_own(pod),
                    rung=escalation.WITHOUT_MEMBER,
                    message=sentence(pod)[:LONGEST_MESSAGE],
                )
            )
    spent = sum(entry.counted for entry in entries)
    return restarts.model_copy(
        update={
            "in_window": spent,
            "budget": max(0, ctx.spec.failure_policy.max_restarts - spent),
            "total": restarts.total + new,
            "rungs": escalation.uses(ctx.spec, tuple(entries)),
            "recent": tuple(entries[-1000:]),
        }
    )


LOST = frozenset({FailureReason.MEMBER_LOST, FailureReason.LEAD_LOST, Reason.AGENT_RESTARTED})
"""As what the round took it."""


def reason(pod: PodView) -> str:
    return FailureReason.OUT_OF_MEMORY if pod.last_exit_reason == "OOMKilled" else Reason.CONTAINER_RESTARTED


def _own(pod: PodView) -> bool:
    return pod.last_exit_code != UNKNOWN_EXIT and pod.last_exit_reason not in OUTSIDE


def events(ctx: JobContext) -> tuple[Event, ...]:
    return tuple(Event("Warning", reason(pod), sentence(pod)) for pod in restarted(ctx)[:5])


def sentence(pod: PodView) -> str:
    again = f"replica {pod.name} on node {pod.node} was started again in its place"
    if reason(pod) == FailureReason.OUT_OF_MEMORY:
        return f"{again}: {OUT_OF_MEMORY}"
    code = "" if pod.last_exit_code is None else f" with exit code {pod.last_exit_code}"
    return f"{again}: its container ended{code} ({pod.last_exit_reason or 'no reason'})"
