"""Planned changes: the round stops after a step, then one with other members starts; no step is lost."""

from __future__ import annotations

from concertina.plan import claims, constants, growth, pods
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
    if look.surplus:
        return Cause("Shrinking", f"spec.replicas is {look.spec.replicas} now", look.surplus[0], planned=True)
    if growing := growth.cause(look, report):
        return growing
    if report.state == "drained":
        return Cause("Drained", "the round has been drained", planned=True)
    if report.state == "draining" and (call := look.agent(look.lead.replica).drain) and _ours(look, call):
        return Cause("Draining", "members change", planned=True)
    return None


def _names(names: list[str]) -> str:
    return f"replica {names[0]}" if len(names) == 1 else f"replicas {', '.join(names[:5])}"


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
