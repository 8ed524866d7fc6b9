"""Decide whether the committed round can continue, with a table of failures and changes that require a new round.

A round is committed once the operator has chosen its members. A round is a period in which a fixed set of replicas
trains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import concertina_protocol as protocol
from concertina.amounts import amount
from concertina.api.status import unix_seconds
from concertina.plan.actions import Event
from concertina.plan.facts import constants, sizes
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Decision, Failure, Phase, Pods, Reason, RoundTrigger, as_before
from concertina.plan.facts.health import Life
from concertina.plan.pods import pod_backoff
from concertina.plan.recovery import escalation, hardware, repeats, stalls, startup
from concertina.plan.recovery.escalation import RecoveryDecision
from concertina.plan.rounds import claims, growth
from concertina_protocol import BAD_INPUTS, FailureReason

OWN_FAULT = frozenset(
    {
        FailureReason.WORKER_FAILED,
        FailureReason.WORKER_SIGNALED,
        FailureReason.OUT_OF_MEMORY,
        FailureReason.WORKER_STOPPED,
        FailureReason.WORKER_EXITED_EARLY,
        FailureReason.START_FAILED,
        FailureReason.RESTORE_FAILED,
        *BAD_INPUTS,
        FailureReason.LOSS_SPIKE,
        FailureReason.LOSS_NOT_FINITE,
        FailureReason.SILENT_CORRUPTION,
        FailureReason.ROLLED_BACK,
    }
)
"""Reasons of failures that count against `failurePolicy.maxRestarts`.

