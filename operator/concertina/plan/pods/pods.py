"""Which pods there should be: one live pod for each slot, successors for the dead, nothing for what is left over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from concertina.api.spec import CleanPodPolicy
from concertina.plan.facts import constants, sizes
from concertina.plan.facts.decision import Decision, Phase, Pods
from concertina.plan.facts.look import Look
from concertina.plan.pods import backoff, nodes, refusals
from concertina.plan.types import Action, CreatePod, CreateSecret, DeletePod, EndPod, Event, PodView


def pod_name(job: str, index: int, attempt: int) -> str:
    return f"{job}-{index}-{attempt}"


@dataclass(frozen=True)
class PodPlan:
    actions: tuple[Action, ...] = ()
    attempts: tuple[int, ...] = ()
    """As status.internal.attempts: written before the pods are created, so that no name is used for two pods."""
    replaced: tuple[PodView, ...] = ()
    """The dead pods that get a successor in this pass."""
    events: tuple[Event, ...] = ()
    recheck: float | None = None
    missing: bool = False
    """Whether pods are wanted that are not there."""


def plan_pods(look: Look, decision: Decision) -> PodPlan:
    if decision.pods is Pods.ENDED:
        return _ended(look, failed=decision.phase is Phase.FAILED)
    return POLICIES[decision.pods](look)


def _wanted(look: Look) -> PodPlan:
    wanted = look.slots
    attempts = _bumped(look, wanted)
    current = {(pod.index, pod.attempt) for pod in look.observed.pods}
    missing = [
        index
        for index in sorted(wanted)
        if (index, _attempt(attempts, index)) not in current and not _filled(look, index)
    ]
    before = look.status.internal.attempts
    dead = [pod for pod in look.observed.pods if _goes(look, pod) and pod.attempt == _attempt(before, pod.index)]
    replaced = tuple(pod for pod in dead if _attempt(attempts, pod.index) > pod.attempt)
    creates, recheck = _creates(look, missing, attempts)
    events = tuple(replaced_event(look, pod) for pod in replaced)
    return PodPlan((*creates, *_deletes(look, wanted, attempts)), attempts, replaced, events, recheck, bool(missing))


def replaced_event(look: Look, pod: PodView) -> Event:
    """For a pod that gets a successor."""
    notice = look.notices.get(pod.name)
    why = notice.message if notice else look.deaths[pod.name]
    return Event(
        "Normal" if notice else "Warning", "ReplicaReplaced", f"replica {pod.name} {why}; a new pod takes its place"
    )


def _goes(look: Look, pod: PodView) -> bool:
    """Whether it needs a successor: dead, or a member with a notice, or one that is not needed yet and must leave. (A
    successor with a notice of its own is not succeeded at once: pods may tolerate what announces the end of nodes.)"""
    if pod.name in look.deaths or pod.name not in look.notices:
        return pod.name in look.deaths
    return pod.name in look.members or (look.leaves(pod.name) and look.now - pod.created >= constants.SETTLED)


def _filled(look: Look, index: int) -> bool:
    """Whether a replica of this index stays, though a newer attempt was asked for when it had a notice."""
    name = look.seats.get(index)
    return name is not None and name not in look.notices


def _attempt(attempts: tuple[int, ...], index: int) -> int:
    return attempts[index] if index < len(attempts) else 0


def _bumped(look: Look, wanted: frozenset[int]) -> tuple[int, ...]:
    """Attempts such that each wanted index is beyond its newest dead pod, and beyond members that are gone."""
    attempts = dict(enumerate(look.status.internal.attempts))
    for name in look.members.keys() - look.pods.keys():  # gone without a trace: its name isn't used again
        _, index, attempt = name.rsplit("-", 2)
        if int(index) in wanted:
            attempts[int(index)] = max(attempts.get(int(index), 0), int(attempt) + 1)
    for pod in look.observed.pods:
        if pod.index in wanted:
            least = pod.attempt + 1 if _goes(look, pod) else pod.attempt
            attempts[pod.index] = max(attempts.get(pod.index, 0), least)
    pass_over_taken(look, attempts, wanted)
    return packed(attempts)


def pass_over_taken(look: Look, attempts: dict[int, int], wanted: Iterable[int]) -> None:
    """Names that other pods hold are not waited for: those of a job that was deleted may stay as long as their node
    is away."""
    if look.observed.taken:
        for index in wanted:
            while pod_name(look.observed.job.name, index, attempts.get(index, 0)) in look.observed.taken:
                attempts[index] = attempts.get(index, 0) + 1


def packed(attempts: Mapping[int, int]) -> tuple[int, ...]:
    """By index, without the zeros at the end."""
    last = max((index for index, attempt in attempts.items() if attempt), default=-1)
    return tuple(attempts.get(index, 0) for index in range(last + 1))


def _creates(look: Look, missing: list[int], attempts: tuple[int, ...]) -> tuple[tuple[Action, ...], float | None]:
    if not missing:
        return (), None
    if (wait := refusals.left(look)) > 0:
        return (), wait
    held = backoff.next_pods(look)
    due = set(missing) - held.keys()
    recheck = min([constants.CREATE_RETRY, *(held[index].left for index in missing if index in held)])
    if not due:
        return (), recheck
    if look.observed.refused:
        due = {min(due)}
    never = nodes.forbidden(look)
    avoid = tuple(sorted((_ending(look) | set(nodes.avoided(look))) - set(never)))
    secret: tuple[Action, ...] = () if look.observed.secret_made else (CreateSecret(),)
    standing = len(look.slots) - len(missing)
    creates = (
        CreatePod(index, _attempt(attempts, index), avoid, never, spare=standing + place >= sizes.most(look.spec))
        for place, index in enumerate(missing)
        if index in due
    )
    return (*secret, *creates), recheck


def _ending(look: Look) -> set[str]:
    """Nodes that replicas leave: a pod that tolerates their taints might go there again."""
    nodes = (look.node(look.pods[name]) for name in look.notices)
    return {node.name for node in nodes if node.notice or node.cordoned}


def _deletes(look: Look, wanted: frozenset[int], attempts: tuple[int, ...]) -> tuple[Action, ...]:
    """The dead (the newest that ended by itself stays, for its logs), those of older attempts, and those not wanted."""
    actions: list[Action] = []
    for pod in look.observed.pods:
        newest = _attempt(attempts, pod.index)
        if pod.name in look.deaths:
            if pod.released and not pod.deleting and pod.attempt >= newest - 1:
                continue
            actions += delete(look, pod, look.deaths[pod.name])
        elif pod.name in look.members and (look.committed or pod.name in look.notices):
            continue  # only after a round without it
        elif pod.index not in wanted:
            actions += delete(look, pod, "is more than spec.replicas")
        elif look.seats.get(pod.index) == pod.name:
            continue
        elif pod.attempt < newest:
            actions += delete(look, pod, _replaced_because(look, pod.name))
        elif _filled(look, pod.index):
            actions += delete(look, pod, f"is not needed: {look.seats[pod.index]} stays")
    return tuple(actions)


def _replaced_because(look: Look, name: str) -> str:
    notice = look.notices.get(name)
    return notice.message if notice else "has a successor"


def delete(look: Look, pod: PodView, reason: str) -> list[Action]:
    """Nothing where it is being deleted already, unless its node can't confirm that."""
    node = look.node(pod)
    unconfirmed = node.out_of_service or not node.ready
    if pod.deleting and not unconfirmed:
        return []
    return [DeletePod(pod.name, pod.uid, f"replica {pod.name} {reason}", force=unconfirmed)]


