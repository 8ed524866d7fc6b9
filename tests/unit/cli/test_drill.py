"""Verdicts of drills."""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import concertina_protocol as protocol
from builders.api_server import api_server
from builders.cluster import drills
from builders.until import until_async
from concertina.agents.authority import Authority
from concertina.agents.connections import AgentConnections
from concertina.api import CHECKPOINT_NOW
from concertina.api.status import JobStatus, rfc3339
from concertina.api.world import Member
from concertina.drill.faults import by_command, by_object, in_container, local_cluster, tenants
from concertina.drill.faults.by_command import ByCommand
from concertina.drill.run import run
from concertina.drill.scenarios import SCENARIOS
from concertina.drill.target import DrillTarget, Fault, Injection
from concertina.drill.verdict import DrillObservation, DrillVerdict, Expect, Seconds, evaluate, positions
from concertina.kube.errors import ApiError, Forbidden, NotFound
from concertina.kube.execute import CommandFailed
from concertina.kube.resources import LEASES, NAMESPACES, TRAINING_JOBS, Raw, Resource
from concertina.terminal.cluster_connection import Target as Connection
from concertina.terminal.cluster_connection import UserError
from concertina_protocol import RestoreSource
from concertina_protocol.log_lines import RoundStarted

START = RoundStarted(4, 13, RestoreSource.MEMORY, 12, {}, at=100.0)
SEEN = DrillObservation(
    Seconds(first_step=1.0), before=3, after=2, end=3, rounds=1, rounds_in_all=2, cause="MemberLost", start=START
)
CRASH = Expect(seconds=5.0, replayed=1, counted=False, reasons=("MemberLost", "NodeLost"))
CALM = replace(SEEN, rounds=0, rounds_in_all=0, start=None, cause="")


def test_what_is_promised_passes() -> None:
    verdict = evaluate("kill-node", "a/b", "killed node n1", CRASH, SEEN)
    assert verdict.passed
    assert verdict.reasons == ()
    assert verdict.positions == "exact: round 4 continued with step 13 from the memory of step 12"


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (replace(SEEN, seconds=Seconds(first_step=5.1)), "seen after 5.10 s, promised are 5 s"),
        (replace(SEEN, seconds=Seconds()), "the first step was not seen"),
        (replace(SEEN, rounds=0), "no new round"),
        (replace(SEEN, replayed=2), "2 steps were trained again"),
        (replace(SEEN, counted=1), "counted against maxRestarts"),
        (replace(SEEN, cause="WorkerFailed: x"), "the operator reports: WorkerFailed: x"),
        (replace(SEEN, end=2), "with 2 of 3 replicas"),
        (replace(SEEN, start=replace(START, step=14)), "NOT exact"),
        (replace(SEEN, missing="a step did not come"), "a step did not come"),
    ],
)
def test_each_broken_promise_is_named(seen: DrillObservation, words: str) -> None:
    verdict = evaluate("kill-node", "a/b", "killed node n1", CRASH, seen)
    assert not verdict.passed
    assert len(verdict.reasons) == 1
    assert words in verdict.reasons[0]


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (
            replace(CALM, rounds_in_all=1, cause="MemberLost"),
            "1 new rounds were started, but none was needed: MemberLost",
        ),
        (replace(CALM, same_pods=False), "pods of the job were replaced"),
    ],
)
def test_a_job_that_must_not_notice(seen: DrillObservation, words: str) -> None:
    expect = Expect(seconds=5.0, new_round=False)
    assert evaluate("operator-kill", "a/b", "", expect, CALM).passed
    assert words in evaluate("operator-kill", "a/b", "", expect, seen).reasons[0]


def test_positions_from_the_seed_and_without_a_log() -> None:
    assert positions(replace(SEEN, start=RoundStarted(2, 1, RestoreSource.FRESH, 0, {}, 1.0))).startswith("exact")
    assert positions(replace(SEEN, start=None)).startswith("unknown")
    assert positions(CALM).startswith("not touched")


