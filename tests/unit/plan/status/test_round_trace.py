"""A round's trace: which spans there are, in which order, by whose clock; once for each round; bounded."""

from __future__ import annotations

from dataclasses import replace

import concertina_protocol as protocol
from builders import jobs
from builders.jobs import T0
from concertina.plan.actions import Plan, RoundTrace, Span
from concertina.plan.observed import JobObservation
from concertina.plan.plan import plan
from concertina.plan.status.round_trace import MOST_MEMBERS

COORDINATOR = "demo-0-0"
REPLACES = "demo-2-0"
"""A replica whose workers could not enter the round."""
TIMELINE = {"start": 0.25, "group": 0.125, "build": 0.5, "restore": 0.25, "compile": 0.75, "first_step": 0.25}


def shape(span: Span) -> list[tuple[str, float, float]]:
    """Names and seconds since T0, a member's replica for its name."""
    name = str(span.attributes.get("k8s.pod.name", "")) if span.name == "prepare member" else str(span.name)
    found = [(name, round(span.begin - T0, 3), round(span.end - T0, 3))]
    return found + [each for child in span.children for each in shape(child)]


def told(made: Plan) -> RoundTrace:
    assert made.trace is not None
    return made.trace


def reported(seen: JobObservation, **report: object) -> JobObservation:
    return replace(
        seen,
        agents={
            **seen.agents,
            COORDINATOR: replace(seen.agents[COORDINATOR], report=jobs.coordinator_report(**report)),
        },
    )


def prepared(seen: JobObservation, made: Plan, sent: float) -> JobObservation:
    """All that were asked have answered, each a tenth of a second after the one before."""
    agents = dict(seen.agents)
    for position, (name, message) in enumerate(jobs.sends(made, protocol.Prepare).items(), 1):
        done, reply = sent + position / 10, jobs.prepared(name, message)
        if name == REPLACES:
            reply = replace(reply, replaced=(protocol.Replaced.STOPPED, protocol.Replaced.LATE))
        agents[name] = jobs.called(agents[name], message, sent, done_at=done, reply=reply)
    return jobs.then(seen, made, agents=agents)


def assigned(seen: JobObservation, made: Plan, done: float) -> JobObservation:
    agents = dict(seen.agents)
    for name, message in jobs.sends(made, protocol.Assign).items():
        reply = protocol.Accepted(message.round, message.claim)
        agents[name] = jobs.called(agents[name], message, done, done_at=done, reply=reply)
    return jobs.then(seen, made, agents=agents)


def first_step(at: float) -> protocol.Progress:
    return protocol.Progress(41, 100, 2.5, 1000.0, 0.1, 1312, "training", at, at, timeline=TIMELINE)


def after_a_failure(failed: float, skew: float = 0.0) -> tuple[JobObservation, Plan]:
    """Return an observation and a plan after a worker failed `failed` seconds after T0.

    The clock of the worker is `skew` seconds ahead. The operator knows of the failure at T0 + 20, has the agents'
    answers at 20.3, commits at 20.5, and receives the first report at 20.75. It receives the report of the first step
    at T0 + 24, in this pass.
    """
    death = protocol.Failure("demo-1-0", "WorkerSignaled", "killed by SIGKILL", at=T0 + failed + skew)
    seen = reported(jobs.running(jobs.spec()), failures=(death,))
    made = plan(seen, T0 + 20)
    seen = prepared(seen, made, T0 + 20.1)
    made = plan(seen, T0 + 20.5)
    seen = assigned(seen, made, T0 + 20.75)
    claim = seen.job.status.world.claim
    assert claim is not None
    running = {"round": claim.round, "claim": claim.claim_id, "state": "running"}
    seen = reported(seen, **running, progress=None)
    seen = jobs.then(seen, plan(seen, T0 + 21))
    seen = reported(seen, **running, progress=first_step(T0 + 9000))  # its clock is another one
    return seen, plan(seen, T0 + 24)


def test_a_failure_to_the_first_step() -> None:
    seen, made = after_a_failure(19.5)
    trace = told(made)
    assert trace.round == 2
    assert shape(trace.root) == [
        ("round", 19.5, 24.0),
        ("detect", 19.5, 20.0),
        ("decide", 20.0, 20.1),
        ("prepare", 20.1, 20.5),
        ("demo-2-0", 20.1, 20.4),
        ("demo-1-0", 20.1, 20.3),
        ("demo-0-0", 20.1, 20.2),
        ("assign", 20.5, 20.75),
        ("start", 20.75, 21.0),
        ("group", 21.0, 21.125),
        ("build", 21.125, 21.625),
        ("restore", 21.625, 21.875),
        ("compile", 21.875, 22.625),
        ("first_step", 22.625, 22.875),
    ]
    assert not trace.root.error
    assert trace.root.attributes["concertina.reason"] == "WorkerSignaled"
    assert trace.root.children[0].attributes == {
        "k8s.pod.name": "demo-1-0",
        "k8s.node.name": "node-1",
        "concertina.failure": "WorkerSignaled",
    }
    members = next(span for span in trace.root.children if span.name == "prepare").children
    replaced = [span.attributes.get("concertina.workers.replaced") for span in members]
    assert replaced == ["late,stopped", None, None]
    assert plan(jobs.then(seen, made), T0 + 25).trace is None, "it is told once"


