"""World in blocks: its members, the order of ranks, its status, and the location of its state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import concertina_protocol as protocol
from builders import jobs
from builders.jobs import T0
from concertina.api.spec import Parallelism
from concertina.api.status import JobStatus
from concertina.api.world import World
from concertina.plan.actions import Plan
from concertina.plan.observed import JobObservation, NodeView
from concertina.plan.plan import plan
from concertina.plan.state.topology import groups_of, layout
from concertina.planning.layout import ParallelLayout
from concertina_trainer.config.trainer import TrainerConfig

RACK = "example.com/rack"


def spec(count: int, **fields: Any) -> Any:
    return jobs.spec(
        **{"replicas": count, "elastic": {"minReplicas": 2, "scaleUp": {"stabilizationWindowSeconds": 5}}, **fields}
    )


def racks(seen: JobObservation, racks: str) -> JobObservation:
    """Return the observation with nodes in racks; racks("aabb") has node-0 and node-1 in rack a."""
    nodes = {f"node-{at}": NodeView(f"node-{at}", ready=True, labels={RACK: rack}) for at, rack in enumerate(racks)}
    return replace(seen, nodes={**seen.nodes, **nodes})


def answered(seen: JobObservation, made: Plan, **held: protocol.HeldSnapshot) -> tuple[JobObservation, Plan]:
    """Return the observation after all replicas have answered a claim, and its plan.

    The named replicas hold the given snapshots.
    """
    agents = dict(seen.agents)
    for name, message in jobs.sends(made, protocol.Prepare).items():
        snapshots = (held[name.replace("-", "_")],) if name.replace("-", "_") in held else ()
        reply = jobs.prepared(name, message, snapshots=snapshots)
        agents[name] = jobs.called(agents[name], message, T0 + 20, done_at=T0 + 20, reply=reply)
    seen = jobs.then(seen, made, agents=agents)
    return seen, plan(seen, T0 + 20)


def first_round(job_spec: Any, where: str, status: JobStatus | None = None) -> Plan:
    pods = tuple(jobs.pod(index) for index in range(len(where)))
    seen = jobs.observed(jobs.job(job_spec, status), pods, {pod.name: jobs.agent(pod.name) for pod in pods})
    seen = racks(seen, where)
    return answered(seen, plan(seen, T0 + 10))[1]


def told(made: Plan) -> list[str]:
    return [event.message for event in made.events if event.reason == "GroupsCrossDomains"]


def members(made: Plan) -> list[str]:
    return [member.replica.removeprefix("demo-").removesuffix("-0") for member in made.status.world.members]


def test_tensor_groups_stay_within_a_rack() -> None:
    parallel = {"parallelism": {"tensor": 2, "shard": 2}, "topology": {"labels": [RACK]}}
    made = first_round(spec(8, **parallel), "abbaabab")
    assert members(made) == ["0", "3", "4", "6", "1", "2", "5", "7"]
    assert (made.status.world.layout, made.status.world.cross_domain_groups) == (
        "replicate 2 x shard 2 x tensor 2",
        None,
    )
    assert told(made) == []


def test_what_must_cross_a_link_is_told_once() -> None:
    job_spec = spec(4, parallelism={"tensor": 2}, topology={"labels": [RACK, "kubernetes.io/hostname"]})
    made = first_round(job_spec, "aaab")
    crossing = f"1 of 2 tensor groups cross {RACK}; 1 of 2 tensor groups cross kubernetes.io/hostname"
    assert made.status.world.cross_domain_groups == crossing
    [sentence] = told(made)
    assert sentence.startswith(f"{crossing}: they wait for that link")
    assert told(first_round(job_spec, "aaab", JobStatus(world=World(cross_domain_groups=crossing)))) == []


def test_each_link_is_named_by_its_own_groups() -> None:
    """There are two racks of three nodes: one pair crosses racks, the others communicate between hosts of a rack."""
    labels = [RACK, "kubernetes.io/hostname"]
    made = first_round(spec(6, parallelism={"context": 2}, topology={"labels": labels}), "aaabbb")
    assert made.status.world.cross_domain_groups == (
        f"1 of 3 context groups cross {RACK}; 2 of 3 context groups cross kubernetes.io/hostname"
    )


def test_experts_of_a_stage_are_a_group() -> None:
    """In pipelines of two, the experts of a layer are distributed to one rank of each.

    A block of two crosses domains.
    """
    experts = {"parallelism": {"expert": 2, "pipeline": 2}, "topology": {"labels": [RACK]}}
    assert first_round(jobs.command_spec(replicas=8, **experts), "aaaabbbb").status.world.cross_domain_groups is None
    made = first_round(jobs.command_spec(replicas=8, **experts), "aaabbbbb")
    assert made.status.world.cross_domain_groups == f"1 of 4 expert groups cross {RACK}"


@pytest.mark.parametrize("degrees", [
    {"expert": 4}, {"expert": 4, "tensor": 2}, {"expert": 2, "tensor": 4}, {"expert": 6, "context": 4, "pipeline": 2},
    {"expert": 2, "shard": 4, "pipeline": 3, "tensor": 2},
])  # fmt: skip
def test_expert_groups_are_those_of_the_plan_and_hold_each_expert_once(degrees: dict[str, int]) -> None:
    parallelism = Parallelism(**degrees)
    ranks = 2 * parallelism.block
    laid = ParallelLayout(TrainerConfig.model_construct(), parallelism, ranks, 1)
    [groups] = [groups for kind, groups in groups_of(parallelism, ranks) if kind == "expert"]
    assert sorted(rank for group in groups for rank in group) == list(range(ranks))
    for group in groups:
        assert sorted(map(laid.expert_place, group)) == list(range(parallelism.expert))
        assert len({laid.degrees.place(rank).pipeline for rank in group}) == 1


def test_without_parallelism_nothing_is_said_of_it() -> None:
    made = first_round(spec(4, topology={"labels": [RACK]}), "aaab")
    assert (made.status.world.layout, made.status.world.cross_domain_groups) == (None, None)


@pytest.mark.parametrize(
    ("parallelism", "ranks", "line"),
    [
        ({"shard": 1}, 4, "replicate 4"),
        ({"shard": 2}, 2, "shard 2"),
        ({"tensor": 2}, 8, "shard 4 x tensor 2"),
        ({"tensor": 2, "pipeline": 2, "context": 2, "shard": 1}, 16, "replicate 2 x pipeline 2 x context 2 x tensor 2"),
        ({}, 8, None),
    ],
)
def test_a_layout_is_a_line(parallelism: dict[str, int], ranks: int, line: str | None) -> None:
    assert layout(spec(16, parallelism=parallelism), ranks) == line


def test_sizes_of_groups_are_in_replicas() -> None:
    degrees = {"tensor": 4, "pipeline": 2, "shard": 3}
    assert spec(24, parallelism=degrees, workersPerReplica=1).group_sizes == (4, 8, 24)
    assert spec(24, parallelism=degrees, workersPerReplica=8).group_sizes == (3,)
    assert spec(24, parallelism={"tensor": 4}, workersPerReplica=3).group_sizes == (4,)
    experts = jobs.command_spec(replicas=8, parallelism={"expert": 2, "shard": 4})
    assert experts.group_sizes == (2, 4)
    assert jobs.command_spec(replicas=8, parallelism={"expert": 2}).group_sizes == (2,)


def test_what_ranks_beside_groups_do_is_a_scripts_own_affair() -> None:
    assert layout(jobs.command_spec(parallelism={"tensor": 2}), 8) == "data 4 x tensor 2"
    experts = jobs.command_spec(replicas=8, parallelism={"expert": 2, "shard": 4})
    assert layout(experts, 8) == "replicate 2 x shard 4, experts over 2"


ID = protocol.SnapshotId(1, 40, "layout", 8)


def held(*shards: int) -> protocol.HeldSnapshot:
    return protocol.HeldSnapshot(ID, shards)


def test_of_a_broken_block_those_who_are_left_hand_over_and_stand_by() -> None:
    """demo-5 is lost, and demo-4 alone has shard 4, whose copy was on demo-5."""
    seen = jobs.running(spec(8, parallelism={"tensor": 2, "shard": 2}), 8)
    gone = tuple(pod for pod in seen.pods if pod.name != "demo-5-0")
    seen = replace(seen, pods=gone)
    made = plan(seen, T0 + 20)
    snapshots = {f"demo_{at}_0": held(at, (at - 1) % 8) for at in range(8) if at != 5}
    _, made = answered(seen, made, **snapshots)
    assert members(made) == ["0", "1", "2", "3"]
    assigned = jobs.sends(made, protocol.Assign)
    assert sorted(assigned) == ["demo-0-0", "demo-1-0", "demo-2-0", "demo-3-0"]
    message = assigned["demo-0-0"]
    assert (message.restore.source, message.restore.step) == ("Memory", 40)
    assert {other.replica for other in message.outside} == {"demo-4-0", "demo-6-0"}
    assert {other.workers for other in message.outside} == {0}
    assert message.restore.holders["3"] == ("demo-3-0", "demo-4-0"), "members first"
    assert message.restore.holders["5"] == ("demo-6-0",)
    assert [action for action in made.actions if type(action).__name__ == "DeletePod"] == []


def test_who_is_beyond_spec_replicas_hands_over_before_its_pod_goes() -> None:
    seen = jobs.running(spec(4), 4)
    drained = replace(seen.agents["demo-0-0"], report=jobs.coordinator_report(state="drained"))
    fewer = replace(seen.job, spec=spec(2))
    seen = replace(seen, job=fewer, agents={**seen.agents, "demo-0-0": drained})
    made = plan(seen, T0 + 20)
    assert sorted(jobs.sends(made, protocol.Prepare)) == [f"demo-{at}-0" for at in range(4)]
    assert [action for action in made.actions if type(action).__name__ == "DeletePod"] == []
    whole = protocol.SnapshotId(1, 40, "layout", 4)
    snapshots = {f"demo_{at}_0": protocol.HeldSnapshot(whole, (at, (at - 1) % 4)) for at in range(4)}
    seen, made = answered(seen, made, **snapshots)
    message = jobs.sends(made, protocol.Assign)["demo-0-0"]
    assert (message.restore.source, message.restore.step) == ("Memory", 40)
    assert [other.replica for other in message.outside] == ["demo-2-0"]
    assert "demo-2-0" not in jobs.sends(made, protocol.Assign), "it has to stay for what it holds"
    assert [action for action in made.actions if type(action).__name__ == "DeletePod"] == []
    made = plan(jobs.then(seen, made), T0 + 21)
    deleted = [action.name for action in made.actions if type(action).__name__ == "DeletePod"]
    assert deleted == ["demo-2-0", "demo-3-0"]
