"""Checkpoints on request: the operator reads an annotation, sends a Save call, and writes the outcome to the status.

A request is an annotation because GitOps tools overwrite fields of the spec, but leave annotations unchanged (decision
"checkpoint create sets an annotation").

When the operator first reads a request, it records the job's current step. Any later durable checkpoint fulfils the
request. If the round ends before that, the operator sends the Save call to the coordinator of the next round.

The coordinator is the agent of rank 0. A round is a period in which a fixed set of replicas trains.
"""

from __future__ import annotations

import concertina_protocol as protocol
from concertina.api.status import CheckpointMark, CheckpointRequest, RequestState, rfc3339
from concertina.plan.actions import Action, Send
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Decision, Phase
from concertina.plan.rounds import growth

NO_STORAGE = "the operator manages no durable checkpoints of this job: the job has no spec.checkpoint, or runs a "
NO_STORAGE += "command of its own that saves by itself (its script does not use trainingjob.State)"
ENDED = "the job has ended without another checkpoint"


def request(ctx: JobContext, decision: Decision, newest: CheckpointMark | None) -> CheckpointRequest | None:
    """Return the state of the checkpoint request after this planning pass; None if no checkpoint was ever requested.

    Args:
        newest: The last durable checkpoint that is known in this pass.
    """
    request_id, current = ctx.observed.job.checkpoint_request, ctx.status.checkpoint_request
    if not request_id:
        return current
    if current is None or current.id != request_id:
        current = CheckpointRequest(
            id=request_id, step=_next_step(ctx), state=RequestState.PENDING, at=rfc3339(round(ctx.now, 3))
        )
    if current.state is not RequestState.PENDING:
        return current
    if newest is not None and newest.step >= current.step:
        message = f"step {newest.step} is in {newest.uri}"
        return current.model_copy(update={"state": RequestState.DONE, "message": message})
    refusal = "" if ctx.saves_durably else NO_STORAGE
    if decision.phase.final:
        refusal = ENDED
    return current.model_copy(update={"state": RequestState.REFUSED, "message": refusal}) if refusal else current


def ask(ctx: JobContext, decision: Decision, checkpoint_request: CheckpointRequest | None) -> tuple[Action, ...]:
    """Return a call that asks the coordinator for a checkpoint, if one is requested and the round trains.

    The operator sends this call, Save, once in each round. The coordinator is the agent of rank 0.
    """
    if (
        checkpoint_request is None
        or checkpoint_request.state is not RequestState.PENDING
        or decision.phase is not Phase.TRAINING
    ):
        return ()
    claim, report = ctx.round.claim, ctx.round.report
    if claim is None or report is None or not growth.trains(ctx, report):
        return ()
    coordinator = ctx.round.coordinator.replica
    call = ctx.agent(coordinator).save
    is_same_request = call is not None and call.is_of(claim) and call.request == checkpoint_request.id
    if call is not None and is_same_request and not call.error:
        return ()
    message = protocol.Save(ctx.observed.job.uid, claim.round, claim.claim_id, checkpoint_request.id)
    return (Send(coordinator, ctx.replicas.address(coordinator), message),)


def _next_step(ctx: JobContext) -> int:
    report = ctx.round.report
    if report is not None and report.progress is not None:
        return min(report.progress.step + 1, report.progress.steps or report.progress.step + 1)
    return ctx.status.progress.step if ctx.status.progress else 0
