"""Responses to failures: the actions, their budgets, and that they only get stronger while failures repeat."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

import concertina_protocol as protocol
from builders import jobs
from builders.jobs import T0
from concertina.api.restarts import Restart, Restarts
from concertina.api.status import CheckpointMark, rfc3339
from concertina.plan.actions import Plan
from concertina.plan.facts.context import JobContext
from concertina.plan.observed import JobObservation, NodeView
from concertina.plan.plan import plan
from concertina.plan.recovery import escalation

MARK = CheckpointMark(step=20, round=1, uri="s3://bucket/run", at=rfc3339(T0))
DURABLE: dict[str, Any] = {"checkpoint": {"uri": "s3://bucket/run"}}


def entry(replica: str = "demo-1-0", after: float = 0.0, **fields: Any) -> Restart:
    """Return a failure of the job's own at step 40, `after` seconds after T0."""
    values: dict[str, Any] = {
        "reason": "WorkerFailed",
        "node": f"node-{replica[5]}",
        "step": 40,
        "action": "RestartWorkers",
    }
    return Restart(at=rfc3339(T0 + after), replica=replica, **{**values, **fields})


def look_at(recent: tuple[Restart, ...], spec: Any = None, saved: bool = False, **fields: Any) -> JobContext:
    seen = jobs.running(jobs.spec() if spec is None or spec.bundled else spec)
    spec = spec or jobs.spec()
    update = {"restarts": Restarts(recent=recent), "last_checkpoint": MARK if saved else None, **fields}
    status = seen.job.status.model_copy(update=update)
    return JobContext(replace(seen, job=replace(seen.job, status=status, spec=spec)), spec, T0 + 100)


def action_of(recent: tuple[Restart, ...], failed: Restart, **fields: Any) -> str:
    return escalation.decide(look_at(recent, **fields), failed, "ValueError: no").reason


A, B, C = "demo-0-0", "demo-1-0", "demo-2-0"
REPLACED = {"action": "RecreatePod"}


@pytest.mark.parametrize(
    ("before", "failed", "expected"),
    [
        ((), entry(A), "RestartWorkers"),
        ((), entry(A, counted=False, reason="MemberLost"), "ExcludeReplica"),
        ((), entry(A, counted=False, reason="NotAssigned"), "RestartWorkers"),
        ((entry(B),), entry(A), "RestartWorkers"),
        ((entry(A),), entry(A), "RecreatePod"),
        ((entry(A, step=3),), entry(A), "RecreatePod"),
        ((entry(A, counted=False, reason="MemberLost"),), entry(A), "RestartWorkers"),
        ((), entry(A, reason="Hang"), "RecreatePod"),
        ((entry(A), entry(B), entry(C)), entry("demo-3-0"), "RecreatePod"),
        ((entry(A), entry(B), entry(C)), entry("demo-3-0", step=42), "RestartWorkers"),
        ((entry(A), entry(A, **REPLACED)), entry(B), "RecreatePod"),
        ((entry(A), entry(A, **REPLACED)), entry(B, step=50), "RestartWorkers"),
        (tuple(entry(r, **REPLACED) for r in (A, B, C)), entry("demo-3-0"), "RecreatePod"),
    ],
    ids=[
        "the first",
        "a lost member",
        "an assign that was never sent",
        "of another replica",
        "again",
        "again, long after",
        "it was lost before, through no fault of its own",
        "a verdict on the replica",
        "three rounds in a row did not help",
        "three failures, but progress since",
        "after a replacement no weaker action follows",
        "unless there was progress",
        "without storage, replacing is all there is",
    ],
)
def test_the_action_that_answers(before: tuple[Restart, ...], failed: Restart, expected: str) -> None:
    assert action_of(before, failed) == expected


