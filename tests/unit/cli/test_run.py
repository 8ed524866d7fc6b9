"""`concertina run` on API servers that report their version, and on one that does not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from aiohttp import web

from builders.api_server import api_server, no_success
from concertina.cli.jobs import run
from concertina.terminal.cluster_connection import Target

DEMO = Path(__file__).resolve().parents[3] / "examples" / "demo.yaml"
NEWER = "spec.template has the fields of Kubernetes 1.36"


@pytest.mark.parametrize(
    ("version", "newer"),
    [
        (lambda: web.json_response({"major": "1", "minor": "36"}), False),
        (lambda: web.json_response({"major": "1", "minor": "37+"}), True),
        (lambda: no_success(403, "forbidden"), False),
    ],
    ids=["as old as the template", "newer", "refused"],
)
def test_a_job_is_applied_whatever_the_server_says_of_its_version(
    version: Callable[[], web.Response], newer: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/version":
            return version()
        if request.method == "POST":
            return web.json_response({"kind": "Pod"}, status=201)
        job = yaml.safe_load(await request.text())
        metadata = {"namespace": "default", "uid": "u", "generation": 1, "resourceVersion": "1"}
        job["metadata"] |= metadata | {"creationTimestamp": "2026-01-01T00:00:00Z"}
        return web.json_response(job)

    async def scenario() -> int:
        async with api_server(tmp_path, answer) as kubeconfig:
            return await run(Target(kubeconfig, None, None), DEMO, detach=True)

    assert asyncio.run(scenario()) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "is applied, generation 1" in printed
    assert (NEWER in printed) == newer
