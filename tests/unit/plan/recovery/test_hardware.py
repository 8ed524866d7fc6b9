"""Replicas on faulty hardware: a GPU that its agent reports, and a node with a condition for a fault."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import concertina_protocol as protocol
from builders import jobs
from builders.jobs import T0
from concertina.api.restarts import Restart
from concertina.api.status import rfc3339
from concertina.plan.actions import CreatePod, DeletePod, Plan
from concertina.plan.observed import JobObservation, NodeView
from concertina.plan.plan import plan

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


def test_a_replica_that_fails_again_counts_as_any_other() -> None:
    seen = trains(failures=(FAILED,), state="failed")
    entry = Restart(at=rfc3339(T0 + 50), replica="demo-2-0", node="node-2", reason="HardwareFault", counted=False)
    restarts = seen.job.status.restarts.model_copy(update={"recent": (entry,)})
    status = seen.job.status.model_copy(update={"restarts": restarts})
    made = plan(replace(seen, job=replace(seen.job, status=status)), T0 + 100)
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
