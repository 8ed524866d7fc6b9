"""Master key of a real operator: created once, kept, switched, and missing. Agents and their TLS are real."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from builders.cluster.operator_process import Jobs, Operator
from builders.until import until
from concertina.controller import master_keys
from concertina.controller.master_keys import MasterKeyError, MasterKeys, key_id
from concertina.controller.settings import from_environment
from concertina.kube import access
from concertina.kube.client import Client
from concertina.kube.errors import NotFound
from concertina.kube.resources import Resource
from concertina.local.binaries import programs
from concertina.local.cluster import LocalCluster

ROOT = Path(__file__).resolve().parents[4]
STAY = "import time; time.sleep(3600)"
OTHER = base64.b64encode(b"another-master-key-" * 3).decode()
SITE = """
from concertina.plan.facts import constants
constants.FIRST_CONTACT = 1.0
"""
"""Patch for the operator's Python: an agent without a connection is in doubt at once."""
Object = dict[str, Any]


class Key:
    """Secret with the operator's master key."""

    def __init__(self, cluster: LocalCluster, operator: Operator) -> None:
        self.cluster = cluster
        self.namespace = operator.environment["CONCERTINA_NAMESPACE"]
        self.name = operator.environment["CONCERTINA_MASTER_KEY_SECRET"]
        self.path = f"/api/v1/namespaces/{self.namespace}/secrets/{self.name}"

    def get(self) -> dict[str, str]:
        data: dict[str, str] = self.cluster.api.call("GET", self.path)["data"]
        return data

    def put(self, **data: str) -> None:
        secret = self.cluster.api.call("GET", self.path)
        entries = {name.replace("_", "-"): content for name, content in data.items()}
        self.cluster.api.call("PUT", self.path, {**secret, "data": entries})


@pytest.fixture
def key(cluster: LocalCluster, operator: Operator) -> Iterator[Key]:
    """Yield the master key, and restore the key and the operator afterwards."""
    found = Key(cluster, operator)
    before = found.get()
    yield found
    if found.get() != before:
        operator.end(signal.SIGTERM)
        found.put(**before)
        operator.start()


def of(job: Object) -> str:
    return str(job["status"].get("masterKey", ""))


def id_of(content: str) -> str:
    return key_id(base64.b64decode(content))


def uids(pods: list[Object]) -> list[str]:
    return [pod["metadata"]["uid"] for pod in pods]


def restarted(operator: Operator) -> None:
    operator.end(signal.SIGTERM)
    operator.start()


class Together(Client):
    """Barrier by which several operators all find that there is no Secret before any of them creates one."""

    barrier: asyncio.Barrier

    async def get(self, resource: Resource, namespace: str | None, name: str, subresource: str = "") -> Object:
        try:
            return await super().get(resource, namespace, name, subresource)
        except NotFound:
            await self.barrier.wait()
            raise


def test_operators_that_start_at_once_agree_on_one_key(cluster: LocalCluster, namespace: str) -> None:
    environment = {
        "CONCERTINA_NAMESPACE": namespace,
        "CONCERTINA_MASTER_KEY_SECRET": "made",
        "CONCERTINA_MASTER_KEY_CREATE": "true",
        "CONCERTINA_IMAGE_AGENT": "agent",
    }

    settings = from_environment(environment)

    async def eight() -> list[MasterKeys]:
        async with Client(await access.load(str(cluster.kubeconfig))) as client:
            with pytest.raises(MasterKeyError, match="not found"):
                await master_keys.read(client, dataclasses.replace(settings, makes_master_key=False))
        async with Together(await access.load(str(cluster.kubeconfig))) as client:
            client.barrier = asyncio.Barrier(8)
            return await asyncio.gather(*(master_keys.read(client, settings) for _ in range(8)))

    found = asyncio.run(eight())
    assert len({tuple(keys.by_id.items()) for keys in found}) == 1


