"""A job whose agents are not heard, though Kubernetes says nothing against their pods: it is left alone, and that is
said, since a person may have to open the way (decision "Silence alone is no death")."""

from __future__ import annotations

from dataclasses import replace

from concertina.api.status import rfc3339
from concertina.plan.actions import Event
from concertina.plan.facts import constants
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Decision, Pods
from concertina.plan.facts.health import Evidence, Life, Verdict

REASON = "AgentsUnreachable"
ONE_BY_ONE = (
    "it waits for its turn to be replaced: for silence alone a namespace loses one pod in 10 s at most, and all "
    "namespaces together six a minute"
)
REMEDY = (
    "Look for a NetworkPolicy or a firewall between the operator and the agents' port of the job's pods; a pod whose "
    "agent hangs is replaced once it is deleted"
)


def annotate(ctx: JobContext, decision: Decision) -> Decision:
    """A decision with what is to be said of agents that have been silent for UNHEARD and that nobody calls dead."""
    if decision.stalled or decision.pods is not Pods.WANTED or (found := _silent(ctx)) is None:
        return decision
    message = f"{_sentence(ctx, found)}. {REMEDY}"
    before = ctx.status.trouble
    events = () if before and before.reason == REASON else (Event("Warning", REASON, message),)
    goes_on = found.evidence is Evidence.MEMBERS
    return replace(
        decision,
        stalled=REASON,
        stalled_message=message,
        goes_on=goes_on,
        events=(*decision.events, *events),
    )


def _silent(ctx: JobContext) -> Verdict | None:
    if ctx.round.committed:
        verdicts = [ctx.health.lead]
    else:
        verdicts = [ctx.health.by_contact(pod) for pod in ctx.replicas.live.values()]
    silent = (found for found in verdicts if found.life is Life.SILENT)
    return next((found for found in silent if found.age is not None and found.age >= constants.UNHEARD), None)


def _sentence(ctx: JobContext, found: Verdict) -> str:
    since = f"since {rfc3339(ctx.now - (found.age or 0.0))}"
    if found.evidence is Evidence.MEMBERS:
        lead = ctx.round.lead.replica
        return f"the lead {lead} has not been reached {since}; its members hear it, so the round goes on"
    heard = "no agent of this job has been reached" if ctx.health.no_agent_reachable else "an agent was not reached"
    if found.waits:
        return f"{heard} {since}, while Kubernetes says that its pod runs: {ONE_BY_ONE}"
    why = f"{heard} {since}, while Kubernetes says that the pods run: they are left alone, for they may be training"
    if ctx.observed.own_side_suspected:
        why += "; nor have most other jobs, so it may be the operator that is cut off"
    return why
