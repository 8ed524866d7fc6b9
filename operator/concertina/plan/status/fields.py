"""Compute each field of the status with a function from the table FIELDS.

The policies of the planning pass have already decided what happens to the job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import concertina_protocol as protocol
from concertina.api.internal import Internal
from concertina.api.restarts import Restarts
from concertina.api.spec import Launcher
from concertina.api.status import (
    CheckpointMark,
    Condition,
    JobProgress,
    JobStatus,
    QueueStatus,
    StandbyReplicas,
    rfc3339,
)
from concertina.plan.facts import gangs, sizes
from concertina.plan.facts.cached import cached
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Decision, Phase, Pods
from concertina.plan.lifecycle import admission, checkpoint_requests, evaluation_jobs, start
from concertina.plan.observed import PodPhase
from concertina.plan.pods import bad_nodes
from concertina.plan.pods.pod_plan import PodPlan
from concertina.plan.recovery import escalation, hardware, stalls, startup
from concertina.plan.rounds import claims, growth
from concertina.plan.state import restore
from concertina.plan.status import conditions, progress
from concertina.plan.status.time_accounting import Account


@dataclass(frozen=True)
class Pass:
    """One planning pass: the context, the decision and the pod plan from which the status is computed."""

    ctx: JobContext
    decision: Decision
    pods: PodPlan

    @cached
    def old(self) -> JobStatus:
        return self.ctx.status

    @cached
    def now(self) -> str:
        return rfc3339(round(self.ctx.now, 3))

    @cached
    def conditions(self) -> tuple[Condition, ...]:
        generation = self.ctx.observed.job.generation
        return conditions.conditions(
            self.decision,
            self.old,
            generation,
            self.ctx.now,
            at_work(self.ctx, self.decision),
            self.ctx.observed.template_outdated,
        )

    @cached
    def restarts(self) -> Restarts:
        stuck = startup.stuck(self.ctx) if self.decision.pods is Pods.WANTED else ()
        counted = escalation.restarts_after(self.ctx, self.decision.restart, self.pods.replaced, stuck)
        return startup.with_container_restarts(self.ctx, counted)

    @cached
    def replayed(self) -> int:
        return self.decision.replayed + progress.replayed(self.ctx)

    @cached
    def progress(self) -> JobProgress | None:
        return progress.progress(self.ctx)

    @cached
    def account(self) -> Account:
        return Account(self.ctx, self.decision, self.progress, self.replayed)

    @cached
    def last_checkpoint(self) -> CheckpointMark | None:
        return progress.last_checkpoint(self.ctx)


NODES_NOT_WATCHED = (
    "The operator does not watch nodes (nodes.enabled: false in its chart). Replicas do not leave a node early for its "
    "taints or a cordon. A node that is not ready or out of service is no evidence: a lost one is noticed when its "
    "agents fall silent, and its pods stay until Kubernetes removes them. Whether a job fits into the cluster is not "
    "checked. Bad nodes are avoided by preference only. Zones, topology labels and spot nodes are unknown."
)


def replicas(ctx: JobContext) -> int:
    """Return the number of replicas, which a HorizontalPodAutoscaler reads from the status.

    If a pod is being deleted and its node does not answer, it is left out, because nothing can confirm its end.
    """
    unended_pods = (pod for pod in ctx.observed.pods if pod.index is not None and not pod.ended)
    return sum(ctx.node(pod).ready or not pod.deleting for pod in unended_pods) - len(ctx.replicas.standby)


def at_work(ctx: JobContext, decision: Decision) -> conditions.AtWork:
    """Return the number of replicas in the round. For torchrun, running and successful pods are counted instead."""
    wanted_count, report = sizes.most(ctx.wanted_spec), ctx.round.report
    if ctx.spec.launcher is Launcher.TORCHRUN:
        pods = [pod for pod in ctx.observed.pods if pod.index is not None]
        runs = sum(pod.phase is PodPhase.RUNNING for pod in pods)
        ended_well = sum(pod.phase is PodPhase.SUCCEEDED for pod in pods)
        return conditions.AtWork(runs + ended_well, wanted_count, stopped=not runs)
    drained = report is not None and report.state == protocol.State.DRAINED
    return conditions.AtWork(len(ctx.world.members), wanted_count, stopped=drained or decision.pods is Pods.NONE)


def quota_status(ctx: JobContext) -> QueueStatus | None:
    """Return the new value of `status.queue`; None if the job has no Kueue queue."""
    lending = ctx.lending
    if not lending.queue:
        return None
    size = lending.size
    return QueueStatus(
        name=lending.queue,
        cluster_queue=lending.cluster_queue,
        workload=lending.lender[0],
        replicas=size.replicas if size else 0,
        reason=lending.reason,
        message=lending.message[:1024],
    )


Row = Callable[[Pass], object]
CONDITIONS: Mapping[str, Row] = {
    "observed_generation": lambda p: p.ctx.observed.job.generation,
    "conditions": lambda p: p.conditions,
    "start_time": lambda p: None if p.decision.phase in (Phase.SUSPENDED, Phase.QUEUED) else p.old.start_time or p.now,
    "completion_time": lambda p: p.old.completion_time or p.now if p.decision.phase.final else None,
    "master_key": lambda p: start.master_key(p.ctx),
}
PODS: Mapping[str, Row] = {
    "selector": lambda p: f"concertina.dev/job-uid={p.ctx.observed.job.uid}",
    "queue": lambda p: quota_status(p.ctx),
    "gang": lambda p: gangs.mark(p.ctx),
    "nodes_not_watched": lambda p: None if p.ctx.observed.nodes_watched else NODES_NOT_WATCHED,
    "standby_replicas": lambda p: StandbyReplicas(
        ready=len(p.ctx.replicas.ready.intersection(p.ctx.replicas.standby)), names=p.ctx.replicas.standby
    ),
}
ROUNDS: Mapping[str, Row] = {
    "world": lambda p: claims.world_after(p.ctx, p.decision),
    "warm_start_disabled_reason": lambda p: progress.coordinator_sentence(p.ctx, "warm_start_disabled_reason"),
    "warm_start_skipped_modules": lambda p: progress.coordinator_sentence(p.ctx, "warm_start_skipped_modules"),
    "world_mismatch": lambda p: progress.coordinator_sentence(p.ctx, "world_mismatch"),
    "tracking": lambda p: progress.coordinator_sentence(p.ctx, "tracking"),
    "settings": lambda p: progress.settings(p.ctx),
    "rounds": lambda p: p.old.rounds + (p.decision.world is not None and p.decision.world.round > p.old.world.round),
}
RECOVERY: Mapping[str, Row] = {
    "restarts": lambda p: p.restarts,
    "last_failure": lambda p: p.decision.last_failure or p.old.last_failure,
    "avoided_nodes": lambda p: bad_nodes.remember(p.ctx, p.restarts.recent),
    "stragglers": lambda p: stalls.straggler_marks(p.ctx),
    "steps_replayed": lambda p: p.old.steps_replayed + p.replayed,
    "rollback": lambda p: restore.last_rollback(p.ctx),
    "damaged_checkpoints": lambda p: restore.damaged_checkpoints(p.ctx),
    "skipped": lambda p: restore.skipped_samples(p.ctx),
}
CHECKPOINTS: Mapping[str, Row] = {
    "last_checkpoint": lambda p: p.last_checkpoint,
    "best_checkpoint": lambda p: progress.best_checkpoint(p.ctx),
    "evaluation_jobs": lambda p: evaluation_jobs.marks(p.ctx, p.last_checkpoint),
    "checkpoint_request": lambda p: checkpoint_requests.request(p.ctx, p.decision, p.last_checkpoint),
}
INTERNAL: Mapping[str, Row] = {
    "attempts": lambda p: p.pods.attempts,
    "container_restarts": lambda p: startup.container_restarts(p.ctx, p.pods.attempts),
    "first_claim": lambda p: claims.next_first_claim(p.ctx, p.decision),
    "requeue_state": lambda p: admission.next_status(p.ctx, p.decision),
    "growth": lambda p: growth.next_status(p.ctx, p.decision),
    "invalidated_checkpoints": lambda p: restore.undone_states(p.ctx),
    "hardware_faults": lambda p: hardware.reported(p.ctx, p.decision),
}
"""Functions that compute the fields of `status.internal`, by name of the field."""
COUNTS: Mapping[str, Row] = {
    "replicas": lambda p: replicas(p.ctx),
}
PROGRESS: Mapping[str, Row] = {
    "progress": lambda p: p.progress,
    "history": lambda p: progress.history(p.ctx, p.progress),
    "last_snapshot": lambda p: progress.last_snapshot(p.ctx),
    "snapshot_interval": lambda p: progress.snapshot_interval(p.ctx),
    "checkpoint_interval": lambda p: progress.interval(p.ctx),
    "batch_assignment": lambda p: progress.shares(p.ctx),
}
"""Status fields that change with every pod and every step, each with the function that computes it.