The loss of a member counts only if it turns out that the member's pod ended by itself.
"""

NOBODYS = frozenset({FailureReason.LOSS_SPIKE, FailureReason.LOSS_NOT_FINITE, FailureReason.ROLLED_BACK})
"""Reasons of failures that all ranks observe in the same way, so that no replica or node is the cause."""


def recover(ctx: JobContext) -> Decision | None:
    """Start a new round if the committed round has failed. If rounds fail repeatedly, start it after a delay."""
    trigger = broken(ctx) if ctx.round.committed else None
    if not isinstance(trigger, Failure):
        return _next_round(ctx, trigger) if trigger else None
    return replace(_recovered(ctx, trigger), last_failure=escalation.last_failure(ctx, trigger))


def _recovered(ctx: JobContext, failure: Failure) -> Decision:
    recovery = escalation.decide(ctx, escalation.restart_entry(ctx, failure), failure.sentence)
    if recovery.action is None:
        return Decision(Phase.FAILED, recovery.reason, recovery.message, restart=recovery.entry, pods=Pods.ENDED)
    return escalation.restarts_exhausted(ctx, failure) or _next_round(ctx, failure, recovery)


def _next_round(ctx: JobContext, trigger: RoundTrigger, recovery: RecoveryDecision | None = None) -> Decision:
    wait = pod_backoff.next_round(ctx)
    if wait > 0:
        message = (
            f"{trigger.sentence}; it has failed at this step before, so the next round waits a little (at most 30 s)"
        )
        return Decision(Phase.RECOVERING, trigger.reason, message, recheck=wait)
    return _claim(ctx, trigger, recovery) or Decision(
        Phase.WAITING, trigger.reason, f"{trigger.sentence}; {pod_backoff.shortage(ctx)}", recheck=1.0, watch_all=True
    )


def _claim(ctx: JobContext, trigger: RoundTrigger, recovery: RecoveryDecision | None) -> Decision | None:
    """Begin the next round, and record the recovery action that was chosen for the failure."""
    if recovery is None:
        return claims.claim(ctx, trigger)
    decision = claims.claim(
        ctx, trigger, recovery.entry, from_storage=recovery.reason == escalation.RESTART_FROM_CHECKPOINT
    )
    return decision and replace(
        decision, events=(*decision.events, Event("Warning", recovery.reason, recovery.message))
    )


def broken(ctx: JobContext) -> RoundTrigger | None:
    """Return the first reason for which the committed round can't continue, or None.

    A round is committed once the operator has chosen its members.
    """
    return next((trigger for check in CHECKS if (trigger := check(ctx))), None)


def _failure_reported(ctx: JobContext) -> Failure | None:
    report = ctx.round.report
    if report is None or report.state == protocol.State.SUCCEEDED:
        return None
    reported = first_failure(report)
    if reported and hardware.failed_because_of_gpu(ctx, reported.replica):
        return Failure(
            Reason.HARDWARE_FAULT,
            f"{hardware.sentence(ctx, reported.replica)}; {reported.message}",
            reported.replica,
            exit_code=reported.exit_code if reported.rank is not None else None,
            last_lines=reported.last_lines,
            step=reported.step,
        )
    if reported:
        return Failure(
            reported.reason,
            reported.message,
            "" if reported.reason in NOBODYS or _by_damage(reported) else reported.replica,
            counted=reported.reason in OWN_FAULT,
            exit_code=reported.exit_code if reported.rank is not None else None,
            last_lines=reported.last_lines,
            error=repeats.signature(reported),
            step=reported.step,
        )
    if report.state == protocol.State.FAILED:
        return Failure(
            "CoordinatorFailed", f"the coordinator {report.replica} says that the round has failed", report.replica
        )
    return None


def _by_damage(failure: protocol.Failure) -> bool:
    """Return whether a damaged checkpoint caused the failure.

    Any replica that reads the checkpoint would fail, so the failure does not count as a failure of this replica.
    """
    return failure.rollback is not None and failure.rollback.damaged is not None


def first_failure(report: protocol.Report) -> protocol.Failure | None:
    """Return the failure in the report that ended the round; None if there is none.

    This is the first failure that is not a consequence of another failure.
    """
    primary = (failure for failure in report.failures if not failure.secondary)
    return next(primary, report.failures[0] if report.failures else None)


def _member_gone(ctx: JobContext) -> Failure | None:
    pods, member_states = ctx.replicas.pods, ctx.round.report.members if ctx.round.report else {}
    for member in ctx.world.members:
        pod, member_state = pods.get(member.replica), member_states.get(member.replica)
        if member_state is not None and member_state.state == protocol.State.DRAINED:
            continue  # the member has finished its part of the round, and may leave before the others
        if pod is None or not member.is_pod(pod.uid):
            return Failure(
                Reason.REPLICA_DELETED, f"replica {member.replica} is gone: its pod was deleted", member.replica
            )
        if pod.ended:
            return Failure(Reason.REPLICA_ENDED, f"replica {pod.name} {ctx.replicas.dead[pod.name]}", pod.name)
        if ctx.node(pod).out_of_service:
            return Failure(
                Reason.NODE_LOST, f"replica {pod.name} {ctx.replicas.dead.get(pod.name, 'lost its node')}", pod.name
            )
    return None


def _coordinator_lost(ctx: JobContext) -> RoundTrigger | None:
    coordinator = ctx.round.coordinator.replica
    if ctx.health.coordinator.dead and ctx.round.report and ctx.round.report.state == protocol.State.DRAINED:
        return RoundTrigger(Reason.DRAINED, f"the coordinator {coordinator} has left after a drain")
    if ctx.health.coordinator.dead:
        return Failure(
            FailureReason.COORDINATOR_LOST,
            f"the coordinator {coordinator} {ctx.health.coordinator.sentence}",
            coordinator,
        )
    report = ctx.agent(coordinator).report
    if not ctx.agent(coordinator).connected or report is None:
        return None
    if not ctx.round.coordinator.is_agent(report.instance):
        return Failure(
            Reason.AGENT_RESTARTED,
            f"the agent of the coordinator {coordinator} was restarted, its workers are gone",
            coordinator,
        )
    if ctx.round.claim and report.round > ctx.round.claim.round:
        return Failure(
            "RoundOvertaken", f"the coordinator {coordinator} has seen round {report.round} already", coordinator
        )
    return None


def _not_acknowledged(ctx: JobContext) -> Failure | None:
    """Return a failure if a member has not accepted its Assign call (which gives it a rank).

    The member has refused the call, did not get it, or has not answered in time. A missing answer is no failure if the
    coordinator (the agent of rank 0) reports that the member has started.
    """
    member_states = ctx.round.report.members if ctx.round.report else {}
    begun = {name for name, member in member_states.items() if member.state is not protocol.State.STARTING}
    coordinator_connected = ctx.agent(ctx.round.coordinator.replica).connected
    for replica, call in ctx.round.unacknowledged:
        if isinstance(call.reply, protocol.Refused):
            return Failure(Reason.ASSIGN_REFUSED, f"replica {replica} refused: {call.reply.reason}", replica)
        if replica in begun or not coordinator_connected:
            continue
        if call.error:
            return Failure(Reason.ASSIGN_FAILED, f"replica {replica} could not receive its rank: {call.error}", replica)
        if call.waited_for(ctx.now) >= constants.ACKNOWLEDGE + constants.crowd(len(ctx.round.members)):
            return Failure(Reason.ASSIGN_FAILED, f"replica {replica} does not acknowledge its rank", replica)
    return None


def _never_assigned(ctx: JobContext) -> Failure | None:
    """Return a failure if the coordinator (the agent of rank 0) never got its Assign call, which starts its workers.

    The previous operator may have stopped after it committed the round and before it sent the call. This operator does
    not know the content of that call, so it begins a new round (decision "A new claim if an Assign may be lost"). If
    only another member lacks its Assign call, the coordinator reports that member as lost.
    """
    report = ctx.round.report
    if report is None or _assign_sent(ctx):
        return None
    if report.state == protocol.State.PREPARED:
        return Failure(
            "NotAssigned", f"the coordinator {report.replica} never received the request to start", report.replica
        )
    return None


def _assign_sent(ctx: JobContext) -> bool:
    call, claim = ctx.agent(ctx.round.coordinator.replica).assign, ctx.round.claim
    return call is not None and claim is not None and call.is_of(claim)


Check = Callable[[JobContext], RoundTrigger | None]
CHECKS: tuple[Check, ...] = (
    _failure_reported,
    _member_gone,
    _coordinator_lost,
    _not_acknowledged,
    _never_assigned,
    stalls.hung,
)


def recheck(ctx: JobContext) -> float:
    """Return the seconds after which to plan the job again even if nothing new is observed.

    A round is committed once the operator has chosen its members. After these seconds, the committed round may count as
    failed, for example because an agent has been silent for too long.
    """
    view, age = ctx.agent(ctx.round.coordinator.replica), ctx.health.coordinator.age
    if not view.alive:
        return constants.RECONNECT / 2 if age is None or age < constants.UNHEARD else constants.UNHEARD / 6
    if ctx.round.unacknowledged:
        return constants.ACKNOWLEDGE
    return constants.STEADY if ctx.round.report else constants.RETRY


def _at_work(ctx: JobContext, report: protocol.Report) -> str:
    """Return a phrase that says how many replicas run or train, such as "3 of 4 replicas train in round 2".

    The phrase says "train" only if steps are known, from the bundled trainer or from a script that reports them.
    Otherwise it says "run".
    """
    size = f"{len(ctx.world.members)} of {ctx.spec.replicas} replicas"
    if ctx.spec.bundled or ctx.status.progress or report.progress:
        return f"{size} train in round {report.round}"
    return f"{size} run in round {report.round}; the script has not reported a step"


def running(ctx: JobContext) -> Decision | None:
    """Return the decision for a committed round that continues, with its progress in the message.

    A round is committed once the operator has chosen its members.
    """
    if not ctx.round.committed:
        return None
    report, total = ctx.round.report, len(ctx.world.members)
    if report is None or report.state == protocol.State.PREPARED:
        # The round was just assigned, or the operator has just started: leave the status unchanged until there is a
        # report.
        return replace(
            as_before(ctx.status), recheck=recheck(ctx), watch_all=ctx.health.coordinator.life is Life.SILENT
        )
    if report.state in (protocol.State.DRAINING, protocol.State.DRAINED):
        return Decision(Phase.DRAINING, "Draining", "all ranks stop after the same step", recheck=1.0)
    progress = report.progress
    if ctx.spec.bundled and (progress is None or progress.first_step_at is None):
        lasted = ctx.now - unix_seconds(ctx.world.since) if ctx.world.since else constants.BRIEF_START
        if 0 <= lasted < constants.BRIEF_START:  # not if the clock was set back: that may take hours
            return replace(as_before(ctx.status), recheck=min(constants.BRIEF_START - lasted, recheck(ctx)))
        phase = Phase.RECOVERING if ctx.status.rounds > 1 else Phase.STARTING
        doing = progress.phase if progress else "starting"
        message = f"round {report.round} with {amount(total, 'replica')} is {doing}"
        return Decision(phase, "RoundStarting", message, recheck=recheck(ctx))
    size = _at_work(ctx, report)
    if total == sizes.most(ctx.spec) != ctx.spec.replicas:
        size += f"; {sizes.rounding(ctx.spec)}"
    if why := growth.sentence(ctx):
        size += f"; {why}"
    size += "".join(f"; replica {name} {notice.message}" for name, notice in list(ctx.replicas.notices.items())[:3])
    if total < sizes.most(ctx.spec):
        absent = [*(delayed.sentence for delayed in pod_backoff.next_pods(ctx).values()), *startup.missing(ctx)]
        size += "".join(f"; {sentence}" for sentence in absent[:3])
    return Decision(
        Phase.TRAINING, "Training", size, recheck=recheck(ctx), watch_all=ctx.health.coordinator.life is Life.SILENT
    )
