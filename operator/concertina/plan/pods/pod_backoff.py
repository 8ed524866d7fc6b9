"""Backoff for new rounds and new pods, and the sentences that explain it to users.

A round is a period in which a fixed set of replicas trains. Failures in quick succession delay the next round, or the
next pod of a replica. The first two failures cause no delay. Further failures cause delays of 1, 2, 4 and so on up to
30 seconds. The backoff applies to rounds that fail at the same step and to replicas whose pods end by themselves. The
operator reads the failures from `status.restarts`, so a new operator continues the backoff of the previous one
(decision "Increasing delays before restarts"). After the API server has refused a pod, the delay depends on the kind of
refusal.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from concertina.amounts import are
from concertina.api.pod_names import parse
from concertina.api.restarts import LONGEST_MESSAGE, Restart
from concertina.api.status import rfc3339, unix_seconds
from concertina.plan.actions import Event
from concertina.plan.facts import constants, gangs, sizes
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Decision, Phase, Reason
from concertina.plan.observed import UNSCHEDULABLE, CreateRefusal, PodPhase, PodView, Refusal
from concertina.plan.pods.pod_plan import number_at

OUTSIDE = frozenset(
    {
        "Evicted",
        "Preempting",
        "Preempted",
        "NodeShutdown",
        "Terminated",
        "NodeLost",
        "Shutdown",
        "UnexpectedAdmissionError",
        "Unknown",
        "ContainerStatusUnknown",
    }
)
"""Exit reasons of a pod that the container itself did not cause.

The last two occur after a node has lost power: once the node is back, the kubelet only knows that the container no
longer runs (decision "Pods of a rebooted node do not count as failures").
"""
NOTICED = 128 + signal.SIGTERM
"""Exit code of an agent that received a SIGTERM.

