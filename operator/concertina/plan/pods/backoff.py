"""Waits after failures that follow each other closely: none for the first two, then 1, 2, 4 ... 30 s. Of rounds that
fail at the same step, and of a replica whose pods end by themselves. What has failed stands in status.restarts, so an
operator that comes new waits as long as the one before (decision "Replacements wait, ever longer")."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from concertina.api.pod_names import parse
from concertina.api.restarts import LONGEST_MESSAGE, Restart
from concertina.api.status import rfc3339, unix_seconds
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Reason
from concertina.plan.observed import PodView
from concertina.plan.pods.attempts import at

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
"""Ways for a pod to end that its own container did not cause. The last two: its node lost power and is back, and all
that the kubelet still knows is that the container no longer runs (decision "Pods of a rebooted node are nobody's
failure")."""
NOTICED = 128 + signal.SIGTERM
"""How agents exit after a SIGTERM, and they alone: what a worker exits with is not what its agent does."""
APART = 120.0
"""Seconds between failures that have nothing to do with each other, though no step is known to lie between them."""
FREE = 2
"""Failures in a row that are answered at once."""
LONGEST = 30.0


def next_round(ctx: JobContext) -> float:
    """Seconds to wait before the next round, by the failures at this step that earlier rounds answered."""
    since = unix_seconds(ctx.world.since) if ctx.world.since else ctx.now
    answered = [entry for entry in ctx.recent if unix_seconds(entry.at) <= since]
    if not answered:
        return 0.0
    row = _in_a_row(answered, ctx.now, lambda entry: entry.step >= ctx.round.step)
    return _delay(row) - ctx.elapsed(answered[-1].at)


@dataclass(frozen=True)
class Held:
    """The next pod of a replica that has to wait."""

    left: float
    """Seconds from now."""
    sentence: str
    """What it waits for and how long; the same as long as it waits."""


def next_pods(ctx: JobContext) -> Mapping[int, Held]:
    """Replica indexes without a live pod whose next one has to wait: those before ended by themselves, in a row."""
    empty = ctx.replicas.wanted_indexes - {
        pod.index for pod in ctx.replicas.live.values() if pod.attempt >= at(ctx.status.internal.attempts, pod.index)
    }
    if not empty:
        return {}
    failed: dict[int, dict[str, Restart]] = {index: {} for index in empty}
    for entry in (*ctx.recent, *(entry_of(ctx, pod) for pod in ctx.observed.pods if _has_just_ended(ctx, pod))):
        known = parse(entry.replica)
        if entry.counted and known and known.index is not None and known.index in failed:
            failed[known.index].pop(entry.replica, None)  # the newest failure of each pod, in order of time
            failed[known.index][entry.replica] = entry
    made = {index: _held(ctx, index, list(pods.values())) for index, pods in failed.items() if pods}
    return {index: held for index, held in made.items() if held.left > 0}


def ended_by_itself(pod: PodView) -> bool:
    """Not after a notice: one that ended as it was told to has not failed."""
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
    """It will be in status.restarts after this pass: its index is still on this attempt."""
    return ended_by_itself(pod) and pod.attempt == at(ctx.status.internal.attempts, pod.index)


def _held(ctx: JobContext, index: int, pods: list[Restart]) -> Held:
    last = pods.pop()
    at = unix_seconds(last.at)
    row = _in_a_row(pods, at)
    delay = _delay(row)
    why = ctx.replicas.dead.get(last.replica, f"failed ({last.reason})")
    sentence = (
        f"the next pod of replica {index} waits {delay:.0f} s: {row + 1} in a row ended by themselves, "
        f"the last, {last.replica}, {why}"
    )
    return Held(delay - ctx.elapsed(last.at), sentence)


def _in_a_row(
    failures: Sequence[Restart], before: float, belongs: Callable[[Restart], bool] = lambda entry: True
) -> int:
    """How many failures, in order of time and the last one `before`, follow each other closely."""
    row = 0
    for entry in reversed(failures):
        at = unix_seconds(entry.at)
        if before - at > APART or not belongs(entry):
            break
        row, before = row + 1, at
    return row


def _delay(row: int) -> float:
    return 0.0 if row < FREE else min(LONGEST, 2.0 ** (row - FREE))
