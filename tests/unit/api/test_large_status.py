"""Status of the largest job: it is stored completely, and is small enough to be written at every step."""

from __future__ import annotations

import json
import random
import string
import uuid
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import jobs
from concertina.api.accounting import Goodput
from concertina.api.internal import Growth, Internal, RequeueState, UndoneStates
from concertina.api.packed import pack
from concertina.api.restarts import LISTED_RESTARTS, AvoidedNode, LastFailure, RecoveryActionUse, Restart, Restarts
from concertina.api.spec import MOST_REPLICAS, MOST_STANDBY_REPLICAS
from concertina.api.status import (
    CheckpointRequest,
    Condition,
    ConditionType,
    JobStatus,
    RollbackMark,
    SampleRange,
    ShareMark,
    StandbyReplicas,
    StragglerMark,
    rfc3339,
)
from concertina.api.world import (
    BEGINNING,
    LISTED_MEMBERS,
    Claim,
    Member,
    World,
    packed_members,
    shortened,
    unpacked_members,
)
from concertina.kube.parse.views import job_view
from concertina.plan.plan import plan
from concertina.plan.status.conditions import LONGEST

MOST_BYTES = 256 * 1024
REPLICAS = max(4096, MOST_REPLICAS)
ids = st.one_of(st.uuids().map(str), st.text(st.characters(codec="utf-8"), max_size=12))
members = st.builds(Member, replica=ids, uid=ids, instance=ids, node=ids, workers=st.integers(0, 1024))


@given(st.lists(members, min_size=1))
def test_all_that_is_known_of_members_is_read_again(some: list[Member]) -> None:
    read = unpacked_members(packed_members(tuple(some)))
    assert read == tuple(member.model_copy(update={"node": ""}) for member in some)
    large = tuple(some) * (LISTED_MEMBERS + 1)
    read = unpacked_members(packed_members(large))
    assert read == tuple(
        member.model_copy(update={"uid": shortened(member.uid), "instance": shortened(member.instance), "node": ""})
        for member in large
    )
    assert unpacked_members(packed_members(read)) == read
    assert all(one.is_pod(whole.uid) and one.is_agent(whole.instance) for one, whole in zip(read, large, strict=True))


def test_the_beginning_of_an_id_stands_for_it_and_for_no_other() -> None:
    one, other = "0f1e2d3c-aaaa-bbbb-cccc-000000000000", "0f1e2d3d-aaaa-bbbb-cccc-000000000000"
    whole = Member(replica="j-0-0", uid=one, instance=one, workers=1)
    cut = whole.model_copy(update={"uid": shortened(one), "instance": shortened(one)})
    for member in (whole, cut):
        assert (member.is_pod(one), member.is_agent(one)) == (True, True)
        assert (member.is_pod(other), member.is_agent(other)) == (False, False)
    assert not whole.is_pod(one[:BEGINNING])
    assert not whole.is_pod(f"{one}0")


def _world(count: int) -> World:
    members = tuple(
        Member(
            replica=f"j-{index}-0",
            uid=str(uuid.UUID(int=index << 96)),
            instance=f"{index:016x}",
            workers=8,
            node=f"node-{index}" if count <= LISTED_MEMBERS else "",
        )
        for index in range(count)
    )
    return World(round=1, replicas=count, members=members)


def test_a_world_of_usual_size_is_listed_without_the_ids_of_pods_and_agents() -> None:
    status = JobStatus(world=_world(LISTED_MEMBERS))
    manifest = status.manifest()
    assert len(manifest["world"]["members"]) == LISTED_MEMBERS
    assert manifest["world"]["members"][1] == {"replica": "j-1-0", "workers": 8, "node": "node-1"}
    assert JobStatus.model_validate(manifest) == _read(manifest) == status


def _read(manifest: dict[str, Any]) -> JobStatus:
    """Return the status as the operator reads it."""
    metadata = {"name": "j", "namespace": "n", "uid": "u", "generation": 1, "creationTimestamp": "2026-01-01T00:00:00Z"}
    return job_view({"metadata": metadata, "spec": {}, "status": manifest}).status


def test_a_larger_one_is_packed_and_read_again_as_often_as_you_like() -> None:
    manifest = JobStatus(world=_world(LISTED_MEMBERS + 1)).manifest()
    assert (manifest["world"].get("members"), manifest["world"]["replicas"]) == (None, LISTED_MEMBERS + 1)
    read = _read(json.loads(json.dumps(manifest)))
    assert [member.replica for member in read.world.members] == [f"j-{i}-0" for i in range(LISTED_MEMBERS + 1)]
    assert read.manifest() == manifest
    assert JobStatus.model_validate(manifest) == read == _read(read.manifest())


def test_failures_of_long_ago_are_packed() -> None:
    recent = tuple(Restart(at=_time(i), replica=f"j-{i}-0", reason="X", step=i) for i in range(3 * LISTED_RESTARTS))
    status = JobStatus(restarts=Restarts(total=len(recent), recent=recent))
    manifest = status.manifest()
    assert [entry["step"] for entry in manifest["restarts"]["recent"]] == [*range(100, 150)]
    assert _read(manifest) == status
    manifest["restarts"]["recent"][-1]["step"] = "a newer version's word"
    read = _read(manifest).restarts.recent
    assert [entry.step for entry in read] == [*range(149), 0], "what can be read is kept"


def _time(seconds: float) -> str:
    return rfc3339(jobs.T0 + seconds)