def _none(look: Look) -> PodPlan:
    """Deletes all; the attempts go on, so that a resumed job's pods have names of their own."""
    actions = [action for pod in look.observed.pods for action in delete(look, pod, "is not wanted now")]
    attempts = dict(enumerate(look.status.internal.attempts))
    for pod in look.observed.pods:
        attempts[pod.index] = max(attempts.get(pod.index, 0), pod.attempt + 1)
    return PodPlan(tuple(actions), packed(attempts))


def _ended(look: Look, failed: bool) -> PodPlan:
    """As spec.cleanPodPolicy says. What runs in a failed job is ended rather than deleted: its log says why."""
    policy = look.spec.clean_pod_policy
    if policy is CleanPodPolicy.NONE:
        return _kept(look)
    actions: list[Action] = []
    waits: list[float] = []
    for pod in look.observed.pods:
        if pod.released and policy is not CleanPodPolicy.ALL:
            continue
        ends = failed and policy is not CleanPodPolicy.ALL and _can_be_ended(look, pod)
        left = look.ended_at + (pod.grace + constants.END if ends else constants.LINGER) - look.now
        if left <= 0:
            actions += delete(look, pod, "is not needed any more: the job has ended")
            continue
        waits.append(left)
        if ends and not pod.ending:
            actions.append(EndPod(pod.name, pod.uid, f"replica {pod.name} has failed with its job"))
    return PodPlan(tuple(actions), look.status.internal.attempts, recheck=min(waits, default=None))


def _can_be_ended(look: Look, pod: PodView) -> bool:
    """It has a log worth keeping, and a node that can stop it."""
    node = look.node(pod)
    return pod.index >= 0 and pod.phase != "Pending" and not pod.deleting and node.ready and not node.out_of_service


def _kept(look: Look) -> PodPlan:
    return PodPlan((), look.status.internal.attempts)


POLICIES = {Pods.WANTED: _wanted, Pods.NONE: _none, Pods.KEPT: _kept}


def shortage(look: Look) -> str:
    """Why there are too few replicas, in a sentence that names a reason for each that isn't ready (the first few)."""
    ready = min(len(look.ready), sizes.most(look.spec))
    reasons = [f"{pod.name}: {waiting(look, pod)}" for name, pod in look.live.items() if name not in look.ready]
    reasons = [held.sentence for held in backoff.next_pods(look).values()] + reasons
    if look.observed.refused:
        reasons.insert(0, look.observed.refused.message)
    text = f"{ready} of {sizes.most(look.spec)} replicas are ready"
    if ready < sizes.least(look.spec):
        text += f", {sizes.least(look.spec)} are needed"
    return text + (f"; {'; '.join(reasons[:3])}" if reasons else "")


def waiting(look: Look, pod: PodView) -> str:
    view = look.agent(pod.name)
    if view.report and view.report.startup_error:
        return view.report.startup_error
    if pod.waiting:
        return f"{pod.waiting} ({pod.waiting_message[:300]})" if pod.waiting_message else pod.waiting
    if pod.phase == "Running":
        return "its agent is warming up" if view.connected else "its agent does not answer yet"
    if pod.node and look.now - pod.created >= constants.SLOW_START:
        return f"no container so far, perhaps for want of a volume: kubectl describe pod {pod.name} says more"
    return "starts"
