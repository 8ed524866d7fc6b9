"""One pass: what is observed about a job, to all that should follow from it.

A pass reads like this. The chain of POLICIES is asked in order, and the first that has something to say decides: the
phase of the job with its reason in a sentence, the world (a new claim, a commit), calls to agents, and what should
become of the pods. Then the pods are planned, and the status is put together: conditions, restarts, progress and where
the time went. Nothing is remembered between passes but the status and what agents and the API server say, so a pass of
a restarted operator is a pass like any other.

A recovery takes three passes: the lead's report of a failure leads to a claim and its Prepares; the last answer leads
to the commit and its Assigns; the first step of the new round makes it Training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from concertina.api.status import Internal, JobStatus, Spares, rfc3339
from concertina.plan.facts.decision import Decision, Phase, Pods
from concertina.plan.facts.look import Look
from concertina.plan.lifecycle import gang, lifecycle, master_key, saves, stores, torchrun
from concertina.plan.pods import nodes, refusals
from concertina.plan.pods.pods import PodPlan, plan_pods
from concertina.plan.recovery import budget, containers, hangs, rounds, starts, startup, stragglers
from concertina.plan.rounds import drains, growth
from concertina.plan.rounds.claims import last_claim, proceed
from concertina.plan.state import memory, rollback
from concertina.plan.status import accounting, conditions
from concertina.plan.types import Event, Observed, Plan

Policy = Callable[[Look], Decision | None]
POLICIES: tuple[Policy, ...] = (
    lifecycle.ended,
    lifecycle.succeeded,
    lifecycle.complete_in_storage,
    lifecycle.permanent_failure,
    lifecycle.deadline,
    budget.exhausted,
    lifecycle.uri_in_use,
    lifecycle.no_size,
    memory.too_small,
    master_key.missing,
    lifecycle.suspend,
    startup.refused,
    gang.release,
    proceed,
    rounds.recover,
    drains.change,
    rounds.running,
    lifecycle.first_round,
)

TORCHRUN: tuple[Policy, ...] = (
    lifecycle.ended,
    torchrun.succeeded,
    lifecycle.deadline,
    budget.exhausted,
    lifecycle.no_size,
    lifecycle.suspend,
    startup.refused,
    gang.release,
    torchrun.next_round,
    torchrun.running,
)


def plan(observed: Observed, now: float) -> Plan:
    """`now` in Unix seconds."""
    job = observed.job
    if job.deleting:
        return Plan(job.status)
    if job.spec is None:
        return _unreadable(observed, now)
    look = Look(observed, job.spec, now)
    policies = TORCHRUN if look.spec.launcher == "torchrun" else POLICIES
    decision = next(decision for policy in policies if (decision := policy(look)))
    decision = master_key.told(look, stragglers.told(look, hangs.reported(look, decision)))
    pods = torchrun.plan_pods(look) if decision.pods is Pods.TORCHRUN else plan_pods(look, decision)
    if pods.missing:
        decision = refusals.told(look, decision)
    status = _status(look, decision, pods)
    waits = (decision.recheck, pods.recheck, look.time_left, growth.left(look), gang.left(look))
    rechecks = [wait for wait in waits if wait]
    return Plan(
        status,
        (*pods.actions, *decision.actions, *saves.ask(look, decision, status.checkpoint_request)),
        _watch(look, decision),
        (*decision.events, *pods.events, *_found(look, status), *_transition(look, decision)),
        min(rechecks, default=None),
    )


def _found(look: Look, status: JobStatus) -> tuple[Event, ...]:
    """What is told besides the decision."""
    found = (*memory.tight(look), *_ignored(look), *nodes.told(look.status, status), *containers.events(look))
    return (*found, *rollback.told(look.status, status))


def _ignored(look: Look) -> tuple[Event, ...]:
    """Once for each generation: fields of another version's CRD, of a newer one just its defaults perhaps."""
    job = look.observed.job
    if not job.ignored or job.generation == look.status.observed_generation:
        return ()
    names = ", ".join(job.ignored[:10])
    message = f"{names}: the CRD has these fields, this version of the operator does not and goes on without them"
    return (Event("Warning", "UnknownFields", f"{message}; bring both to the same version"),)


def _unreadable(observed: Observed, now: float) -> Plan:
    """A manifest that got past an older CRD: said, and left alone."""
    job = observed.job
    decision = Decision(Phase.STALLED, "InvalidSpec", job.spec_error)
    status = job.status.model_copy(
        update={
            "conditions": conditions.conditions(decision, job.status, job.generation, now),
            "observed_generation": job.generation,
        }
    )
    events = () if status == job.status else (Event("Warning", "InvalidSpec", job.spec_error),)
    return Plan(status, events=events)