@pytest.mark.parametrize("text", ["", "?", "é", "AAAA", packed_members(_world(3).members)[:-8], 7])
def test_what_can_not_be_unpacked_is_left_out(text: Any) -> None:
    status = JobStatus(world=_world(100), rounds=7).manifest()
    status["internal"] |= {"members": text, "restarts": text, "attempts": [1]}
    read = _read(status)
    assert (read.world.members, read.restarts.recent) == ((), ())
    assert (read.rounds, read.world.round, read.internal.attempts) == (7, 1, (1,))


@pytest.mark.parametrize("value", [7, [1, 2], [[1], [2, 3]], {"a": 1}, None, [["a"], ["b"], ["c"], [-1]]])
def test_nor_is_what_was_something_else(value: Any) -> None:
    assert unpacked_members(pack(value)) == ()


def test_what_unpacks_without_end_is_left_out() -> None:
    assert unpacked_members(pack(["x" * 40_000_000])) == ()


def test_the_worst_status_of_the_largest_job_is_small() -> None:
    """Every list has its maximum length, with names that have only a cluster's way of making names in common."""
    some = random.Random(0)

    def word(length: int) -> str:
        return "".join(some.choices(string.ascii_lowercase + string.digits, k=length))

    def sentence(length: int) -> str:
        return " ".join(word(7) for _ in range(length // 8 + 1))[:length]

    job, at = word(50), _time(0.123456)
    names = [f"{job}-{index}-{some.randrange(10)}" for index in range(REPLICAS)]
    pools = [f"gke-{word(8)}-gpus-{word(8)}" for _ in range(8)]
    nodes = [f"{some.choice(pools)}-{word(4)}" for _ in names]
    found = tuple(
        Member(
            replica=name, uid=str(uuid.UUID(int=some.getrandbits(128))), instance=f"{some.getrandbits(64):016x}",
            node=node, workers=8,
        )
        for name, node in zip(names, nodes, strict=True)
    )  # fmt: skip
    recent = tuple(
        Restart(
            at=_time(some.uniform(0, 3600)), replica=some.choice(names), node=some.choice(nodes),
            reason="WorkerFailed", step=some.randrange(10**7), counted=place % 2 == 0, action="ExcludeReplica",
            error=sentence(200) if place >= 951 else "", after_seconds=some.uniform(0, 1e4),
        )
        for place in range(1001)
    )  # fmt: skip
    numbers = tuple(some.randrange(100) for _ in names)
    status = JobStatus(
        conditions=tuple(
            Condition(type=kind, status="True", reason=word(30), message=sentence(LONGEST), last_transition_time=at)
            for kind in ConditionType
        ),
        world=World(
            round=10**6, replicas=len(names), workers=8 * len(names), coordinator=names[0], members=found, since=at,
            claim=Claim(round=10**6, claim_id=word(16), at=at, reason=word(30), message=sentence(1000)),
        ),
        standby_replicas=StandbyReplicas(ready=MOST_STANDBY_REPLICAS, names=tuple(names[:MOST_STANDBY_REPLICAS])),
        rollback=RollbackMark(round=1, step=1, reason=word(30), message=sentence(1000), at=at),
        skipped=tuple(SampleRange(begin=10**9 + i, end=2 * 10**9 + i) for i in range(32)),
        checkpoint_request=CheckpointRequest(id=word(63), step=1, state="Pending", message=sentence(1000), at=at),
        restarts=Restarts(recent=recent, recovery_actions=(RecoveryActionUse(action="ExcludeReplica"),) * 4),
        last_failure=LastFailure(
            at=at, round=1, replica=names[0], node=nodes[0], reason=word(30), message=sentence(1000),
            last_lines=tuple(sentence(400) for _ in range(20)),
        ),
        avoided_nodes=tuple(AvoidedNode(node=node, until=at, reason=sentence(300)) for node in nodes[:32]),
        stragglers=tuple(
            StragglerMark(rank=10**4, replica=name, node=node, seconds=1.5, others_seconds=0.1, since=at)
            for name, node in zip(names[:16], nodes, strict=False)
        ),
        shares=tuple(
            ShareMark(replica=name, node=node, sequences=1000, factor=0.123)
            for name, node in zip(names[:16], nodes, strict=False)
        ),
        goodput=Goodput(at=at),
        internal=Internal(
            attempts=numbers,
            container_restarts=numbers,
            requeue_state=RequeueState(message=sentence(1000)),
            growth=Growth(joined=tuple(names[:100]), message=sentence(1000), at=at),
            undone=tuple(UndoneStates(round=10**6, step=10**6 + i) for i in range(16)),
        ),
    )  # fmt: skip
    assert len(json.dumps(status.manifest())) < MOST_BYTES
    assert JobStatus.model_validate(status.manifest()).manifest() == status.manifest()


def test_an_operator_that_comes_new_goes_on_with_a_packed_world(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = jobs.running(jobs.spec())
    monkeypatch.setattr("concertina.api.status.LISTED_MEMBERS", 2)
    assert "members" not in seen.job.status.manifest()["world"]
    seen = replace(seen, job=replace(seen.job, status=_read(seen.job.status.manifest())))
    made = plan(seen, jobs.T0 + 11)
    assert (made.status, made.actions) == (seen.job.status, ())
    another = tuple(jobs.pod(pod.index, uid="another") if pod.index == 1 else pod for pod in seen.pods)
    made = plan(replace(seen, pods=another), jobs.T0 + 11)
    assert made.status.world.claim is not None
    assert made.status.world.claim.message == "replica demo-1-0 is gone: its pod was deleted"
    coordinator = replace(seen.agents["demo-0-0"], report=jobs.coordinator_report(instance="restarted"))
    made = plan(replace(seen, agents={**seen.agents, "demo-0-0": coordinator}), jobs.T0 + 11)
    assert made.status.world.claim is not None
    assert made.status.world.claim.reason == "AgentRestarted"
