"""Policies for `launcher: Torchrun`: torchrun manages membership, and the operator manages the pods.

A round is one torchrun rendezvous here: a pod that serves the TCPStore, and members that connect to it. The operator
replaces members that are killed or lost within the round, and torchrun adds the replacements. A round ends in the cases
below, and the operator then creates all of its pods anew:

  - The pod with the TCPStore is lost. All members then end.
  - torchrun gives up in one of the members. This closes the rendezvous for all members.
  - A job of fixed size gets another size.
  - One of the round's pods has an outdated pod template.

The operator begins and commits each round in one status write. If another operator does not know the new round, the API
server refuses its status writes (decision "Status writes test whether the claim is committed"). The operator does not
know what torchrun does inside the pods and does not report it (decision "launcher: Torchrun without a Service").
"""

from __future__ import annotations

from dataclasses import replace

from concertina.amounts import amount, are
from concertina.api.pod_names import rendezvous_name
from concertina.api.status import rfc3339
from concertina.api.world import Claim, World
from concertina.plan.actions import Event
from concertina.plan.facts import constants, sizes
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Decision, Failure, Phase, Pods, Reason, RoundTrigger
from concertina.plan.observed import PodPhase, PodView
from concertina.plan.pods import pod_backoff, torchrun_pods
from concertina.plan.pods.pod_backoff import why_waiting
from concertina.plan.recovery import escalation, startup
from concertina.plan.rounds import claims

SIGNALLED = 128
"""Smallest exit code of a process that a signal killed. With a lower exit code, torchrun itself gave up."""


def succeeded(ctx: JobContext) -> Decision | None:
    """Complete the job once torchrun has ended with exit code 0 in every member.

    torchrun ends with this exit code when all workers of all members have exited with 0. In an elastic job, pending
    pods are ignored: they never joined the rendezvous, which is closed now. In a job of fixed size, a pending pod is a
    member that has not ended.
    """
    fixed = ctx.spec.elastic is None
    members = [pod for pod in _members(ctx) if fixed or pod.phase is not PodPhase.PENDING]
    if not members or any(pod.phase is not PodPhase.SUCCEEDED for pod in members):
        return None
    message = f"torchrun has ended with exit code 0 in {amount(len(members), 'replica')}"
    return Decision(Phase.COMPLETE, "Succeeded", message, pods=Pods.ENDED)


def _members(ctx: JobContext) -> list[PodView]:
    """Return the pods that are members of the current torchrun round.

    Pods that are being deleted are included only after a member has succeeded. From then on, the operator does not
    replace pods that are deleted, for example in a node drain.
    """
    current = torchrun_pods.members(ctx)
    indexes = {pod.index for pod in current}
    deleting = [
        pod
        for pod in ctx.observed.pods
        if pod.deleting and pod.round == ctx.world.round and pod.phase is not PodPhase.PENDING
        if pod.index is not None and pod.index < sizes.most(ctx.spec) and pod.index not in indexes
    ]
    return [*current, *deleting] if any(pod.phase is PodPhase.SUCCEEDED for pod in current) else current


def next_round(ctx: JobContext) -> Decision | None:
    """Start a new rendezvous if there is none or the current one can't continue."""
    if not ctx.world.round:
        return _begun(ctx, RoundTrigger(Reason.FIRST_ROUND, "the first rendezvous"))
    # members are from an earlier round with agents: the launcher has changed
    if ctx.round.disbanded or ctx.world.members:
        return _begun(ctx, RoundTrigger(Reason.RESUMED, "the job continues with another rendezvous"))
    if rendezvous_name(ctx.observed.job.name, ctx.world.round) in ctx.observed.taken:
        return _begun(ctx, RoundTrigger("NameTaken", "another pod has the name of the rendezvous"))
    trigger = _over(ctx)
    if not isinstance(trigger, Failure):
        return _after_backoff(ctx, trigger) if trigger else None
    decision = escalation.restarts_exhausted(ctx, trigger) or _after_backoff(ctx, trigger)
    return replace(decision, last_failure=escalation.last_failure(ctx, trigger))


def _after_backoff(ctx: JobContext, trigger: RoundTrigger) -> Decision:
    wait = pod_backoff.next_round(ctx)
    if wait > 0:
        message = f"{trigger.sentence}; the next rendezvous waits because failures follow each other closely"
        return Decision(Phase.RECOVERING, trigger.reason, message, recheck=wait, pods=Pods.KEPT)
    return _begun(ctx, trigger)