def test_every_scenario_can_be_played_or_says_why() -> None:
    for name, scenario in SCENARIOS.items():
        for way in (scenario.local, scenario.elsewhere):
            assert callable(way) or len(way.split()) > 5, name


@dataclass(frozen=True)
class Target(DrillTarget):
    """Target of a drill: a job with that many replicas, on nodes n0, n1, ...; the operator is on `home`."""

    replicas: int
    home: str = "home"

    async def job(self) -> dict[str, Any]:
        pod = {"spec": {"containers": [{"name": "trainer", "image": "i"}]}}
        return drills.manifest(pod, "s3://bucket/data", {"uri": "s3://bucket/job"})

    async def status(self) -> JobStatus:
        names = {n: {"replica": f"a-{n}-0", "uid": f"u{n}", "node": f"n{n}"} for n in range(self.replicas)}
        members = [{**names[n], "instance": "i", "workers": 1} for n in names]
        return JobStatus.model_validate({"world": {"members": members, "coordinator": "a-0-0"}})

    async def operator(self) -> dict[str, Any]:
        return {"metadata": {"name": "operator-1"}, "spec": {"nodeName": self.home}}


def target(replicas: int = 3) -> Target:
    return Target(None, "default", drills.JOB, None, replicas)  # type: ignore[arg-type]


class Cluster:
    """Client of a cluster with two releases in one namespace: b's operator serves all namespaces, a's two others."""

    async def list_all(self, resource: Resource, *_: Any) -> tuple[list[Raw], str]:
        if resource == LEASES:
            holders = {"a-operator": "a-2", "b-operator": "b-1"}
            return [{"metadata": {"name": n}, "spec": {"holderIdentity": holders[n]}} for n in holders], "1"
        served = {"a-1": "c,d", "a-2": "c,d", "b-2": "", "b-1": ""}
        env = {name: [{"name": "CONCERTINA_WATCH_NAMESPACES", "value": served[name]}] for name in served}
        named = ({"name": name, "namespace": "system"} for name in served)
        return [{"metadata": each, "spec": {"containers": [{"env": env[each["name"]]}]}} for each in named], "1"


@pytest.mark.parametrize(("namespace", "acting"), [("default", "b-1"), ("d", "a-2")])
def test_the_operator_that_gets_the_fault_is_the_one_that_acts_on_the_job(namespace: str, acting: str) -> None:
    on = DrillTarget(Cluster(), namespace, drills.JOB, None)  # type: ignore[arg-type]
    assert asyncio.run(on.operator())["metadata"]["name"] == acting


async def played(fault: Fault, on: DrillTarget) -> Injection:
    async with fault(on) as injection:
        return injection


def test_a_job_that_would_stand_still_without_its_pod_is_refused_none() -> None:
    async def play() -> None:
        async with by_object.refuse_pods(target(replicas=2)):
            raise AssertionError

    with pytest.raises(UserError, match="minReplicas"):
        asyncio.run(play())


@dataclass(frozen=True)
class Answering(Target):
    """Cluster whose programs in containers print these texts one after the other, or fail; `s3` is its S3 server."""

    answers: list[str | ApiError] = field(default_factory=list)

    async def run_python(self, pod: str, program: str, *arguments: str, seconds: float = 30.0) -> str:
        answer = self.answers.pop(0)
        if isinstance(answer, ApiError):
            raise answer
        return answer

    async def worker(self, member: Member) -> str:
        return "17"


def answering(*answers: str | ApiError, local: Any = None) -> Answering:
    return Answering(None, "default", drills.JOB, local, 3, answers=list(answers))  # type: ignore[arg-type]


