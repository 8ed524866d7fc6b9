"""Pods that the API server refuses: how long until one is tried again, and what a person must see to."""

from __future__ import annotations

from dataclasses import replace

from concertina.plan.actions import Event
from concertina.plan.facts import constants
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Decision, Phase
from concertina.plan.observed import Refusal, Refused

REASON = "PodRefused"
LONGEST = 300.0
"""Seconds, at most, between tries of what is refused for good: policies and webhooks get mended too."""


def seconds_left(ctx: JobContext) -> float:
    """Seconds until a pod may be created again, after the API server refused one."""
    refused = ctx.observed.refused
    return _pause(refused) - ctx.since(refused.at) if refused else 0.0


def _pause(refused: Refused) -> float:
    if refused.kind is Refusal.TRANSIENT:
        return constants.RETRY
    if refused.kind is Refusal.FOR_GOOD:  # as long again as it was refused so far
        return min(LONGEST, max(constants.CREATE_RETRY, refused.at - refused.since))
    return constants.CREATE_RETRY


def annotate(ctx: JobContext, decision: Decision) -> Decision:
    """A decision to wait for pods (said as Stalled) or to go on without some (Degraded) that no time will bring."""
    refused = ctx.observed.refused
    if refused is None or decision.stalled or not _needs_a_person(refused):
        return decision
    message = f"{_advice(refused)} The API server says: {refused.message}"
    said = replace(decision, stalled=REASON, stalled_message=message)
    if decision.phase is Phase.WAITING:
        return replace(said, phase=Phase.STALLED, reason=REASON)
    said = replace(said, goes_on=True)
    before = ctx.status.trouble
    known = before is not None and before.reason == REASON
    return said if known else replace(said, events=(*decision.events, Event("Warning", REASON, message)))


def _needs_a_person(refused: Refused) -> bool:
    """What is missing may just not be there yet: a service account made along with the job. A webhook may be down for
    a moment."""
    if refused.kind in (Refusal.MISSING, Refusal.WEBHOOK):
        return refused.at - refused.since >= constants.CREATE_RETRY
    return refused.kind is Refusal.FOR_GOOD


def _advice(refused: Refused) -> str:
    if refused.kind is Refusal.MISSING:
        return "The job's pods are refused for want of something that they name: make it, and the job goes on."
    if refused.kind is Refusal.WEBHOOK:
        return "The job's pods are refused while an admission webhook fails: mend or remove it, and the job goes on."
    return (
        "The job's pods are refused: set spec.suspend to true, change spec.template, and set it to false; or change "
        f"the cluster's policy, which is found out within {LONGEST / 60:.0f} minutes."
    )
