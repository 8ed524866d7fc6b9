"""Life of jobs with a small command of their own: run, fail, suspend, scale, lose replicas, grow back, end."""

from __future__ import annotations

import base64
import json
import signal
from typing import Any

import pytest

from builders.cluster.cli import Cli
from builders.cluster.operator_process import Jobs, Operator
from builders.until import until

pytestmark = pytest.mark.usefixtures("operator")
SAY = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"
STAY = SAY + "; import time; time.sleep(3600)"
ELASTIC = {"minReplicas": 1, "scaleUp": {"stabilizationWindowSeconds": 1}}
Object = dict[str, Any]


def test_a_job_runs_to_its_end(jobs: Jobs) -> None:
    jobs.create("a", SAY, replicas=2)
    job = jobs.wait_true("a", "Complete")
    assert jobs.condition(job, "Ready")["status"] == "True"
    assert jobs.condition(job, "Running")["status"] == "False"
    assert job["status"].get("rounds", 0) == 1
    assert job["status"]["restarts"]["total"] == 0
    assert job["status"]["observedGeneration"] == job["metadata"]["generation"]
    assert jobs.events("a", "Succeeded")
    # The operator wrote nothing into the user's object.
    assert set(job["metadata"].get("annotations", {})) == set()
    assert "finalizers" not in job["metadata"]
    assert "labels" not in job["metadata"]


@pytest.mark.long(
    law="tests/cluster/operator/lifecycle/test_ends.py::test_a_job_that_fails_for_good_leaves_its_pods_with_the_scripts_last_words"
)
def test_a_worker_that_fails_says_why_in_the_status_and_an_event(jobs: Jobs) -> None:
    script = "print('about to divide'); 1 / 0"
    jobs.create("a", script, failurePolicy={"maxRestarts": 1})
    job = jobs.wait_true("a", "Failed")
    assert "ZeroDivisionError: division by zero" in jobs.condition(job, "Failed")["message"]
    assert "about to divide" in job["status"]["lastFailure"]["lastLines"]
    assert job["status"].get("rounds", 0) == 2
    assert jobs.condition(job, "Stalled")["status"] == "True"
    assert any("ZeroDivisionError" in event["message"] for event in jobs.events("a", "WorkerFailed"))


def test_what_is_shown_of_a_job_that_trains_and_deleted_with_it(jobs: Jobs) -> None:
    jobs.create("a", STAY, replicas=2, elastic={"minReplicas": 2})
    members = jobs.wait_training("a", 2)["status"]["world"]["members"]
    described = jobs.cluster.kubectl("describe", "tj/a", "-n", jobs.namespace)
    assert "2 of 2 replicas" in described
    assert len(described.partition("\nEvents:")[0].splitlines()) <= 100, described
    # The Secret has the identity of the agents, and nothing else.
    secrets = json.loads(jobs.cluster.kubectl("get", "secrets", "-n", jobs.namespace, "-o", "json"))["items"]
    (secret,) = (each for each in secrets if each["metadata"]["name"].startswith("a-concertina-"))
    assert set(secret["data"]) == {"ca.crt", "tls.crt", "tls.key"}
    assert base64.b64decode(secret["data"]["tls.key"]).startswith(b"-----BEGIN PRIVATE KEY")
    # Members are listed as the coordinator knows them.
    done = Cli(jobs.cluster, jobs.namespace)("status", "a", "--members")
    rows = [line.split() for line in done.stdout.splitlines()]
    assert rows == [
        ["Ranks", "Replica", "Node", "Pod", "State", "Step"],
        *([str(rank), each["replica"], each["node"], "Running", "running"] for rank, each in enumerate(members)),
    ], done.stderr
    jobs.delete("a")
    jobs.wait_gone("tj/a")
    jobs.wait_gone("pod,secret", "-l", "app.kubernetes.io/managed-by=concertina")


def test_suspend_and_resume(jobs: Jobs) -> None:
    jobs.create("a", STAY, replicas=2)
    jobs.wait_training("a", 2)
    jobs.patch("a", {"suspend": True})
    job = jobs.wait_true("a", "Suspended")
    jobs.wait("a", lambda _: not jobs.pods("a"))
    assert jobs.condition(job, "Ready")["status"] == "True"
    jobs.patch("a", {"suspend": False})
    job = jobs.wait_training("a", 2)
    assert jobs.condition(job, "Suspended")["status"] == "False"
    assert job["status"]["restarts"]["total"] == 0


@pytest.mark.long(
    law="tests/unit/plan/lifecycle/test_beginning_and_end.py::test_what_is_suspended_drains_as_it_was_whatever_its_template_is_now"
)
def test_a_template_that_changes_between_a_suspend_and_a_resume_that_nobody_saw_is_what_runs(
    jobs: Jobs, operator: Operator
) -> None:
    """The operator receives suspend, change and resume as one event, while the pods of the old template run."""
    made = jobs.create("a", STAY, replicas=2, elastic=ELASTIC)
    jobs.wait_training("a", 2)
    template = made["spec"]["template"]
    template["spec"]["containers"][0]["command"] = ["python3", "-uc", "print('the new one'); " + STAY]
    assert operator.process is not None
    operator.process.send_signal(signal.SIGSTOP)
    try:
        jobs.patch("a", {"suspend": True})
        jobs.patch("a", {"suspend": False, "template": template})
    finally:
        operator.process.send_signal(signal.SIGCONT)
    jobs.wait("a", lambda job: {"a-0-1", "a-1-1"} == set(jobs.members(job)))
    job = jobs.wait_training("a", 2)
    assert job["status"]["restarts"]["total"] == 0
    until(lambda: "the new one" in jobs.logs("a-1-1"), "what the new template prints", lambda: jobs.describe("a"))
    assert jobs.events("a", "TemplateChanged")


