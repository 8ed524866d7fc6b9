"""Planned changes of members: the round stops after a step, and the next round continues from this step.

A round is a period in which a fixed set of replicas trains. The next round has other members.
"""

from __future__ import annotations

import concertina_protocol as protocol
from concertina.plan.actions import Action, Send
from concertina.plan.facts import constants, sizes
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Decision, Phase, Reason, RoundTrigger
from concertina.plan.observed import Call
from concertina.plan.pods.pod_backoff import shortage
from concertina.plan.rounds import claims, growth


def change(ctx: JobContext) -> Decision | None:
    """Drain a healthy round whose members should change, then begin the next round.

    In a drain, all ranks stop after the same step.
    """
    report = ctx.round.report
    if not ctx.round.committed or report is None or not ctx.agent(ctx.round.coordinator.replica).connected:
        return None
    trigger = _trigger(ctx, report)
    if trigger is None:
        return None
    durable = must_be_saved(ctx)
    grace = limit(ctx, durable)
    if report.state == protocol.State.DRAINED or expired(ctx, grace):
        return claims.claim(ctx, trigger) or Decision(
            Phase.WAITING, trigger.reason, f"{trigger.message}; {shortage(ctx)}", recheck=1.0
        )
    saved = " and is saved" if durable and ctx.saves_durably else ""
    return Decision(
        Phase.DRAINING,
        trigger.reason,
        f"{trigger.message}: all ranks stop after the same step{saved}",
        actions=drain(ctx, trigger.message, durable, grace),
        recheck=constants.RETRY,
    )


def _trigger(ctx: JobContext, report: protocol.Report) -> RoundTrigger | None:
    leaving = [name for name in ctx.round.members if ctx.replicas.leaves(name)]
    if leaving:
        return RoundTrigger(Reason.REPLICA_LEAVING, _sentence(ctx, leaving))
    if ctx.replicas.surplus:
        return RoundTrigger(Reason.SHRINKING, ctx.why_fewer)
    moving = _moving(ctx)
    if moving and (
        report.state == protocol.State.DRAINED
        or (report.state == protocol.State.RUNNING and growth.trains(ctx, report))
    ):
        message = f"{_sentence(ctx, moving)}, and its replacement is ready"
        return RoundTrigger(Reason.REPLICA_MOVING, message)
    if growing := growth.trigger(ctx, report):
        return growing
    if report.state == protocol.State.DRAINED:
        return RoundTrigger(Reason.DRAINED, "the round has been drained")
    if report.state == protocol.State.DRAINING:
        # The drain is sent even if another operator or the coordinator itself has begun it, so that its time limit
        # applies here too (decision "No wait for checkpoint parts of lost members").
        return RoundTrigger("Draining", "members change")
    return None


def _sentence(ctx: JobContext, names: list[str]) -> str:
    """Return a sentence that says why the first of `names` leaves the round, and how many more members leave."""
    suffix = f", and {len(names) - 1} more will go" if len(names) > 1 else ""
    return f"replica {names[0]} {ctx.replicas.notices[names[0]].message}{suffix}"


def _moving(ctx: JobContext) -> list[str]:
    """Return the members on cordoned nodes whose successors on other nodes are ready.

    The result is empty while further successors may become ready soon, so that all members move together.
    """
    cordoned = [name for name in ctx.round.members if name in ctx.replicas.notices and name in ctx.replicas.pods]
    seats, pods = ctx.replicas.pod_by_index, ctx.replicas.pods
    ready = [name for name in cordoned if (index := pods[name].index) is not None and seats.get(index, name) != name]
    return ready if len(ready) == len(cordoned) or growth.seconds_left(ctx) <= 0 else []


def must_be_saved(ctx: JobContext) -> bool:
    """Return whether the round must end with a durable checkpoint.

    There are two cases. In the first case, members leave and the remaining ones are too few for a round, so their
    successors must load the state from storage. In the second case, the only member of the round leaves or moves. No
    other member then has a copy of its state, even if a standby replica is ready.
    """
    leave, alone = any(ctx.replicas.leaves(name) for name in ctx.round.members), len(ctx.round.members) == 1
    if not ctx.keeps_state or not (leave or (alone and _moving(ctx))):
        return False
    return alone or not sizes.fitting(len(ctx.replicas.candidates), ctx.spec)


def limit(ctx: JobContext, durable: bool) -> float:
    """Return the seconds within which the workers must save their state and stop after a drain request.

    If pods of members are about to be terminated, the result is at most their shortest remaining grace period, minus
    the time for a snapshot.

    In a drain, all ranks stop after the same step.

    Args:
        ctx: Context of this planning pass.
        durable: Whether the drain also writes a checkpoint to storage. The limit is then longer, but only if a pod of a
            member is about to be terminated. Otherwise the next round can take the state from memory.
    """
    progress = ctx.round.report.progress if ctx.round.report else None
    save = (progress.save_seconds if progress else None) or constants.SAVE
    steps = 3 * progress.step_seconds if progress else 0.0
    graces = [ctx.replicas.notices[name].left - save for name in ctx.round.members if ctx.replicas.leaves(name)]
    upper_bound = max(constants.DRAIN_DURABLE if durable and graces else constants.DRAIN, steps + save)
    return max(1.0, min([upper_bound, *graces]))


def drain(ctx: JobContext, reason: str, durable: bool, grace: float) -> tuple[Action, ...]:
    claim, coordinator = ctx.round.claim, ctx.round.coordinator.replica
    if claim is None or coordinator not in ctx.replicas.pods:
        return ()
    call = ctx.agent(coordinator).drain
    is_asked = call is not None and call.is_of(claim) and (call.durable or not durable)
    if is_asked and not ctx.is_due(call):
        return ()
    uid = ctx.observed.job.uid
    message = protocol.Drain(uid, claim.round, claim.claim_id, reason, durable, grace)
    return (Send(coordinator, ctx.replicas.address(coordinator), message),)


def expired(ctx: JobContext, seconds: float) -> bool:
    """Return whether this operator asked the coordinator to drain this round at least `seconds` ago.

    The coordinator is the agent of rank 0. In a drain, all ranks stop after the same step.
    """
    call = ctx.agent(ctx.round.coordinator.replica).drain
    return call is not None and _ours(ctx, call) and call.waited_for(ctx.now) >= seconds


def saved_as_asked(ctx: JobContext, seconds: float) -> bool:
    """Return whether the coordinator accepted a Drain call with a durable checkpoint at least `seconds` ago.

    The coordinator is the agent of rank 0. In a drain, all ranks stop after the same step.
    """
    call = ctx.agent(ctx.round.coordinator.replica).drain
    if call is None or not (_ours(ctx, call) and call.durable and isinstance(call.reply, protocol.Accepted)):
        return False
    return call.done_at is not None and ctx.now - call.done_at >= seconds


def _ours(ctx: JobContext, call: Call) -> bool:
    return ctx.round.claim is not None and call.is_of(ctx.round.claim)
