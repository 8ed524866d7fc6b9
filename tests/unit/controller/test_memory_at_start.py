"""Memory of an operator that starts beside many of the largest objects that an API server accepts."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web

from builders.api_server import api_server, no_success
from builders.manifests import job
from builders.until import until_async
from concertina.kube.resources import Raw
from concertina.local.host import linux_namespaces

MOST_MIB = 300
EMPTY_LISTS = 430_000
"""Number of empty lists in an object: 1.3 MB of the JSON that takes the most memory when it is decoded. The API server
stores 1.5 MiB."""
JOBS = "/apis/concertina.dev/v1beta1/trainingjobs"


@dataclass
class ApiServer:
    """API server with this number of large jobs and nothing else; it does not answer the operator's writes."""

    jobs: int
    entries: int = EMPTY_LISTS
    named: Counter[str] = field(default_factory=Counter)
    """Return how often a page had an object with a name."""

    def __post_init__(self) -> None:
        container = {"name": "trainer", "image": "i", "command": ["x"]}
        obj = job({"suspend": True, "template": {"spec": {"containers": [container], "junk": "JUNK"}}}, "NAME")
        obj["metadata"] |= {"uid": "uid-NAME", "resourceVersion": "5"}
        self._text = json.dumps(obj).replace('"JUNK"', json.dumps([[]] * self.entries, separators=(",", ":")))

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET" and request.path == JOBS and "watch" not in request.query:
            return await self._page(request)
        if request.method == "GET" and request.path.endswith(("/pods", "/nodes")) and "watch" not in request.query:
            return web.json_response({"metadata": {"resourceVersion": "9"}, "items": []})
        if request.method == "GET" and "/secrets/" in request.path:
            return web.json_response({"data": {"key": base64.b64encode(b"k" * 32).decode()}})
        if request.path.startswith("/apis/kueue.x-k8s.io"):
            return no_success(404, "not found")
        if "/leases" in request.path:
            if request.method == "GET":
                return no_success(404, "not found")
            written: Raw = await request.json()
            return web.json_response({**written, "metadata": {**written["metadata"], "resourceVersion": "7"}})
        await asyncio.sleep(3600)
        raise AssertionError

    async def _page(self, request: web.Request) -> web.StreamResponse:
        begin = int(request.query.get("continue", "0"))
        end = min(self.jobs, begin + int(request.query["limit"]))
        response = web.StreamResponse()
        await response.prepare(request)
        metadata = {"resourceVersion": "9", **({"continue": str(end)} if end < self.jobs else {})}
        await response.write(f'{{"metadata":{json.dumps(metadata)},"items":['.encode())
        try:
            for number in range(begin, end):
                text = self._text.replace("NAME", f"job-{number}")
                await response.write(((", " if number > begin else "") + text).encode())
            await response.write(b"]}")
            await response.write_eof()
        except ConnectionError:  # The page is too large.
            return response
        self.named.update(f"job-{number}" for number in range(begin, end))
        return response


def highest_mib(folder: Path, server: ApiServer) -> float:
    """Return the most memory that an operator takes until it has started."""
    return asyncio.run(_highest_mib(folder, server))


async def _highest_mib(folder: Path, server: ApiServer) -> float:
    log = folder / "operator.log"
    async with api_server(folder, server.answer) as config:
        environment = {
            "PATH": "",
            "PYTHONPATH": ":".join(sys.path),
            "KUBECONFIG": str(config),
            "CONCERTINA_NAMESPACE": "concertina",
            "CONCERTINA_MASTER_KEY_SECRET": "key",
            "CONCERTINA_IMAGE_AGENT": "agent",
        }
        process = _begun(log, environment)
        try:
            await until_async(lambda: '"started"' in log.read_text() or process.poll() is not None, "a start")
            assert process.poll() is None, log.read_text()
            (started,) = [json.loads(line) for line in log.read_text().splitlines() if '"started"' in line]
            assert started["jobs"] == server.jobs
            return _highest_of(process.pid)
        finally:
            process.kill()
            process.wait()


def _begun(log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "concertina.controller.operator"]
    with log.open("wb") as written:
        return subprocess.Popen(
            command, env=environment, stderr=written, stdout=written, preexec_fn=linux_namespaces.die_with_parent
        )


def _highest_of(pid: int) -> float:
    """Return the highest memory use of a process in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


@pytest.mark.parametrize(
    ("jobs", "entries"),
    [
        (10, EMPTY_LISTS),
        *(
            pytest.param(
                *size,
                marks=pytest.mark.long(
                    law="tests/unit/controller/test_memory_at_start.py::"
                    "test_an_operator_starts_where_objects_are_large[10-430000]"
                ),
            )
            for size in [(300, EMPTY_LISTS), (300, 84_000)]
        ),
    ],
)
def test_an_operator_starts_where_objects_are_large(tmp_path: Path, jobs: int, entries: int) -> None:
    server = ApiServer(jobs, entries)
    highest = highest_mib(tmp_path, server)
    assert highest < MOST_MIB
    assert set(server.named) == {f"job-{number}" for number in range(jobs)}
