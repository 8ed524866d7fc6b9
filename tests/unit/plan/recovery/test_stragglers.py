"""Responses to a straggler, as failurePolicy.onStraggler says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import concertina_protocol as protocol
from builders import jobs
from concertina.plan.actions import DeletePod
from concertina.plan.observed import JobObservation
from concertina.plan.plan import plan

FOUND = protocol.Straggler("demo-2-0", 2, 0.31, 0.05)
SAID = (
    "rank 2 (replica demo-2-0 on node node-2) is a straggler: "
    "its own work takes 0.31 s per step, and that of the other ranks 0.05 s"
)


def lagging(*found: protocol.Straggler, **fields: Any) -> JobObservation:
    seen = jobs.running(jobs.spec(**fields))
    coordinator = replace(seen.agents["demo-0-0"], report=jobs.coordinator_report(stragglers=found))
    return replace(seen, agents={**seen.agents, "demo-0-0": coordinator})


def deleted(made: Any) -> list[str]:
    return [action.name for action in made.actions if isinstance(action, DeletePod)]


def test_it_is_named_in_status_condition_and_one_event() -> None:
    seen = lagging(FOUND)
    made = plan(seen, jobs.T0 + 100)
    (mark,) = made.status.stragglers
    assert (mark.rank, mark.replica, mark.node, mark.seconds) == (2, "demo-2-0", "node-2", 0.31)
    running = made.status.condition("Running")
    assert running is not None
    assert running.message.endswith(SAID)
    assert [(event.reason, event.message) for event in made.events] == [("Straggler", SAID)]
    assert deleted(made) == []
    again = plan(jobs.then(seen, made), jobs.T0 + 200)
    assert (again.status.stragglers, again.events) == ((mark,), ())
    unheard = {name: replace(view, report=None) for name, view in seen.agents.items()}
    new_operator = plan(jobs.then(seen, made, agents=unheard), jobs.T0 + 200)
    assert new_operator.status.condition("Running") == running
    over = plan(replace(lagging(), job=jobs.then(seen, made).job), jobs.T0 + 300)
    assert over.status.stragglers == ()


REPLACE = {"onStraggler": "Replace"}


def test_its_pod_is_replaced_once_without_a_failure_being_counted() -> None:
    seen = lagging(FOUND, failurePolicy=REPLACE)
    made = plan(seen, jobs.T0 + 100)
    assert deleted(made) == ["demo-2-0"]
    (entry,) = made.status.restarts.recent
    assert (entry.replica, entry.node, entry.reason, entry.counted) == ("demo-2-0", "node-2", "Straggler", False)
    assert made.status.restarts.in_window == 0
    assert (made.status.incidents, made.status.goodput.recovery) == ((), ()), "it still trains"
    claim = made.status.world.claim
    assert claim is not None
    assert claim.round == 1, "the round is drained first"
    pods = tuple(replace(pod, deleting=pod.name == "demo-2-0") for pod in seen.pods)
    after = plan(jobs.then(seen, made, pods=pods), jobs.T0 + 101)
    assert "demo-0-0" in jobs.sends(after, protocol.Drain)
    assert len(after.status.restarts.recent) == 1


def test_a_job_that_can_not_go_on_without_it_keeps_it() -> None:
    made = plan(lagging(FOUND, failurePolicy=REPLACE, elastic=None), jobs.T0 + 100)
    assert deleted(made) == []
    running = made.status.condition("Running")
    assert running is not None
    assert "it is not replaced: the job can't continue without it" in running.message


def test_what_is_slow_on_every_node_is_replaced_no_more() -> None:
    seen = lagging(FOUND, failurePolicy=REPLACE)
    made = plan(seen, jobs.T0 + 50)
    (entry,) = made.status.restarts.recent
    past = tuple(entry.model_copy(update={"replica": f"demo-2-{attempt}"}) for attempt in (7, 8, 9))
    status = seen.job.status.model_copy(update={"restarts": made.status.restarts.model_copy(update={"recent": past})})
    made = plan(replace(seen, job=replace(seen.job, status=status)), jobs.T0 + 100)
    assert deleted(made) == []
    running = made.status.condition("Running")
    assert running is not None
    assert "3 pods before it were slow as well" in running.message
