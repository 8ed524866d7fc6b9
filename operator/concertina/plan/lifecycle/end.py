"""Policies that end a job: success, permanent failure and the deadline."""

from __future__ import annotations

from concertina.api.status import ConditionType
from concertina.plan.actions import DeleteJob
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Decision, Failure, Phase, Pods
from concertina.plan.lifecycle import evaluation_jobs
from concertina.plan.observed import PodPhase
from concertina.plan.recovery import escalation
from concertina.plan.state import restore
from concertina_protocol import Prepared, State, StorageHealth

ENDED = {ConditionType.COMPLETE: Phase.COMPLETE, ConditionType.FAILED: Phase.FAILED}


def ended(ctx: JobContext) -> Decision | None:
    """Leave a job that is Complete or Failed unchanged, and delete it after `spec.ttlSecondsAfterFinished`.

    The deletion waits for the Jobs that evaluate the job's checkpoints, because Kubernetes deletes them together with
    the job.
    """
    for type, phase in ENDED.items():
        condition = ctx.status.condition(type)
        if condition and condition.status == "True":
            seconds_left = ctx.time_to_live
            evaluated = not evaluation_jobs.may_be_unfinished(ctx)
            due = seconds_left is not None and seconds_left <= 0 and not ctx.observed.job.deleting
            actions = (DeleteJob(),) if due and evaluated else ()
            recheck = seconds_left if seconds_left is not None and seconds_left > 0 else None
            return Decision(
                phase, condition.reason, condition.message, actions=actions, recheck=recheck, pods=Pods.ENDED
            )
    return None


def succeeded(ctx: JobContext) -> Decision | None:
    """Complete the job once all workers have exited with 0 and the last checkpoint is in storage.

    An agent exits with 0 only after both have happened. A single pod with exit code 0 is therefore enough evidence,
    even if the operator does not know yet that the other pods have ended.
    """
    if not ctx.round.committed:
        return None
    members = (ctx.replicas.pods.get(member.replica) for member in ctx.world.members)
    by_pods = any(pod is not None and pod.phase is PodPhase.SUCCEEDED and not pod.deleting for pod in members)
    if by_pods or (ctx.round.report is not None and ctx.round.report.state == State.SUCCEEDED):
        workers = ctx.world.workers
        all_of_them = "the only worker" if workers == 1 else f"all {workers} workers"
        have = "has" if workers == 1 else "have"
        message = f"{all_of_them} of round {ctx.world.round} {have} ended with exit code 0{_without(ctx)}"
        if stopped := _stop_reason(ctx):
            return Decision(Phase.COMPLETE, "StoppedEarly", f"{stopped}; {message}", pods=Pods.ENDED)
        return Decision(Phase.COMPLETE, "Succeeded", message, pods=Pods.ENDED)
    return None


def _without(ctx: JobContext) -> str:
    """Return the part of the message on replicas that were missing when the job completed; empty if none were.

    Without this part, a bug that ends only one rank would stay unnoticed, because the other ranks complete the job.
    """
    missing, failure = ctx.spec.replicas - len(ctx.world.members), ctx.status.last_failure
    if missing <= 0 or failure is None or failure.replica in {member.replica for member in ctx.world.members}:
        return ""
    of = f" of {failure.replica}" if failure.replica else ""
    return (
        f", without {missing} of {ctx.spec.replicas} replicas. The last failure{of} was {failure.reason}: "
        f"{failure.message}"
    )


def _stop_reason(ctx: JobContext) -> str:
    """Return the trainer's sentence on why it ended before its last step; empty if it trained all its steps."""
    reported = ctx.round.report.progress if ctx.round.report else None
    step = reported.step if reported else ctx.status.progress.step if ctx.status.progress else 0
    if ctx.spec.trainer is not None and step >= ctx.spec.trainer.last_step:
        return ""  # the evaluation of the last step may also have been the last one without an improvement
    if reported is not None and reported.evaluated is not None:
        return reported.evaluated.stop_reason
    mark = ctx.status.progress.evaluation if ctx.status.progress else None
    return mark.stop_reason if mark else ""


def complete_in_storage(ctx: JobContext) -> Decision | None:
    """Complete a job whose last step is already in storage, for example a job that was deleted and created again."""
    if not restore.uses_storage(ctx.spec) or ctx.round.committed or ctx.spec.trainer is None:
        return None
    views = [view for name in ctx.replicas.live if (view := ctx.agent(name))]
    storages = [view.report.storage for view in views if view.connected and view.report]
    storages += [
        view.prepare.reply.storage for view in views if view.prepare and isinstance(view.prepare.reply, Prepared)
    ]
    latest = [
        storage.latest for storage in storages if storage and storage.state == StorageHealth.READY and storage.latest
    ]
    done = [durable for durable in latest if durable.complete and durable.step >= ctx.spec.trainer.last_step]
    if not done:
        return None
    message = (
        f"the checkpoint {done[0].uri} is that of the run's last step, {done[0].step}: there is nothing left to train"
    )
    return Decision(Phase.COMPLETE, "AlreadyComplete", message, pods=Pods.ENDED)


def permanent_failure(ctx: JobContext) -> Decision | None:
    """Fail the job after a failure that a new round can't fix."""
    report = ctx.round.report
    reported = next((failure for failure in report.failures if failure.permanent), None) if report else None
    if reported is None:
        return None
    failure = Failure(
        reported.reason,
        reported.message,
        reported.replica,
        exit_code=reported.exit_code,
        last_lines=reported.last_lines,
    )
    return Decision(
        Phase.FAILED,
        failure.reason,
        failure.sentence,
        restart=escalation.restart_entry(ctx, failure),
        last_failure=escalation.last_failure(ctx, failure),
        pods=Pods.ENDED,
    )


def deadline(ctx: JobContext) -> Decision | None:
    limit = ctx.spec.active_deadline_seconds
    if limit is None or ctx.running_for is None or ctx.running_for < limit:
        return None
    message = f"ran for longer than activeDeadlineSeconds ({limit})"
    return Decision(Phase.FAILED, "DeadlineExceeded", message, pods=Pods.ENDED)