NO_ROOM = CommandFailed(0, "CommandFailed", "OSError: [Errno 28] No space left on device")
GONE = NotFound(404, "NotFound", "container not found")


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        pytest.param([Forbidden(403, "Forbidden", "pods/exec is forbidden")], "is forbidden", id="not allowed"),
        pytest.param([CommandFailed(0, "", "no such file: python3")], "python3", id="no Python"),
        pytest.param([""], "no memory limit", id="no limit"),
        pytest.param(["100 5", NO_ROOM, "alive"], "survived .* No space left", id="what eats fails"),
        pytest.param(["100 5", "", "alive"], "survived its container's memory limit", id="it has other memory"),
    ],
)
def test_a_worker_that_lives_was_not_killed_for_want_of_memory(answers: list[Any], words: str) -> None:
    on = answering(*answers)
    with pytest.raises((UserError, ApiError), match=words):
        asyncio.run(played(in_container.out_of_memory, on))
    assert not on.answers


@pytest.mark.parametrize(
    "answers", [["100 5", "", ""], ["100 5", NO_ROOM, ""], ["100 5", GONE, GONE]], ids=["worker", "eater", "container"]
)
def test_a_worker_that_is_gone_was_killed_for_want_of_memory(answers: list[Any]) -> None:
    assert "a-1-0 on n1" in asyncio.run(played(in_container.out_of_memory, answering(*answers))).text


def test_what_eats_ends_at_the_limit_and_whether_a_worker_lives_is_told_of_that_one_alone() -> None:
    def said(program: str, *arguments: str) -> str:
        command = [sys.executable, "-c", program, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()

    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as worker:
        pid = str(worker.pid)
        born = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        assert said(in_container._EAT, pid, str(2 << 20)) == ""
        assert said(in_container._LIVES, pid, born) == "alive"
        assert said(in_container._LIVES, pid, "0") == ""
    assert said(in_container._EAT, pid, str(1 << 40)) == ""
    assert said(in_container._LIVES, pid, born) == ""


class WithS3:
    """Local cluster with an S3 server."""

    endpoint = "http://127.0.0.1:9000"

    def __init__(self) -> None:
        self.s3, self.done = self, list[str]()

    def kill(self) -> None:
        self.done.append("kill")

    def start(self) -> None:
        self.done.append("start")


@dataclass(frozen=True)
class OnDisk(Answering):
    async def job(self) -> dict[str, Any]:
        return {"spec": {"checkpoint": {"uri": "file:///x"}}}


def test_only_the_storage_of_the_job_is_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_cluster, "OUTAGE", 0.0)
    cluster = WithS3()
    assert "S3" in asyncio.run(played(local_cluster.kill_storage, answering(cluster.endpoint, local=cluster))).text
    assert cluster.done == ["kill", "start"]
    on_disk = OnDisk(None, "default", drills.JOB, cluster, 3, answers=[cluster.endpoint])  # type: ignore[arg-type]
    for other in (answering("", local=cluster), answering("https://elsewhere", local=cluster), on_disk):
        with pytest.raises(UserError, match="not on this cluster's S3 server"):
            asyncio.run(played(local_cluster.kill_storage, other))
    assert cluster.done == ["kill", "start"]


@asynccontextmanager
async def outage(target: DrillTarget) -> AsyncIterator[Injection]:
    yield Injection(time.time(), "took the storage away")


