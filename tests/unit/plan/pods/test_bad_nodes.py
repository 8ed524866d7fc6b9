"""Nodes that failed a job: which ones, for how long, and how strictly new pods avoid them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from builders import jobs
from builders.jobs import T0
from concertina.api.restarts import AvoidedNode, Restart, Restarts
from concertina.api.status import JobStatus, rfc3339, unix_seconds
from concertina.plan.actions import CreatePod, DeletePod
from concertina.plan.facts import sizes
from concertina.plan.facts.context import JobContext
from concertina.plan.observed import JobObservation, NodeView, PodView
from concertina.plan.plan import plan
from concertina.plan.pods import bad_nodes


def entry(node: str, after: float = 0.0, **fields: Any) -> Restart:
    values: dict[str, Any] = {"reason": "WorkerFailed", "replica": f"demo-{node}-0", "error": f"bad {node}"}
    return Restart(at=rfc3339(T0 + after), node=node, **{**values, **fields})


def bad(node: str, until: float, **fields: Any) -> AvoidedNode:
    return AvoidedNode(node=node, until=rfc3339(T0 + until), **fields)


def seen(
    pods: tuple[PodView, ...] = (), spec: Any = None, ready: int = 6, known: tuple[AvoidedNode, ...] = ()
) -> JobObservation:
    """Return the observation of a job with those pods, in a cluster of that many nodes in service."""
    job = jobs.job(spec or jobs.spec(), JobStatus(avoided_nodes=known))
    return replace(
        jobs.observed(job, pods), nodes={f"node-{i}": NodeView(f"node-{i}", ready=True) for i in range(ready)}
    )


def ctx(now: float = 100.0, **fields: Any) -> JobContext:
    observed = seen(**fields)
    assert observed.job.spec is not None
    return JobContext(observed, observed.job.spec, T0 + now)


def avoided(entries: tuple[Restart, ...], now: float = 100.0, **fields: Any) -> dict[str, float]:
    """Return, by node, the seconds after T0 until which it is avoided."""
    found = bad_nodes.remember(ctx(now, **fields), entries)
    return {entry.node: round(unix_seconds(entry.until) - T0, 3) for entry in found}


X, Y = "node-1", "node-2"


def test_the_event_shows_what_was_said_and_not_what_failures_are_compared_by() -> None:
    said = {"error": "rank # of round #", "message": "rank 1 of round 7"}
    (node,) = bad_nodes.remember(ctx(), (entry(X, **said), entry(X, 10, **said)))
    assert node.reason == "2 failures on it, the last of demo-node-1-0: WorkerFailed (rank 1 of round 7)"


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ((entry(X),), {}),
        ((entry(X), entry(X, 10)), {X: 910}),
        ((entry(X, replica="demo-1-0"), entry(X, 10, replica="demo-2-0")), {X: 910}),
        ((entry(X, error="same"), entry(X, 10, error="same"), entry(Y, 11, error="same")), {}),
        ((entry(X), entry(X, 10, counted=False, reason="MemberLost")), {}),
        ((entry(X, reason="NodeLost", counted=False), entry(X, 10, reason="NodeLost", counted=False)), {X: 910}),
        ((entry(X, reason="RestoreFailed"), entry(X, 10, reason="RestoreFailed")), {}),
        ((entry(X, reason="WorkerSignaled", error=""), entry(X, 10, reason="WorkerSignaled", error="")), {}),
        ((entry(X, reason="Hang"),), {X: 900}),
        ((entry(X, reason="Hang", error=""), entry(Y, 10, reason="Hang", error="")), {X: 900, Y: 910}),
        ((entry("", 0), entry("", 10)), {}),
    ],
    ids=[
        "once is bad luck",
        "twice",
        "of two replicas",
        "others fail the same way: it isn't the node",
        "a member that was lost may come back",
        "a node that dies again",
        "it's the state",
        "somebody killed it",
        "a verdict on the node",
        "on two nodes",
        "nobody knows where",
    ],
)
def test_which_nodes_are_avoided(entries: tuple[Restart, ...], expected: dict[str, float]) -> None:
    assert avoided(entries) == expected


def test_a_repeat_offender_is_avoided_for_twice_as_long_and_at_once() -> None:
    known = (bad(X, 50, times=1),)
    assert avoided((entry(X, 10), entry(X, 20)), known=known) == {X: 50}, "that was judged already"
    assert avoided((entry(X, 10), entry(X, 60)), known=known) == {X: 60 + 1800}
    assert avoided((entry(X, 60),), known=(bad(X, 50, times=3),)) == {X: 60 + 7200}
    assert avoided((entry(X, 60),), known=(bad(X, 50, times=1000),)) == {X: 60 + bad_nodes.LONGEST}


def test_a_node_is_forgotten_a_window_after_it_was_forgiven() -> None:
    assert avoided((), now=3649, known=(bad(X, 50),)) == {X: 50}
    assert avoided((), now=3650, known=(bad(X, 50),)) == {}


def test_nothing_is_avoided_where_the_user_says_so() -> None:
    spec = jobs.spec(failurePolicy={"avoidNodeSeconds": 0})
    assert avoided((entry(X), entry(X, 10)), spec=spec) == {}


PODS = tuple(jobs.pod(index) for index in range(3))


@pytest.mark.parametrize(
    ("pods", "ready", "never", "wish"),
    [
        (PODS, 6, ["node-1", "node-2"], []),
        (PODS, 4, ["node-2"], ["node-1"]),
        (PODS, 3, [], ["node-1", "node-2"]),
        (tuple(replace(pod, node="node-0") for pod in PODS), 3, ["node-1", "node-2"], []),
        ((), 6, ["node-1", "node-2"], []),
    ],
    ids=["room for all", "room without one of them", "no room", "one node holds all", "none is placed yet"],
)
def test_a_rule_only_where_the_whole_job_fits_without(
    pods: tuple[PodView, ...], ready: int, never: list[str], wish: list[str]
) -> None:
    known = (bad("node-1", 900), bad("node-2", 900, times=2), bad("node-3", 50, times=9))
    observed = seen(pods, ready=ready, known=known)
    gone = replace(observed, pods=pods[:1])  # so that pods are created
    wanted = JobContext(replace(observed, pods=pods), jobs.spec(), T0 + 100)
    assert sorted(bad_nodes.forbidden(wanted)) == never
    assert sorted(set(bad_nodes.avoided(wanted)) - set(never)) == wish
    made = [action for action in plan(gone, T0 + 100).actions if isinstance(action, CreatePod)]
    assert made
    assert {node for action in made for node in (*action.avoid_nodes, *action.never_nodes)} == {"node-1", "node-2"}


@given(
    some.integers(1, 8),
    some.integers(0, 12),
    some.lists(some.integers(0, 11), max_size=12, unique=True),
    some.lists(some.integers(0, 11), max_size=8),
)
def test_the_job_always_fits_without_the_nodes_it_must_not_use(
    replicas: int, ready: int, offenders: list[int], placed: list[int]
) -> None:
    pods = tuple(jobs.pod(i, node=f"node-{node}") for i, node in enumerate(placed[:replicas]))
    known = tuple(bad(f"node-{i}", 900, times=1 + i % 3) for i in offenders)
    spec = jobs.spec(replicas=replicas, elastic=None)
    it = ctx(pods=pods, spec=spec, ready=ready, known=known)
    density = max((placed[:replicas].count(node) for node in placed[:replicas]), default=1)
    left = {f"node-{i}" for i in range(ready)} - set(bad_nodes.forbidden(it))
    assert not bad_nodes.forbidden(it) or len(left) * density >= sizes.most(spec)


@given(
    some.lists(some.tuples(some.sampled_from([X, Y]), some.floats(0, 5000)), max_size=12),
    some.floats(5000, 20000),
    some.floats(0, 20000),
)
def test_forgiving_is_monotone_in_time(failures: list[tuple[str, float]], first: float, more: float) -> None:
    """Without new failures, a forgiven node stays so, and no time is ever extended."""
    entries = tuple(entry(node, at) for node, at in sorted(failures, key=lambda failure: failure[1]))
    spec = jobs.spec(failurePolicy={"windowSeconds": 100000})
    known = bad_nodes.remember(ctx(first, spec=spec), entries)
    later = bad_nodes.remember(ctx(first + more, spec=spec, known=known), entries)
    before = {each.node: each.until for each in known}
    assert all(before[each.node] == each.until for each in later)


def test_a_healthy_replica_on_an_avoided_node_is_left_alone() -> None:
    trains = jobs.running(jobs.spec())
    status = trains.job.status.model_copy(update={"avoided_nodes": (bad(X, 900),)})
    made = plan(replace(trains, job=replace(trains.job, status=status)), T0 + 20)
    assert made.actions == ()


# --- a job that finds no place


def stranded(running: int, now: float) -> tuple[list[str], list[str]]:
    """Return the replicas that are deleted and the nodes that are avoided from then on.

    The job wants three replicas, needs two, and has `running`.
    """
    waits = jobs.pod(2, phase="Pending", node="", ip="", waiting="Unschedulable", avoids=(X,))
    pods = (*(jobs.pod(index) for index in range(running)), waits)
    status = JobStatus(avoided_nodes=(bad(X, 900),), restarts=Restarts())
    before = replace(seen(pods), job=jobs.job(jobs.spec(), status))
    made = plan(before, T0 + now)
    after = plan(jobs.then(before, made), T0 + now + 0.1)
    still = [each.node for each in made.status.avoided_nodes if unix_seconds(each.until) > T0 + now]
    return [action.name for action in after.actions if isinstance(action, DeletePod)], still


def test_a_job_that_can_not_run_otherwise_takes_its_bad_nodes_back() -> None:
    assert stranded(running=1, now=29) == ([], [X])
    assert stranded(running=1, now=31) == (["demo-2-0"], [])


def test_a_job_that_runs_with_fewer_takes_them_back_once_an_autoscaler_would_have_come() -> None:
    assert stranded(running=2, now=31) == ([], [X])
    assert stranded(running=2, now=179) == ([], [X])
    assert stranded(running=2, now=181) == (["demo-2-0"], [])


def test_a_member_whose_node_died_counts_against_the_node() -> None:
    lost = Restart(at=rfc3339(T0 + 1), replica="demo-1-0", node=X, reason="MemberLost", counted=False)
    trains = jobs.running(jobs.spec())
    status = trains.job.status.model_copy(update={"restarts": Restarts(recent=(lost,), total=1)})
    agents = {**trains.agents, "demo-1-0": jobs.agent("demo-1-0", connected=False, lost_at=T0 + 11)}
    dead = {**trains.nodes, X: NodeView(X, ready=False)}
    report = jobs.coordinator_report(
        failures=(jobs.protocol.Failure("demo-1-0", "MemberLost", "it closed its connection"),)
    )
    agents["demo-0-0"] = replace(agents["demo-0-0"], report=report)
    made = plan(replace(trains, job=replace(trains.job, status=status), agents=agents, nodes=dead), T0 + 20)
    assert [each.reason for each in made.status.restarts.recent][-1] == "NodeLost"
