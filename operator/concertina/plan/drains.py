"""Planned changes: the round stops after a step, then one with other members starts; no step is lost."""

from __future__ import annotations

from concertina.plan import claims, constants, pods, sizes
from concertina.plan.claims import Cause
from concertina.plan.decision import Decision, Phase
from concertina.plan.look import Look
from concertina.plan.types import Action, Call, Send
from concertina_agent import protocol


def change(look: Look) -> Decision | None:
    """A healthy round whose members should be others: drain it, then claim."""
    report = look.report
    if not look.committed or report is None or not look.agent(look.lead.replica).connected:
        return None
    cause = _cause(look, report)
    if cause is None:
        return None
    if report.state == "drained" or expired(look, constants.DRAIN):
        return claims.claim(look, cause) or Decision(
            Phase.WAITING, cause.reason, f"{cause.message}; {pods.shortage(look)}", recheck=1.0
        )
    return Decision(
        Phase.DRAINING,
        cause.reason,
        f"{cause.message}: the round stops after the same step everywhere",
        actions=drain(look, cause.message, durable=False, grace=constants.DRAIN),
        recheck=constants.RETRY,
    )


def _cause(look: Look, report: protocol.Report) -> Cause | None:
    leaving = [name for name in look.members if (pod := look.pods.get(name)) and pod.deleting]
    if leaving:
        return Cause("ReplicaLeaving", f"{_names(leaving)} is being deleted", leaving[0], planned=True)
    surplus = [name for name in look.members if (pod := look.pods.get(name)) and pod.index not in look.slots]
    if surplus:
        return Cause("Shrinking", f"spec.replicas is {look.spec.replicas} now", surplus[0], planned=True)
    if report.state == "drained":
        return Cause("Drained", "the round has been drained", planned=True)
    if report.state == "running" and _can_grow(look, report):
        joining = sorted(look.ready - look.members.keys())
        return Cause("Growing", f"{_names(joining)} joins", planned=True)
    if report.state == "draining" and (call := look.agent(look.lead.replica).drain) and _ours(look, call):
        return Cause("Draining", "members change", planned=True)
    return None


def _names(names: list[str]) -> str:
    return f"replica {names[0]}" if len(names) == 1 else f"replicas {', '.join(names[:5])}"


def _can_grow(look: Look, report: protocol.Report) -> bool:
    """A larger valid size is there, training has got under way, and nobody became ready for a quiet time."""
    if not look.ready - look.members.keys():
        return False
    joined = len(claims.candidates(look))
    if sizes.fitting(joined, look.spec) <= len(look.members) or quiet_left(look) > 0:
        return False
    return not look.spec.bundled or (report.progress is not None and report.progress.first_step_at > 0)


def quiet_left(look: Look) -> float:
    """Seconds until ready replicas may join; 0 where they may, or there are none."""
    since = [look.agent(name).ready_at for name in look.ready if name not in look.members]
    wait = look.spec.elastic.grow_after_seconds if look.spec.elastic else 0
    return max(0.0, max(since) + wait - look.now) if since else 0.0


def drain(look: Look, reason: str, durable: bool, grace: float) -> tuple[Action, ...]:
    claim, lead = look.claim, look.lead.replica
    if claim is None or lead not in look.pods:
        return ()
    call = look.agent(lead).drain
    if call and _ours(look, call) and (not call.error or look.now - call.done_at < constants.RETRY):
        return ()
    uid = look.observed.job.uid
    message = protocol.Drain(uid, claim.round, claim.claim_id, reason, durable, grace)
    return (Send(lead, look.address(lead), message),)


def expired(look: Look, limit: float) -> bool:
    """Whether the lead was asked to drain this round more than `limit` seconds ago."""
    call = look.agent(look.lead.replica).drain
    return call is not None and _ours(look, call) and look.now - call.sent_at >= limit


def _ours(look: Look, call: Call) -> bool:
    return look.claim is not None and (call.round, call.claim) == (look.claim.round, look.claim.claim_id)