@pytest.mark.long(law="tests/unit/plan/lifecycle/test_beginning_and_end.py::test_a_job_created_suspended_gets_no_pods")
def test_a_job_that_is_created_suspended_has_no_pods(jobs: Jobs) -> None:
    jobs.create("a", SAY, suspend=True)
    jobs.wait_true("a", "Suspended")
    assert jobs.pods("a") == []
    jobs.patch("a", {"suspend": False})
    jobs.wait_true("a", "Complete")


@pytest.mark.long(
    law="tests/cluster/operator/rounds/test_growth.py::test_scaling_a_training_job_up_and_down_loses_no_step"
)
def test_scale_up_and_down(jobs: Jobs) -> None:
    jobs.create("a", STAY, replicas=2, elastic=ELASTIC)
    jobs.wait_training("a", 2)
    jobs.cluster.kubectl("scale", "tj", "a", "--replicas=3", "-n", jobs.namespace)
    jobs.wait_training("a", 3)
    jobs.cluster.kubectl("scale", "tj", "a", "--replicas=1", "-n", jobs.namespace)
    job = jobs.wait_training("a", 1)
    jobs.wait("a", lambda _: len(jobs.pods("a")) == 1)
    assert jobs.pods("a")[0]["metadata"]["labels"]["concertina.dev/replica-index"] == "0"
    assert job["status"]["restarts"]["total"] == 0


@pytest.mark.long(
    law="tests/cluster/operator/pods/test_pods.py::test_a_sidecar_that_never_ends_holds_up_neither_success_nor_replacement"
)
@pytest.mark.parametrize("victim", [0, 1], ids=["the coordinator", "another member"])
def test_a_replica_that_dies_is_left_out_at_once_and_replaced(jobs: Jobs, victim: int) -> None:
    jobs.create("a", STAY, replicas=3, elastic=ELASTIC)
    before = jobs.wait_training("a", 3)
    coordinator = before["status"]["world"]["coordinator"]
    others = [m["replica"] for m in before["status"]["world"]["members"] if m["replica"] != coordinator]
    jobs.kill_pod([coordinator, *others][victim])
    jobs.wait("a", lambda job: job["status"]["world"].get("round", 0) > before["status"]["world"]["round"])
    after = jobs.wait_training("a", 3)
    assert after["status"]["restarts"]["total"] >= 1
    survivors = {*jobs.members(before, "uid")} & {*jobs.members(after, "uid")}
    assert len(survivors) == 2, "the survivors were not kept"


def test_a_job_that_is_deleted_in_the_foreground_goes_after_its_pods(jobs: Jobs) -> None:
    jobs.create("a", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + STAY, replicas=2)
    jobs.wait_training("a", 2)
    jobs.cluster.kubectl("delete", "tj", "a", "-n", jobs.namespace, "--cascade=foreground", "--wait=false")
    jobs.wait_gone("tj/a")
    assert jobs.pods("a") == []


@pytest.mark.long(
    law="tests/cluster/operator/pods/test_refusals.py::test_torchruns_pods_do_not_wait_for_those_of_the_job_before"
)
def test_a_job_created_again_under_its_name_is_another_job(jobs: Jobs) -> None:
    jobs.create("a", STAY)
    first = jobs.wait_training("a", 1)
    jobs.delete("a")
    jobs.wait_gone("tj/a")
    jobs.create("a", SAY)
    again = jobs.wait_true("a", "Complete")
    assert again["metadata"]["uid"] != first["metadata"]["uid"]


@pytest.mark.long(
    law="tests/unit/plan/lifecycle/test_beginning_and_end.py::test_after_its_end_pods_are_deleted_and_the_job_too_when_its_time_has_come"
)
def test_ttl_deletes_a_job_that_has_ended(jobs: Jobs) -> None:
    jobs.create("a", SAY, ttlSecondsAfterFinished=1)
    jobs.wait_true("a", "Complete")
    jobs.wait_gone("tj/a")


@pytest.mark.long(law="tests/unit/plan/lifecycle/test_beginning_and_end.py::test_the_deadline")
def test_a_deadline_fails_the_job_and_ends_its_pods(jobs: Jobs) -> None:
    jobs.create("a", STAY, activeDeadlineSeconds=3)
    job = jobs.wait_true("a", "Failed")
    assert "activeDeadlineSeconds" in jobs.condition(job, "Failed")["message"]
    jobs.wait("a", lambda _: all(pod["status"]["phase"] in ("Succeeded", "Failed") for pod in jobs.pods("a")))
