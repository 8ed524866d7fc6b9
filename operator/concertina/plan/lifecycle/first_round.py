"""The first round of a run: when there are enough replicas, or why there are not."""

from __future__ import annotations

from concertina.amounts import amount, are
from concertina.plan.facts import constants, sizes
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Decision, Phase, Pods, Reason, stalled
from concertina.plan.observed import PodPhase
from concertina.plan.pods.backoff import shortage
from concertina.plan.recovery import startup
from concertina.plan.rounds import claims, commits
from concertina.plan.rounds.claims import Cause
from concertina.plan.state import restore
from concertina_protocol import StorageHealth


def first_round(ctx: JobContext) -> Decision | None:
    """No round is committed: when all wanted replicas are ready, or enough of them after a while. As the last policy it
    answers for a status as well that names members and no claim of theirs: somebody wrote into it."""
    names = ctx.replicas.candidates
    size, trouble = sizes.fitting(len(names), ctx.spec), _start_trouble(ctx)
    if trouble and not size:
        return trouble
    if size < sizes.most(ctx.spec) and (not size or (wait := _first_start_left(ctx)) > 0):
        return Decision(Phase.WAITING, "WaitingForReplicas", shortage(ctx), recheck=wait if size else _look_again(ctx))
    if restore.uses_storage(ctx.spec):
        storages = [view.report.storage for name in names if (view := ctx.agent(name)).report]
        looks = [storage for storage in storages if storage is not None]
        if not any(storage.state == StorageHealth.READY for storage in looks):
            error = next((storage.message for storage in looks if storage.state == StorageHealth.ERROR), "")
            return commits.storage_unknown(restore.Unknown(error))
    reason = Reason.FIRST_ROUND if not ctx.status.rounds else Reason.RESUMED
    message = f"{amount(size, 'replica')} {are(size)} ready"
    return claims.claim(ctx, Cause(reason, message, planned=True))


def _look_again(ctx: JobContext) -> float:
    """Time alone makes news only of pods that run and are not heard; for others it changes the wording of the sentence,
    soon where no scheduler has looked at a pod."""
    live = ctx.replicas.live.values()
    if any(pod.phase is PodPhase.RUNNING and not ctx.agent(pod.name).alive for pod in live):
        return constants.CREATE_RETRY
    new = [constants.UNSCHEDULED - ctx.age(pod) for pod in live if pod.awaited_scheduler]
    return min([constants.SLOW_START, *filter(lambda left: left > 0, new)])


def _first_start_left(ctx: JobContext) -> float:
    patience = ctx.spec.elastic.grow_after_seconds if ctx.spec.elastic else constants.FIRST_START
    return patience - max(map(ctx.age, ctx.replicas.live.values()), default=0.0)


def _start_trouble(ctx: JobContext) -> Decision | None:
    """What keeps every replica from starting until a person mends it; then the job goes on by itself."""
    if stuck := startup.waiting(ctx):
        return stuck
    broken = [
        view.report.startup_error
        for name in ctx.replicas.live
        if (view := ctx.agent(name)).report and view.report.startup_error
    ]
    if broken:
        return stalled(Reason.AGENT_CANNOT_START, broken[0], Pods.WANTED)
    return None
