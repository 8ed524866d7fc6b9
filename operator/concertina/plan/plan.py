"""One planning pass: from the observation of a job to everything that the operator should do.

A planning pass uses four tables:

- POLICIES are called in order, and the first policy that returns a decision wins. The decision contains the phase of
  the job with its reason, a new round that the operator begins or commits, calls to agents, and what to do with the
  pods.
- REMARKS are functions that can add to the decision. They run after the pods are planned.
- FIELDS (`status.fields`) compute the new status.
- EVENTS report what has changed in the status.

Between passes, the operator remembers only the status, the agents' reports and the objects in the API server. The first
pass of a restarted operator is therefore like any other pass.

A recovery takes three passes. In the first pass, the coordinator (the agent of rank 0) has reported a failure, and the
operator asks all replicas to prepare for a new round (Prepare calls). In the second pass, the last answer has arrived,
and the operator commits the round and gives the members their ranks (Assign calls). In the third pass, the new round
has finished its first step, and the job's phase becomes Training.

A round is a period in which a fixed set of replicas trains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from concertina.api.spec import Launcher
from concertina.api.status import ENDED, JobStatus
from concertina.plan.actions import Event, Plan
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Decision, Phase, Pods
from concertina.plan.facts.lending import spec_within
from concertina.plan.lifecycle import (
    admission,
    checkpoint_requests,
    end,
    evaluation_jobs,
    gang,
    queued,
    start,
    suspend,
    torchrun,
)
from concertina.plan.observed import JobObservation, PodPhase
from concertina.plan.pods import bad_nodes, pod_backoff, pod_groups
from concertina.plan.pods.planner import plan_pods
from concertina.plan.pods.pod_plan import PodPlan
from concertina.plan.quota.lending import lend
from concertina.plan.recovery import causes, escalation, hardware, stalls, startup
from concertina.plan.rounds import claims, drains, growth, holders
from concertina.plan.state import restore, snapshot_memory
from concertina.plan.status import conditions, progress
from concertina.plan.status.fields import status_after
from concertina.plan.status.round_trace import round_trace

Policy = Callable[[JobContext], Decision | None]
AGENT: tuple[Policy, ...] = (
    end.ended,  # final, whatever is observed later
    end.succeeded,  # must precede every policy that could take pods that ended well for failed ones
    end.complete_in_storage,
    end.permanent_failure,
    end.deadline,
    escalation.restarts_exhausted,
    start.uri_in_use,
    start.gpus_unknown,
    start.no_size,
    gang.not_served,
    snapshot_memory.too_small,
    start.master_key_missing,  # must precede every policy that contacts agents: silence proves nothing without the key
    suspend.suspend,
    suspend.replace_outdated,  # before the round of outdated pods continues or another one begins
    startup.refused,
    gang.regroup,
    admission.release,  # before an open claim is continued: it may wait for room that never becomes free
    claims.proceed,  # finishes an open claim before any other change of the world
    causes.recover,
    drains.change,  # planned changes of a round that has not failed
    causes.running,
    start.first_round,  # always returns a decision
)
TORCHRUN: tuple[Policy, ...] = (
    end.ended,
    torchrun.succeeded,
    end.deadline,
    escalation.restarts_exhausted,
    start.gpus_unknown,
    start.no_size,
    gang.not_served,
    suspend.suspend,
    startup.refused,
    gang.regroup,
    admission.release,
    torchrun.next_round,
    torchrun.running,  # always returns a decision
)
POLICIES: Mapping[Launcher, tuple[Policy, ...]] = {Launcher.AGENT: AGENT, Launcher.TORCHRUN: TORCHRUN}

Remark = Callable[[JobContext, Decision, PodPlan], Decision]
REMARKS: tuple[Remark, ...] = (
    lambda ctx, decision, pods: queued.annotate_queue(ctx, decision),
    lambda ctx, decision, pods: stalls.annotate_hang(ctx, decision),
    lambda ctx, decision, pods: hardware.annotate(ctx, decision),
    lambda ctx, decision, pods: stalls.annotate_stragglers(ctx, decision),
    lambda ctx, decision, pods: start.annotate_master_key(ctx, decision),
    lambda ctx, decision, pods: stalls.annotate_unreachable(ctx, decision),
    lambda ctx, decision, pods: pod_backoff.annotate_refusal(ctx, decision) if pods.missing else decision,
    lambda ctx, decision, pods: gang.annotate_ignored(ctx, decision),
    lambda ctx, decision, pods: stalls.annotate_storage(ctx, decision),
    lambda ctx, decision, pods: progress.annotate_world_mismatch(ctx, decision),
    lambda ctx, decision, pods: suspend.annotate_deletion(ctx, decision),
)
"""Functions that add to a decision.

