"""Containers that die as a whole, pods in the host's network, and torchrun's example, on real kubelets."""

from __future__ import annotations

import json
import time

import pytest
import yaml

from builders import drills, e2e
from builders.e2e import Cluster, Object, condition
from concertina.cli.drill.inside import EAT

pytestmark = [pytest.mark.usefixtures("operator"), pytest.mark.timeout(900)]
STAY = "import time; time.sleep(3600)"
BIG: Object = {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "1536Mi"}}


def test_a_container_that_runs_out_of_memory_as_a_whole_comes_back_in_place(
    cluster: Cluster, data: None, request: pytest.FixtureRequest
) -> None:
    """As with cgroup v2, where the kernel kills all of it. Here process 1 is made its choice: all others go with it."""
    template = e2e.pod(e2e.trainer(resources=BIG))
    elastic = {"minReplicas": 1, "growAfterSeconds": 1}
    job = e2e.own_job("oom", template, elastic=elastic, trainer={**drills.TRAINER, "data": {"uri": e2e.DATA}})
    with cluster.running(job):
        before = cluster.training(2, name="oom")
        cluster.until("some steps", lambda status: status["progress"]["step"] > 20, "oom")
        uids = {pod["metadata"]["uid"] for pod in cluster.pods("oom")}
        victim = before["world"]["members"][1]["replica"]
        at = time.time()
        cluster.kubectl("exec", victim, "-c", "trainer", "--", "python3", "-c", EAT, "1", check=False)
        found = cluster.until("the container's restart", lambda status: status.get("containerRestarts"), "oom")
        after = cluster.training(2, above=before["world"]["round"], name="oom")
        drills.keep(request.config, "whole-container OOM", f"whole {time.time() - at:.1f}")
        assert {pod["metadata"]["uid"] for pod in cluster.pods("oom")} == uids, "a pod was replaced"
        assert victim in [member["replica"] for member in after["world"]["members"]]
        after = cluster.until("its count", lambda status: status["restarts"].get("inWindow"), "oom")
        entries = [(entry["replica"], entry["reason"]) for entry in after["restarts"]["recent"]]
        assert entries == [(victim, "OutOfMemory")], found
        assert after.get("stepsReplayed", 0) <= 2


def test_two_jobs_in_the_network_of_one_host(cluster: Cluster) -> None:
    """Four agents at one address: each at a port of its own, which the operator and the others reach."""
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


def test_the_example_of_torchrun(cluster: Cluster) -> None:
    example = yaml.safe_load((e2e.ROOT / "examples/torchrun.yaml").read_text())
    (container,) = example["spec"]["template"]["spec"]["containers"]
    example["spec"]["template"]["spec"] = e2e.pod(e2e.trainer(command=container["command"], args=container["args"]))
    with cluster.running(example):
        status = cluster.until("its end", lambda status: condition(status, "Complete").get("status"), "torchrun")
        cluster.until("success", lambda status: condition(status, "Complete")["status"] == "True", "torchrun")
        logs = [cluster.kubectl("logs", pod["metadata"]["name"], check=False) for pod in cluster.pods("torchrun")]
        assert any("step 180: 3 ranks" in log or "step 180: 2 ranks" in log for log in logs), json.dumps(status)