def _status(look: Look, decision: Decision, pods: PodPlan) -> JobStatus:
    old, job, now = look.status, look.observed.job, look.now
    done = decision.phase in (Phase.COMPLETE, Phase.FAILED)
    world = decision.world or old.world
    if done and not old.completion_time:
        world = world.model_copy(update={"claim": last_claim(look, decision.reason)})
    committed = world.round > old.world.round
    stuck = starts.stuck(look) if decision.pods is Pods.WANTED else ()
    restarts = containers.counted(look, budget.counted(look, decision.restart, pods.replaced, stuck))
    newest = accounting.last_checkpoint(look)
    started = old.start_time if decision.phase is not Phase.SUSPENDED else None
    fields = {
        "observed_generation": job.generation,
        "conditions": conditions.conditions(stores.told(look, decision), old, job.generation, now),
        "start_time": started or (None if decision.phase is Phase.SUSPENDED else rfc3339(round(now, 3))),
        "completion_time": (old.completion_time or rfc3339(round(now, 3))) if done else None,
        "replicas": sum(not pod.ended for pod in look.observed.pods if pod.index >= 0) - len(look.spares),
        "selector": f"concertina.dev/job-uid={job.uid}",
        "master_key": master_key.recorded(look),
        "world": world,
        "spares": _spares(look),
        "restarts": restarts,
        "last_failure": decision.last_failure or old.last_failure,
        "avoided_nodes": nodes.remember(look, restarts.recent),
        "stragglers": stragglers.marks(look),
        "rounds": old.rounds + committed,
        "steps_replayed": old.steps_replayed + decision.replayed + accounting.replayed(look),
        "rollback": rollback.seen(look),
        "skipped": rollback.skipped(look),
        "last_checkpoint": newest,
        "checkpoint_request": saves.request(look, decision, newest),
    }
    remembered = {
        "attempts": pods.attempts,
        "container_restarts": containers.seen(look, pods.attempts),
        "gang": gang.after(look, decision),
        "growth": growth.after(look, decision),
        "undone": rollback.voided(look),
    }
    changed = _differ(old, fields) or _differ(old.internal, remembered)
    if not changed and not accounting.due(look):
        return old
    numbers = {
        "progress": accounting.progress(look),
        "last_snapshot": accounting.last_snapshot(look),
        "checkpoint_interval": accounting.interval(look),
        "shares": accounting.shares(look),
    }
    if not changed and not _differ(old, numbers):
        return old
    internal = old.internal.model_copy(update={**remembered, "round_waits": accounting.round_waits(look)})
    goodput = accounting.goodput(look, decision)
    return old.model_copy(update={**fields, **numbers, "goodput": goodput, "internal": internal})


def _spares(look: Look) -> Spares:
    return Spares(ready=len(look.ready.intersection(look.spares)), replicas=look.spares)


def _differ(old: JobStatus | Internal, fields: Mapping[str, object]) -> bool:
    for name, value in fields.items():
        known = getattr(old, name)
        if known is not value and known != value:  # most are the very same object; pydantic compares field by field
            return True
    return False


def _watch(look: Look, decision: Decision) -> dict[str, str]:
    """The lead, also while it leaves, and who is outside of the round, to know when it is ready. While the lead is in
    doubt, all."""
    if decision.pods is not Pods.WANTED:
        return {}
    return {
        name: look.address(name)
        for name, pod in look.pods.items()
        if (name in look.live or name == look.leading)
        and pod.ip
        and pod.phase == "Running"
        and (decision.watch_all or name not in look.members or name == look.lead.replica)
    }


def _transition(look: Look, decision: Decision) -> tuple[Event, ...]:
    """An event where the job enters a phase that someone waits for."""
    ready = look.status.condition("Ready")
    before = ready.reason if ready else ""
    if decision.phase.value == before or decision.phase not in ANNOUNCED:
        return ()
    bad = decision.phase in (Phase.FAILED, Phase.STALLED, Phase.WAITING)
    return (Event("Warning" if bad else "Normal", decision.reason, decision.message),)


ANNOUNCED = frozenset({Phase.COMPLETE, Phase.FAILED, Phase.STALLED, Phase.SUSPENDED, Phase.TRAINING, Phase.SUSPENDING})
