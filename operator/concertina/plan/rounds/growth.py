"""Growing: replicas that are ready join the running round together, after a quiet time; where those who joined are soon
lost again, less and less often. What went wrong stands in status.internal.growth, so a new operator waits as long as
the old."""

from __future__ import annotations

import concertina_protocol as protocol
from concertina.api.status import Growth, rfc3339, unix_seconds
from concertina.plan.facts import sizes
from concertina.plan.facts.decision import Decision
from concertina.plan.facts.look import Look
from concertina.plan.rounds import claims
from concertina.plan.rounds.claims import Cause

SETTLED, SETTLED_SCRIPT = 30.0, 120.0
"""Seconds after which the loss of those who joined has nothing to do with their joining: joining has paid off then. A
script's world takes longer to begin."""
SHORTEST, LONGEST = 5.0, 600.0
"""Seconds that are doubled at each failure in a row (growAfterSeconds, where that is more), and what they end at."""
REASON = "Growing"


def joining(look: Look) -> tuple[str, ...]:
    """Who would join: ready, not a member, and not there to stand by."""
    return tuple(sorted(look.ready.intersection(look.seats.values()) - look.members.keys() - set(look.spares)))


def cause(look: Look, report: protocol.Report) -> Cause | None:
    """A larger valid size is there, training has got under way, and nothing speaks for waiting (any more)."""
    names = joining(look)
    if not names or sizes.fitting(len(claims.candidates(look)), look.spec) <= len(look.members):
        return None
    if report.state != "drained" and not (report.state == "running" and left(look) <= 0 and trains(look, report)):
        return None
    who = f"replica {names[0]} joins" if len(names) == 1 else f"replicas {', '.join(names[:5])} join"
    return Cause(REASON, who, planned=True)


def left(look: Look) -> float:
    """Seconds until ready replicas may join; 0 where they may, or there are none."""
    since = [look.agent(name).ready_at for name in joining(look)] if look.committed else []
    if not since:
        return 0.0
    quiet = max(since) + _quiet(look) - look.now
    return max(0.0, quiet, _held(look))


def sentence(look: Look) -> str:
    """Why a world that is too small does not grow though it could; the same as long as it waits, empty otherwise."""
    growth = look.status.internal.growth
    if _held(look) <= 0 or len(look.members) >= sizes.most(look.spec):
        return ""
    often = f" ({growth.failures} times in a row)" if growth.failures > 1 else ""
    return f"growing waits {_delay(look, growth.failures):.0f} s: {growth.message}{often}"


def after(look: Look, decision: Decision) -> Growth:
    """status.internal.growth after this pass."""
    old, world = look.status.internal.growth, decision.world
    if world is None or world.claim is None:
        return old
    if world.round > look.world.round:
        return _joined(look, decision) if world.claim.reason == REASON else old
    ended = look.committed and look.world.round == old.round and world.claim.round > old.round
    return _failed(look, why) if ended and (why := _lost(look, decision)) else old


def _joined(look: Look, decision: Decision) -> Growth:
    assert decision.world is not None
    members = decision.world.members
    if len(members) <= len(look.members):
        return _failed(look, "the replicas that were ready could not be reached by the members")
    joined = tuple(member.replica for member in members if member.replica not in look.members)
    return look.status.internal.growth.model_copy(update={"round": decision.world.round, "joined": joined[:100]})


def _lost(look: Look, decision: Decision) -> str:
    """How the round that some joined in ended because of them, as far as one can tell; empty where it did not."""
    growth, since = look.status.internal.growth, look.world.since
    lasted = look.now - (unix_seconds(since) if since else look.now)
    if lasted > _settled(look):
        return ""
    failed = decision.restart.replica if decision.restart else ""
    gone = [name for name in growth.joined if name not in look.live or name == failed]
    if gone:
        return f"replica {gone[0]}, which joined in round {growth.round}, was lost {lasted:.0f} s later"
    if decision.restart and look.report and not trains(look, look.report):
        return f"round {growth.round}, in which {len(growth.joined)} joined, failed before its first step"
    return ""


def _failed(look: Look, why: str) -> Growth:
    old = look.status.internal.growth
    close = old.at is not None and look.now - unix_seconds(old.at) <= _delay(look, old.failures) + 2 * _settled(look)
    return Growth(failures=old.failures + 1 if close else 1, at=rfc3339(look.now), message=why[:1000])


def trains(look: Look, report: protocol.Report) -> bool:
    """Whether the round has got under way."""
    return not look.spec.bundled or (report.progress is not None and report.progress.first_step_at > 0)


def _settled(look: Look) -> float:
    return SETTLED if look.spec.bundled else SETTLED_SCRIPT


def _quiet(look: Look) -> float:
    return float(look.spec.elastic.grow_after_seconds) if look.spec.elastic else 0.0


def _held(look: Look) -> float:
    """Seconds to wait because of earlier failures."""
    growth = look.status.internal.growth
    if not growth.failures or growth.at is None:
        return 0.0
    return unix_seconds(growth.at) + _delay(look, growth.failures) - look.now


def _delay(look: Look, failures: int) -> float:
    shortest = max(SHORTEST, _quiet(look))
    return min(max(LONGEST, shortest), shortest * 2.0 ** min(failures, 30)) if failures else 0.0