@pytest.mark.parametrize(
    ("before", "failed", "expected"),
    [
        (tuple(entry(r, **REPLACED) for r in (A, B, C)), entry("demo-3-0"), "RestartFromCheckpoint"),
        (tuple(entry(r, **REPLACED) for r in (A, B)), entry("demo-3-0"), "RecreatePod"),
        ((entry(B, reason="RestoreFailed"),), entry(A, reason="RestoreFailed"), "RestartFromCheckpoint"),
        ((entry(B, reason="RestoreFailed", step=9),), entry(A, reason="RestoreFailed"), "RestartWorkers"),
        ((entry(A, action="RestartFromCheckpoint"),), entry(B), "RestartFromCheckpoint"),
        (
            (entry(A, action="RestartFromCheckpoint"), entry(A, action="RestartFromCheckpoint")),
            entry(B),
            "ReachedMaxRestarts",
        ),
        (
            (entry(A, action="RestartFromCheckpoint"), entry(A, action="RestartFromCheckpoint")),
            entry(B, step=90),
            "RestartWorkers",
        ),
        (
            (entry(A, error="x"), entry(A, error="x", **REPLACED)),
            entry(B, error="x"),
            "RestartFromCheckpoint",
        ),
        (
            (entry(A, error="x"), entry(A, error="x", **REPLACED), entry(B, error="x", action="RestartFromCheckpoint")),
            entry(C, error="x"),
            "RepeatedFailure",
        ),
    ],
    ids=[
        "three replaced pods did not help",
        "two may not be enough",
        "memory can't be restored, twice",
        "there was progress since",
        "again",
        "not without end",
        "after progress a failure is a first one",
        "the same failure in replaced pods: memory may be damaged",
        "the same failure from storage too: a bug",
    ],
)
def test_the_whole_job_restarts_where_memory_is_suspected(
    before: tuple[Restart, ...], failed: Restart, expected: str
) -> None:
    assert action_of(before, failed, spec=jobs.spec(**DURABLE), saved=True) == expected
    assert action_of(before, failed, spec=jobs.spec(**DURABLE)) != "RestartFromCheckpoint", "nothing is saved yet"


def test_a_round_that_storage_gave_no_state_for_is_only_tried_again() -> None:
    ctx = look_at((entry(A, reason="RestoreFailed"),), jobs.spec(**DURABLE), saved=True)
    base = ctx.world.base
    assert base is not None
    world = ctx.world.model_copy(update={"base": base.model_copy(update={"source": "Storage"})})
    ctx = look_at(ctx.recent, ctx.spec, saved=True, world=world)
    failed = entry(A, reason="RestoreFailed")
    assert escalation.decide(ctx, failed, "").reason == "RestartWorkers"


@pytest.mark.parametrize("reason", ["WorkerFailed", "Hang"])
@pytest.mark.parametrize("kind", [jobs.spec, jobs.command_spec], ids=["bundled", "a script that keeps no state"])
def test_the_only_one_that_holds_the_state_is_not_given_up(kind: Any, reason: str) -> None:
    spec = kind(replicas=1, elastic=None, **(DURABLE if kind is jobs.spec else {}))
    seen = jobs.running(kind(replicas=1, elastic=None), 1)
    restarts = Restarts(recent=(entry(A),))

    def answered(**fields: Any) -> str:
        status = seen.job.status.model_copy(update={"restarts": restarts, **fields})
        ctx = JobContext(replace(seen, job=replace(seen.job, status=status, spec=spec)), spec, T0 + 100)
        return escalation.decide(ctx, entry(A, reason=reason, step=60), "").reason

    assert answered() == ("RestartWorkers" if kind is jobs.spec else "RecreatePod")
    assert answered(last_checkpoint=MARK) == "RecreatePod"
    base = seen.job.status.world.base
    assert base is not None
    given = seen.job.status.world.model_copy(update={"base": base.model_copy(update={"source": "Storage", "step": 40})})
    assert answered(world=given) == "RecreatePod", "it has trained nothing since"


# --- laws


@dataclass(frozen=True)
class Blow:
    """One failure of a generated history."""

    replica: int
    attempt: int
    reason: str
    gained: int
    """Steps made since the previous failure."""
    error: str
    seconds: float


