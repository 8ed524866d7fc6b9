"""Silence alone is no death: an operator that is cut off, stopped, or has a wrong clock leaves healthy rounds alone.

The operator is a real process, and the faults between it and the agents are injected in it
(tests/programs/operator_faults).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from builders.cluster.operator_process import Jobs, Operator
from builders.programs import PROGRAMS

HEARD = "tests/unit/agents/test_connections.py"
STAY = "import time; time.sleep(3600)"
ELASTIC = {"minReplicas": 1, "scaleUp": {"stabilizationWindowSeconds": 1}}
LONG_ENOUGH = 8.0
"""Seconds for streams to count as silent (3), to be reopened (1), and for UNHEARD (3 here)."""
Object = dict[str, Any]


class Faults:
    """Faults in the operator's process, from now on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def cut(self, *addresses: str) -> None:
        (self._folder / "cut").write_text(" ".join(addresses))

    def set_clock(self, seconds: float) -> None:
        (self._folder / "clock").write_text(str(seconds))


@pytest.fixture
def faults(operator: Operator, tmp_path: Path) -> Iterator[Faults]:
    operator.end(signal.SIGTERM)
    operator.start(PYTHONPATH=str(PROGRAMS / "operator_faults"), FAULTS=str(tmp_path))
    yield Faults(tmp_path)
    operator.end(signal.SIGTERM)
    operator.start()


def address(jobs: Jobs, replica: str) -> str:
    (pod,) = (pod for pod in jobs.pods("a") if pod["metadata"]["name"] == replica)
    return f"{pod['status']['podIP']}:29400"


def undisturbed(jobs: Jobs, before: Object) -> Object:
    """Check that the job has the same round and pods as before, and return the job."""
    after = jobs.get("a")
    assert after["status"]["world"] == before["status"]["world"], jobs.describe("a")
    assert after["status"]["restarts"]["total"] == 0
    members = dict(zip(jobs.members(before), jobs.members(before, "uid"), strict=True))
    assert {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in jobs.pods("a")} == members
    return after


def stalled(job: Object) -> bool:
    return Jobs.condition(job, "Stalled").get("reason") == "AgentsUnreachable"


def degraded(job: Object) -> bool:
    return Jobs.condition(job, "Degraded").get("reason") == "AgentsUnreachable"


@pytest.mark.long(law="tests/simulation/stories/test_partitions.py::test_a_partition_is_answered_in_a_few_rounds")
def test_a_coordinator_that_the_operator_alone_does_not_hear_goes_on_until_a_member_says_otherwise(
    jobs: Jobs, faults: Faults
) -> None:
    jobs.create("a", STAY, replicas=3, elastic=ELASTIC)
    before = jobs.wait_training("a", 3)
    coordinator, member = jobs.members(before)[0], jobs.members(before)[1]
    faults.cut(address(jobs, coordinator))
    reported = jobs.wait("a", degraded)
    assert "the other members still reach it" in jobs.condition(reported, "Degraded")["message"]
    time.sleep(LONG_ENOUGH)
    undisturbed(jobs, before)
    assert len(jobs.events("a", "AgentsUnreachable")) == 1
    # The connected members still answer a failure. The coordinator takes part again once it is connected.
    jobs.kill_worker("a", member)
    shrunk = jobs.wait_training("a", 2, past=before["status"]["world"]["round"])
    assert coordinator not in jobs.members(shrunk)
    faults.cut()
    jobs.wait_training("a", 3, past=shrunk["status"]["world"]["round"])


@pytest.mark.long(law="tests/simulation/stories/test_partitions.py::test_a_partition_is_answered_in_a_few_rounds")
def test_an_operator_that_hears_nobody_tears_nothing_down_and_heals(jobs: Jobs, faults: Faults) -> None:
    jobs.create("a", STAY, replicas=2, elastic=ELASTIC)
    before = jobs.wait_training("a", 2)
    faults.cut("*")
    reported = jobs.wait("a", stalled)
    assert "no agent of this job has been reached" in jobs.condition(reported, "Stalled")["message"]
    assert jobs.condition(reported, "Running")["status"] == "True"
    jobs.create("b", STAY)  # The agent of this pod is never connected.
    time.sleep(LONG_ENOUGH)
    undisturbed(jobs, before)
    faults.cut()
    jobs.wait("a", lambda job: jobs.condition(job, "Stalled")["status"] == "False")
    undisturbed(jobs, before)
    jobs.wait_training("b", 1)
    jobs.kill_worker("a", jobs.members(before)[1])
    jobs.wait_training("a", 2, past=before["status"]["world"]["round"])


@pytest.mark.long(law=f"{HEARD}::test_a_clock_that_is_set_makes_no_silence_longer_or_shorter")
def test_a_clock_that_is_set_costs_no_round_and_delays_no_recovery(jobs: Jobs, faults: Faults) -> None:
    jobs.create("a", STAY, replicas=2, elastic=ELASTIC)
    before = jobs.wait_training("a", 2)
    for seconds in (3600.0, -3600.0):
        faults.set_clock(seconds)
        time.sleep(LONG_ENOUGH / 2)
        undisturbed(jobs, before)
    jobs.kill_worker("a", jobs.members(before)[1])
    jobs.wait_training("a", 2, past=before["status"]["world"]["round"])
    jobs.kill_pod(jobs.members(before)[1])
    shrunk = jobs.wait_training("a", 1)
    jobs.wait_training("a", 2, past=shrunk["status"]["world"]["round"])


@pytest.mark.long(law=f"{HEARD}::test_time_in_which_the_operator_stood_still_does_not_count_against_an_agent")
def test_an_operator_that_was_stopped_for_long_costs_no_round(jobs: Jobs, operator: Operator) -> None:
    jobs.create("a", STAY, replicas=2, elastic=ELASTIC)
    before = jobs.wait_training("a", 2)
    assert operator.process is not None
    operator.process.send_signal(signal.SIGSTOP)
    time.sleep(5.0)
    operator.process.send_signal(signal.SIGCONT)
    jobs.create("b", "print('hello')")
    jobs.wait_true("b", "Complete")
    undisturbed(jobs, before)
