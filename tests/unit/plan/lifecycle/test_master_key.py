"""Jobs whose agents have another master key than the operator: they are reported, and left alone meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest

import concertina_protocol as protocol
from builders import jobs
from builders.jobs import T0
from concertina.api.status import ConditionType
from concertina.plan.actions import CreatePod, DeletePod, Plan
from concertina.plan.observed import AgentView, ConnectionRefusal, JobObservation
from concertina.plan.plan import plan

KEYS = ("active", "older")


def stalled(made: Plan) -> tuple[str, str]:
    condition = made.status.condition("Stalled")
    assert condition is not None
    return condition.status, condition.reason


def with_key(seen: JobObservation, key: str) -> JobObservation:
    status = seen.job.status.model_copy(update={"master_key": key})
    return replace(seen, job=replace(seen.job, status=status), master_keys=KEYS)


@pytest.mark.parametrize("after", [0.1, 5, 31, 600])
def test_a_coordinator_that_knows_another_key_is_not_lost(after: float) -> None:
    """A restarted operator has not been in contact with any member."""
    seen = jobs.running(jobs.spec())
    coordinator = AgentView(wanted_at=T0 + 20, refusal=ConnectionRefusal.OTHER_KEY)
    made = plan(replace(seen, agents={"demo-0-0": coordinator}), T0 + 20 + after)
    assert made.actions == ()
    assert made.status.world == seen.job.status.world
    assert stalled(made) == ("True", "MasterKeyMismatch")
    assert made.status.phase == "Training"
    assert not made.status.is_true(ConditionType.READY), "nobody knows"
    assert made.status.is_true(ConditionType.RUNNING)
    assert made.watch == {"demo-0-0": "127.0.0.1:29400"}


def test_a_coordinator_that_no_longer_listens_is_lost_whatever_key_it_knew() -> None:
    seen = jobs.running(jobs.spec())
    coordinator = AgentView(wanted_at=T0 + 20, refusal=ConnectionRefusal.NOT_LISTENING)
    seen = replace(seen, agents={**seen.agents, "demo-0-0": coordinator})
    made = plan(seen, T0 + 20)
    assert not jobs.sends(made, protocol.Prepare), "members may hear it"
    assert made.watch.keys() == {"demo-0-0", "demo-1-0", "demo-2-0"}, "they are asked at once"
    report = jobs.report("demo-1-0", round=1, claim="claim-a", state="failed")
    seen = replace(seen, agents={**seen.agents, "demo-1-0": jobs.agent("demo-1-0", report=report)})
    assert jobs.sends(plan(seen, T0 + 20.1), protocol.Prepare)


def test_a_replica_outside_of_the_round_that_knows_another_key_stays_and_the_round_goes_on() -> None:
    seen = jobs.running(jobs.spec(replicas=4))
    late = jobs.pod(3)
    agents = {**seen.agents, late.name: AgentView(wanted_at=T0, refusal=ConnectionRefusal.OTHER_KEY)}
    seen = replace(seen, pods=(*seen.pods, late), agents=agents)
    made = plan(seen, T0 + 1000)
    assert not [action for action in made.actions if isinstance(action, CreatePod | DeletePod)]
    assert made.status.restarts == seen.job.status.restarts
    trouble = made.status.trouble
    assert trouble is not None
    assert (trouble.type, trouble.reason) == ("Degraded", "MasterKeyMismatch")
    assert "demo-3-0: the agent's certificate" in trouble.message
    # The reachable members still answer a worker's failure.
    failure = protocol.Failure("demo-1-0", "WorkerFailed", "exit code 1", at=T0 + 1001)
    coordinator = replace(seen.agents["demo-0-0"], report=jobs.coordinator_report(failures=(failure,)))
    made = plan(replace(seen, agents={**seen.agents, "demo-0-0": coordinator}), T0 + 1001)
    assert sorted(jobs.sends(made, protocol.Prepare)) == ["demo-0-0", "demo-1-0", "demo-2-0"]


def test_nothing_is_done_to_a_job_whose_key_is_missing_though_its_coordinator_dies() -> None:
    seen = with_key(jobs.running(jobs.spec()), "lost")
    made = plan(replace(seen, pods=seen.pods[1:], agents={}), T0 + 600)
    assert (made.actions, made.watch) == ((), {})
    assert made.status.world == seen.job.status.world
    assert stalled(made) == ("True", "MasterKeyMismatch")
    assert "started with master key lost" in made.status.condition("Stalled").message  # type: ignore[union-attr]
    again = plan(jobs.then(with_key(seen, "lost"), made, agents={}), T0 + 601)
    assert (again.status.conditions, again.actions) == (made.status.conditions, ())
    found = replace(jobs.then(seen, made, pods=seen.pods[1:], agents={}), master_keys=("another", "lost"))
    made = plan(found, T0 + 700)
    assert jobs.sends(made, protocol.Prepare), "the key is there again, and the coordinator is dead"
    assert stalled(made)[0] == "False"


def test_a_job_keeps_the_key_that_it_was_started_with() -> None:
    new = jobs.observed(jobs.job(jobs.spec()), master_keys=KEYS)
    made = plan(new, T0)
    assert made.status.master_key == "active"
    switched = replace(jobs.then(new, made), master_keys=("newer", *KEYS))
    assert plan(switched, T0 + 1).status.master_key == "active"


def test_of_a_job_from_before_keys_had_ids_an_agent_that_answers_shows_which_it_is() -> None:
    seen = replace(jobs.running(jobs.spec()), master_keys=KEYS)
    assert plan(replace(seen, agents={}), T0 + 11).status.master_key == ""
    assert plan(seen, T0 + 11).status.master_key == "active"
