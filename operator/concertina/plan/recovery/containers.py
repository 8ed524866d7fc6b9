"""Containers that were started again in their pod: on cgroup v2 a container that runs out of memory loses its agent
too. The round has gone on by then (its lead told of a lost member); here it is named, and counted as the job's own."""

from __future__ import annotations

from collections.abc import Iterable

from concertina.api.status import Restart, Restarts, rfc3339
from concertina.plan.facts.look import Look
from concertina.plan.pods.backoff import OUTSIDE
from concertina.plan.recovery import ladder
from concertina.plan.types import Event, PodView
from concertina_protocol.reports import OUT_OF_MEMORY

UNKNOWN_EXIT = 255
"""What the kubelet says of a container whose end it did not see: its node was started again."""


def restarted(look: Look) -> tuple[PodView, ...]:
    """Pods whose container was started again since the last pass."""
    known, attempts = look.status.internal.container_restarts, look.status.internal.attempts
    return tuple(
        pod
        for pod in look.observed.pods
        if pod.attempt == _at(attempts, pod.index) and pod.restarts > _at(known, pod.index)
    )


def seen(look: Look, attempts: tuple[int, ...]) -> tuple[int, ...]:
    """status.internal.containerRestarts: by replica index, of the pod of its present attempt."""
    counts = {pod.index: pod.restarts for pod in look.observed.pods if pod.attempt == _at(attempts, pod.index)}
    last = max((index for index, count in counts.items() if count), default=-1)
    return tuple(counts.get(index, 0) for index in range(last + 1))


def counted(look: Look, restarts: Restarts) -> Restarts:
    """With an entry for each; where its loss stands there already, that is the entry."""
    pods = restarted(look)
    if not pods:
        return restarts
    entries, new = list(restarts.recent), 0
    for pod in pods:
        known = next((i for i, entry in reversed(list(enumerate(entries))) if entry.replica == pod.name), None)
        changes = {"reason": reason(pod), "counted": _own(pod)}
        if known is not None and entries[known].reason in LOST:
            entries[known] = entries[known].model_copy(update=changes)
        else:
            new += 1
            entries.append(
                Restart(
                    at=rfc3339(look.now),
                    replica=pod.name,
                    node=pod.node,
                    reason=reason(pod),
                    step=look.step,
                    counted=_own(pod),
                    rung=ladder.WITHOUT_MEMBER,
                )
            )
    spent = sum(entry.counted for entry in entries)
    return restarts.model_copy(
        update={
            "in_window": spent,
            "budget": max(0, look.spec.failure_policy.max_restarts - spent),
            "total": restarts.total + new,
            "rungs": ladder.uses(look.spec, tuple(entries)),
            "recent": tuple(entries[-1000:]),
        }
    )


LOST = frozenset({"MemberLost", "LeadLost", "AgentRestarted"})
"""As what the round took it."""


def reason(pod: PodView) -> str:
    return "OutOfMemory" if pod.last_exit_reason == "OOMKilled" else "ContainerRestarted"


def _own(pod: PodView) -> bool:
    return pod.last_exit_code != UNKNOWN_EXIT and pod.last_exit_reason not in OUTSIDE


def events(look: Look) -> tuple[Event, ...]:
    return tuple(Event("Warning", reason(pod), sentence(pod)) for pod in restarted(look)[:5])


def sentence(pod: PodView) -> str:
    again = f"replica {pod.name} on node {pod.node} was started again in its place"
    if reason(pod) == "OutOfMemory":
        return f"{again}: {OUT_OF_MEMORY}"
    return f"{again}: its container ended with exit code {pod.last_exit_code} ({pod.last_exit_reason or 'no reason'})"


def _at(numbers: Iterable[int], index: int) -> int:
    known = tuple(numbers)
    return known[index] if 0 <= index < len(known) else 0
