"""A job that is being deleted while another tool's finalizer holds it: it comes to rest as a suspended one does, and no
pod is made for it any more (decision "A deleted job that is held is drained")."""

from __future__ import annotations

from dataclasses import replace

from concertina.amounts import first_of
from concertina.plan.actions import DeletePod, EndPod
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Decision, Phase
from concertina.plan.observed import JobView
from concertina.plan.pods.pod_plan import PodPlan

GARBAGE_COLLECTOR = ("foregroundDeletion", "orphan")
"""Finalizers of the garbage collector, which deletes the pods itself, or is to leave them alone."""
ORPHAN = "orphan"
REMARK = "the job is being deleted, and a finalizer holds it"


def held_by(job: JobView) -> tuple[str, ...]:
    """The finalizers that keep a deleted job, for however long; empty where the garbage collector does the rest."""
    if not job.deleting or ORPHAN in job.finalizers:
        return ()
    return tuple(name for name in job.finalizers if name not in GARBAGE_COLLECTOR)


def why(job: JobView) -> str:
    """Say that a job is being deleted, and what holds it."""
    return f"the job is being deleted, and held by the finalizer {first_of(held_by(job), 3)}"


def annotate(ctx: JobContext, decision: Decision) -> Decision:
    """Add to any other decision about a deleted job that it is one: as it ended, or as it saves its state first."""
    if not held_by(ctx.observed.job) or decision.phase is Phase.DELETING or REMARK in decision.message:
        return decision
    return replace(decision, message=f"{decision.message}; {REMARK}")


def without_new_pods(pods: PodPlan) -> PodPlan:
    """The plan for the pods that are there; nothing replaces what is lost."""
    kept = tuple(action for action in pods.actions if isinstance(action, DeletePod | EndPod))
    return replace(pods, actions=kept, events=(), missing=False)