If several of them give a reason why a person must act, the first reason is used.
"""

Announcement = Callable[[JobContext, JobStatus], tuple[Event, ...]]
EVENTS: tuple[Announcement, ...] = (
    lambda ctx, status: snapshot_memory.events(ctx),
    lambda ctx, status: unknown_fields(ctx),
    lambda ctx, status: bad_nodes.events(ctx.status, status),
    lambda ctx, status: startup.container_events(ctx),
    lambda ctx, status: restore.rollback_events(ctx.status, status),
    lambda ctx, status: progress.sentence_events(ctx.status, status),
    lambda ctx, status: queued.events(ctx, status),
    lambda ctx, status: evaluation_jobs.events(ctx.status, status),
    lambda ctx, status: conditions.events(ctx.status, status),
)


def plan(observed: JobObservation, now: float) -> Plan:
    """Compute the plan for one observation of a job. `now` is in Unix seconds."""
    job, lending = observed.job, lend(observed, now)
    if job.deleting and (job.spec is None or not suspend.held_by(job)):
        return Plan(job.status, actions=lending.writes)
    if job.spec is None:
        return _unreadable(observed, now)
    spec = job.spec.model_copy(update={"suspend": True}) if job.deleting else spec_within(job.spec, lending)
    ctx = JobContext(observed, spec, now, lending)
    decision = next(decision for policy in POLICIES[ctx.spec.launcher] if (decision := policy(ctx)))
    pods = queued.within_quota(ctx, plan_pods(ctx, decision))
    if job.deleting:
        pods = suspend.without_new_pods(pods)
    for remark in REMARKS:
        decision = remark(ctx, decision, pods)
    status, held_back, only_numbers, only_conditions = status_after(ctx, decision, pods)
    calls = (*checkpoint_requests.ask(ctx, decision, status.checkpoint_request), *holders.release(ctx))
    events = (event for announcement in EVENTS for event in announcement(ctx, status))
    seconds_left = (ctx.time_left, growth.seconds_left(ctx), admission.seconds_left(ctx))
    waits = (
        decision.recheck,
        pods.recheck,
        held_back,
        lending.recheck,
        evaluation_jobs.seconds_left(ctx, status),
        *seconds_left,
    )
    return Plan(
        status,
        actions=(
            *pod_groups.actions(ctx, decision),
            *pods.actions,
            *lending.writes,
            *decision.actions,
            *evaluation_jobs.actions(ctx, status),
            *calls,
        ),
        watch=_watch(ctx, decision),
        events=(*decision.events, *pods.events, *events),
        recheck_after=min(filter(None, waits), default=None),
        trace=round_trace(ctx, status),
        silent=ctx.replicas.silent if decision.pods is Pods.WANTED else (),
        only_numbers=only_numbers,
        only_conditions=only_conditions,
    )


def unknown_fields(ctx: JobContext) -> tuple[Event, ...]:
    """Return an event that names the spec fields that this operator ignores, once per generation of the job.

    A CRD of another version defines these fields. If the CRD is newer than the operator, the API server may have added
    the fields with their default values.
    """
    job = ctx.observed.job
    if not job.ignored or job.generation == ctx.status.observed_generation:
        return ()
    names = ", ".join(job.ignored[:10])
    message = f"{names}: the CRD has these fields, but this version of the operator ignores them"
    return (Event("Warning", "UnknownFields", f"{message}; install the same version of both"),)


def _unreadable(observed: JobObservation, now: float) -> Plan:
    """Return a plan that only reports an invalid manifest.

    The API server accepted this manifest because the CRD's version differs from the operator's. A job that has ended
    keeps its status.
    """
    job = observed.job
    if any(job.status.is_true(kind) for kind in ENDED):
        return Plan(job.status)
    decision = Decision(Phase.STALLED, "InvalidSpec", job.spec_error)
    status = job.status.model_copy(
        update={
            "conditions": conditions.conditions(decision, job.status, job.generation, now, conditions.AtWork()),
            "observed_generation": job.generation,
        }
    )
    events = () if status == job.status else (Event("Warning", "InvalidSpec", job.spec_error),)
    return Plan(status, events=events)


def _watch(ctx: JobContext, decision: Decision) -> dict[str, str]:
    """Return the addresses of the agents to which status streams should be open, keyed by replica.

    These streams should be open:

    - the stream to the coordinator, even while its pod is being deleted;
    - streams to replicas outside of the round, which report when they are ready. A replica that counts as dead because
      it is silent is included until its pod is gone: without a stream, its silence would prove nothing;
    - streams to members that may be lost: if they don't answer this operator either, the next round does not wait for
      them;
    - streams to all replicas, while the operator doubts that the coordinator is alive.

    Jobs with torchrun have no agents, and so no streams.

    The coordinator is the agent of rank 0.
    """
    if decision.pods is not Pods.WANTED or ctx.spec.launcher is Launcher.TORCHRUN:
        return {}
    replicas = ctx.replicas
    return {
        name: replicas.address(name)
        for name, pod in replicas.pods.items()
        if (not ctx.health.by_objects(pod).dead or name == replicas.coordinator)
        and pod.ip
        and pod.phase is PodPhase.RUNNING
        and (
            decision.watch_all
            or name not in ctx.round.members
            or name == ctx.round.coordinator.replica
            or name in replicas.suspects
        )
    }