def test_a_chart_applied_again_as_argo_cd_does_and_a_restart_change_no_round(
    jobs: Jobs, operator: Operator, key: Key
) -> None:
    jobs.create("a", STAY, replicas=2)
    before, pods = jobs.wait_training("a", 2), uids(jobs.pods("a"))
    assert of(before) == id_of(key.get()["key"])
    helm = [str(programs.helm(print)), "template", "tests", str(ROOT / "charts/concertina")]
    options = ["--namespace", key.namespace, "--set", "replicas=0"]
    rendered = subprocess.run([*helm, *options], capture_output=True, text=True, check=True).stdout
    jobs.cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=rendered)
    restarted(operator)
    jobs.create("b", "print('hello')")
    jobs.wait_true("b", "Complete")
    after = jobs.get("a")
    assert (after["status"]["world"], uids(jobs.pods("a"))) == (before["status"]["world"], pods)
    # The job's agents can be reached: the operator answers a worker's failure with the same pods.
    jobs.kill_worker("a", "a-1-0")
    jobs.wait_training("a", 2, past=before["status"]["world"]["round"])
    assert uids(jobs.pods("a")) == pods


def test_a_secret_that_is_deleted_is_put_back_with_the_same_key(operator: Operator, key: Key) -> None:
    before = key.get()
    key.cluster.api.call("DELETE", key.path)
    until(lambda: operator.lines("master key restored"), "the master key put back", operator.text)
    assert key.get() == before


@pytest.mark.long(
    law="tests/cluster/operator/controller/test_master_key.py::test_a_chart_applied_again_as_argo_cd_does_and_a_restart_change_no_round"
)
def test_running_jobs_go_on_with_their_key_after_a_switch(jobs: Jobs, operator: Operator, key: Key) -> None:
    old = key.get()["key"]
    jobs.create("a", STAY, replicas=2, elastic={"minReplicas": 1, "scaleUp": {"stabilizationWindowSeconds": 1}})
    before = jobs.wait_training("a", 2)
    key.put(key=OTHER, key_old=old)
    restarted(operator)
    jobs.create("b", STAY)
    assert of(jobs.wait_training("b", 1)) == id_of(OTHER)
    assert jobs.get("a")["status"]["world"] == before["status"]["world"]
    # A pod that is created after the switch takes part, because the job's Secret and its calls use the old key.
    jobs.kill_pod("a-1-0")
    after = jobs.wait("a", lambda job: "a-1-1" in jobs.members(job))
    assert of(after) == id_of(old)


@pytest.mark.long(
    law="tests/unit/plan/lifecycle/test_master_key.py::test_nothing_is_done_to_a_job_whose_key_is_missing_though_its_coordinator_dies"
)
@pytest.mark.parametrize("recorded", [True, False], ids=["the job's key has an id", "its status lacks the id"])
def test_a_job_whose_key_is_gone_is_left_alone_until_it_is_back(
    jobs: Jobs, operator: Operator, key: Key, tmp_path: Path, recorded: bool
) -> None:
    old = key.get()["key"]
    jobs.create("a", STAY, replicas=2, elastic={"minReplicas": 1, "scaleUp": {"stabilizationWindowSeconds": 1}})
    before, pods = jobs.wait_training("a", 2), uids(jobs.pods("a"))
    operator.end(signal.SIGTERM)
    if not recorded:
        patch = json.dumps({"status": {"masterKey": None}})
        jobs.cluster.kubectl(
            "patch", "tj", "a", "-n", jobs.namespace, "--subresource=status", "--type=merge", "-p", patch
        )
    key.put(key=OTHER)
    (tmp_path / "sitecustomize.py").write_text(SITE)
    operator.start(PYTHONPATH=str(tmp_path))
    after = jobs.wait_true("a", "Stalled")
    assert jobs.condition(after, "Stalled")["reason"] == "MasterKeyMismatch"
    # This takes longer than giving an agent up. Another job runs from its start to its end meanwhile.
    jobs.create("b", "import time; time.sleep(4)")
    jobs.wait_true("b", "Complete")
    after = jobs.get("a")
    assert (after["status"]["world"], uids(jobs.pods("a"))) == (before["status"]["world"], pods)
    assert jobs.condition(after, "Running")["status"] == "True"
    assert jobs.condition(after, "Stalled")["status"] == "True"
    key.put(key=old)
    restarted(operator)
    jobs.wait("a", lambda job: jobs.condition(job, "Stalled")["status"] == "False")
    assert of(jobs.wait("a", of)) == id_of(old)
    jobs.kill_worker("a", "a-1-0")
    jobs.wait_training("a", 2, past=before["status"]["world"]["round"])
    assert uids(jobs.pods("a")) == pods
