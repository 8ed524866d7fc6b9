"""Replicas on faulty hardware: a GPU that its agent reports, and a node with a condition for a fault."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import concertina_protocol as protocol
from builders import jobs
from builders.jobs import T0
from concertina.api.restarts import AvoidedNode, Restart
from concertina.api.status import rfc3339
from concertina.plan.actions import CreatePod, DeletePod, Plan
from concertina.plan.observed import JobObservation, NodeView
from concertina.plan.plan import plan
from concertina.plan.recovery import repeats

XID = "GPU 3 (NVIDIA H100, GPU-7) reports XID 79 (the GPU has fallen off the bus)"
SAID = f"replica demo-2-0 on node node-2 has faulty hardware: {XID}"
CONDITION = "the node has the condition GPUMissing=True (7 of 8 GPUs)"
RUNNING = protocol.State.RUNNING
MEMBER = protocol.MemberState("demo-2-0", "i-demo-2-0", 1, "claim-a", RUNNING)
FAILED = protocol.Failure("demo-2-0", "WorkerFailed", "CUDA error: unspecified launch failure", rank=2)


def trains(by: str = "agent", nodes: int = 6, **report: Any) -> JobObservation:
    """Return a job of three replicas that trains, of which demo-2-0 has faulty hardware."""
    policy = report.pop("policy", {})
    seen = jobs.running(jobs.spec(failurePolicy=policy, **report.pop("spec", {})))
    there = {f"node-{i}": NodeView(f"node-{i}", ready=True) for i in range(nodes)}
    members = {}
    if by == "agent":
        members["demo-2-0"] = replace(MEMBER, gpu_fault=XID)
    else:
        there["node-2"] = replace(there["node-2"], fault=CONDITION)
    told = jobs.coordinator_report(members=members, **report)
    agents = {**seen.agents, "demo-0-0": replace(seen.agents["demo-0-0"], report=told)}
    return replace(seen, agents=agents, nodes=there)


def deleted(made: Plan) -> list[str]:
    return [action.name for action in made.actions if isinstance(action, DeletePod)]


@pytest.mark.parametrize(("by", "clause"), [("agent", XID), ("node", CONDITION)])
def test_its_pod_is_replaced_once_and_its_node_avoided_without_a_failure_being_counted(by: str, clause: str) -> None:
    seen = trains(by)
    made = plan(seen, T0 + 100)
    assert deleted(made) == ["demo-2-0"]
    (entry,) = made.status.restarts.recent
    assert (entry.replica, entry.node, entry.reason, entry.counted) == ("demo-2-0", "node-2", "HardwareFault", False)
    assert made.status.restarts.in_window == 0
    assert [avoided.node for avoided in made.status.avoided_nodes] == ["node-2"]
    assert {event.reason for event in made.events} == {"HardwareFault", "NodeAvoided"}
    assert any(event.message.endswith(clause) for event in made.events)
    claim = made.status.world.claim
    assert claim is not None
    assert claim.round == 1, "the round is drained first, so no step is lost"
    pods = tuple(replace(pod, deleting=pod.name == "demo-2-0") for pod in seen.pods)
    after = plan(jobs.then(seen, made, pods=pods), T0 + 101)
    assert "demo-0-0" in jobs.sends(after, protocol.Drain)
    assert len(after.status.restarts.recent) == 1
    assert "HardwareFault" not in {event.reason for event in after.events}
    (new,) = [action for action in after.actions if isinstance(action, CreatePod)]
    assert new.never_nodes == ("node-2",)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"policy": {"onHardwareFault": "Report"}}, ""),
        ({"spec": {"elastic": None}}, "; it is not replaced: the job can't continue without it"),
        ({"nodes": 3}, "; it is not replaced: there is no other node"),
    ],
    ids=["report", "of a fixed size", "no other node"],
)
def test_it_stays_and_is_named_once_where_it_must_not_or_can_not_be_replaced(fields: dict[str, Any], why: str) -> None:
    seen = trains(**fields)
    made = plan(seen, T0 + 100)
    assert deleted(made) == []
    running = made.status.condition("Running")
    assert running is not None
    assert running.message.endswith(f"{SAID}{why}")
    assert [(event.reason, event.message) for event in made.events] == [("HardwareFault", SAID)]
    assert plan(jobs.then(seen, made), T0 + 101).events == ()


def test_a_worker_that_fails_on_a_faulty_gpu_is_no_failure_of_the_job_and_moves() -> None:
    made = plan(trains(failures=(FAILED,), state="failed"), T0 + 100)
    (entry,) = made.status.restarts.recent
    assert (entry.reason, entry.counted, entry.action) == ("HardwareFault", False, "RecreatePod")
    assert made.status.last_failure is not None
    assert made.status.last_failure.message == f"{SAID}; CUDA error: unspecified launch failure"
    assert [avoided.node for avoided in made.status.avoided_nodes] == ["node-2"]


@pytest.mark.parametrize(
    "fields",
    [{"policy": {"onHardwareFault": "Report"}}, {"by": "node"}],
    ids=["the spec asks for a report only", "a node says nothing about a worker"],
)
def test_a_failure_counts_as_any_other_where_no_gpu_explains_it(fields: dict[str, Any]) -> None:
    """Otherwise a bug of the script would never end the job."""
    made = plan(trains(failures=(FAILED,), state="failed", **fields), T0 + 100)
    (entry,) = made.status.restarts.recent
    assert (entry.reason, entry.counted) == ("WorkerFailed", True)


@pytest.mark.parametrize("earlier", ["demo-2-0", "demo-2-7"], ids=["in the same pod", "in another pod"])
def test_a_replica_that_fails_again_counts_as_any_other(earlier: str) -> None:
    seen = with_entries(trains(failures=(FAILED,), state="failed"), hardware_entry(earlier))
    made = plan(seen, T0 + 100)
    running = made.status.condition("Running")
    assert running is not None
    assert running.reason == "WorkerFailed"


def unready(nodes: int, failed: bool = True, policy: str = "Replace") -> JobObservation:
    """Return a new job of one replica with a faulty GPU, which by default its preflight has found."""
    report = jobs.report("demo-0-0", ready=False, gpu_fault="GPU 0 multiplies wrongly", preflight_failed=failed)
    seen = jobs.observed(
        jobs.job(jobs.spec(replicas=1, elastic=None, failurePolicy={"onHardwareFault": policy})),
        (jobs.pod(0),),
        {"demo-0-0": jobs.agent("demo-0-0", report=report, ready_at=None)},
    )
    return replace(seen, nodes={f"node-{i}": NodeView(f"node-{i}", ready=True) for i in range(nodes)})


def test_the_first_replica_of_a_job_is_replaced_elsewhere_if_its_preflight_fails() -> None:
    seen = unready(nodes=2)
    made = plan(seen, T0 + 20)
    (entry,) = made.status.restarts.recent
    assert (entry.reason, entry.action, entry.counted) == ("HardwareFault", "RecreatePod", False)
    then = plan(jobs.then(seen, made), T0 + 20.1)
    (new,) = [action for action in then.actions if isinstance(action, CreatePod)]
    assert (new.attempt, new.never_nodes) == (1, ("node-0",))


def test_without_another_node_it_waits_and_the_status_says_why() -> None:
    made = plan(unready(nodes=1), T0 + 20)
    assert made.status.restarts.recent == ()
    ready = made.status.condition("Ready")
    assert ready is not None
    assert "GPU 0 multiplies wrongly" in ready.message


@pytest.mark.parametrize(
    ("node", "leaves"),
    [
        ({"fault": CONDITION, "fault_since": T0 + 71}, False),
        ({"fault": CONDITION, "fault_since": T0 + 70}, True),
        ({"drilled_job": "default/demo"}, True),
        ({"drilled_job": "default/other"}, False),
    ],
    ids=["it may flap", "it lasts", "a drill", "a drill of another job"],
)
def test_a_condition_counts_if_it_lasts_and_a_drill_for_its_job_only(node: dict[str, Any], leaves: bool) -> None:
    seen = trains("node")
    nodes = {**seen.nodes, "node-2": NodeView("node-2", ready=True, **node)}
    assert bool(deleted(plan(replace(seen, nodes=nodes), T0 + 100))) == leaves


def test_one_event_is_enough_if_the_text_changes_or_the_message_has_no_room_for_it() -> None:
    seen = trains("node", policy={"onHardwareFault": "Report"})
    nodes = [
        {name: replace(node, fault=f"{name} {text}" * 60) for name, node in seen.nodes.items()}
        for text in ("fails at 8:00\n\x1b[31m", "fails at 8:01\n\x1b[31m")
    ]
    made = plan(replace(seen, nodes=nodes[0]), T0 + 100)
    assert [event.reason for event in made.events] == ["HardwareFault"] * 3
    assert all(event.message.isprintable() for event in made.events)
    again = plan(jobs.then(seen, made, nodes=nodes[1]), T0 + 101)
    assert again.events == ()
    assert len(again.status.internal.hardware_faults) == 3
    assert plan(jobs.then(seen, again, nodes={}), T0 + 102).status.internal.hardware_faults == ()


# --- replicas that must stay


FAULTY = NodeView("node-2", ready=True, fault=CONDITION)


def given_up(made: Plan) -> list[str]:
    return [entry.replica for entry in made.status.restarts.recent if entry.action == "RecreatePod"]


def with_entries(seen: JobObservation, *entries: Restart) -> JobObservation:
    restarts = seen.job.status.restarts.model_copy(update={"recent": entries})
    return replace(seen, job=replace(seen.job, status=seen.job.status.model_copy(update={"restarts": restarts})))


def hardware_entry(replica: str, at: float = T0 + 50, **fields: Any) -> Restart:
    return Restart(at=rfc3339(at), replica=replica, node="node-9", reason="HardwareFault", counted=False, **fields)


@pytest.mark.parametrize("elastic", [{"minReplicas": 2}, None], ids=["elastic", "of a fixed size"])
def test_members_keep_their_pods_while_the_next_round_is_formed(elastic: dict[str, int] | None) -> None:
    """Nothing else has the state of training."""
    lost = protocol.Failure("demo-0-0", "WorkerFailed", "boom", rank=0)
    seen = trains(spec={"elastic": elastic}, failures=(lost,), state="failed")
    made = plan(seen, T0 + 100)
    faulty = {name: replace(node, fault=CONDITION) if name < "node-3" else node for name, node in seen.nodes.items()}
    asked = jobs.then(seen, made, nodes=faulty)
    assert asked.job.status.world.claim is not None
    assert not asked.job.status.world.claim.committed
    made = plan(asked, T0 + 101)
    assert (given_up(made), deleted(made)) == ([], [])


@pytest.mark.parametrize(("phase", "replaced"), [("Running", False), ("Pending", True)])
def test_a_pod_of_torchrun_is_replaced_only_before_it_runs(phase: str, replaced: bool) -> None:
    store = jobs.pod(None, 1, name="demo-rendezvous-1", uid="store", round=1)
    seen = jobs.observed(jobs.job(jobs.command_spec(launcher="Torchrun")))
    pods = (store, *(jobs.pod(index, round=1, phase=phase if index == 2 else "Running") for index in range(3)))
    nodes = {f"node-{i}": NodeView(f"node-{i}", ready=True) for i in (0, 1, 3, 4, 5)}
    seen = jobs.then(seen, plan(seen, T0), pods=pods, nodes={**nodes, "node-2": FAULTY})
    assert given_up(plan(seen, T0 + 100)) == (["demo-2-0"] if replaced else [])


def outside(**policy: Any) -> JobObservation:
    """Return a job of which two replicas train, and demo-2-0 is outside of the round, on a faulty node."""
    seen = jobs.running(jobs.spec(failurePolicy=policy), 2)
    nodes = {f"node-{i}": NodeView(f"node-{i}", ready=True) for i in range(6)}
    return replace(seen, pods=(*seen.pods, jobs.pod(2)), nodes={**nodes, "node-2": FAULTY})


def avoiding(seen: JobObservation, *names: str) -> JobObservation:
    avoided = tuple(AvoidedNode(node=name, until=rfc3339(T0 + 900), reason="", times=1) for name in names)
    status = seen.job.status.model_copy(update={"avoided_nodes": avoided})
    return replace(seen, job=replace(seen.job, status=status))


FAULTY_TOO = {f"node-{i}": NodeView(f"node-{i}", ready=True, fault=CONDITION) for i in (3, 4, 5)}
OFTEN = tuple(hardware_entry(f"demo-2-{9 - attempt}", T0 + attempt) for attempt in range(1, 4))


CHANGES: dict[str, tuple[Any, bool]] = {
    "free nodes": (lambda seen: seen, True),
    "its node is avoided": (lambda seen: avoiding(seen, "node-2", "node-3", "node-4", "node-5"), False),
    "the other nodes are faulty": (lambda seen: replace(seen, nodes={**seen.nodes, **FAULTY_TOO}), False),
    "moved twice": (lambda seen: with_entries(seen, *OFTEN[:2]), True),
    "moved three times": (lambda seen: with_entries(seen, *OFTEN), False),
}


@pytest.mark.parametrize("start", [outside, lambda: trains("node")], ids=["outside of the round", "a member"])
@pytest.mark.parametrize(
    ("change", "moves"),
    CHANGES.values(),
    ids=CHANGES.keys(),
)
def test_a_replica_moves_only_if_that_is_likely_to_help(start: Any, change: Any, moves: bool) -> None:
    made = plan(change(start()), T0 + 100)
    assert ("demo-2-0" in {*given_up(made), *deleted(made)}) == moves


@pytest.mark.parametrize("start", [outside, lambda **policy: trains("node", policy=policy)])
def test_a_replica_stays_if_new_pods_avoid_no_node(start: Any) -> None:
    made = plan(start(avoidNodeSeconds=0), T0 + 100)
    assert (given_up(made), deleted(made)) == ([], [])


def test_faults_of_hardware_are_never_taken_for_a_bug_in_the_script() -> None:
    """They may have the same text on each node."""
    seen = trains(failures=(FAILED,), state="failed")
    error = repeats.normalised(XID)
    earlier = (hardware_entry(f"demo-{i}-0", step=40, error=error, action="RestartWorkers") for i in (0, 1))
    made = plan(with_entries(seen, *earlier), T0 + 100)
    assert made.status.restarts.recent[-1].reason == "HardwareFault"
    assert "RepeatedFailure" not in {condition.reason for condition in made.status.conditions}


def test_a_deletion_that_was_lost_is_repeated_without_another_entry() -> None:
    seen = trains()
    made = plan(jobs.then(seen, plan(seen, T0 + 100)), T0 + 101)
    assert deleted(made) == ["demo-2-0"]
    assert len(made.status.restarts.recent) == 1


def test_other_faulty_replicas_are_no_reason_to_expect_that_the_job_can_continue() -> None:
    seen = trains("node")
    nodes = {**seen.nodes, "node-1": replace(seen.nodes["node-1"], fault=CONDITION)}
    made = plan(replace(seen, nodes=nodes), T0 + 100)
    running = made.status.condition("Running")
    assert running is not None
    assert running.message.endswith("; it is not replaced: the job can't continue without it")
    assert deleted(made) == []


def test_the_message_stays_the_same_until_the_coordinator_has_reported_to_a_new_operator() -> None:
    seen = trains(policy={"onHardwareFault": "Report"})
    made = plan(seen, T0 + 100)
    unheard = {name: replace(view, report=None) for name, view in seen.agents.items()}
    nodes = {**seen.nodes, "node-2": FAULTY}
    again = plan(jobs.then(seen, made, agents=unheard, nodes=nodes), T0 + 101)
    assert again.status.condition("Running") == made.status.condition("Running")
    assert again.events == ()


@pytest.mark.parametrize(("failed", "count"), [(True, 1), (False, 0)], ids=["by the preflight", "by an XID"])
def test_a_spec_that_asks_for_a_report_only_replaces_after_a_failed_preflight_alone(failed: bool, count: int) -> None:
    made = plan(unready(2, failed, "Report"), T0 + 20)
    assert len(made.status.restarts.recent) == count


def test_the_coordinator_knows_newer_states_of_its_members_than_their_own_reports() -> None:
    seen = trains()
    old = jobs.report("demo-2-0", gpu_fault=XID)
    told = jobs.coordinator_report(members={"demo-2-0": replace(MEMBER, gpu_fault="")})
    agents = {
        **seen.agents,
        "demo-0-0": replace(seen.agents["demo-0-0"], report=told),
        "demo-2-0": replace(seen.agents["demo-2-0"], report=old),
    }
    assert deleted(plan(replace(seen, agents=agents), T0 + 100)) == []