REASONS = some.sampled_from(["WorkerFailed", "WorkerSignaled", "RestoreFailed", "Hang", "MemberLost"])
BLOWS = some.lists(
    some.builds(
        Blow,
        some.integers(0, 2),
        some.integers(0, 2),
        REASONS,
        some.sampled_from([0, 0, 0, 1, 5]),
        some.sampled_from(["", "x", "y"]),
        some.floats(0.1, 30),
    ),
    max_size=40,
)
ORDER = [each.name for each in escalation.ACTIONS]


def played(blows: list[Blow], spec: Any) -> list[tuple[Restart, str]]:
    """Return each failure with its action, answered one after the other.

    The last may have the reason for the job's end.
    """
    recent: tuple[Restart, ...] = ()
    now, step, told = 0.0, 10, []
    for blow in blows:
        now, step = now + blow.seconds, step + blow.gained
        failed = entry(
            f"demo-{blow.replica}-{blow.attempt}",
            now,
            reason=blow.reason,
            error=blow.error,
            step=step,
            counted=blow.reason != "MemberLost",
        )
        ctx = look_at(recent, spec, saved=True)
        recovery = escalation.decide(ctx, failed, "")
        if sum(e.counted for e in (*recent, failed)) > spec.failure_policy.max_restarts:
            recovery = escalation.RecoveryDecision(None, "ReachedMaxRestarts", "", failed)
        told.append((failed, recovery.reason))
        if not recovery.action:
            break
        recent = (*recent, recovery.entry)
    return told


@given(BLOWS, some.integers(0, 12), some.booleans())
def test_rounds_are_bounded_by_the_budgets(blows: list[Blow], borne: int, durable: bool) -> None:
    spec = jobs.spec(failurePolicy={"maxRestarts": borne}, **(DURABLE if durable else {}))
    told = played(blows, spec)
    answered = [name for failed, name in told if failed.counted and name in ORDER]
    assert len(answered) <= borne
    assert answered.count("RestartFromCheckpoint") <= escalation.RESTARTS_FROM_CHECKPOINT
    assert all(name in ORDER for _, name in told[:-1])


@given(BLOWS)
def test_no_weaker_action_follows_while_failures_repeat(blows: list[Blow]) -> None:
    stuck = [replace(blow, gained=0) for blow in blows if blow.reason != "MemberLost"]
    told = played(stuck, jobs.spec(failurePolicy={"maxRestarts": 100}, **DURABLE))
    heights = [ORDER.index(name) for _, name in told if name in ORDER]
    assert heights == sorted(heights)


# --- through plan()


def failing(seen: JobObservation, now: float, **fields: Any) -> Plan:
    values: dict[str, Any] = {"replica": "demo-1-0", "reason": "WorkerFailed", "message": "Rank 1 exited with code 1."}
    failure = protocol.Failure(**{**values, **fields})
    coordinator = replace(seen.agents["demo-0-0"], report=jobs.coordinator_report(failures=(failure,)))
    return plan(replace(seen, agents={**seen.agents, "demo-0-0": coordinator}), now)


def test_status_and_events_name_the_action_and_why() -> None:
    made = failing(jobs.running(jobs.spec()), T0 + 11)
    (answered,) = made.status.restarts.recent
    assert (answered.action, answered.step, answered.node) == ("RestartWorkers", 40, "node-1")
    uses = {use.action: (use.in_window, use.budget) for use in made.status.restarts.recovery_actions}
    assert uses == {"RestartWorkers": (1, 9)}, "those that were used"
    events = {event.reason: event.message for event in made.events}
    assert events["RestartWorkers"] == "Replica demo-1-0 failed. A new round starts with the same replicas."
    assert "WorkerFailed" in events


def failed_again(number: int, recent: tuple[Restart, ...], **policy: int) -> Plan:
    """Return the plan after one more failure, which differs from all of `recent`."""
    seen = look_at(recent, jobs.spec(failurePolicy=policy)).observed
    status = seen.job.status.model_copy(update={"restarts": Restarts(recent=recent, total=len(recent))})
    return failing(replace(seen, job=replace(seen.job, status=status)), T0 + 11, message=f"Rank 1 failed: {number}")


