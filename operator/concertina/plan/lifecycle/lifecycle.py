"""The job's own life: not runnable, ended, suspended, out of time; and the first round of a run."""

from __future__ import annotations

from concertina.api.status import unix_seconds
from concertina.plan.facts import constants, sizes
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Decision, Phase, Pods, stalled
from concertina.plan.pods.shortage import shortage
from concertina.plan.recovery import budget, causes, startup
from concertina.plan.rounds import claims, commits, drains
from concertina.plan.rounds.claims import Cause
from concertina.plan.state import restore
from concertina.plan.types import DeleteJob
from concertina_protocol import Prepared, State, StorageHealth

ENDED = {"Complete": Phase.COMPLETE, "Failed": Phase.FAILED}


def ended(ctx: JobContext) -> Decision | None:
    """Complete or Failed is for good; after the time to live the job is deleted."""
    for type, phase in ENDED.items():
        condition = ctx.status.condition(type)
        if condition and condition.status == "True":
            left = ctx.time_to_live
            actions = (DeleteJob(),) if left is not None and left <= 0 else ()
            recheck = left if left is not None and left > 0 else None
            return Decision(
                phase, condition.reason, condition.message, actions=actions, recheck=recheck, pods=Pods.ENDED
            )
    return None


def succeeded(ctx: JobContext) -> Decision | None:
    """Every worker of the round has exited 0, and the last checkpoint is in storage. Agents exit 0 by themselves after
    that alone, so one pod that has ended so speaks for all: the others' ends may not be known yet."""
    if not ctx.round.committed:
        return None
    members = (ctx.replicas.pods.get(member.replica) for member in ctx.world.members)
    by_pods = any(pod is not None and pod.phase == "Succeeded" and not pod.deleting for pod in members)
    if by_pods or (ctx.round.report is not None and ctx.round.report.state == State.SUCCEEDED):
        message = f"all {ctx.world.workers} workers of round {ctx.world.round} have ended with exit code 0"
        return Decision(Phase.COMPLETE, "Succeeded", message, pods=Pods.ENDED)
    return None


def complete_in_storage(ctx: JobContext) -> Decision | None:
    """A job, created again perhaps, whose last step is in storage already."""
    if not restore.uses_storage(ctx.spec) or ctx.round.committed or ctx.spec.trainer is None:
        return None
    views = [view for name in ctx.replicas.live if (view := ctx.agent(name))]
    seen = [view.report.storage for view in views if view.connected and view.report]
    seen += [view.prepare.reply.storage for view in views if view.prepare and isinstance(view.prepare.reply, Prepared)]
    latest = [storage.latest for storage in seen if storage and storage.state == StorageHealth.READY and storage.latest]
    done = [durable for durable in latest if durable.complete and durable.step >= ctx.spec.trainer.steps]
    if not done:
        return None
    message = f"the checkpoint {done[0].uri} is that of the run's last step, {done[0].step}: nothing is left to do"
    return Decision(Phase.COMPLETE, "AlreadyComplete", message, pods=Pods.ENDED)


def permanent_failure(ctx: JobContext) -> Decision | None:
    """What a new round can't mend."""
    report = ctx.round.report
    failure = next((failure for failure in report.failures if failure.permanent), None) if report else None
    if failure is None:
        return None
    cause = Cause(
        failure.reason,
        failure.message,
        failure.replica,
        exit_code=failure.exit_code,
        last_lines=failure.last_lines,
    )
    told = budget.last_failure(ctx, cause)
    return Decision(Phase.FAILED, failure.reason, cause.sentence, last_failure=told, pods=Pods.ENDED)


def deadline(ctx: JobContext) -> Decision | None:
    limit = ctx.spec.active_deadline_seconds
    if limit is None or ctx.running_for is None or ctx.running_for < limit:
        return None
    message = f"ran for longer than activeDeadlineSeconds, which is {limit}"
    return Decision(Phase.FAILED, "DeadlineExceeded", message, pods=Pods.ENDED)


def uri_in_use(ctx: JobContext) -> Decision | None:
    holder = ctx.observed.uri_holder
    if not holder or ctx.spec.suspend:
        return None
    uri = ctx.spec.checkpoint.uri if ctx.spec.checkpoint else ""
    whose, do = "an older job of another namespace", "give this job another one"
    if holder.startswith(f"{ctx.observed.job.namespace}/"):
        whose, do = f"the older job {holder}", f"{do}, or delete that job"
    message = f"checkpoint.uri {uri} belongs to {whose}: {do}"
    return stalled("CheckpointURIInUse", message, Pods.NONE)