No other exit has this code, because an agent does not exit with the exit code of its worker.
"""
APART = 120.0
"""Seconds between two failures after which they count as unrelated, even if no step was made between them."""
FREE = 2
"""Number of consecutive failures that cause no delay."""
LONGEST = 30.0


def next_round(ctx: JobContext) -> float:
    """Return the seconds to wait before the next round. The delay grows with rounds that failed at the same step."""
    since = unix_seconds(ctx.world.since) if ctx.world.since else ctx.now
    answered = [entry for entry in ctx.recent if unix_seconds(entry.at) <= since]
    if not answered:
        return 0.0
    row = _in_a_row(answered, ctx.now, lambda entry: entry.step >= ctx.round.step)
    return _delay(row) - ctx.elapsed(answered[-1].at)


@dataclass(frozen=True)
class DelayedPod:
    """The next pod of a replica, whose creation is delayed because earlier pods ended in quick succession."""

    left: float
    """Seconds until the operator may create the pod."""
    sentence: str
    """Reason and total length of the delay. The sentence does not change during the delay."""


def next_pods(ctx: JobContext) -> Mapping[int, DelayedPod]:
    """Return the next pods that are delayed by backoff, keyed by replica index.

    A pod is delayed if the replica has no live pod and its previous pods ended by themselves in quick succession.
    """
    empty = ctx.replicas.wanted_indexes - {
        pod.index
        for pod in ctx.replicas.live.values()
        if pod.attempt >= number_at(ctx.status.internal.attempts, pod.index)
    }
    if not empty:
        return {}
    failures_by_index: dict[int, dict[str, Restart]] = {index: {} for index in empty}
    for entry in (*ctx.recent, *(entry_of(ctx, pod) for pod in ctx.observed.pods if _has_just_ended(ctx, pod))):
        parsed = parse(entry.replica)
        if entry.counted and parsed and parsed.index is not None and parsed.index in failures_by_index:
            # keep the newest failure of each pod, in order of time
            failures_by_index[parsed.index].pop(entry.replica, None)
            failures_by_index[parsed.index][entry.replica] = entry
    delays = {index: _delayed(ctx, index, list(pods.values())) for index, pods in failures_by_index.items() if pods}
    return {index: delayed for index, delayed in delays.items() if delayed.left > 0}


def ended_by_itself(pod: PodView) -> bool:
    """Return whether the pod ended without an outside cause, such as a termination notice or the loss of its node.

    Only a pod that ended by itself has failed.
    """
    noticed = pod.deleting or bool(pod.disruption) or pod.exit_code == NOTICED
    return pod.ended and not noticed and pod.exit_reason not in OUTSIDE


def entry_of(ctx: JobContext, pod: PodView) -> Restart:
    """Return the entry in status.restarts for a pod that has ended by itself."""
    message = f"replica {pod.name} {ctx.replicas.dead.get(pod.name, 'ended')}"
    return Restart(
        at=rfc3339(ctx.now),
        replica=pod.name,
        node=pod.node,
        reason=pod.exit_reason or Reason.REPLICA_ENDED,
        step=ctx.round.step,
        message=message[:LONGEST_MESSAGE],
    )


def _has_just_ended(ctx: JobContext, pod: PodView) -> bool:
    """Return whether this planning pass must add an entry for the pod's end to `status.restarts`.

    The pod must have ended by itself, and must be the current attempt of its replica index.
    """
    return ended_by_itself(pod) and pod.attempt == number_at(ctx.status.internal.attempts, pod.index)


def _delayed(ctx: JobContext, index: int, pods: list[Restart]) -> DelayedPod:
    last = pods.pop()
    row = _in_a_row(pods, unix_seconds(last.at))
    delay = _delay(row)
    why = ctx.replicas.dead.get(last.replica, f"failed ({last.reason})")
    sentence = (
        f"the next pod of replica {index} waits {delay:.0f} s: {row + 1} pods in a row ended by themselves. The "
        f"last one, {last.replica}, {why}"
    )
    return DelayedPod(delay - ctx.elapsed(last.at), sentence)


def _in_a_row(
    failures: Sequence[Restart], before: float, belongs: Callable[[Restart], bool] = lambda entry: True
) -> int:
    """Return how many of the last failures before the Unix time `before` followed each other in quick succession.

    Args:
        failures: Failures in order of time.
        before: Unix time from which the function counts back.
        belongs: Function that returns whether a failure counts. The first failure that does not count ends the series.
    """
    row = 0
    for entry in reversed(failures):
        failed_at = unix_seconds(entry.at)
        if before - failed_at > APART or not belongs(entry):
            break
        row, before = row + 1, failed_at
    return row


def _delay(row: int) -> float:
    return 0.0 if row < FREE else min(LONGEST, 2.0 ** (row - FREE))


# --- pods that the API server refuses

POD_REFUSED = "PodRefused"
LONGEST_REFUSED = 300.0
"""Longest delay in seconds before a pod is created again that the API server refuses permanently.

