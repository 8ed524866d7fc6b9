"""Jobs that nothing is made for, as their spec is: another job has their checkpoints, or no size of theirs is valid."""

from __future__ import annotations

from concertina.plan.facts import sizes
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Decision, Pods, stalled


def uri_in_use(ctx: JobContext) -> Decision | None:
    holder = ctx.observed.uri_holder
    if holder is None or ctx.spec.suspend:
        return None
    uri = ctx.spec.checkpoint.uri if ctx.spec.checkpoint else ""
    message = (
        f"checkpoint.uri {uri} belongs to the job {holder.name}, which has begun: give this job another one, delete "
        f"that job, or set checkpoint.takeOver: {holder.uid}"
    )
    return stalled("CheckpointURIInUse", message, Pods.NONE)


def no_size(ctx: JobContext) -> Decision | None:
    if sizes.most(ctx.spec) or ctx.spec.suspend:
        return None
    return stalled(
        "NoValidSize", f"{sizes.rounding(ctx.spec)}: set spec.replicas to at least {ctx.spec.replica_step}", Pods.NONE
    )