def test_the_failure_that_ends_the_job_is_counted_and_said_in_a_sentence() -> None:
    once = failed_again(0, (), maxRestarts=0)
    failed = once.status.condition("Failed")
    assert (failed.reason, once.status.restarts.total) == ("ReachedMaxRestarts", 1)
    assert failed.message == (
        "Replica demo-1-0 failed once, and failurePolicy.maxRestarts is 0. Raise maxRestarts to allow restarts. "
        "The failure: Rank 1 failed: 0"
    )
    before = tuple(entry(replica, number) for number, replica in enumerate((A, B, C)))
    often = failed_again(3, before, maxRestarts=3)
    failed, restarts = often.status.condition("Failed"), often.status.restarts
    assert (failed.reason, restarts.total, restarts.in_window, len(restarts.recent)) == ("ReachedMaxRestarts", 4, 4, 4)
    assert failed.message == (
        "The job failed 4 times within 3600 s, and failurePolicy.maxRestarts is 3. Raise maxRestarts if so many "
        "failures are expected. The last failure: Rank 1 failed: 3"
    )
    spec = jobs.spec(failurePolicy={"maxRestarts": 3})
    later = plan(jobs.then(look_at(before, spec).observed, often), T0 + 30)
    assert later.status.restarts == restarts, "counted once"


def test_whole_restarts_that_do_not_help_end_the_job_with_a_sentence() -> None:
    before = (entry(A, action="RestartFromCheckpoint"), entry(A, action="RestartFromCheckpoint"))
    recovery = escalation.decide(look_at(before, jobs.spec(**DURABLE), saved=True), entry(B), "ValueError: no")
    assert recovery.message == (
        "The job made no progress after a restart from the checkpoint. "
        "A job restarts from its checkpoint at most 2 times within 3600 s. "
        "The last failure: ValueError: no"
    )


def test_a_failure_for_good_is_counted() -> None:
    made = failing(jobs.running(jobs.spec()), T0 + 11, reason="InvalidInput", message="no such data", permanent=True)
    assert made.status.condition("Failed").reason == "InvalidInput"
    (failed,) = made.status.restarts.recent
    assert (made.status.restarts.total, failed.message, failed.counted) == (1, "no such data", False)


def test_a_pod_whose_end_was_counted_does_not_exhaust_the_budget_twice() -> None:
    """The coordinator may report a failure after the operator saw the pod's end, counted it and created a new pod."""
    ended = entry(B, after=10.5, action="ExcludeReplica")
    made = failed_again(0, (ended,), maxRestarts=1)
    assert not made.status.is_true("Failed")
    assert made.status.restarts.total == 1


def test_a_whole_restart_passes_over_what_is_in_memory() -> None:
    spec = jobs.spec(**DURABLE)
    storage = protocol.Storage("Ready", protocol.Durable(jobs.UID, 1, 20, "s3://bucket/run"))
    ctx = look_at(tuple(entry(r, **REPLACED) for r in ("demo-7-0", "demo-8-0", "demo-9-0")), spec, saved=True)
    seen = ctx.observed
    made = failing(seen, T0 + 11)
    assert made.status.world.claim is not None
    assert made.status.world.claim.from_storage
    assert made.status.restarts.recent[-1].action == "RestartFromCheckpoint"
    held = (protocol.HeldSnapshot(protocol.SnapshotId(1, 40, "layout", 1), (0,)),)
    agents = {
        name: jobs.called(
            seen.agents[name],
            message,
            T0 + 11,
            done_at=T0 + 11,
            reply=jobs.prepared(name, message, snapshots=held, storage=storage),
        )
        for name, message in jobs.sends(made, protocol.Prepare).items()
    }
    made = plan(jobs.then(seen, made, agents=agents), T0 + 11.1)
    sources = {(message.restore.source, message.restore.step) for message in jobs.sends(made, protocol.Assign).values()}
    assert sources == {("Storage", 20)}