def running(ctx: JobContext) -> Decision:
    running_members = [
        pod for pod in torchrun_pods.members(ctx) if pod.phase is PodPhase.RUNNING and pod.name in ctx.replicas.live
    ]
    needed_count, wanted_count = sizes.least(ctx.spec), sizes.most(ctx.spec)
    text = f"{len(running_members)} of {wanted_count} replicas run torchrun"
    if any(pod.phase is PodPhase.SUCCEEDED for pod in torchrun_pods.members(ctx)):
        return Decision(Phase.TRAINING, "Ending", f"{text}, and the others have completed", pods=Pods.WANTED)
    if len(running_members) >= needed_count:
        message = f"{text}; torchrun does not report its members or its progress"
        return Decision(Phase.TRAINING, "TorchrunRuns", message, pods=Pods.WANTED)
    if stuck := startup.waiting(ctx):
        return Decision(
            stuck.phase, stuck.reason, stuck.message,
            stalled=stuck.stalled, stalled_message=stuck.stalled_message, pods=Pods.WANTED,
        )  # fmt: skip
    reasons = [why_waiting(ctx, pod) for pod in ctx.replicas.live.values() if pod.phase is not PodPhase.RUNNING]
    refused = [ctx.observed.refused.message] if ctx.observed.refused else []
    needed = f"{text}, {needed_count} {are(needed_count)} needed"
    message = "; ".join([needed, *refused, *(sorted(set(reasons))[:3])])
    return Decision(Phase.WAITING, "WaitingForReplicas", message, pods=Pods.WANTED, recheck=constants.CREATE_RETRY)


def _over(ctx: JobContext) -> RoundTrigger | None:
    """Return the reason why the current torchrun round can't continue; None if it can."""
    members, store = _members(ctx), torchrun_pods.store(ctx)
    if outdated := [
        pod.name for pod in ctx.observed.pods if pod.round == ctx.world.round and pod.name in ctx.replicas.outdated
    ]:
        message = f"pod {outdated[0]} has an outdated pod template"
        return RoundTrigger(Reason.TEMPLATE_CHANGED, message)
    if store is None and members:
        return Failure("RendezvousLost", "the pod that served torchrun's store is gone")
    if store is not None and store.name in ctx.replicas.dead:
        message = f"the pod that served torchrun's store {ctx.replicas.dead[store.name]}"
        return Failure("RendezvousLost", message, store.name, counted=pod_backoff.ended_by_itself(store))
    if ctx.spec.elastic is None and ctx.world.replicas != sizes.most(ctx.spec):
        return RoundTrigger("Scaled", "spec.replicas has changed, and torchrun runs at a fixed size")
    live = [pod for pod in members if pod.name in ctx.replicas.live]
    if any(pod.phase is PodPhase.SUCCEEDED for pod in members) and live:
        return None  # the live members are about to end as well
    for pod in members:
        if pod.phase is PodPhase.FAILED and pod_backoff.ended_by_itself(pod) and 0 < (pod.exit_code or 0) < SIGNALLED:
            return Failure(
                "TorchrunFailed", f"torchrun gave up: {ctx.replicas.dead[pod.name]}", pod.name, counted=True,
                exit_code=pod.exit_code, last_lines=tuple(pod.exit_message.splitlines()),
            )  # fmt: skip
    if any(pod.phase is PodPhase.SUCCEEDED for pod in members):  # members are not replaced once one has succeeded
        lost = next(pod for pod in members if pod.phase is not PodPhase.SUCCEEDED)
        message = f"the others have completed, but replica {lost.name} {ctx.replicas.dead[lost.name]}"
        return Failure(
            "MemberLost", message, lost.name, counted=pod_backoff.ended_by_itself(lost), exit_code=lost.exit_code,
            last_lines=tuple(lost.exit_message.splitlines()),
        )  # fmt: skip
    return None


def _begun(ctx: JobContext, trigger: RoundTrigger) -> Decision:
    fixed = ctx.spec.elastic is None
    round = 1 + claims.highest_round(ctx)
    while rendezvous_name(ctx.observed.job.name, round) in ctx.observed.taken:
        round += 1
    begun_at = rfc3339(ctx.now)
    claim = Claim(
        round=round, claim_id=ctx.observed.fresh_claim, committed=True, at=begun_at, reason=trigger.reason,
        message=trigger.sentence,
    )  # fmt: skip
    world = World(round=round, claim=claim, replicas=sizes.most(ctx.spec) if fixed else 0, since=begun_at)
    first = not ctx.world.round
    phase = Phase.STARTING if first else Phase.RECOVERING
    restart = escalation.restart_entry(ctx, trigger) if isinstance(trigger, Failure) else None
    event = Event("Warning" if restart else "Normal", trigger.reason, trigger.sentence)
    return Decision(
        phase, trigger.reason, trigger.sentence,
        world=world, restart=restart, events=() if first else (event,), pods=Pods.KEPT,
    )  # fmt: skip
