"""Container that was restarted in its pod: its reason is named, and it is counted once."""

from __future__ import annotations

from dataclasses import replace

import pytest

import concertina_protocol as protocol
from builders import jobs
from concertina.plan.observed import JobObservation
from concertina.plan.plan import plan


def restarted(seen: JobObservation, index: int = 1, **ended: object) -> JobObservation:
    fields = {"restarts": 1, "last_exit_code": 137, "last_exit_reason": "OOMKilled", **ended}
    pods = tuple(replace(pod, **fields) if pod.index == index else pod for pod in seen.pods)
    return replace(seen, pods=pods)


def test_the_loss_of_the_member_turns_out_to_be_want_of_memory() -> None:
    seen = jobs.running(jobs.spec())
    lost = protocol.Failure("demo-1-0", "MemberLost", "demo-1-0 closed its connection to the coordinator.", step=40)
    coordinator = replace(seen.agents["demo-0-0"], report=jobs.coordinator_report(failures=(lost,)))
    made = plan(replace(seen, agents={**seen.agents, "demo-0-0": coordinator}), jobs.T0 + 50)
    (entry,) = made.status.restarts.recent
    assert (entry.reason, entry.counted) == ("MemberLost", False)

    after = restarted(jobs.then(seen, made))
    made = plan(after, jobs.T0 + 51)
    (entry,) = made.status.restarts.recent
    assert (entry.replica, entry.reason, entry.counted) == ("demo-1-0", "OutOfMemory", True)
    assert (made.status.restarts.in_window, made.status.restarts.total) == (1, 1)
    assert made.status.internal.container_restarts == (0, 1)
    (event,) = [event for event in made.events if event.reason == "OutOfMemory"]
    assert "demo-1-0 on node node-1" in event.message
    assert "resources.limits.memory" in event.message

    again = plan(jobs.then(after, made), jobs.T0 + 52)
    assert (again.status.restarts.total, again.status.internal.container_restarts) == (1, (0, 1))
    assert not [event for event in again.events if event.reason == "OutOfMemory"]


@pytest.mark.parametrize(
    ("code", "reason", "name", "counted"),
    [(1, "Error", "ContainerRestarted", True), (255, "Unknown", "ContainerRestarted", False)],
)
def test_one_that_was_not_seen_before_has_an_entry_of_its_own(code: int, reason: str, name: str, counted: bool) -> None:
    made = plan(restarted(jobs.running(jobs.spec()), last_exit_code=code, last_exit_reason=reason), jobs.T0 + 50)
    (entry,) = made.status.restarts.recent
    assert (entry.reason, entry.counted) == (name, counted)


def test_a_job_that_runs_out_of_memory_again_and_again_fails() -> None:
    seen = jobs.running(jobs.spec(failurePolicy={"maxRestarts": 1}))
    made = plan(restarted(seen), jobs.T0 + 50)
    seen = restarted(jobs.then(seen, made), restarts=2)
    made = plan(seen, jobs.T0 + 60)
    seen = jobs.then(seen, made)
    failed = plan(seen, jobs.T0 + 61).status.condition("Failed")
    assert failed is not None
    assert (failed.status, failed.reason) == ("True", "ReachedMaxRestarts")
