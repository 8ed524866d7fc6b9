"""Growth: ready replicas join the running round together, once no further replica has become ready for some time.

If replicas are lost soon after they joined, the operator waits longer before each further growth. The failures are
recorded in `status.internal.growth`, so that a new operator continues the backoff (decision "Growing that fails is
tried less often").

A round is a period in which a fixed set of replicas trains.
"""

from __future__ import annotations

import concertina_protocol as protocol
from concertina.amounts import first_of
from concertina.api.internal import Growth
from concertina.api.status import rfc3339, unix_seconds
from concertina.plan.facts import sizes
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Decision, Reason, RoundTrigger

SETTLED, SETTLED_SCRIPT = 30.0, 120.0
"""Seconds after which the loss of a replica is no longer attributed to its joining the round.

SETTLED_SCRIPT applies to jobs with a user's script, whose rounds take longer to begin.
"""
SHORTEST, LONGEST = 5.0, 600.0
"""Shortest and longest delay in seconds before replicas may join again, after replicas that joined were lost.

The first delay is SHORTEST, or `stabilizationWindowSeconds` if that is longer. The delay doubles with each consecutive
failure, up to LONGEST.
"""


def joining(ctx: JobContext) -> tuple[str, ...]:
    """Return the replicas that can join the round: they are ready, and neither members nor standby replicas."""
    return tuple(
        sorted(
            ctx.replicas.ready.intersection(ctx.replicas.pod_by_index.values())
            - ctx.round.members.keys()
            - set(ctx.replicas.standby)
        )
    )


def trigger(ctx: JobContext, report: protocol.Report) -> RoundTrigger | None:
    """Return the reason for a larger round, or None if the round keeps its members.

    A larger round needs enough ready replicas for a larger valid size, and the present round must be training. After
    replicas that joined were lost, the round must not grow for some time.
    """
    names = joining(ctx)
    if not names or sizes.fitting(len(ctx.replicas.candidates), ctx.spec) <= len(ctx.round.members):
        return None
    if report.state != protocol.State.DRAINED and not (
        report.state == protocol.State.RUNNING and seconds_left(ctx) <= 0 and trains(ctx, report)
    ):
        return None
    message = f"replica {names[0]} joins" if len(names) == 1 else f"replicas {first_of(names, 5)} join"
    return RoundTrigger(Reason.GROWING, message)


def seconds_left(ctx: JobContext) -> float:
    """Return the seconds until ready replicas may join; 0 if they may join now, or if there are none."""
    names = joining(ctx) if ctx.round.committed else ()
    if not names:
        return 0.0
    since = (ready_at for name in names if (ready_at := ctx.agent(name).ready_at) is not None)
    return max(0.0, _backoff_left(ctx), *(ready_at + _quiet(ctx) - ctx.now for ready_at in since))


def sentence(ctx: JobContext) -> str:
    """Return the reason why a round that is too small does not add ready replicas now; empty if nothing prevents this.

    The sentence does not change while ready replicas must wait.
    """
    growth = ctx.status.internal.growth
    if _backoff_left(ctx) <= 0 or len(ctx.round.members) >= sizes.most(ctx.spec):
        return ""
    often = f" ({growth.failures} times in a row)" if growth.failures > 1 else ""
    return f"growing waits {_delay(ctx, growth.failures):.0f} s: {growth.message}{often}"


def next_status(ctx: JobContext, decision: Decision) -> Growth:
    """Return the new value of `status.internal.growth`: whether replicas were lost soon after they joined."""
    old, world = ctx.status.internal.growth, decision.world
    if world is None or world.claim is None:
        return old
    if world.round > ctx.world.round:
        return _joined(ctx, decision) if world.claim.reason == Reason.GROWING else old
    ended = ctx.round.committed and ctx.world.round == old.round and world.claim.round > old.round
    return _failed(ctx, why) if ended and (why := _lost(ctx, decision)) else old


def _joined(ctx: JobContext, decision: Decision) -> Growth:
    assert decision.world is not None
    members = decision.world.members
    if len(members) <= len(ctx.round.members):
        return _failed(ctx, "the replicas that were ready could not be reached by the members")
    joined = tuple(member.replica for member in members if member.replica not in ctx.round.members)
    return ctx.status.internal.growth.model_copy(update={"round": decision.world.round, "joined": joined[:100]})


def _lost(ctx: JobContext, decision: Decision) -> str:
    """Return a clause, for a message, that says that the loss of replicas that had just joined ended the round.

    The result is empty if the round did not end for this reason.
    """
    growth, since = ctx.status.internal.growth, ctx.world.since
    lasted = ctx.now - (unix_seconds(since) if since else ctx.now)
    if lasted > _settled(ctx):
        return ""
    failed = decision.restart.replica if decision.restart else ""
    lost_names = [name for name in growth.joined if name not in ctx.replicas.live or name == failed]
    if lost_names:
        return f"replica {lost_names[0]}, which joined in round {growth.round}, was lost {lasted:.0f} s later"
    if decision.restart and ctx.round.report and not trains(ctx, ctx.round.report):
        return f"round {growth.round}, which {len(growth.joined)} joined, failed before its first step"
    return ""


def _failed(ctx: JobContext, why: str) -> Growth:
    old = ctx.status.internal.growth
    close = old.at is not None and ctx.now - unix_seconds(old.at) <= _delay(ctx, old.failures) + 2 * _settled(ctx)
    return Growth(failures=old.failures + 1 if close else 1, at=rfc3339(ctx.now), message=why[:1000])


def trains(ctx: JobContext, report: protocol.Report) -> bool:
    """Return whether the workers of the round have begun to train."""
    return not ctx.spec.bundled or (report.progress is not None and report.progress.first_step_at is not None)


def _settled(ctx: JobContext) -> float:
    return SETTLED if ctx.spec.bundled else SETTLED_SCRIPT


def _quiet(ctx: JobContext) -> float:
    return float(ctx.spec.elastic.scale_up.stabilization_window_seconds) if ctx.spec.elastic else 0.0


def _backoff_left(ctx: JobContext) -> float:
    """Return the seconds until replicas may join the round again, after replicas that had joined were lost."""
    growth = ctx.status.internal.growth
    if not growth.failures or growth.at is None:
        return 0.0
    return _delay(ctx, growth.failures) - ctx.elapsed(growth.at)


def _delay(ctx: JobContext, failures: int) -> float:
    shortest = max(SHORTEST, _quiet(ctx))
    return min(max(LONGEST, shortest), shortest * 2.0 ** min(failures, 30)) if failures else 0.0
