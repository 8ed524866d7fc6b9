"""`concertina logs -f`: the logs that it follows, and its end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

from aiohttp import web
from typer.testing import CliRunner

from builders.api_server import api_server, no_success
from concertina.cli.main import app
from concertina.kube.resources import Raw

METADATA = {"namespace": "team", "uid": "u", "resourceVersion": "1", "creationTimestamp": "2026-01-01T00:00:00Z"}


def pod(restarts: int, state: str = "running") -> Raw:
    container = {"name": "trainer", "restartCount": restarts, "state": {state: {}}}
    return {"metadata": {**METADATA, "name": "a-0-0"}, "status": {"containerStatuses": [container]}}


def job(*holds: str) -> Raw:
    conditions = [{"type": kind, "status": "True", "reason": "R", "message": "", "lastTransitionTime": METADATA[
        "creationTimestamp"]} for kind in holds]  # fmt: skip
    return {"metadata": {**METADATA, "name": "a"}, "spec": {}, "status": {"conditions": conditions}}


def event(obj: Raw) -> bytes:
    return json.dumps({"type": "MODIFIED", "object": obj}).encode() + b"\n"


def followed(folder: Path, pods: Callable[[], web.Response], *later: Raw) -> tuple[int, list[str], str]:
    """Return the exit status, the output, and stderr.

    `pods` is the list of pods. `later` are their later states, each of which follows as soon as the previous log has
    ended. Then the job is over.
    """
    runs = asyncio.Event()
    logs = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal logs
        if request.path.endswith("/log"):
            logs += 1
            runs.set()
            lines = range(1, 3)[-int(request.query.get("tailLines", "2")) :]
            return web.Response(text="".join(f"2026-01-01T00:00:0{at}Z run {logs} line {at}\n" for at in lines))
        if not request.query.get("watch"):
            return pods() if request.path.endswith("/pods") else web.json_response(job())
        stream = web.StreamResponse()
        await stream.prepare(request)
        if request.path.endswith("/pods"):
            for each in later:
                await runs.wait()
                runs.clear()
                await stream.write(event(each) * 2)
            await asyncio.Event().wait()
        while logs <= len([each for each in later if "running" in str(each)]):
            await asyncio.sleep(0.01)
        await stream.write(event(job("Complete")))
        return stream

    async def scenario() -> tuple[int, list[str], str]:
        async with api_server(folder, answer) as config:
            asked = ["logs", "a", "-f", "--tail", "1", "-n", "team", "--kubeconfig", str(config)]
            done = await asyncio.to_thread(CliRunner().invoke, app, asked)
            return done.exit_code, done.stdout.splitlines(), done.stderr

    return asyncio.run(scenario())


def test_a_container_that_is_started_again_in_its_pod_is_printed_again_from_its_start(tmp_path: Path) -> None:
    """The log is printed once. Other changes of the container are ignored."""

    def listed() -> web.Response:
        return web.json_response({"metadata": {"resourceVersion": "1"}, "items": [pod(3)]})

    done = followed(tmp_path, listed, pod(4))
    lines = ["run 1 line 2", "run 2 line 1", "run 2 line 2"]
    assert done == (0, [f"a-0-0 | {line}" for line in lines], "")


def test_who_may_not_list_pods_is_told_so_in_a_sentence(tmp_path: Path) -> None:
    code, printed, said = followed(tmp_path, lambda: no_success(403, "pods is forbidden: ann can't list them"), pod(0))
    assert (code, printed, said) == (1, [], "pods is forbidden: ann can't list them\n")
