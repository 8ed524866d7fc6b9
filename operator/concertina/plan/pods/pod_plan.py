"""Plan for a job's pods: actions, events and attempt numbers. All launchers use this type."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from concertina.api.pod_names import parse, pod_name
from concertina.plan.actions import Action, DeletePod, Event
from concertina.plan.facts.context import JobContext
from concertina.plan.observed import PodView


@dataclass(frozen=True)
class PodPlan:
    actions: tuple[Action, ...] = ()
    attempts: tuple[int, ...] = ()
    """Attempt number by replica index, as in `status.internal.attempts`.

    The operator writes a status with these numbers before it creates the pods. No pod name is therefore used twice,
    which matters because agents are identified by name (decision "Attempts are written before pods").
    """
    replaced: tuple[PodView, ...] = ()
    """Dead pods that the operator replaces in this planning pass."""
    events: tuple[Event, ...] = ()
    recheck: float | None = None
    missing: bool = False
    """True if some of the wanted pods do not exist yet."""


def replaced_event(ctx: JobContext, pod: PodView) -> Event:
    """Return the event that announces the replacement of a pod.

    If the pod is being deleted, the event says that a replacement is created only if the job continues. The reason is
    that the whole job may be in a foreground deletion that the operator has not observed yet.
    """
    notice = ctx.replicas.notices.get(pod.name)
    why = notice.message if notice else ctx.replicas.dead[pod.name]
    unless = " unless the job is deleted too" if pod.deleting else ""
    message = f"replica {pod.name} {why}; a new pod replaces it{unless}"
    return Event("Normal" if notice else "Warning", "ReplicaReplaced", message)


def delete(ctx: JobContext, pod: PodView, reason: str) -> list[Action]:
    """Return the deletion of a pod; empty if the pod is already being deleted and the deletion can't be forced.

    A forced deletion removes the pod before its node confirms that the pod has stopped. The deletion is forced in two
    cases. In the first case, the pod's node is out of service. In the second case, the pod is of the bundled trainer
    and its node does not respond. If old workers still run there, storage rejects their writes, so the old and the new
    pod can't both write (decision "Forced deletion of pods on lost nodes").
    """
    node = ctx.node(pod)
    force = node.out_of_service or (not node.ready and ctx.spec.bundled)
    if pod.deleting and not force:
        return []
    return [DeletePod(pod.name, pod.uid, f"replica {pod.name} {reason}", force)]


# --- attempt numbers of replicas


def same_replica(first_name: str, second_name: str) -> bool:
    """Return whether two names are names of pods of the same replica.

    The result is False if either is not the name of a replica's pod, because agents may report any name.
    """
    first, second = parse(first_name), parse(second_name)
    return first is not None and second is not None and first.index is not None and first.index == second.index


def number_at(numbers: Sequence[int], index: int | None) -> int:
    """Return `numbers[index]`. The result is 0 if the tuple is shorter, or if `index` is None.

    Only the pod of torchrun's store has no index.
    """
    return numbers[index] if index is not None and index < len(numbers) else 0


def packed(numbers: Mapping[int, int]) -> tuple[int, ...]:
    """Return the numbers as a tuple in order of index, without trailing zeros. The status uses this form."""
    last = max((index for index, number in numbers.items() if number), default=-1)
    return tuple(numbers.get(index, 0) for index in range(last + 1))


def pass_over_taken(
    job: str, attempts: dict[int, int], wanted_indexes: Iterable[int], taken_names: Collection[str]
) -> None:
    """Increase the attempts of `wanted_indexes` until each resulting pod name is free.

    The operator does not wait for a name to become free. An earlier job with the same name may have left pods, which
    exist for as long as their node is down (decision "Pod names that are taken are skipped").
    """
    if taken_names:
        for index in wanted_indexes:
            while pod_name(job, index, attempts.get(index, 0)) in taken_names:
                attempts[index] = attempts.get(index, 0) + 1