The delay is limited because a person may fix a policy or webhook.
"""


def refused_for(ctx: JobContext) -> float:
    """Return the seconds until the operator may try to create a pod again after the API server refused one."""
    refused = ctx.observed.refused
    return _pause(refused) - ctx.since(refused.at) if refused else 0.0


def _pause(refused: CreateRefusal) -> float:
    if refused.kind is Refusal.TRANSIENT:
        return constants.RETRY
    if refused.kind is Refusal.PERMANENT:  # wait as long as the refusals have lasted so far
        return min(LONGEST_REFUSED, max(constants.CREATE_RETRY, refused.at - refused.since))
    return constants.CREATE_RETRY


def annotate_refusal(ctx: JobContext, decision: Decision) -> Decision:
    """Report that a person must act before the API server accepts the job's pods.

    The job is Stalled if it waits for these pods, and Degraded if it continues without them.
    """
    refused = ctx.observed.refused
    if refused is None or decision.stalled or not _needs_a_person(refused):
        return decision
    message = f"{_advice(refused)} The API server says: {refused.message}"
    annotated = replace(decision, stalled=POD_REFUSED, stalled_message=message)
    if decision.phase is Phase.WAITING:
        return replace(annotated, phase=Phase.STALLED, reason=POD_REFUSED)
    annotated = replace(annotated, goes_on=True)
    trouble = ctx.status.trouble
    is_reported = trouble is not None and trouble.reason == POD_REFUSED
    if is_reported:
        return annotated
    return replace(annotated, events=(*decision.events, Event("Warning", POD_REFUSED, message)))


def _needs_a_person(refused: CreateRefusal) -> bool:
    """Return whether the API server will refuse the job's pods until a person acts.

    A missing object does not count at first, because somebody may create it together with the job (a service account,
    for example). A failing webhook does not count at first either, because it may be down only for a moment.
    """
    if refused.kind in (Refusal.MISSING, Refusal.WEBHOOK):
        return refused.at - refused.since >= constants.CREATE_RETRY
    return refused.kind is Refusal.PERMANENT


def _advice(refused: CreateRefusal) -> str:
    if refused.kind is Refusal.MISSING:
        return (
            "The job's pods are refused because they name an object that does not exist. Create it, and the "
            "job continues."
        )
    if refused.kind is Refusal.WEBHOOK:
        return (
            "The job's pods are refused because an admission webhook fails. Fix or remove the webhook, and "
            "the job continues."
        )
    return (
        "The job's pods are refused. Set spec.suspend to true, change spec.template, and set spec.suspend to "
        f"false. Or change the policy of the cluster; the operator tries again within {LONGEST_REFUSED / 60:.0f} "
        "minutes."
    )


# --- replicas that are not ready


def shortage(ctx: JobContext) -> str:
    """Return a sentence that says why too few replicas are ready. It contains at most three reasons."""
    ready = min(len(ctx.replicas.ready), sizes.most(ctx.spec))
    reasons = [
        f"{pod.name}: {why_waiting(ctx, pod)}"
        for name, pod in ctx.replicas.live.items()
        if name not in ctx.replicas.ready
    ]
    reasons = [delayed.sentence for delayed in next_pods(ctx).values()] + reasons
    if ctx.observed.refused:
        reasons.insert(0, ctx.observed.refused.message)
    text = f"{ready} of {sizes.most(ctx.spec)} replicas are ready"
    if ready < (needed_count := sizes.least(ctx.spec)):
        text += f", {needed_count} {are(needed_count)} needed"
    return text + (f"; {'; '.join(reasons[:3])}" if reasons else "")


def too_large(ctx: JobContext, pod: PodView) -> str:
    """Return a sentence if the pod requests more devices or CPUs than any node has; otherwise an empty string.

    The scheduler's message is the same as for a pod that would fit on a node with fewer other pods.
    """
    for name, amount in pod.requests.items() if pod.waiting == UNSCHEDULABLE else ():
        offers = [node.allocatable[name] for node in ctx.observed.nodes.values() if name in node.allocatable]
        if offers and amount > max(offers) and ("/" in name or name == "cpu"):
            return f"the pod requests {amount} {name}, and no node has more than {max(offers)}"
    return ""


def why_waiting(ctx: JobContext, pod: PodView) -> str:
    """Return why a pod is not ready, as a clause for the job's status."""
    view = ctx.agent(pod.name)
    if fault := ctx.replicas.gpu_faults.get(pod.name):
        return fault
    if view.report and view.report.startup_error:
        return view.report.startup_error
    if pod.waiting:
        if why := too_large(ctx, pod):
            return why
        return f"{pod.waiting} ({pod.waiting_message[:300]})" if pod.waiting_message else pod.waiting
    if pod.awaited_scheduler and ctx.age(pod) >= constants.UNSCHEDULED:
        if why := gangs.shortage(ctx, pod):
            return why
        return f"no scheduler has looked at it so far: is {pod.awaited_scheduler} running?"
    if pod.phase is PodPhase.RUNNING:
        return "its agent is warming up" if view.connected else "its agent does not answer yet"
    if pod.node and ctx.age(pod) >= constants.SLOW_START:
        return f"no container has started, perhaps because a volume is missing: see kubectl describe pod {pod.name}"
    return "starts"
