"""Start of a job: preconditions, the first round, and the master key from which its agents' certificates derive.

A round is a period in which a fixed set of replicas trains.
"""

from __future__ import annotations

from dataclasses import replace

from concertina.amounts import amount, are, first_of
from concertina.api.spec import Launcher
from concertina.plan.facts import constants, sizes
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Decision, Phase, Pods, Reason, RoundTrigger, as_before, stalled
from concertina.plan.observed import ConnectionRefusal, PodPhase
from concertina.plan.pods.pod_backoff import shortage
from concertina.plan.recovery import startup
from concertina.plan.rounds import claims, commits
from concertina.plan.state import restore
from concertina_protocol import StorageHealth


def first_round(ctx: JobContext) -> Decision | None:
    """Begin the first round once all requested replicas are ready, or after a delay once enough replicas are ready.

    This is the last policy in the table, so it returns a decision for every job without a committed round (one whose
    members are chosen). If another program wrote the status, the status can list members without a claim (decision to
    begin a round); this policy decides about such a job too.
    """
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
    if asked := claims.first_claim(ctx):
        return asked
    reason = Reason.FIRST_ROUND if not ctx.status.rounds else Reason.RESUMED
    message = f"{amount(size, 'replica')} {are(size)} ready"
    return claims.claim(ctx, RoundTrigger(reason, message))


def _look_again(ctx: JobContext) -> float:
    """Return the seconds until the next planning pass of a job that waits for its first round.

    If pods run but their agents do not answer, the time is short, because an agent that stays silent counts as dead
    after some time. Otherwise the next pass can only change the job's message. The first such change is due when no
    scheduler has tried to place a pod for some time.
    """
    live = ctx.replicas.live.values()
    if any(pod.phase is PodPhase.RUNNING and not ctx.agent(pod.name).alive for pod in live):
        return constants.CREATE_RETRY
    new = [constants.UNSCHEDULED - ctx.age(pod) for pod in live if pod.awaited_scheduler]
    return min([constants.SLOW_START, *filter(lambda seconds: seconds > 0, new)])


def _first_start_left(ctx: JobContext) -> float:
    patience = ctx.spec.elastic.scale_up.stabilization_window_seconds if ctx.spec.elastic else constants.FIRST_START
    return patience - max(map(ctx.age, ctx.replicas.live.values()), default=0.0)


def _start_trouble(ctx: JobContext) -> Decision | None:
    """Return a decision that names a problem that keeps all replicas from starting, or None.

    After a person has fixed the problem, the job starts without another request.
    """
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


# --- specs for which the operator creates no pods


def uri_in_use(ctx: JobContext) -> Decision | None:
    """Create no pods if another job already uses the checkpoint URI in the spec."""
    holder = ctx.observed.uri_holder
    if holder is None or ctx.spec.suspend:
        return None
    uri = ctx.spec.checkpoint.uri if ctx.spec.checkpoint else ""
    message = (
        f"checkpoint.uri {uri} belongs to the job {holder.name}, which has already started: give this job "
        f"another one, delete that job, or set checkpoint.takeOver: {holder.uid}"
    )
    return stalled("CheckpointURIInUse", message, Pods.NONE)


def no_size(ctx: JobContext) -> Decision | None:
    """Create no pods if `spec.replicas` is smaller than one block of the parallel layout."""
    if sizes.most(ctx.spec) or ctx.spec.suspend:
        return None
    return stalled(
        "NoValidSize", f"{sizes.rounding(ctx.spec)}: set spec.replicas to at least {ctx.spec.replica_step}", Pods.NONE
    )


def gpus_unknown(ctx: JobContext) -> Decision | None:
    """Create no pods if `workersPerReplica: Auto` can't be derived from the template's resource claims.

    A job that already has pods continues, because its number of workers is already fixed.
    """
    why = ctx.observed.job.claims_error
    if not why or ctx.spec.suspend or ctx.observed.pods:
        return None
    return replace(stalled("WorkersUnknown", why, Pods.NONE), recheck=constants.SLOW_START)


# --- the master key

MASTER_KEY_MISMATCH = "MasterKeyMismatch"
MASTER_KEY_REMEDY = (
    "Put that key back into the Secret with the operator's master key, as an entry whose name begins with key-, and "
    "restart the operator (docs/master-key.md), or delete the job and create it again"
)


def master_key(ctx: JobContext) -> str:
    """Return the new value of `status.masterKey`: the id of the key from which the job's agents' certificates derive.

    A job without pods gets the operator's key for new jobs. If the value is missing in the status, the operator sets it
    again once an agent answers, because an answer proves that the agent uses the operator's key.
    """
    if ctx.status.master_key or ctx.spec.launcher is Launcher.TORCHRUN:
        return ctx.status.master_key
    answered = any(view.connected for view in ctx.observed.agents.values())
    return next(iter(ctx.observed.master_keys), "") if answered or not ctx.observed.pods else ""


def master_key_missing(ctx: JobContext) -> Decision | None:
    """Leave a job and its pods unchanged if the operator does not have the job's master key.

    Without the key, the operator can't reach the job's agents. The agents continue to train, and a person can restore
    the key. The operator does not replace dead pods either, because it could not reach the agents of new pods.
    """
    key = ctx.status.master_key
    if not key or key in ctx.observed.master_keys:
        return None
    message = f"the job was started with master key {key}, which this operator does not have: no agent can be reached"
    return replace(
        as_before(ctx.status),
        stalled=MASTER_KEY_MISMATCH,
        stalled_message=f"{message}. {MASTER_KEY_REMEDY}",
        pods=Pods.KEPT,
    )


def annotate_master_key(ctx: JobContext, decision: Decision) -> Decision:
    """Report live replicas whose certificates derive from a different master key."""
    names = [name for name in ctx.replicas.live if ctx.agent(name).refusal is ConnectionRefusal.OTHER_KEY]
    if not names or decision.stalled or decision.pods is not Pods.WANTED:
        return decision
    message = (
        f"{first_of(names, 3)}: the agent's certificate is from another master key, so the operator can't reach "
        "the agent and leaves its pod unchanged"
    )
    goes_on = decision.phase in (Phase.TRAINING, Phase.DRAINING) and ctx.round.coordinator.replica not in names
    return replace(
        decision, stalled=MASTER_KEY_MISMATCH, stalled_message=f"{message}. {MASTER_KEY_REMEDY}", goes_on=goes_on
    )
