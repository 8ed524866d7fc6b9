"""A job whose agents can't be reached for want of the master key that they know: nothing is done to it, and it is said.

That its agents can't be heard says nothing about them here: they train on, and a person can give the key back.
"""

from __future__ import annotations

from dataclasses import replace

from concertina.amounts import first_of
from concertina.api.spec import Launcher
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Decision, Phase, Pods
from concertina.plan.observed import ConnectionRefusal
from concertina.plan.recovery import causes

MISMATCH = "MasterKeyMismatch"
REMEDY = (
    "Put that key back into the Secret with the operator's master key, as an entry whose name begins with key-, and "
    "restart the operator (docs/master-key.md), or delete the job and create it again"
)


def recorded(ctx: JobContext) -> str:
    """status.masterKey: the key for new jobs as long as there are no pods. Of a job that an older operator started, the
    first agent that answers shows that it is the same one."""
    if ctx.status.master_key or ctx.spec.launcher is Launcher.TORCHRUN:
        return ctx.status.master_key
    answered = any(view.connected for view in ctx.observed.agents.values())
    return next(iter(ctx.observed.master_keys), "") if answered or not ctx.observed.pods else ""


def missing(ctx: JobContext) -> Decision | None:
    """The operator does not have the job's key: all stays as it is, down to the dead, whom nobody could succeed."""
    key = ctx.status.master_key
    if not key or key in ctx.observed.master_keys:
        return None
    message = f"the job was started with master key {key}, which this operator does not have: no agent can be reached"
    return replace(causes.as_before(ctx), stalled=MISMATCH, stalled_message=f"{message}. {REMEDY}", pods=Pods.KEPT)


def annotate(ctx: JobContext, decision: Decision) -> Decision:
    """A decision with what is to be said of live replicas whose certificates come from another key."""
    names = [name for name in ctx.replicas.live if ctx.agent(name).refusal is ConnectionRefusal.OTHER_KEY]
    if not names or decision.stalled or decision.pods is not Pods.WANTED:
        return decision
    message = (
        f"{first_of(names, 3)}: the agent's certificate comes from another master key than this operator has, so it "
        "can't be reached, and is left alone"
    )
    goes_on = decision.phase in (Phase.TRAINING, Phase.DRAINING) and ctx.round.lead.replica not in names
    return replace(decision, stalled=MISMATCH, stalled_message=f"{message}. {REMEDY}", goes_on=goes_on)