@pytest.mark.parametrize("checkpoint", [{"uri": "s3://a/b"}, None], ids=["", "none"])
def test_a_checkpoint_is_asked_for_once_storage_is_back(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, checkpoint: Any
) -> None:
    """By itself, the next checkpoint would be due in ten minutes."""
    for most in ("STEADY", "WHOLE", "FRESH", "CHECKPOINT"):
        monkeypatch.setattr(f"concertina.drill.run.{most}", 10.0)
    asked, looks = list[str](), itertools.count(1)

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.method == "PATCH":
            asked.append((await request.json())["metadata"]["annotations"][CHECKPOINT_NOW])
        if request.path.endswith("/pods"):
            pod = {"metadata": {"uid": "u", "name": "a-0-0"}, "status": {"phase": "Running"}}
            return web.json_response({"items": [pod], "metadata": {"resourceVersion": "1"}})
        now, step = rfc3339(round(time.time(), 3)), next(looks)
        saved = {"step": step, "round": 1, "uri": "s3://a/b/u", "complete": False, "at": now}
        member = {"replica": "a-0-0", "uid": "u", "node": "n", "instance": "i", "workers": 1}
        world = {
            "round": 1,
            "replicas": 1,
            "size": "1/1",
            "since": rfc3339(1),
            "coordinator": "a-0-0",
            "members": [member],
        }
        status = {
            "world": world,
            "progress": {"step": step, "steps": 10**6, "at": now},
            "conditions": [{"type": "Ready", "status": "True", "reason": "Training", "lastTransitionTime": now}],
            **({"lastCheckpoint": saved} if asked else {}),
        }
        spec = {"replicas": 1, "template": {}, **({"checkpoint": checkpoint} if checkpoint else {})}
        return web.json_response({"metadata": {"name": "a", "uid": "j"}, "spec": spec, "status": status})

    async def play() -> DrillVerdict:
        async with api_server(tmp_path, answer) as config, Connection(config, None, "team").connect() as (client, _):
            on = DrillTarget(client, "team", "a", None)
            return await run(on, "storage-outage", SCENARIOS["storage-outage"], outage, lambda text: None)

    if checkpoint:
        verdict = asyncio.run(play())
        assert verdict.passed, verdict.reasons
    else:
        with pytest.raises(UserError, match=r"no spec\.checkpoint"):
            asyncio.run(play())
    assert len(asked) == (1 if checkpoint else 0)


def test_commands_are_told_which_node_and_which_operator(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    said = tmp_path / "said"
    for name, words in (("A", "stop {operator} {operator_node}"), ("B", "go {operator}"), ("C", "{node}"), ("D", "up")):
        monkeypatch.setenv(by_command.PREFIX + name, f"sh -c 'echo {words} >> {said}'")
    operator = ByCommand("A", "B", "stopped {operator}")
    assert asyncio.run(played(operator, target())).text == "stopped operator-1"
    assert asyncio.run(played(ByCommand("C", "D", "killed {node}"), target())).text == "killed n2"
    assert said.read_text().splitlines() == ["stop operator-1 home", "go operator-1", "n2", "up"]
    monkeypatch.delenv(by_command.PREFIX + "A")
    assert operator.given
    with pytest.raises(UserError, match=by_command.PREFIX + "A"):
        asyncio.run(played(operator, target()))


class Tenants:
    """Client of a cluster with namespaces and jobs, whose operator has throttled the agents of every namespace.

    `left` are the namespaces that an earlier drill of the job has left.
    """

    def __init__(self, left: list[str]) -> None:
        self.namespaces = {name: {tenants.DRILL_OF: "j"} for name in left}
        self.jobs: list[Raw] = []

    async def list_all(self, resource: Resource, namespace: str | None, labels: str = "") -> tuple[list[Raw], str]:
        if resource == TRAINING_JOBS:
            return [job for job in self.jobs if job["metadata"]["namespace"] == namespace], "1"
        name, _, value = labels.partition("=")
        return [{"metadata": {"name": each}} for each, has in self.namespaces.items() if has.get(name) == value], "1"

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Raw:
        return {"metadata": {"name": name, "labels": {"team": "a", tenants.OWN_NAME: name}}}

    async def create(self, resource: Resource, namespace: str | None, body: Raw) -> Raw:
        if resource == NAMESPACES:
            assert body["metadata"]["name"] not in self.namespaces
            self.namespaces[body["metadata"]["name"]] = body["metadata"]["labels"]
        else:
            assert namespace in self.namespaces
            self.jobs.append({**body, "status": {"conditions": [{"type": "Ready", "status": "False"}]}})
        return body

    async def delete(self, resource: Resource, namespace: str | None, name: str) -> None:
        del self.namespaces[name]

    async def logs(self, *_: Any, **__: Any) -> AsyncIterator[str]:
        for name in self.namespaces:
            yield f'{{"event":"agents_held_back","namespace":"{name}"}}'


@dataclass(frozen=True)
class Served(Answering):
    """Return the job of a namespace for an operator that serves all namespaces, or those `watched`."""

    watched: str = ""

    async def job(self) -> dict[str, Any]:
        return {**await super().job(), "metadata": {"name": drills.JOB, "uid": "j"}}

    async def operator(self) -> dict[str, Any]:
        environment = [{"name": "CONCERTINA_WATCH_NAMESPACES", "value": self.watched}]
        return {
            "metadata": {"name": "operator", "namespace": "system"},
            "spec": {"containers": [{"env": environment}]},
        }


@pytest.mark.parametrize(
    ("fault", "jobs"),
    [pytest.param(tenants.hostile_agent, 1, id="a-flood"), pytest.param(tenants.long_queue, 9, id="a-queue")],
)
def test_the_tenants_of_a_drill_go_however_it_ends(monkeypatch: pytest.MonkeyPatch, fault: Fault, jobs: int) -> None:
    """The tenants exist while a worker is killed. Those of an earlier drill are gone by then."""
    monkeypatch.setattr(tenants, "LOOK_SECONDS", 0.0)
    monkeypatch.setenv(tenants.QUEUE_JOBS, "9")
    client = Tenants(left=["concertina-drill-j-0", "concertina-drill-j-7"])
    on = Served(client, "default", drills.JOB, None, 3, answers=[""])  # type: ignore[arg-type]

    async def play() -> None:
        async with fault(on) as injection:
            assert "SIGKILL to the worker of a-1-0" in injection.text
            assert all(labels == {"team": "a", tenants.DRILL_OF: "j"} for labels in client.namespaces.values())
            assert len(client.jobs) == jobs
            assert {job["metadata"]["namespace"] for job in client.jobs} == set(client.namespaces)
            raise asyncio.CancelledError

    with suppress(asyncio.CancelledError):
        asyncio.run(play())
    assert not on.answers
    assert not client.namespaces


def test_an_operator_that_serves_named_namespaces_gets_no_tenants() -> None:
    on = Served(Tenants([]), "default", drills.JOB, None, 3, watched="default")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="serves only default"):
        asyncio.run(played(tenants.long_queue, on))


