"""Remains of a job that has ended: its pods with their logs, and the last failure in its status."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from builders.cluster.operator_process import Jobs, bundled

pytestmark = pytest.mark.usefixtures("operator")
CONCERTINA = str(Path(sys.executable).parent / "concertina")
BREAKS = """
import os, time
def breaks():
    raise RuntimeError("the second rank breaks")
print("rank", os.environ["RANK"], "is here", flush=True)
if os.environ["RANK"] == "1":
    breaks()
time.sleep(3600)
"""
Object = dict[str, Any]


def status(jobs: Jobs, name: str) -> str:
    """Return the output of `concertina status`."""
    command = [CONCERTINA, "status", name, "-n", jobs.namespace]
    environment = os.environ | {"KUBECONFIG": str(jobs.cluster.kubeconfig)}
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=60).stdout


def phases(jobs: Jobs, name: str) -> dict[str, str]:
    return {pod["metadata"]["name"]: pod["status"]["phase"] for pod in jobs.pods(name)}


def wait_ended(jobs: Jobs, name: str) -> Object:
    """Return the job as soon as none of its pods runs."""
    return jobs.wait(name, lambda _: set(phases(jobs, name).values()) <= {"Succeeded", "Failed"})


def test_a_job_that_fails_for_good_leaves_its_pods_with_the_scripts_last_words(jobs: Jobs) -> None:
    jobs.create("a", BREAKS, replicas=2)
    job = jobs.wait_true("a", "Failed")
    members = jobs.members(job)
    assert len(members) == 2
    wait_ended(jobs, "a")
    left = phases(jobs, "a")
    assert [left[member] for member in members] == ["Failed", "Failed"]
    failure = job["status"]["lastFailure"]
    assert failure["replica"] in members
    log = jobs.logs(failure["replica"])
    assert "in breaks" in log
    assert "RuntimeError: the second rank breaks" in log
    shown = jobs.cluster.kubectl("get", "pod", failure["replica"], "-n", jobs.namespace, "--no-headers")
    assert "Error" in shown

    assert (failure["reason"], failure["exitCode"]) == ("WorkerFailed", 1)
    assert failure["message"].endswith("exited with code 1: RuntimeError: the second rank breaks")
    assert failure["lastLines"][-1] == "RuntimeError: the second rank breaks"
    assert "Traceback (most recent call last):" in failure["lastLines"]
    conditions = job["status"]["conditions"]
    assert not any("Traceback" in each.get("message", "") for each in conditions)
    text = status(jobs, "a")
    assert text.count("Traceback (most recent call last):") == 1
    before, _, events = text.partition("\nEvent ")
    besides = before + events[events.index("The last lines of") :]
    assert besides.count("RuntimeError: the second rank breaks") == 2, "in the sentence at the top, and at its place"
    assert all(len(event["message"]) < 300 for event in jobs.events("a", "WorkerFailed"))
    rounds = [event["message"] for event in jobs.events("a", "RoundCommitted")]
    assert not any("beginning" in message for message in rounds)
    assert any("continues from its own checkpoint if it has one" in message for message in rounds)

    jobs.patch("a", {"ttlSecondsAfterFinished": 1})
    jobs.wait_gone("tj/a")
    jobs.wait_gone("pod", "-l", "concertina.dev/job=a")


@pytest.mark.long(
    law="tests/cluster/operator/lifecycle/test_ends.py::test_a_job_that_fails_for_good_leaves_its_pods_with_the_scripts_last_words"
)
@pytest.mark.timeout(280)
def test_bad_input_of_the_bundled_trainer_can_be_read_in_its_pod(jobs: Jobs, tmp_path: Path) -> None:
    jobs.create("a", **bundled(tmp_path / "nowhere", tmp_path / "fault"))
    job = jobs.wait_true("a", "Failed")
    failure = job["status"]["lastFailure"]
    assert (failure["reason"], failure["exitCode"]) == ("InvalidInput", 78)
    assert str(tmp_path / "nowhere") in failure["message"]
    wait_ended(jobs, "a")
    assert phases(jobs, "a") == {failure["replica"]: "Failed"}
    assert str(tmp_path / "nowhere") in jobs.logs(failure["replica"])


@pytest.mark.long(law="tests/unit/plan/lifecycle/test_beginning_and_end.py::test_which_pods_go_when_the_job_has_ended")
def test_a_complete_job_keeps_its_pods_and_other_policies_keep_none_or_all(jobs: Jobs) -> None:
    never = {"maxRestarts": 0}
    jobs.create("done", "print('done')", replicas=2)
    jobs.create("none", "1 / 0", failurePolicy=never, cleanPodPolicy="None")
    wait_ended(jobs, "done")
    jobs.wait_true("none", "Failed")
    jobs.create("all", "print('done')", cleanPodPolicy="All")
    jobs.wait_true("all", "Complete")
    jobs.wait("all", lambda _: not jobs.pods("all"))
    # All pods of the job that ended later are gone by now.
    assert phases(jobs, "done") == {"done-0-0": "Succeeded", "done-1-0": "Succeeded"}
    assert "done" in jobs.logs("done-0-0")
    assert phases(jobs, "none") == {"none-0-0": "Running"}