def test_no_span_is_before_or_after_what_the_operator_knows_whatever_clocks_say() -> None:
    for skew in (-3600.0, 3600.0):
        root = told(after_a_failure(19.5, skew)[1]).root
        spans = [root, *root.children, *(each for child in root.children for each in child.children)]
        assert all(root.begin <= span.begin <= span.end <= root.end == T0 + 24 for span in spans)
        assert root.begin >= T0 + 10, "when it was seen to train"


def test_no_span_ends_before_it_begins_where_the_operators_clock_is_set_back() -> None:
    root = told(plan(after_a_failure(19.5)[0], T0 + 15)).root
    assert all(span.begin <= span.end for span in (root, *root.children))


def test_a_first_round_begins_with_its_claim() -> None:
    pods = tuple(jobs.pod(index) for index in range(3))
    seen = jobs.observed(jobs.job(jobs.command_spec()), pods, {pod.name: jobs.agent(pod.name) for pod in pods})
    made = plan(seen, T0 + 1)
    seen = assigned(seen := prepared(seen, made, T0 + 1), plan(seen, T0 + 2), T0 + 2.5)
    seen = reported(seen, progress=None)
    names = [name for name, *_ in shape(told(plan(seen, T0 + 5)).root) if not name.startswith("demo")]
    assert names == ["round", "decide", "prepare", "assign", "start"]
    assert told(plan(seen, T0 + 5)).root.begin == T0 + 1


def test_a_first_round_begins_no_later_than_its_first_prepare() -> None:
    """The claim's time is that of the first Prepare as text, and so rounded."""
    pods = tuple(jobs.pod(index) for index in range(3))
    seen = jobs.observed(jobs.job(jobs.command_spec()), pods, {})
    seen = jobs.then(seen, plan(seen, T0), agents={pod.name: jobs.agent(pod.name) for pod in pods})
    seen = prepared(seen, plan(seen, T0 + 1), T0 + 1.0000007)
    seen = reported(assigned(seen, plan(seen, T0 + 2), T0 + 2.5), progress=None)
    root = told(plan(seen, T0 + 5)).root
    assert root.begin == min(span.begin for span in root.children) == T0 + 1.0000007


def test_a_planned_change_begins_with_its_drain() -> None:
    seen = jobs.running(jobs.spec())
    smaller = replace(seen.job, spec=jobs.spec(replicas=2))
    seen = replace(seen, job=smaller)
    seen = jobs.then(seen, plan(seen, T0 + 20))
    seen = reported(seen, state="drained")
    made = plan(seen, T0 + 23)
    seen = prepared(seen, made, T0 + 23)
    made = plan(seen, T0 + 23.5)
    seen = assigned(seen, made, T0 + 23.75)
    seen = reported(seen, round=2, claim="claim-b", progress=first_step(T0 + 27))
    spans = shape(told(plan(seen, T0 + 27)).root)
    assert spans[:3] == [("round", 20.0, 27.0), ("drain", 20.0, 23.0), ("decide", 23.0, 23.0)]


def test_so_does_one_that_the_coordinator_began() -> None:
    seen = reported(jobs.running(jobs.spec()), state="draining")
    seen = jobs.then(seen, plan(seen, T0 + 20))
    seen = reported(seen, state="drained")
    made = plan(seen, T0 + 23)
    seen = assigned(seen := prepared(seen, made, T0 + 23), plan(seen, T0 + 23.5), T0 + 23.75)
    seen = reported(seen, round=2, claim="claim-b", progress=first_step(T0 + 27))
    assert shape(told(plan(seen, T0 + 27)).root)[1] == ("drain", 20.0, 23.0)


