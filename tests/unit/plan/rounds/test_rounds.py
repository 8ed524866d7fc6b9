"""Course of a job from its first pods to its end, pass by pass, and the consequences of failures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import concertina_protocol as protocol
from builders import jobs
from builders.jobs import T0
from concertina.api.restarts import Restart, Restarts
from concertina.api.status import JobStatus, rfc3339
from concertina.plan.actions import CreatePod, DeletePod, Plan
from concertina.plan.observed import Call, ConnectionRefusal, JobObservation
from concertina.plan.plan import plan
from concertina.plan.rounds import claims


def phase_of(made: Plan) -> str:
    ready = made.status.condition("Ready")
    return ready.reason if ready else ""


def test_a_new_job_gets_its_pods_and_secret() -> None:
    made = plan(jobs.observed(jobs.job(jobs.spec()), secret_made=False), T0)
    assert [type(action).__name__ for action in made.actions] == ["CreateSecret"] + ["CreatePod"] * 3
    assert [action.index for action in made.actions if isinstance(action, CreatePod)] == [0, 1, 2]
    assert phase_of(made) == "Waiting"
    assert made.status.world.claim is None


def test_from_ready_agents_to_training_takes_a_claim_a_commit_and_nothing_else() -> None:
    pods = tuple(jobs.pod(index, image="b" if index else "a") for index in range(3))
    agents = {pod.name: jobs.agent(pod.name) for pod in pods}
    seen = jobs.observed(jobs.job(jobs.spec()), pods, agents)

    made = plan(seen, T0 + 1)
    assert made.status.world.claim.round == 1
    assert not made.status.world.claim.committed
    prepares = jobs.sends(made, protocol.Prepare)
    assert sorted(prepares) == ["demo-0-0", "demo-1-0", "demo-2-0"]
    assert not jobs.sends(made, protocol.Assign)

    agents = {
        name: jobs.called(agents[name], message, T0 + 1, done_at=T0 + 1, reply=jobs.prepared(name, message))
        for name, message in prepares.items()
    }
    seen = jobs.then(seen, made, agents=agents, uri_sharing=("another",))
    made = plan(seen, T0 + 1.1)
    world = made.status.world
    assert (world.round, world.coordinator, world.workers, world.claim.committed) == (1, "demo-0-0", 3, True)
    assigns = jobs.sends(made, protocol.Assign)
    assert sorted(assigns) == ["demo-0-0", "demo-1-0", "demo-2-0"]
    assert {message.restore.source for message in assigns.values()} == {"Fresh"}
    assert {message.images for message in assigns.values()} == {("a", "b")}
    assert {message.living for message in assigns.values()} == {("another",)}
    assert [member.first_rank for member in assigns["demo-0-0"].members] == [0, 1, 2]

    seen = jobs.running(jobs.spec())
    made = plan(seen, T0 + 10)
    assert phase_of(made) == "Training"
    assert made.actions == ()
    assert made.watch == {"demo-0-0": "127.0.0.1:29400"}
    assert made.status is seen.job.status


def test_success_completes_the_job() -> None:
    made = plan(jobs.running(jobs.spec(), state="succeeded"), T0 + 11)
    assert phase_of(made) == "Complete"
    assert made.status.completion_time


def test_a_failed_worker_leads_to_a_round_of_the_same_members_at_once() -> None:
    failure = protocol.Failure("demo-1-0", "WorkerFailed", "exit code 1", ("Traceback", "ValueError: no"), at=T0 + 11)
    seen = jobs.running(jobs.spec())
    coordinator = replace(seen.agents["demo-0-0"], report=jobs.coordinator_report(failures=(failure,), state="running"))
    made = plan(replace(seen, agents={**seen.agents, "demo-0-0": coordinator}), T0 + 11)
    assert made.status.world.claim.round == 2
    assert made.status.world.round == 1
    assert sorted(jobs.sends(made, protocol.Prepare)) == ["demo-0-0", "demo-1-0", "demo-2-0"]
    assert made.status.condition("Running").message == "exit code 1"
    assert made.status.last_failure.last_lines == ("Traceback", "ValueError: no")
    assert made.status.restarts.in_window == 1
    assert made.events[0].type == "Warning"


@pytest.mark.parametrize(
    ("spec", "first", "second"),
    [
        (jobs.spec(), "starts from the beginning", "starts from the beginning"),
        (
            jobs.command_spec(),
            "starts the command",
            "starts the command again, which continues from its own checkpoint if it has one",
        ),
    ],
    ids=["the bundled trainer, without a snapshot", "a command of one's own"],
)
def test_what_is_said_of_where_a_round_goes_on_from(spec: Any, first: str, second: str) -> None:
    pods = tuple(jobs.pod(index) for index in range(3))
    seen = jobs.observed(jobs.job(spec), pods, {pod.name: jobs.agent(pod.name) for pod in pods})
    for rounds, words in ((0, first), (1, second)):
        status = JobStatus(rounds=rounds)
        now = replace(seen, job=replace(seen.job, status=status))
        claimed = plan(now, T0 + 10)
        agents = {
            name: jobs.called(seen.agents[name], message, T0 + 10, done_at=T0 + 10, reply=jobs.prepared(name, message))
            for name, message in jobs.sends(claimed, protocol.Prepare).items()
        }
        made = plan(jobs.then(now, claimed, agents=agents), T0 + 10)
        sentence = f"round 1 with 3 replicas (3 workers) {words}"
        assert made.status.condition("Running").message == sentence
        told = [event.message for event in (*claimed.events, *made.events) if event.type == "Normal"]
        assert told == (["3 replicas are ready", sentence] if rounds else []), "of a first round conditions tell"


# --- what ends a round


def with_coordinator(seen: JobObservation, **fields: Any) -> JobObservation:
    coordinator = replace(seen.agents["demo-0-0"], **fields)
    return replace(seen, agents={**seen.agents, "demo-0-0": coordinator})


def prepares(made: Plan) -> list[str]:
    return sorted(jobs.sends(made, protocol.Prepare))


@pytest.mark.parametrize(
    ("coordinator", "others", "after", "asked"),
    [
        (
            {"connected": False, "lost_at": T0 + 20, "closed": True, "refusal": ConnectionRefusal.NOT_LISTENING},
            True,
            0.01,
            ["demo-1-0", "demo-2-0"],
        ),
        ({"connected": False, "lost_at": T0 + 20}, True, 0.1, []),
        ({"connected": False, "lost_at": T0 + 20}, "running", 0.6, []),
        ({"connected": False, "lost_at": T0 + 20}, "failed", 0.1, []),
        ({"connected": False, "lost_at": T0 + 20}, "failed", 0.6, ["demo-1-0", "demo-2-0"]),
        ({"connected": False, "lost_at": T0 + 20}, False, 0.6, []),
        ({"connected": False, "lost_at": T0 + 20}, False, 3600, []),
        ({"connected": False, "wanted_at": T0 + 20, "report": None}, "failed", 3, []),
        ({"connected": False, "wanted_at": T0 + 20, "report": None}, "failed", 4.5, ["demo-1-0", "demo-2-0"]),
        ({"connected": True, "report": jobs.report("demo-0-0", instance="another")}, True, 0, ["demo-0-0"]),
    ],
    ids=[
        "refused",
        "just broken",
        "silent, and members train",
        "silent just now, and a member has failed",
        "silent, and a member has failed",
        "all are silent",
        "all are silent for long",
        "operator is new",
        "operator is new and gets no answer from a coordinator whose members have failed",
        "agent was restarted",
    ],
)
def test_when_a_coordinator_is_lost(
    coordinator: dict[str, Any], others: bool | str, after: float, asked: list[str]
) -> None:
    seen = jobs.running(jobs.spec())
    told = {"round": 1, "claim": "claim-a", "state": others} if isinstance(others, str) else {}
    agents = {
        name: replace(view, connected=bool(others), report=jobs.report(name, **told) if told else view.report)
        for name, view in seen.agents.items()
        if name != "demo-0-0"
    }
    seen = replace(seen, agents={**seen.agents, **agents})
    made = plan(with_coordinator(seen, **coordinator), T0 + 20 + after)
    assert set(asked) <= set(prepares(made))
    assert bool(asked) == bool(prepares(made))
    assert ("demo-0-0" in asked) == ("demo-0-0" in prepares(made))
    if not asked:
        assert made.recheck_after is not None
        assert made.recheck_after < (1 if after < 30 else 10)


def test_a_new_operator_leaves_a_running_round_alone() -> None:
    seen = jobs.running(jobs.spec())
    made = plan(replace(seen, agents={}), T0 + 30)
    assert made.actions == ()
    assert made.status.conditions == seen.job.status.conditions
    assert list(made.watch) == ["demo-0-0"]
    again = plan(replace(seen, agents={"demo-0-0": jobs.agent("demo-0-0", report=jobs.coordinator_report())}), T0 + 31)
    assert again.actions == ()


def test_a_round_that_was_committed_and_never_assigned_is_made_anew() -> None:
    seen = jobs.running(jobs.spec())
    coordinator = jobs.agent("demo-0-0", report=jobs.coordinator_report(state="prepared"))
    made = plan(replace(seen, agents={"demo-0-0": coordinator}), T0 + 30)
    assert made.status.world.claim.round == 2
    assert made.status.world.claim.reason == "NotAssigned"


@pytest.mark.parametrize(
    ("call", "claimed"),
    [
        ({"done_at": T0 + 10, "reply": protocol.Accepted(1, "claim-a")}, False),
        ({"done_at": T0 + 10, "reply": protocol.Refused("restarted", 1, "claim-a")}, True),
        ({"done_at": T0 + 10, "error": "connection reset"}, True),
        ({}, True),
        ({"sent_at": None}, False),
    ],
    ids=["accepted", "refused", "failed", "silent", "waits its turn"],
)
def test_an_assign_that_is_not_acknowledged(call: dict[str, Any], claimed: bool) -> None:
    seen = jobs.running(jobs.spec())
    member = replace(
        seen.agents["demo-1-0"], assign=Call(**{"round": 1, "claim": "claim-a", "sent_at": T0 + 10, **call})
    )
    made = plan(replace(seen, agents={**seen.agents, "demo-1-0": member}), T0 + 14)
    assert (made.status.world.claim.round == 2) == claimed


def test_a_failure_that_follows_from_another_is_not_the_cause() -> None:
    failures = (
        protocol.Failure("demo-2-0", "WorkerFailed", "lost a peer", at=T0 + 11, secondary=True),
        protocol.Failure("demo-1-0", "WorkerSignaled", "killed by SIGKILL", at=T0 + 11),
    )
    made = plan(with_coordinator(jobs.running(jobs.spec()), report=jobs.coordinator_report(failures=failures)), T0 + 11)
    assert made.status.restarts.recent[0].replica == "demo-1-0"
    assert made.status.condition("Running").reason == "WorkerSignaled"


def test_bad_input_fails_the_job_at_once() -> None:
    bad = protocol.Failure(
        "demo-1-0", "InvalidInput", "shard 3 has a wrong checksum: build the data again", permanent=True
    )
    made = plan(with_coordinator(jobs.running(jobs.spec()), report=jobs.coordinator_report(failures=(bad,))), T0 + 11)
    failed = made.status.condition("Failed")
    assert (failed.status, failed.reason) == ("True", "InvalidInput")
    assert "wrong checksum" in failed.message
    assert not jobs.sends(made, protocol.Prepare)


def test_what_is_left_of_the_budget_is_said_before_any_failure_and_when_the_spec_changes() -> None:
    seen = jobs.running(jobs.spec(failurePolicy={"maxRestarts": 7}))
    assert seen.job.status.restarts.budget == 7
    more = replace(seen, job=replace(seen.job, spec=jobs.spec(failurePolicy={"maxRestarts": 9})))
    assert plan(more, jobs.T0 + 20).status.restarts.budget == 9


@pytest.mark.parametrize(("before", "budget", "phase"), [(0, 3, "Recovering"), (2, 3, "Recovering"), (3, 3, "Failed")])
def test_failures_use_up_the_budget(before: int, budget: int, phase: str) -> None:
    spec = jobs.spec(failurePolicy={"maxRestarts": budget, "windowSeconds": 600})
    seen = jobs.running(spec)
    entries = tuple(
        Restart(at=rfc3339(T0 - 100 + i), replica="demo-9-0", reason="WorkerFailed", step=i) for i in range(before)
    )
    old = Restart(at=rfc3339(T0 - 700), replica="demo-9-0", reason="WorkerFailed")
    status = seen.job.status.model_copy(update={"restarts": Restarts(recent=(old, *entries), total=9)})
    failure = protocol.Failure("demo-1-0", "WorkerFailed", "exit code 1: ValueError", ("Traceback", "ValueError"))
    seen = with_coordinator(
        replace(seen, job=replace(seen.job, status=status)), report=jobs.coordinator_report(failures=(failure,))
    )
    made = plan(seen, T0 + 11)
    assert phase_of(made) == phase
    if phase == "Failed":
        assert "4 times within 600 s" in made.status.condition("Failed").message
        assert "ValueError" in made.status.condition("Failed").message
    else:
        assert (made.status.restarts.in_window, made.status.restarts.budget) == (before + 1, budget - before - 1)
        assert made.status.restarts.total == 10


def test_a_lost_member_costs_nothing_of_the_budget() -> None:
    lost = protocol.Failure("demo-1-0", "MemberLost", "demo-1-0 closed its connection.")
    made = plan(with_coordinator(jobs.running(jobs.spec()), report=jobs.coordinator_report(failures=(lost,))), T0 + 11)
    assert (made.status.restarts.in_window, made.status.restarts.total) == (0, 1)


def test_failing_again_and_again_at_the_same_step_slows_down() -> None:
    seen = jobs.running(jobs.spec())
    entries = tuple(Restart(at=rfc3339(T0 + 9), replica="demo-9-0", reason="WorkerFailed", step=40) for _ in range(4))
    status = seen.job.status.model_copy(update={"restarts": Restarts(recent=entries, total=4)})
    failure = protocol.Failure("demo-1-0", "WorkerFailed", "exit code 1")
    seen = with_coordinator(
        replace(seen, job=replace(seen.job, status=status)), report=jobs.coordinator_report(failures=(failure,))
    )
    made = plan(seen, T0 + 11)
    assert not jobs.sends(made, protocol.Prepare)
    assert made.recheck_after == pytest.approx(2)
    assert jobs.sends(plan(seen, T0 + 13), protocol.Prepare)
    spread = tuple(entry.model_copy(update={"at": rfc3339(T0 + 9 - 200 * i)}) for i, entry in enumerate(entries))
    status = status.model_copy(update={"restarts": Restarts(recent=spread[::-1], total=4)})
    assert jobs.sends(plan(replace(seen, job=replace(seen.job, status=status)), T0 + 11), protocol.Prepare)


def test_a_coordinator_that_leaves_after_a_drain_is_no_failure() -> None:
    seen = with_coordinator(
        jobs.running(jobs.spec()),
        report=jobs.coordinator_report(state="drained"),
        connected=False,
        closed=True,
        refusal=ConnectionRefusal.NOT_LISTENING,
    )
    made = plan(seen, T0 + 20)
    assert prepares(made) == ["demo-1-0", "demo-2-0"]
    assert made.status.restarts.total == 0
    assert made.events[0].type == "Normal"


# --- a claim


def claimed(two: dict[str, Any] | None = None) -> JobObservation:
    """Return a failed round of three members with the Prepares of round 2.

    The first two have answered. `two` stands for the call to the third (None: it has answered too).
    """
    failure = protocol.Failure("demo-1-0", "WorkerFailed", "exit code 1", at=T0 + 11)
    seen = with_coordinator(jobs.running(jobs.spec()), report=jobs.coordinator_report(failures=(failure,)))
    made = plan(seen, T0 + 11)
    agents = dict(seen.agents)
    for name, message in jobs.sends(made, protocol.Prepare).items():
        done = {"done_at": T0 + 11.1, "reply": jobs.prepared(name, message)}
        done = two if name == "demo-2-0" and two is not None else done
        agents[name] = jobs.called(agents[name], message, T0 + 11, **done)
    return jobs.then(seen, made, agents=agents)


@pytest.mark.parametrize(
    ("two", "after", "members"),
    [
        (None, 0.11, 3),
        ({}, 0.11, 0),
        ({}, 0.59, 0),
        ({}, 0.61, 2),
        ({"done_at": T0 + 11.1, "error": "connection refused"}, 0.11, 2),
        ({"done_at": T0 + 11.1, "reply": protocol.Refused("not my job", 1, "claim-a")}, 0.11, 2),
    ],
    ids=["all answer", "one is silent", "still within patience", "silent for too long", "one refuses", "another job"],
)
def test_a_claim_is_committed_with_those_who_answer(two: dict[str, Any] | None, after: float, members: int) -> None:
    made = plan(claimed(two=two), T0 + 11 + after)
    assert len(jobs.sends(made, protocol.Assign)) == members
    assert made.status.world.round == (2 if members else 1)
    assert made.recheck_after is not None


@pytest.mark.parametrize(("begun", "after", "members"), [(None, 10, 0), (0.5, 0.9, 0), (0.5, 1.1, 2)])
def test_a_candidate_is_waited_for_from_when_its_call_had_its_turn(
    begun: float | None, after: float, members: int
) -> None:
    seen = claimed(two={})
    view = seen.agents["demo-2-0"]
    assert view.prepare is not None
    prepare = replace(view.prepare, sent_at=None if begun is None else T0 + 11 + begun)
    seen = replace(seen, agents={**seen.agents, "demo-2-0": replace(view, prepare=prepare)})
    assert len(jobs.sends(plan(seen, T0 + 11 + after), protocol.Assign)) == members


def test_a_member_that_is_dead_for_its_silence_is_listened_to_until_its_pod_goes() -> None:
    """Otherwise nothing would speak against it once its stream is closed, and its successor would be surplus."""
    seen = claimed(two={"done_at": T0 + 11.1, "error": "connection refused"})
    view = replace(seen.agents["demo-2-0"], wanted_at=T0 + 11, refusal=ConnectionRefusal.NOT_LISTENING)
    silent = replace(view, connected=False, lost_at=None, report=None)
    seen = replace(
        seen, agents={**seen.agents, "demo-0-0": replace(seen.agents["demo-0-0"], prepare=None), "demo-2-0": silent}
    )
    made = plan(seen, T0 + 16)
    assert any(isinstance(action, DeletePod) and action.name == "demo-2-0" for action in made.actions)
    assert "demo-2-0" in made.watch
    going = replace(seen, pods=tuple(replace(pod, deleting=pod.name == "demo-2-0") for pod in seen.pods))
    assert "demo-2-0" not in plan(going, T0 + 16).watch


def test_a_higher_round_seen_by_an_agent_is_claimed_beyond() -> None:
    overtaken = {"done_at": T0 + 11.1, "reply": protocol.Refused("older", 5, "claim-z")}
    made = plan(claimed(two=overtaken), T0 + 11.2)
    assert made.status.world.claim.round == 6
    assert not made.status.world.claim.committed


def test_a_round_beyond_all_numbers_is_not_believed() -> None:
    """Reports of the following round could not be distinguished, because the numbers of rounds are bounded."""
    for seen in (5, 2**53):
        overtaken = {"done_at": T0 + 11.1, "reply": protocol.Refused("older", seen, "claim-z")}
        made = plan(claimed(two=overtaken), T0 + 11.2)
        assert made.status.world.claim.round == min(seen, 2 + claims.LEAP) + 1


def test_an_agent_that_was_restarted_since_it_answered_is_asked_again() -> None:
    """What the previous agent was about to find out, about storage for example, is never reported."""
    seen = claimed(two={})
    name, view = "demo-0-0", seen.agents["demo-0-0"]
    assert view.report is not None
    for instance, round, asked in (("reborn", 2, True), ("reborn", 1, False), ("i-demo-0-0", 2, False)):
        report = replace(view.report, instance=instance, round=round)
        now = replace(seen, agents={**seen.agents, name: replace(view, report=report)})
        made = plan(now, T0 + 11.2)
        assert (name in jobs.sends(made, protocol.Prepare)) == asked
        assert made.status.world.claim.round == (3 if asked else 2)


def test_a_new_operator_carries_on_with_the_claim_it_finds() -> None:
    seen = replace(claimed(), agents={})
    made = plan(seen, T0 + 12)
    assert {message.claim for message in jobs.sends(made, protocol.Prepare).values()} == {"claim-b"}
    assert made.status.world.claim == seen.job.status.world.claim


def test_too_few_survivors_wait_for_replacements() -> None:
    seen = jobs.running(jobs.spec(elastic=None))
    gone = replace(seen, pods=seen.pods[:1] + seen.pods[2:])
    made = plan(gone, T0 + 11)
    assert made.status.world.claim.round == 1
    assert phase_of(made) == "Waiting"
    assert [action for action in made.actions if isinstance(action, CreatePod)] == [CreatePod(1, 1)]
    fresh = {**gone.agents, "demo-1-1": jobs.agent("demo-1-1")}
    pods = (gone.pods[0], jobs.pod(1, 1, ip="127.0.0.9"), gone.pods[1])
    made = plan(jobs.then(gone, made, pods=pods, agents=fresh), T0 + 12)
    assert prepares(made) == ["demo-0-0", "demo-1-1", "demo-2-0"]


def anew(seen: JobObservation, *names: str, ready: bool) -> JobObservation:
    """Return the observation after the containers of these replicas were restarted."""
    reports = {name: jobs.report(name, instance="another", ready=ready) for name in names}
    agents = {name: replace(seen.agents[name], connected=True, report=report) for name, report in reports.items()}
    return replace(seen, agents={**seen.agents, **agents})


def test_a_member_that_came_back_is_asked_once_it_can_start_workers() -> None:
    lost = jobs.coordinator_report(failures=(protocol.Failure("demo-1-0", "MemberLost", "it closed its connection"),))
    seen = with_coordinator(jobs.running(jobs.spec()), report=lost)
    assert prepares(plan(anew(seen, "demo-1-0", ready=False), T0 + 11)) == ["demo-0-0", "demo-2-0"]
    assert prepares(plan(anew(seen, "demo-1-0", ready=True), T0 + 11)) == ["demo-0-0", "demo-1-0", "demo-2-0"]


def test_where_all_members_came_back_none_goes_on_without_the_others() -> None:
    names = ["demo-0-0", "demo-1-0", "demo-2-0"]
    assert prepares(plan(anew(jobs.running(jobs.spec()), *names, ready=False), T0 + 11)) == names


def silent(stream: dict[str, Any] | None, lost: bool = True, spec: Any = None) -> JobObservation:
    """Return a job whose coordinator has had no line from demo-1-0 for a while.

    Args:
        stream: State of this operator's own stream to the member; None if it has none.
        lost: Whether the coordinator has given the member up.
        spec: Spec of the job.
    """
    failure = protocol.Failure("demo-1-0", "MemberLost", "demo-1-0 has not answered for 3 s.", at=T0 + 20)
    state = protocol.State.FAILED if lost else protocol.State.RUNNING
    member = protocol.MemberState(
        "demo-1-0", "i-demo-1-0", 1, "claim-a", state, failure=failure if lost else None, silent=True
    )
    report = jobs.coordinator_report(members={"demo-1-0": member}, failures=(failure,) if lost else ())
    seen = with_coordinator(jobs.running(spec or jobs.spec()), report=report)
    unwatched = {"connected": False, "wanted_at": None, "report": None, "ready_at": None}
    views = {name: replace(view, **unwatched) for name, view in seen.agents.items() if name != "demo-0-0"}
    views["demo-1-0"] = replace(views["demo-1-0"], **(stream or {}))
    return replace(seen, agents={**seen.agents, **views})


ALL, OTHERS = ["demo-0-0", "demo-1-0", "demo-2-0"], ["demo-0-0", "demo-2-0"]
UNANSWERED = {"wanted_at": T0 + 18.5}
"""Stream of the operator that nobody has answered since the coordinator reported the member as silent."""


def test_the_operator_tries_to_reach_a_member_that_is_silent_itself() -> None:
    made = plan(silent(None, lost=False), T0 + 18.5)
    assert made.watch.keys() == {"demo-0-0", "demo-1-0"}
    assert made.actions == ()


@pytest.mark.parametrize(
    ("stream", "spec", "asked"),
    [
        (UNANSWERED, {}, OTHERS),
        ({**UNANSWERED, "connected": True}, {}, ALL),
        ({"wanted_at": T0 + 19.5}, {}, ALL),
        ({**UNANSWERED, "queued_at": T0 + 19.0}, {}, ALL),
        ({**UNANSWERED, "refusal": ConnectionRefusal.OTHER_KEY}, {}, OTHERS),
        (None, {}, ALL),
        (UNANSWERED, {"elastic": None}, ALL),
    ],
    ids=[
        "unanswered here too",
        "answered here",
        "not tried for long",
        "the attempt waits its turn",
        "refuses this operator, which can't ask it",
        "not tried",
        "the others are too few",
    ],
)
def test_the_next_round_begins_without_a_member_that_answers_nobody(
    stream: dict[str, Any] | None, spec: dict[str, Any], asked: list[str]
) -> None:
    assert prepares(plan(silent(stream, spec=jobs.spec(**spec)), T0 + 20)) == asked


def test_a_member_that_was_left_out_stays_so_until_it_answers() -> None:
    """The coordinator no longer reports its members once it has prepared for the next round."""
    seen = silent(UNANSWERED)
    made = plan(seen, T0 + 20)
    agents = dict(seen.agents)
    for name, message in jobs.sends(made, protocol.Prepare).items():
        assert [candidate.replica for candidate in message.candidates] == OTHERS
        agents[name] = jobs.called(agents[name], message, T0 + 20)
    prepared = jobs.report("demo-0-0", round=2, claim="claim-b", state="prepared")
    agents["demo-0-0"] = replace(agents["demo-0-0"], report=prepared)
    seen = jobs.then(seen, made, agents=agents)
    waiting = plan(seen, T0 + 20.1)
    assert prepares(waiting) == []
    assert waiting.watch.keys() == {"demo-0-0", "demo-1-0"}

    done = {
        name: jobs.called(agents[name], message, T0 + 20, done_at=T0 + 20.1, reply=jobs.prepared(name, message))
        for name, message in jobs.sends(made, protocol.Prepare).items()
    }
    committed = plan(replace(seen, agents={**agents, **done}), T0 + 20.2)
    assert sorted(jobs.sends(committed, protocol.Assign)) == OTHERS

    answers_now = replace(agents["demo-1-0"], connected=True, report=jobs.report("demo-1-0", round=1, claim="claim-a"))
    seen = replace(seen, agents={**agents, "demo-1-0": answers_now})
    assert prepares(plan(seen, T0 + 20.3)) == ["demo-1-0"]


def test_a_member_that_answers_the_call_is_not_lost_while_its_stream_is_not_open() -> None:
    """The coordinator, which has given the member up, dies before it prepares for the next round."""
    seen = silent({"wanted_at": T0 + 19.5})
    made = plan(seen, T0 + 20)
    agents = dict(seen.agents)
    for name, message in jobs.sends(made, protocol.Prepare).items():
        answer: dict[str, Any] = {"error": "reset"} if name == "demo-0-0" else {"reply": jobs.prepared(name, message)}
        agents[name] = jobs.called(agents[name], message, T0 + 20, done_at=T0 + 20.3, **answer)
    made = plan(jobs.then(seen, made, agents=agents), T0 + 21)
    assert sorted(jobs.sends(made, protocol.Assign)) == ["demo-1-0", "demo-2-0"]


def answered(**changes: dict[str, Any]) -> JobObservation:
    """Return a claim with all answers, of which some have other fields.

    The operator has just started: it has a stream to the coordinator only.
    """
    seen = claimed()
    agents = {}
    for name, view in seen.agents.items():
        assert view.prepare is not None
        assert isinstance(view.prepare.reply, protocol.Prepared)
        reply = replace(view.prepare.reply, **changes.get(name.replace("-", "_"), {}))
        stream = {} if name == "demo-0-0" else {"connected": False, "wanted_at": None, "report": None}
        agents[name] = replace(view, prepare=replace(view.prepare, reply=reply), **stream)
    return replace(seen, agents=agents)


IMPORTING = {"instance": "another", "ready": False}


@pytest.mark.parametrize(
    ("changes", "members"),
    [
        ({"demo_1_0": IMPORTING}, {"demo-0-0", "demo-2-0"}),
        ({"demo_1_0": {"instance": "another"}}, {"demo-0-0", "demo-1-0", "demo-2-0"}),
        ({"demo_1_0": {"ready": False}}, {"demo-0-0", "demo-1-0", "demo-2-0"}),
        ({"demo_1_0": IMPORTING, "demo_2_0": IMPORTING}, {"demo-0-0", "demo-1-0", "demo-2-0"}),
        (dict.fromkeys(("demo_0_0", "demo_1_0", "demo_2_0"), IMPORTING), {"demo-0-0", "demo-1-0", "demo-2-0"}),
    ],
    ids=[
        "one imports",
        "one came back and is ready, or its agent is older",
        "one is not ready, and was not restarted",
        "the others are too few",
        "all import",
    ],
)
def test_an_operator_that_is_new_learns_from_its_answer_that_a_member_imports(
    changes: dict[str, dict[str, Any]], members: set[str]
) -> None:
    """The operator did not see the restart of the container, and the agent answers Prepare while it imports."""
    assert jobs.sends(plan(answered(**changes), T0 + 11.2), protocol.Assign).keys() == members


def test_no_round_of_strangers_begins_while_the_only_member_left_imports() -> None:
    """The member has the state; a replica that has just joined has none."""
    seen = answered(demo_0_0=IMPORTING)
    streams = {name: {"connected": True, "report": jobs.report(name)} for name in ("demo-1-0", "demo-2-0")}
    agents = {name: replace(view, **streams.get(name, {})) for name, view in seen.agents.items()}
    seen = replace(seen, agents=agents)
    world = seen.job.status.world.model_copy(update={"members": seen.job.status.world.members[:1]})
    status = seen.job.status.model_copy(update={"world": world})
    made = plan(replace(seen, job=replace(seen.job, status=status)), T0 + 11.2)
    assert "demo-0-0" in jobs.sends(made, protocol.Assign)


def test_a_member_that_imports_gives_the_round_the_shards_that_only_it_has() -> None:
    newest = protocol.SnapshotId(1, 39, "layout", 3)
    held = {name: {"snapshots": (protocol.HeldSnapshot(newest, (0, 2)),)} for name in ("demo_0_0", "demo_2_0")}
    only = {**IMPORTING, "snapshots": (protocol.HeldSnapshot(newest, (1,)),)}
    assigns = jobs.sends(plan(answered(**held, demo_1_0=only), T0 + 11.2), protocol.Assign)
    assert assigns.keys() == {"demo-0-0", "demo-2-0"}
    assert {message.restore.step for message in assigns.values()} == {39}
    assert {peer.replica for message in assigns.values() for peer in message.outside} == {"demo-1-0"}


# --- planned changes


def joining(ready_at: float, **coordinator: Any) -> JobObservation:
    """Return a job in which two of three replicas train, and the third has become ready."""
    seen = jobs.running(jobs.spec(), 2)
    third = jobs.agent("demo-2-0", ready_at=ready_at)
    seen = replace(seen, pods=(*seen.pods, jobs.pod(2)), agents={**seen.agents, "demo-2-0": third})
    return with_coordinator(seen, report=jobs.coordinator_report(**coordinator)) if coordinator else seen


def test_a_job_grows_after_a_quiet_time_by_a_drain() -> None:
    seen = joining(T0 + 20)
    made = plan(seen, T0 + 21)
    assert made.actions == ()
    assert made.recheck_after == pytest.approx(4)
    made = plan(seen, T0 + 25.1)
    assert list(jobs.sends(made, protocol.Drain)) == ["demo-0-0"]
    assert made.status.world.claim.round == 1
    made = plan(jobs.then(joining(T0 + 20, state="drained"), made), T0 + 26)
    assert prepares(made) == ["demo-0-0", "demo-1-0", "demo-2-0"]
    assert made.status.restarts.total == 0


def test_nobody_joins_before_the_first_step() -> None:
    progress = protocol.Progress(0, 100, 0.0, 0.0, 0.0, 0, "restoring", T0 + 10)
    assert plan(joining(T0 + 20, progress=progress), T0 + 40).actions == ()


def test_a_member_that_is_being_deleted_is_drained_first() -> None:
    seen = jobs.running(jobs.spec())
    pods = tuple(replace(pod, deleting=pod.index == 1) for pod in seen.pods)
    made = plan(replace(seen, pods=pods), T0 + 20)
    assert list(jobs.sends(made, protocol.Drain)) == ["demo-0-0"]
    assert [action for action in made.actions if isinstance(action, CreatePod)] == [CreatePod(1, 1)]
    drained = with_coordinator(
        jobs.then(replace(seen, pods=pods), made), report=jobs.coordinator_report(state="drained")
    )
    assert prepares(plan(drained, T0 + 21)) == ["demo-0-0", "demo-2-0"]


def test_a_drain_that_takes_too_long_is_given_up() -> None:
    seen = joining(T0)
    drain = Call(1, "claim-a", T0 + 20, done_at=T0 + 20, reply=protocol.Accepted(1, "claim-a"))
    stuck = with_coordinator(seen, drain=drain, report=jobs.coordinator_report(state="draining"))
    assert prepares(plan(stuck, T0 + 40)) == []
    assert len(prepares(plan(stuck, T0 + 51))) == 3
