"""Why replicas are not ready, in sentences."""

from __future__ import annotations

from concertina.amounts import are
from concertina.plan.facts import constants, sizes
from concertina.plan.facts.context import JobContext
from concertina.plan.observed import PodPhase, PodView
from concertina.plan.pods import backoff


def shortage(ctx: JobContext) -> str:
    """Why there are too few replicas, in a sentence that names a reason for each that isn't ready (the first few)."""
    ready = min(len(ctx.replicas.ready), sizes.most(ctx.spec))
    reasons = [
        f"{pod.name}: {waiting(ctx, pod)}" for name, pod in ctx.replicas.live.items() if name not in ctx.replicas.ready
    ]
    reasons = [held.sentence for held in backoff.next_pods(ctx).values()] + reasons
    if ctx.observed.refused:
        reasons.insert(0, ctx.observed.refused.message)
    text = f"{ready} of {sizes.most(ctx.spec)} replicas are ready"
    if ready < (least := sizes.least(ctx.spec)):
        text += f", {least} {are(least)} needed"
    return text + (f"; {'; '.join(reasons[:3])}" if reasons else "")


def waiting(ctx: JobContext, pod: PodView) -> str:
    view = ctx.agent(pod.name)
    if view.report and view.report.startup_error:
        return view.report.startup_error
    if pod.waiting:
        return f"{pod.waiting} ({pod.waiting_message[:300]})" if pod.waiting_message else pod.waiting
    if pod.awaited_scheduler and ctx.age(pod) >= constants.UNSCHEDULED:
        return f"no scheduler has looked at it so far: is {pod.awaited_scheduler} running?"
    if pod.phase is PodPhase.RUNNING:
        return "its agent is warming up" if view.connected else "its agent does not answer yet"
    if pod.node and ctx.age(pod) >= constants.SLOW_START:
        return f"no container so far, perhaps for want of a volume: kubectl describe pod {pod.name} says more"
    return "starts"