# --- a bug


def test_the_same_failure_three_times_at_one_step_stops_the_job() -> None:
    error = "Rank # exited with code 1: ValueError: bad sample #"
    before = (entry("demo-0-0", error=error), entry("demo-2-0", error=error))
    message = "Rank 1 exited with code 1: ValueError: bad sample 17"
    made = failing(look_at(before).observed, T0 + 11, message=message, last_lines=("Traceback", "ValueError: bad 17"))
    failed = made.status.condition("Failed")
    assert (failed.status, failed.reason) == ("True", "RepeatedFailure")
    assert "failed 3 times at step 40 with the same error" in failed.message
    assert "ValueError: bad sample 17" in failed.message
    assert "bug in the script" in failed.message
    assert not jobs.sends(made, protocol.Prepare)
    assert len(made.status.restarts.recent) == 3


def test_a_command_that_cannot_be_started_is_no_bug_of_the_script() -> None:
    message = "Workers could not be started: The command 'pyton' can't be started: No such file or directory."
    before = (
        entry("demo-0-0", reason="StartFailed", error=message),
        entry("demo-2-0", reason="StartFailed", error=message),
    )
    made = failing(look_at(before).observed, T0 + 11, reason="StartFailed", message=message)
    failed = made.status.condition("Failed")
    assert failed.status == "True"
    assert "can't be started. Correct the command or the image, then delete the job" in failed.message
    assert "script" not in failed.message


@pytest.mark.parametrize(
    ("rollback", "ends"), [(None, True), (protocol.Rollback(30, ((0, 64),)), False)], ids=["stopped", "rolled back"]
)
def test_a_loss_that_is_none_ends_the_job_under_its_own_name(rollback: protocol.Rollback | None, ends: bool) -> None:
    """The exception is that the next round has other samples."""
    said = {"reason": "LossNotFinite", "error": "Rank # (exit code #): the loss is nan"}
    before = entry(node="", **said).model_copy(update={"replica": ""})
    seen = look_at((before, before)).observed
    message = "Rank 1 (exit code 1): the loss is nan"
    made = failing(seen, T0 + 11, reason="LossNotFinite", message=message, rollback=rollback)
    failed = made.status.condition("Failed")
    assert (failed is not None and (failed.status, failed.reason) == ("True", "LossNotFinite")) == ends


SAME = "Rank # exited with code 1: E"


@pytest.mark.parametrize(
    ("before", "failure", "bug"),
    [
        ((entry(A, error=SAME), entry(C, error=SAME)), {}, True),
        ((entry(A, error=SAME), entry(C, error=SAME, step=41)), {}, True),
        ((entry(A, error=SAME), entry(C, error=SAME, step=30)), {}, False),
        ((entry(A, error=SAME), entry(C, error="another")), {}, False),
        ((entry(A, error=SAME), entry(B, error=SAME, node="node-9"), entry(A, reason="MemberLost")), {}, True),
        ((entry(B, error=SAME), entry(B, error=SAME)), {}, False),
        ((entry(A, error=SAME), entry(C, error=SAME)), {"provoked": True}, False),
        ((entry(A, error=SAME), entry(C, error=SAME)), {"reason": "RestoreFailed"}, False),
        ((entry(A, error=SAME), entry(C, error=SAME)), {"reason": "MemberLost"}, False),
    ],
    ids=[
        "on other replicas",
        "a step apart, as ranks end a step one after the other",
        "at other steps",
        "another error",
        "a lost node in between",
        "on one node only: that is a bad node",
        "of a rank that lost a peer",
        "of the state, not the script",
        "of a lost node",
    ],
)
def test_what_looks_like_a_bug(before: tuple[Restart, ...], failure: dict[str, Any], bug: bool) -> None:
    made = failing(look_at(before).observed, T0 + 11, **{"message": "Rank 1 exited with code 1: E", **failure})
    failed = made.status.condition("Failed")
    assert (failed is not None and failed.reason == "RepeatedFailure") == bug


