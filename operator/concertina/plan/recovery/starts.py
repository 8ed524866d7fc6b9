"""Replicas that don't get to start where others do, or that others can't reach: said in failures of their own, which
replace them elsewhere.

Nothing here loops fast: each symptom has its patience, and a node that keeps replicas from starting is avoided next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from concertina.api.status import Restart, rfc3339
from concertina.plan.facts import constants, quorum, sizes
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.replicas import REPLACE_POD
from concertina.plan.pods import bad_nodes
from concertina.plan.recovery import same_failure
from concertina.plan.recovery.startup import WAITING
from concertina.plan.rounds import claims
from concertina.plan.types import PodView

IMAGE_PATIENCE = 60.0
"""For an image that can't be pulled: the kubelet tries again by itself."""
CLAIMS = 3
"""Claims that came to nothing, about 7 s in all, before who is cut off from the others is replaced."""


@dataclass(frozen=True)
class Symptom:
    reason: str
    seen: Callable[[JobContext, PodView], str]
    """What is wrong, for long enough; empty where nothing is."""
    elsewhere: bool
    """Only another node can help: without one to spare, the pod is left to its kubelet."""


def _image(ctx: JobContext, pod: PodView) -> str:
    late = ctx.now - pod.created >= IMAGE_PATIENCE
    unavailable = WAITING.get(pod.waiting) == "ImageUnavailable"
    return f"{pod.waiting}: {pod.waiting_message}" if unavailable and late else ""


def _never_started(ctx: JobContext, pod: PodView) -> str:
    view = ctx.agent(pod.name)
    if pod.phase != "Running" or view.alive or view.lost_at or not view.wanted_at or ctx.health.no_agent_reachable:
        return ""
    return "its agent was never heard of" if ctx.now - view.wanted_at >= constants.AGENT_START else ""


def _cannot_start(ctx: JobContext, pod: PodView) -> str:
    report = ctx.agent(pod.name).report
    return report.startup_error if report else ""


def _cut_off(ctx: JobContext, pod: PodView) -> str:
    """It answers the operator, but not the others, and they are too few without it: claim after claim has failed."""
    if ctx.round.claim is None or ctx.round.claim.round - ctx.world.round <= CLAIMS:
        return ""
    replies = claims.answers(ctx)
    together = quorum.connected(replies, ctx.round.members)
    if pod.name not in replies or pod.name in together or sizes.fitting(len(together), ctx.spec):
        return ""
    return "the other replicas and it can't reach each other"


SYMPTOMS = (
    Symptom("ImageUnavailable", _image, elsewhere=True),
    Symptom("AgentNeverStarted", _never_started, elsewhere=False),
    Symptom("AgentCannotStart", _cannot_start, elsewhere=True),
    Symptom("CutOff", _cut_off, elsewhere=True),
)


def stuck(ctx: JobContext) -> tuple[Restart, ...]:
    """For status.restarts; empty where no replica has started yet: then it is not the replica's fault."""
    going = ctx.round.members.keys() if ctx.round.committed else ()
    outside = [pod for name, pod in ctx.replicas.live.items() if name not in going and pod.node]
    if not outside or not (ctx.replicas.ready or ctx.round.members):
        return ()
    room = len(bad_nodes.avoided(ctx)) < bad_nodes.spare(ctx)
    found = ((pod, _symptom(ctx, pod, room)) for pod in outside)
    return tuple(
        Restart(
            at=rfc3339(ctx.now),
            replica=pod.name,
            node=pod.node,
            reason=symptom[0],
            step=ctx.round.step,
            counted=False,
            rung=REPLACE_POD,
            error=same_failure.normalised(symptom[1]),
        )
        for pod, symptom in found
        if symptom
    )


def _symptom(ctx: JobContext, pod: PodView, room: bool) -> tuple[str, str] | None:
    return next(
        ((each.reason, why) for each in SYMPTOMS if (room or not each.elsewhere) and (why := each.seen(ctx, pod))),
        None,
    )


def missing(ctx: JobContext) -> tuple[str, ...]:
    """Replicas that a round goes on without, each with what keeps it from starting."""
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