def test_a_round_that_is_given_up_says_why() -> None:
    death = protocol.Failure("demo-1-0", "WorkerFailed", "exit code 1", at=T0 + 19)
    seen = reported(jobs.running(jobs.spec()), failures=(death,))
    seen = prepared(seen, plan(seen, T0 + 20), T0 + 20)
    made = plan(seen, T0 + 20.5)
    seen = assigned(seen, made, T0 + 20.75)
    again = protocol.Failure("demo-2-0", "WorkerFailed", "exit code 9", at=T0 + 22)
    seen = reported(seen, round=2, claim="claim-b", progress=None, failures=(again,))
    made = plan(replace(seen, fresh_claim="claim-c"), T0 + 22.5)
    trace = told(made)
    assert trace.round == 2
    assert trace.root.error == "given up before its first step: exit code 9"
    assert [name for name, *_ in shape(trace.root)][-2:] == ["assign", "start"]


def test_a_round_that_has_trained_is_not_told_again_when_it_ends() -> None:
    seen = jobs.running(jobs.spec())
    death = protocol.Failure("demo-1-0", "WorkerFailed", "exit code 1", at=T0 + 19)
    made = plan(reported(seen, failures=(death,)), T0 + 20)
    assert jobs.sends(made, protocol.Prepare)
    assert made.trace is None


def test_nor_is_it_where_the_next_one_has_to_wait_for_replicas() -> None:
    seen = jobs.running(jobs.spec())
    made = plan(replace(seen, pods=seen.pods[:1]), T0 + 20)
    assert not jobs.sends(made, protocol.Prepare)
    pods = (seen.pods[0], jobs.pod(1, 1), jobs.pod(2, 1))
    agents = {pod.name: jobs.agent(pod.name) for pod in pods} | {COORDINATOR: seen.agents[COORDINATOR]}
    made = plan(jobs.then(seen, made, pods=pods, agents=agents), T0 + 40)
    assert jobs.sends(made, protocol.Prepare)
    assert made.trace is None


def test_a_round_that_is_suspended_before_its_first_step_is_given_up() -> None:
    pods = tuple(jobs.pod(index) for index in range(3))
    seen = jobs.observed(jobs.job(jobs.spec()), pods, {pod.name: jobs.agent(pod.name) for pod in pods})
    seen = assigned(seen := prepared(seen, plan(seen, T0 + 1), T0 + 1), plan(seen, T0 + 2), T0 + 2.5)
    made = plan(replace(seen, job=replace(seen.job, spec=jobs.spec(suspend=True))), T0 + 3)
    assert told(made).root.error.startswith("given up before its first step: ")
    assert plan(jobs.then(seen, made), T0 + 4).trace is None


def test_another_operator_goes_on_with_what_the_status_says() -> None:
    """It knows of no call that it did not make."""
    seen, _ = after_a_failure(19.5)
    agents = {name: replace(view, prepare=None, assign=None) for name, view in seen.agents.items()}
    trace = told(plan(replace(seen, agents=agents), T0 + 24))
    assert shape(trace.root)[:6] == [
        ("round", 19.5, 24.0),
        ("detect", 19.5, 20.0),
        ("decide", 20.0, 20.0),
        ("prepare", 20.0, 20.5),
        ("assign", 20.5, 20.5),
        ("start", 20.5, 20.75),
    ]


def test_of_many_members_the_slowest_are_told() -> None:
    count = 100
    pods = tuple(jobs.pod(index) for index in range(count))
    agents = {pod.name: jobs.agent(pod.name) for pod in pods}
    seen = jobs.observed(jobs.job(jobs.command_spec(replicas=count)), pods, agents)
    seen = prepared(seen, plan(seen, T0 + 1), T0 + 1)
    seen = assigned(seen, plan(seen, T0 + 12), T0 + 13)
    seen = reported(seen, progress=None)
    prepare = told(plan(seen, T0 + 15)).root.children[1]
    assert prepare.attributes["concertina.replicas.asked"] == count
    seconds = [span.end - span.begin for span in prepare.children]
    assert len(seconds) == MOST_MEMBERS
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > 9.9


def test_one_that_is_drained_at_once_is_told_as_well() -> None:
    """Of a world that grows as soon as it trains."""
    seen, _ = after_a_failure(19.5)
    draining = plan(reported(seen, round=2, claim="claim-b", state="draining", progress=first_step(T0 + 24)), T0 + 24)
    root = told(draining).root
    assert shape(root)[-1][0] == "first_step"
    assert not root.error


def test_who_does_not_answer_is_told_as_such() -> None:
    seen, _ = after_a_failure(19.5)
    call = seen.agents["demo-2-0"].prepare
    assert call is not None
    silent = replace(seen.agents["demo-2-0"], prepare=replace(call, done_at=None, reply=None))
    members = told(plan(replace(seen, agents={**seen.agents, "demo-2-0": silent}), T0 + 24)).root.children[2].children
    assert (members[0].attributes["k8s.pod.name"], members[0].error) == ("demo-2-0", "no answer")
