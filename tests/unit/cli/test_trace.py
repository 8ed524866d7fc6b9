"""`concertina trace`, with an API server that answers for the pods' agents."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import concertina_protocol as protocol
from builders.answering import report
from builders.api_server import api_server
from concertina.cli.trace import trace
from concertina.terminal.cluster_connection import Target, UserError

MEMBERS = [{"replica": f"a-{n}-0", "uid": f"u{n}", "instance": "i", "node": "", "workers": 1} for n in range(2)]
WORLD = {"members": MEMBERS, "coordinator": "a-0-0", "replicas": 2, "workers": 2}
AGENT = ["python3", "/concertina/agent.pyz", "run"]


def option(command: list[str], name: str) -> int:
    return int(command[command.index(f"--{name}") + 1])


class Cluster:
    """API server with a job of two ranks, whose agents trace what they are asked for."""

    def __init__(self, world: dict[str, Any] = WORLD) -> None:
        self.world = world
        self.commands: dict[str, list[str]] = {}
        """Command that was run in each pod to trace it."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        parts = request.path.strip("/").split("/")
        if parts[-1] == "exec":
            return await self._run(request, parts[-2])
        if parts[-2] == "pods":
            pod = {"metadata": {"name": parts[-1]}, "spec": {"containers": [{"name": "trainer", "command": AGENT}]}}
            return web.json_response({"kind": "Pod", **pod})
        return web.json_response({"kind": "TrainingJob", "metadata": {"name": "a"}, "status": {"world": self.world}})

    async def _run(self, request: web.Request, pod: str) -> web.WebSocketResponse:
        command = request.query.getall("command")
        assert command[:2] == AGENT[:2]
        ws = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
        await ws.prepare(request)
        output = protocol.encode(report(40)) if command[2] == "report" else self._trace(pod, command)
        await ws.send_bytes(b"\x01" + output)
        await ws.send_bytes(b'\x03{"status": "Success"}')
        await ws.close()
        return ws

    def _trace(self, pod: str, command: list[str]) -> bytes:
        self.commands[pod] = command
        first = option(command, "first-step")
        steps = range(first, first + option(command, "steps"))
        events = [{"ph": "X", "name": f"step {step}", "ts": step, "dur": 1, "pid": 1, "tid": 1} for step in steps]
        content = json.dumps({"trace": {"traceEvents": events}, "flightRecorder": {}}).encode()
        return base64.encodebytes(gzip.compress(content))


def run(cluster: Cluster, folder: Path, steps: int, ranks: str) -> Path:
    async def scenario() -> None:
        async with api_server(folder, cluster.answer) as kubeconfig:
            await trace(Target(kubeconfig, None, "team"), "a", steps, ranks, str(folder / "trace.json"))

    asyncio.run(scenario())
    return folder / "trace.json"


def test_all_ranks_are_asked_for_the_same_steps(tmp_path: Path) -> None:
    cluster = Cluster()
    file = run(cluster, tmp_path, 2, "1,0")
    assert {pod: option(command, "rank") for pod, command in cluster.commands.items()} == {"a-0-0": 0, "a-1-0": 1}
    events = json.loads(file.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    marks: dict[str, list[str]] = {name: [] for name in names.values()}
    for event in (event for event in events if event["ph"] == "X"):
        marks[names[event["pid"]]].append(event["name"])
    # A step takes 1 s, so the ranks have 3 s to get ready after step 40.
    assert marks == {"rank 0 (a-0-0)": ["step 44", "step 45"], "rank 1 (a-1-0)": ["step 44", "step 45"]}


@pytest.mark.parametrize(
    ("steps", "ranks", "world", "said"),
    [
        (2, "7", WORLD, "a has ranks 0 to 1 now, and no rank 7"),
        (0, "0", WORLD, "--steps takes 1 to 100"),
        (101, "0", WORLD, "--steps takes 1 to 100"),
        (2, "first", WORLD, "--ranks takes up to 16 numbers"),
        (2, "0", {}, "a does not train now"),
    ],
)
def test_what_can_not_be_traced_is_refused(
    tmp_path: Path, steps: int, ranks: str, world: dict[str, Any], said: str
) -> None:
    cluster = Cluster(world)
    with pytest.raises(UserError, match=said):
        run(cluster, tmp_path, steps, ranks)
    assert cluster.commands == {}
    assert not (tmp_path / "trace.json").exists()
