"""Containers that die as a whole, pods in the host's network, and torchrun's example, on real kubelets."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import time

import pytest
import yaml

from builders.cluster import drills, e2e
from builders.cluster.e2e import Cluster, Object, condition, reason
from concertina.api.status import JobStatus

pytestmark = [pytest.mark.usefixtures("operator"), pytest.mark.timeout(900)]
STAY = "import time; time.sleep(3600)"
BIG: Object = {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "1536Mi"}}


def test_a_container_that_is_killed_as_a_whole_comes_back_in_place(
    cluster: Cluster, data: None, request: pytest.FixtureRequest
) -> None:
    """With cgroup v2, the kernel kills all processes of a container at once for lack of memory."""
    job = e2e.bundled_job("killed", e2e.pod(e2e.trainer(resources=BIG)))
    job["spec"]["elastic"] = {"minReplicas": 1, "scaleUp": {"stabilizationWindowSeconds": 1}}
    with cluster.running(job):
        before = cluster.training(2, name="killed")
        before = cluster.until("some steps", lambda status: status["progress"]["step"] > 20, "killed")
        uids = {pod["metadata"]["uid"] for pod in cluster.pods("killed")}
        victim = before["world"]["members"][1]
        at = time.time()
        kill = f"{e2e.PROCESS_1}os.kill(process_1(), 9)"
        e2e.on_node(victim["node"], "python3", "-c", kill, victim["replica"])
        cluster.until(
            "the container's restart", lambda status: status.get("internal", {}).get("containerRestarts"), "killed"
        )
        after = cluster.training(2, above=before["world"]["round"], name="killed")
        drills.keep(request.config, "whole container killed", f"whole {time.time() - at:.1f}")
        assert {pod["metadata"]["uid"] for pod in cluster.pods("killed")} == uids, "a pod was replaced"
        assert {member["replica"] for member in after["world"]["members"]} == {
            member["replica"] for member in before["world"]["members"]
        }
        after = cluster.until("its count", lambda status: status["restarts"].get("inWindow"), "killed")
        entries = [(entry["replica"], entry["reason"]) for entry in after["restarts"]["recent"]]
        assert entries == [(victim["replica"], "ContainerRestarted")]


def test_two_jobs_in_the_network_of_one_host(cluster: Cluster) -> None:
    """There are four agents at one address, each at a port of its own, which the operator and the others reach."""
    node = cluster.kubectl("get", "nodes", "-o=jsonpath={.items[0].metadata.name}")
    there = {"hostNetwork": True, "nodeSelector": {"kubernetes.io/hostname": node}, "terminationGracePeriodSeconds": 1}
    container = e2e.trainer(command=["python3", "-c", STAY])
    names = ("host-a", "host-b")
    with cluster.running(*(e2e.own_job(name, e2e.pod(container, **there)) for name in names)):
        for name in names:
            cluster.training(2, name=name)
        pods = [pod for name in names for pod in cluster.pods(name)]
        assert len({pod["status"]["podIP"] for pod in pods}) == 1
        assert pods[0]["status"]["podIP"] == pods[0]["status"]["hostIP"]
        trainers = [next(c for c in pod["spec"]["containers"] if c["name"] == "trainer") for pod in pods]
        assert len({port["hostPort"] for c in trainers for port in c["ports"] if port["name"] == "concertina"}) == 4


FAILS = """
import os, time
print("epoch 0", flush=True)
if os.environ["RANK"] == "1":
    raise KeyError("labels")
time.sleep(3600)
"""


def test_what_a_failed_script_printed_can_be_read_when_its_job_is_over(cluster: Cluster) -> None:
    """The kubelet ends the running pods without deleting them, and keeps their logs."""
    job = e2e.own_job("fails", e2e.pod(e2e.trainer(command=["python3", "-c", FAILS])), failurePolicy={"maxRestarts": 0})
    with cluster.running(job):
        status = cluster.until("the end", lambda status: condition(status, "Failed")["status"] == "True", "fails")
        assert "KeyError: 'labels'" in condition(status, "Failed")["message"]
        assert status["lastFailure"]["lastLines"][-1] == "KeyError: 'labels'"

        def ended(_: Object) -> bool:
            return {pod["status"]["phase"] for pod in cluster.pods("fails")} == {"Failed"}

        cluster.until("the end of both pods", ended, "fails")
        logs = {pod["metadata"]["name"]: cluster.log(pod["metadata"]["name"]) for pod in cluster.pods("fails")}
        assert sorted(logs) == ["fails-0-0", "fails-1-0"]
        assert all("epoch 0" in log for log in logs.values())
        assert any("KeyError: 'labels'" in log for log in logs.values())


def test_a_job_made_again_does_not_wait_for_a_pod_on_a_lost_node(
    cluster: Cluster, request: pytest.FixtureRequest
) -> None:
    """Nothing ends the pod on the lost node: it keeps its name until the node is back."""
    lose, mend = (os.environ.get(f"CONCERTINA_DRILL_NODE_{name}", "") for name in ("KILL", "UP"))
    if not (lose and mend):
        pytest.skip("set CONCERTINA_DRILL_NODE_KILL and CONCERTINA_DRILL_NODE_UP (docs/drills.md)")
    elastic = {"minReplicas": 1, "scaleUp": {"stabilizationWindowSeconds": 1}}
    job = e2e.own_job("again", e2e.pod(e2e.trainer(command=["python3", "-c", STAY])), elastic=elastic)
    with cluster.running(job):
        before = cluster.training(2, name="again")
        spared = cluster.operator_nodes()
        members = JobStatus.model_validate(before).world.members
        gone = next(member for member in members if member.node not in spared)
        subprocess.run(shlex.split(lose.replace("{node}", gone.node)), check=True, timeout=60)
        try:
            cluster.kubectl("delete", "tj", "again", "--timeout=60s")
            cluster.apply(job)
            at = time.time()
            cluster.until("a new round", lambda status: reason(status) == "Training", "again")
            drills.keep(request.config, "job made again", f"trains after {time.time() - at:.1f}")
            pods = {pod["metadata"]["name"]: pod["metadata"] for pod in cluster.pods("again")}
            assert pods[gone.replica]["uid"] == gone.uid, "the old pod stands still"
            assert "deletionTimestamp" in pods[gone.replica]
        finally:
            subprocess.run(shlex.split(mend.replace("{node}", gone.node)), check=True, timeout=120)

        def left(_: Object) -> bool:
            return gone.uid not in [pod["metadata"]["uid"] for pod in cluster.pods("again")]

        cluster.until("the end of the old pod", left, "again")
        whole = cluster.training(2, name="again")
        uids = {member.uid for member in JobStatus.model_validate(whole).world.members}
        assert uids.isdisjoint(member.uid for member in members)
        assert whole["restarts"].get("inWindow", 0) == 0


def test_the_example_of_torchrun(cluster: Cluster) -> None:
    example = yaml.safe_load((e2e.ROOT / "examples/torchrun.yaml").read_text())
    (container,) = example["spec"]["template"]["spec"]["containers"]
    example["spec"]["template"]["spec"] = e2e.pod(e2e.trainer(command=container["command"], args=container["args"]))
    with cluster.running(example):
        status = cluster.until("success", lambda status: condition(status, "Complete")["status"] == "True", "torchrun")
        logs = [cluster.kubectl("logs", pod["metadata"]["name"], check=False) for pod in cluster.pods("torchrun")]
        assert any("step 180: 3 ranks" in log or "step 180: 2 ranks" in log for log in logs), json.dumps(status)
