"""Accounting of the time of scripts, with real processes that report their steps or do not."""

from __future__ import annotations

from contextlib import suppress

import pytest

from builders.cluster.drills import each_second_is_in_one_class
from builders.cluster.operator_process import Jobs
from builders.until import until
from concertina.api.status import JobStatus

pytestmark = pytest.mark.usefixtures("operator")
SILENT = "import time; time.sleep(3600)"
REPORTS = """
import itertools, time, trainingjob

time.sleep(1)
for step in itertools.count(1):
    trainingjob.report(step=step)
    time.sleep(0.1)
"""


def kill_worker(jobs: Jobs, replica: str) -> None:
    """Kill the worker of a replica once it is there: the operator may hear of a round before all its workers start."""

    def killed() -> bool:
        with suppress(LookupError):
            jobs.kill_worker("a", replica)
            return True
        return False

    until(killed, f"a worker of {replica}", lambda: jobs.describe("a"))


def killed_twice(jobs: Jobs, script: str, reports: bool) -> JobStatus:
    """Kill a worker in each of the first two rounds, and return the status after both incidents."""
    jobs.create("a", script, replicas=2, price={"perReplicaHour": "3600"})
    for incidents in (1, 2):
        job = jobs.wait_training("a", 2, incidents - 1)
        if reports:  # a round that fails before the first report of the job leaves unknown time
            job = jobs.wait("a", lambda job: job["status"].get("progress"))
        kill_worker(jobs, jobs.members(job)[1])
        job = jobs.wait("a", lambda job, number=incidents: len(job["status"].get("incidents", ())) == number)
    each_second_is_in_one_class(job)
    return JobStatus.model_validate(job["status"])


@pytest.mark.long(
    law="tests/unit/plan/status/test_accounting.py::test_time_without_known_steps_is_neither_productive_nor_part_of_the_goodput"
)
def test_the_goodput_of_a_silent_script_is_unknown(jobs: Jobs) -> None:
    status = killed_twice(jobs, SILENT, reports=False)
    assert status.goodput.percent is None
    assert status.goodput.unknown_seconds > 0
    assert status.goodput.productive_seconds == 0
    assert [(each.cause, each.at_least) for each in status.incidents] == [("WorkerSignaled", True)] * 2
    assert "percent" not in jobs.get("a")["status"]["goodput"]


@pytest.mark.long(
    law="tests/unit/plan/status/test_accounting.py::test_a_script_that_reports_recovers_until_its_next_report"
)
def test_the_start_of_a_script_that_reports_is_startup_and_then_recovery(jobs: Jobs) -> None:
    status = killed_twice(jobs, REPORTS, reports=True)
    assert status.goodput.percent is not None
    assert status.goodput.unknown_seconds == 0
    assert status.goodput.startup_seconds > 1
    for incident in status.incidents:
        assert (incident.cause, incident.at_least) == ("WorkerSignaled", False)
        assert incident.seconds > 1, "the script sleeps before its first step"
