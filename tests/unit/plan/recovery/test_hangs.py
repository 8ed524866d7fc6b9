"""Responses to a hang, as failurePolicy says."""

from __future__ import annotations

from dataclasses import replace

import pytest

import concertina_protocol as protocol
from builders import jobs
from concertina.plan.observed import JobObservation
from concertina.plan.plan import plan

STACK = (
    "process 8: state S (sleeping), 9 threads",
    "Current thread 0x1 (most recent call first):",
    '  File "/usr/lib/queue.py", line 171 in get',
    '  File "/opt/data/batches.py", line 40 in next',
    "Thread 0x2 (most recent call first):",
    '  File "/opt/data/reader.py", line 12 in read',
)
HANG = protocol.Hang("demo-1-0", 1, 40, "loading data", "computing", 62.0, stack=STACK)
SAID = "no rank has moved for 62 s after step 40: rank 1 (replica demo-1-0 on node node-1) is loading data while the"


def hanging(hang: protocol.Hang | None = HANG, **policy: object) -> JobObservation:
    """Return a job that trained, whose coordinator has just reported a hang."""
    seen = jobs.running(jobs.spec(failurePolicy=policy))
    coordinator = replace(seen.agents["demo-0-0"], report=jobs.coordinator_report(hang=hang))
    return replace(seen, agents={**seen.agents, "demo-0-0": coordinator})


def test_a_hang_leads_to_a_new_round_and_names_who_is_behind() -> None:
    made = plan(hanging(), jobs.T0 + 100)
    claim = made.status.world.claim
    assert claim is not None
    assert (claim.round, claim.reason, claim.committed) == (2, "Hang", False)
    (event,) = [event for event in made.events if event.reason == "Hang"]
    assert event.message.startswith(SAID)
    assert "get (queue.py:171) < next (batches.py:40); another thread: read (reader.py:12)" in event.message
    assert "log of pod demo-1-0" in event.message
    (failed,) = made.status.restarts.recent
    assert (failed.replica, failed.node, failed.reason, failed.counted) == ("demo-1-0", "node-1", "Hang", True)
    assert failed.action == "RecreatePod"


def test_a_hang_of_all_blames_nobody() -> None:
    made = plan(hanging(protocol.Hang("", None, 40, "computing", "", 62.0, 3)), jobs.T0 + 100)
    claim = made.status.world.claim
    assert claim is not None
    assert (claim.reason, claim.message) == (
        "CollectiveHang",
        "no rank has moved for 62 s after step 40: all 3 workers wait in the same way (computing)",
    )


@pytest.mark.parametrize(
    ("hung", "said"),
    [
        (
            protocol.HungCollective("all_reduce", 12, "mesh_shard", 3, (1,), 1),
            "; rank 1 did not call all_reduce (number 12 in process group mesh_shard), for which 3 ranks wait; stack",
        ),
        (
            protocol.HungCollective("all_reduce", 12, "mesh_shard", 1, (1, 2), 9),
            "; ranks 1, 2 and 7 more did not call all_reduce (number 12 in process group mesh_shard), for which 1 rank "
            "waits; stack",
        ),
        (
            protocol.HungCollective("all_reduce", 12, "mesh_shard", 3, (1,), 1, "broadcast"),
            "; rank 1 called broadcast instead of all_reduce (number 12 in process group mesh_shard), for which 3 "
            "ranks wait; stack",
        ),
        (
            protocol.HungCollective("all_reduce", 12, "mesh_shard", 3, silent=(1,)),
            "; all_reduce (number 12 in process group mesh_shard) does not complete, and the flight recorder of rank 1 "
            "does not answer; stack",
        ),
        (
            protocol.HungCollective("all_reduce", 12, "mesh_shard", 4),
            "; all its ranks called all_reduce (number 12 in process group mesh_shard), but it does not complete; ",
        ),
    ],
)
def test_a_hang_names_the_collective_and_the_rank_that_did_not_come(hung: protocol.HungCollective, said: str) -> None:
    made = plan(hanging(replace(HANG, collective=hung)), jobs.T0 + 100)
    (event,) = [event for event in made.events if event.reason == "Hang"]
    assert said in event.message
    assert made.status.last_failure is not None
    assert said in made.status.last_failure.message


def test_report_lets_the_round_be_and_says_it_once() -> None:
    seen = hanging(onHang="Report")
    made = plan(seen, jobs.T0 + 100)
    claim = made.status.world.claim
    assert claim is not None
    assert (claim.round, claim.committed) == (1, True)
    stalled = made.status.condition("Stalled")
    assert stalled is not None
    assert (stalled.status, stalled.reason) == ("True", "Hang")
    assert stalled.message.startswith(SAID)
    assert [event.reason for event in made.events] == ["Hang"]
    again = plan(jobs.then(seen, made), jobs.T0 + 101)
    assert again.events == ()
    moves = hanging(None, onHang="Report")
    over = plan(replace(moves, job=jobs.then(seen, made).job), jobs.T0 + 110).status.condition("Stalled")
    assert over is not None
    assert over.status == "False"


@pytest.mark.parametrize(("policy", "seconds"), [({}, None), ({"hangTimeoutSeconds": 7}, 7.0)])
def test_the_coordinator_is_told_the_limit(policy: dict[str, object], seconds: float | None) -> None:
    spec = jobs.spec(failurePolicy=policy)
    seen = jobs.observed(jobs.job(spec), tuple(jobs.pod(i) for i in range(3)), {})
    seen = replace(seen, agents={pod.name: jobs.agent(pod.name) for pod in seen.pods})
    made = plan(seen, jobs.T0 + 10)
    prepares = jobs.sends(made, protocol.Prepare)
    agents = {
        name: jobs.called(
            seen.agents[name], message, jobs.T0 + 10, done_at=jobs.T0 + 10, reply=jobs.prepared(name, message)
        )
        for name, message in prepares.items()
    }
    assigns = jobs.sends(plan(jobs.then(seen, made, agents=agents), jobs.T0 + 10), protocol.Assign)
    assert {message.limits.hang_seconds for message in assigns.values()} == {seconds}