def no_size(ctx: JobContext) -> Decision | None:
    if sizes.most(ctx.spec) or ctx.spec.suspend:
        return None
    return stalled(
        "NoValidSize", f"{sizes.rounding(ctx.spec)}: set spec.replicas to at least {ctx.spec.replica_step}", Pods.NONE
    )


def suspend(ctx: JobContext) -> Decision | None:
    """Drain with a checkpoint in storage, then delete the pods. A round that is being made is made first, so that it
    can be drained; where there is none, nothing can be lost."""
    if not ctx.spec.suspend:
        return None
    if not ctx.observed.pods or not ctx.world.members:
        return _suspended(ctx)
    if ctx.round.committed:
        report = ctx.round.report
        if report is not None and report.state == State.DRAINED:
            return _suspended(ctx)
        if causes.broken(ctx) is None:
            return _draining(ctx)
    can_go_on = sizes.fitting(len(claims.candidates(ctx)), ctx.spec) > 0
    return None if can_go_on and not _overdue(ctx) else _suspended(ctx)


def _draining(ctx: JobContext) -> Decision:
    durable = restore.uses_storage(ctx.spec)
    limit = constants.DRAIN_DURABLE if durable else constants.DRAIN
    if drains.expired(ctx, limit):
        return _suspended(ctx)
    message = "spec.suspend is set: the round stops after the same step everywhere" + (
        " and is saved" if durable else ""
    )
    storage = ctx.round.report.storage if ctx.round.report else None
    if storage and storage.state == StorageHealth.ERROR:
        message += f"; durable storage fails: {storage.message}"
    return Decision(
        Phase.SUSPENDING,
        "Suspending",
        message,
        actions=drains.drain(ctx, "spec.suspend is set", durable, limit),
        recheck=constants.RETRY,
    )


def _overdue(ctx: JobContext) -> bool:
    at = ctx.round.claim.at if ctx.round.claim else None
    return not ctx.round.committed and bool(at) and ctx.now - unix_seconds(at or "") >= 2 * constants.DRAIN


def _suspended(ctx: JobContext) -> Decision:
    left = len(ctx.observed.pods)
    phase = Phase.SUSPENDING if left else Phase.SUSPENDED
    message = f"{left} pods are being deleted" if left else "spec.suspend is set: no pods, the state is kept"
    reason = "Suspending" if left else "Suspended"
    return Decision(phase, reason, message, world=claims.disbanded(ctx, "Suspended"), pods=Pods.NONE)


def first_round(ctx: JobContext) -> Decision | None:
    """No round is committed: when all wanted replicas are ready, or enough of them after a while. As the last policy it
    answers for a status as well that names members and no claim of theirs: somebody wrote into it."""
    names = claims.candidates(ctx)
    size, trouble = sizes.fitting(len(names), ctx.spec), _start_trouble(ctx)
    if trouble and not size:
        return trouble
    if size < sizes.most(ctx.spec) and (not size or (wait := _first_start_left(ctx)) > 0):
        recheck = wait if size else constants.CREATE_RETRY
        return Decision(Phase.WAITING, "WaitingForReplicas", shortage(ctx), recheck=recheck)
    if restore.uses_storage(ctx.spec):
        storages = [view.report.storage for name in names if (view := ctx.agent(name)).report]
        looks = [storage for storage in storages if storage is not None]
        if not any(storage.state == StorageHealth.READY for storage in looks):
            error = next((storage.message for storage in looks if storage.state == StorageHealth.ERROR), "")
            return commits.storage_unknown(restore.Unknown(error))
    reason = "FirstRound" if not ctx.status.rounds else "Resumed"
    return claims.claim(ctx, Cause(reason, f"{size} replicas are ready", planned=True))


def _first_start_left(ctx: JobContext) -> float:
    patience = ctx.spec.elastic.grow_after_seconds if ctx.spec.elastic else constants.FIRST_START
    oldest = min((pod.created for pod in ctx.replicas.live.values()), default=ctx.now)
    return oldest + patience - ctx.now


def _start_trouble(ctx: JobContext) -> Decision | None:
    """What keeps every replica from starting until a person mends it; then the job goes on by itself."""
    if stuck := startup.waiting(ctx):
        return stuck
    broken = [
        view.report.startup_error
        for name in ctx.replicas.live
        if (view := ctx.agent(name)).report and view.report.startup_error
    ]
    if broken:
        return stalled("AgentCannotStart", broken[0], Pods.WANTED)
    return None