If nothing else changes, these fields are written only at intervals (`progress.seconds_left`). The same applies to
conditions of which only the messages have changed, because messages contain counts too.
"""
CLOCK: Mapping[str, Row] = {
    "goodput": lambda p: p.account.goodput,
    "incidents": lambda p: p.account.incidents,
    "cost": lambda p: p.account.cost,
}
INTERNAL_CLOCK: Mapping[str, Row] = {
    "round_waits": lambda p: p.account.waits,
    "incident": lambda p: p.account.incident,
    "tokens_before": lambda p: p.account.tokens_before,
}
"""Fields of `status.internal` that change with time alone, each with the function that computes it.

These fields are written along with other changes. If nothing else changes, they are written every COUNT_TIME seconds.
"""
AT_ONCE: Mapping[str, Row] = {**CONDITIONS, **PODS, **ROUNDS, **RECOVERY, **CHECKPOINTS}
FIELDS: Mapping[str, Row] = {**AT_ONCE, **COUNTS, **PROGRESS, **CLOCK}


class StatusAfter(NamedTuple):
    status: JobStatus
    """Status after the pass. If there is nothing to write now, it is the same object as before."""
    held_back: float | None = None
    """Seconds after which a postponed change of the status may be written; None if no change is postponed."""
    only_numbers: bool = False
    """True if the only changed values are values on which no decision depends."""
    only_conditions: bool = False
    """True if the only changed values are conditions, and values on which no decision depends."""


def status_after(ctx: JobContext, decision: Decision, pods: PodPlan) -> StatusAfter:
    current_pass, old = Pass(ctx, decision, pods), ctx.status
    values = {name: row(current_pass) for name, row in AT_ONCE.items()}
    internal = {name: row(current_pass) for name, row in INTERNAL.items()}
    only_reworded = conditions.only_reworded(old.conditions, current_pass.conditions)
    but_conditions = {name: value for name, value in values.items() if name != "conditions"}
    decided = _differ(old, but_conditions) or _differ(old.internal, internal)
    changed = decided or (not only_reworded and _differ(old, {"conditions": current_pass.conditions}))
    counts = {name: row(current_pass) for name, row in COUNTS.items()}
    if not changed and (seconds := progress.seconds_left(ctx)):
        return StatusAfter(old, seconds if _differ(old, {**values, **counts}) else None)
    numbers = counts | {name: row(current_pass) for name, row in PROGRESS.items()}
    if not changed and not _differ(old, {**values, **numbers}):
        count_due = progress.uncounted_seconds_left(ctx, decision.phase)
        if count_due is None or count_due > 0:
            return StatusAfter(old, count_due)
    clock = {name: row(current_pass) for name, row in CLOCK.items()}
    internal |= {name: row(current_pass) for name, row in INTERNAL_CLOCK.items()}
    remembered = old.internal.model_copy(update=internal)
    status = old.model_copy(update={**values, **numbers, **clock, "internal": remembered})
    return StatusAfter(status, only_numbers=not changed, only_conditions=not decided)


def _differ(old: JobStatus | Internal, values: Mapping[str, object]) -> bool:
    for name, value in values.items():
        old_value = getattr(old, name)
        # Most values are the same object. pydantic would compare two equal objects field by field.
        if old_value is not value and old_value != value:
            return True
    return False
