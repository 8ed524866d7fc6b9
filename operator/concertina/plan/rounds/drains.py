"""Planned changes: the round stops after a step, then one with other members starts; no step is lost."""

from __future__ import annotations

import concertina_protocol as protocol
from concertina.plan.facts import constants, sizes
from concertina.plan.facts.decision import Decision, Phase
from concertina.plan.facts.look import Look
from concertina.plan.pods import pods
from concertina.plan.rounds import claims, growth
from concertina.plan.rounds.claims import Cause
from concertina.plan.state import restore
from concertina.plan.types import Action, Call, Send


def change(look: Look) -> Decision | None:
    """A healthy round whose members should be others: drain it, then claim."""
    report = look.report
    if not look.committed or report is None or not look.agent(look.lead.replica).connected:
        return None
    cause = _cause(look, report)
    if cause is None:
        return None
    durable = must_be_saved(look)
    grace = limit(look, durable)
    if report.state == "drained" or expired(look, grace):
        return claims.claim(look, cause) or Decision(
            Phase.WAITING, cause.reason, f"{cause.message}; {pods.shortage(look)}", recheck=1.0
        )
    saved = " and is saved" if durable and restore.uses_storage(look.spec) else ""
    return Decision(
        Phase.DRAINING,
        cause.reason,
        f"{cause.message}: the round stops after the same step everywhere{saved}",
        actions=drain(look, cause.message, durable, grace),
        recheck=constants.RETRY,
    )


def _cause(look: Look, report: protocol.Report) -> Cause | None:
    leaving = [name for name in look.members if look.leaves(name)]
    if leaving:
        return Cause("ReplicaLeaving", _sentence(look, leaving), leaving[0], planned=True)
    if look.surplus:
        return Cause("Shrinking", f"spec.replicas is {look.spec.replicas} now", look.surplus[0], planned=True)
    moving = _moving(look)
    if moving and (report.state == "drained" or (report.state == "running" and growth.trains(look, report))):
        message = f"{_sentence(look, moving)}, and what takes its place is ready"
        return Cause("ReplicaMoving", message, moving[0], planned=True)
    if growing := growth.cause(look, report):
        return growing
    if report.state == "drained":
        return Cause("Drained", "the round has been drained", planned=True)
    if report.state == "draining":
        # Also where another operator, or the lead itself, began it: asked again, so that its time runs here too.
        return Cause("Draining", "members change", planned=True)
    return None


def _sentence(look: Look, names: list[str]) -> str:
    """Why the first one goes, and how many more."""
    more = f", and {len(names) - 1} more will go" if len(names) > 1 else ""
    return f"replica {names[0]} {look.notices[names[0]].message}{more}"


def _moving(look: Look) -> list[str]:
    """Members on cordoned nodes with a successor that is ready: once all have one, or nobody gets one any more."""
    cordoned = [name for name in look.members if name in look.notices and name in look.pods]
    ready = [name for name in cordoned if look.seats.get(look.pods[name].index, name) != name]
    return ready if len(ready) == len(cordoned) or growth.left(look) <= 0 else []


def must_be_saved(look: Look) -> bool:
    """Whether those who stay can't go on: then the state has to wait in storage, or for successors to come for it. So
    does that of a round of one, which no neighbour has a copy of, also where a spare stands ready."""
    if not look.spec.bundled or not any(look.leaves(name) for name in look.members):
        return False
    return len(look.members) == 1 or not sizes.fitting(len(claims.candidates(look)), look.spec)


def limit(look: Look, durable: bool) -> float:
    """Seconds for the round to stop: the smallest grace of those who leave, less the time that a save takes."""
    progress = look.report.progress if look.report else None
    save = (progress.save_seconds if progress else 0.0) or constants.SAVE
    steps = 3 * progress.step_seconds if progress else 0.0
    most = max(constants.DRAIN_DURABLE if durable else constants.DRAIN, steps + save)
    left = (look.notices[name].left - save for name in look.members if look.leaves(name))
    return max(1.0, min([most, *left]))


def drain(look: Look, reason: str, durable: bool, grace: float) -> tuple[Action, ...]:
    claim, lead = look.claim, look.lead.replica
    if claim is None or lead not in look.pods:
        return ()
    call = look.agent(lead).drain
    asked = call is not None and _ours(look, call) and (call.durable or not durable)
    if call and asked and (not call.error or look.now - call.done_at < constants.RETRY):
        return ()
    uid = look.observed.job.uid
    message = protocol.Drain(uid, claim.round, claim.claim_id, reason, durable, grace)
    return (Send(lead, look.address(lead), message),)


def expired(look: Look, seconds: float) -> bool:
    """Whether the lead was asked to drain this round more than `seconds` ago."""
    call = look.agent(look.lead.replica).drain
    return call is not None and _ours(look, call) and look.now - call.sent_at >= seconds


def _ours(look: Look, call: Call) -> bool:
    return look.claim is not None and (call.round, call.claim) == (look.claim.round, look.claim.claim_id)