@pytest.mark.parametrize("count", ["0", "1001", "many", "-1"])
def test_a_queue_has_a_bound(monkeypatch: pytest.MonkeyPatch, count: str) -> None:
    monkeypatch.setenv(tenants.QUEUE_JOBS, count)
    with pytest.raises(UserError, match="a number from 1 to 1000"):
        asyncio.run(played(tenants.long_queue, target()))


def test_a_flood_is_what_an_operator_takes(tmp_path: Path) -> None:
    """The drill's program takes the place of an agent: a refused line would end its stream."""
    key, created = b"k" * 32, time.time()
    for name, text in Authority(key, "j", created).secret_data().items():
        (tmp_path / name).write_bytes(base64.b64decode(text))
    (tmp_path / "python").symlink_to(Path(protocol.__file__).parents[1])
    command = [sys.executable, "-c", tenants._REPLACE_AGENT, str(tmp_path), tenants._FLOOD]
    subprocess.run(command, check=True, timeout=60)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {
        "CONCERTINA_IDENTITY": str(tmp_path),
        "CONCERTINA_REPLICA": "a-0-0",
        "CONCERTINA_POD_IP": "127.0.0.1",
        "CONCERTINA_PORT": str(port),
    }

    async def heard() -> None:
        connections = AgentConnections(lambda uid, urgent: None)
        await connections.open("j", created, key)
        connections.watch("j", {"a-0-0": f"127.0.0.1:{port}"})
        said = set[str]()

        def both() -> bool:
            report = connections.views("j")["a-0-0"].report
            said.add(report.tracking if report else "")
            return {"one", "another"} <= said

        try:
            await until_async(both, "both lines of the flood")
        finally:
            connections.close()

    with subprocess.Popen([sys.executable, str(tmp_path / "agent.pyz")], env=os.environ | environment) as flood:
        try:
            asyncio.run(heard())
        finally:
            flood.kill()