@pytest.mark.parametrize("watched", [True, False])
def test_one_node_is_to_blame_where_nodes_are_not_watched(watched: bool) -> None:
    """A single known node may be the only one, which makes the failure a bug.

    If no node is known, there may be others.
    """
    before = (entry(B, error=SAME), entry(B, error=SAME))
    seen = replace(look_at(before).observed, nodes_watched=watched)
    alone = {name: node for name, node in seen.nodes.items() if watched and name == entry(B).node}
    made = failing(replace(seen, nodes=alone), T0 + 11, message="Rank 1 exited with code 1: E")
    failed = made.status.condition("Failed")
    assert (failed is not None and failed.reason == "RepeatedFailure") == watched


@pytest.mark.parametrize(
    ("code", "message", "everywhere", "bug"),
    [
        (-9, "Rank 1 was killed by SIGKILL.", True, False),
        (-15, "Rank 1 was killed by SIGTERM.", True, False),
        (-11, "Rank 1 was killed by SIGSEGV.", True, True),
        (-11, "Rank 1 was killed by SIGSEGV.", False, False),
        (-9, "Rank 1 was killed by SIGKILL: the container ran out of memory: raise the limit", True, True),
        (-9, "Rank 1 was killed by SIGKILL: the container ran out of memory: raise the limit", False, False),
    ],
)
def test_signals_are_a_bug_only_where_several_nodes_see_them(
    code: int, message: str, everywhere: bool, bug: bool
) -> None:
    reason = "OutOfMemory" if "memory" in message else "WorkerSignaled"
    seen, failure = jobs.running(jobs.spec()), {"reason": reason, "exit_code": code, "message": message}
    if not everywhere:  # There is no other node to try.
        pods = tuple(replace(pod, node="node-1") for pod in seen.pods)
        seen = replace(seen, pods=pods, nodes={"node-1": NodeView("node-1", ready=True)})
    for replica in (A, C):
        made = failing(seen, T0 + 11, replica=replica, **failure)
        assert jobs.sends(made, protocol.Prepare)
        kept = made.status.restarts
        seen = replace(seen, job=replace(seen.job, status=seen.job.status.model_copy(update={"restarts": kept})))
    failed = failing(seen, T0 + 12, **failure).status.condition("Failed")
    assert (failed is not None and failed.reason == "RepeatedFailure") == bug


def test_on_the_only_node_there_is_a_bug_is_seen_too() -> None:
    one = {"error": SAME, "node": "node-1"}
    ctx = look_at((entry(A, **one), entry(C, **one)))
    pods = tuple(replace(pod, node="node-1") for pod in ctx.observed.pods)
    seen = replace(ctx.observed, pods=pods, nodes={"node-1": NodeView("node-1", ready=True)})
    made = failing(seen, T0 + 11, message="Rank 1 exited with code 1: E")
    assert made.status.condition("Failed").reason == "RepeatedFailure"


@pytest.mark.parametrize(("after", "bug"), [(3.0, True), (500.0, False)])
def test_without_steps_only_a_round_that_fails_soon_is_the_same(after: float, bug: bool) -> None:
    own = jobs.command_spec()
    ctx = look_at((entry(A, error=SAME, step=0), entry(C, error=SAME, step=0)), own, progress=None)
    coordinator = replace(ctx.observed.agents["demo-0-0"], report=jobs.coordinator_report(progress=None))
    seen = replace(ctx.observed, agents={**ctx.observed.agents, "demo-0-0": coordinator})
    failure = protocol.Failure("demo-1-0", "WorkerFailed", "Rank 1 exited with code 1: E")
    coordinator = replace(coordinator, report=jobs.coordinator_report(progress=None, failures=(failure,)))
    made = plan(replace(seen, agents={**seen.agents, "demo-0-0": coordinator}), T0 + 10 + after)
    failed = made.status.condition("Failed")
    assert (failed is not None and failed.reason == "RepeatedFailure") == bug
