"""Following a job to its end, as `concertina run` and `status -f` do."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import web
from rich.console import Console

from builders.api_server import api_server, no_success
from concertina.api.status import Condition, JobProgress, JobStatus, rfc3339
from concertina.kube import access
from concertina.kube.client import Client
from concertina.kube.resources import Raw
from concertina.terminal.console import plain
from concertina.terminal.follow import follow_job

AT = rfc3339(1_800_000_000)
SENTENCE = (
    "The checkpoint's folder s3://bucket/run-with-a-long-name/ refuses the credentials of Secret s3 (AccessDenied): "
    "give its key PutObject on that folder."
)


STARTS = {"type": "ERROR", "object": {"kind": "Status", "code": 500, "message": "etcd has no leader"}}


def job(message: str, *holds: str, progress: JobProgress | None = None) -> Raw:
    conditions = tuple(
        Condition(type=kind, status=str(kind in holds), reason="Training", message=message, last_transition_time=AT)
        for kind in ("Ready", "Complete", "Failed", "Stalled")
    )
    status = JobStatus(phase="Training", conditions=conditions, progress=progress).manifest()
    metadata = {"namespace": "team", "name": "a", "uid": "u", "resourceVersion": "1", "creationTimestamp": AT}
    return {"metadata": metadata, "spec": {"replicas": 2}, "status": status}


def lines(*jobs: Raw) -> web.Response:
    """Return the lines of a watch."""
    return web.Response(text="".join(json.dumps({"type": "MODIFIED", "object": each}) + "\n" for each in jobs))


def followed(
    folder: Path, looks: list[Raw | web.Response], watches: list[web.Response], terminal: bool = False
) -> tuple[int, str]:
    """Return the exit status and the output.

    `looks` are the API server's answers about the job, one after the other.
    """

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.query.get("watch"):
            return watches.pop(0)
        if request.path.endswith("/events"):
            return web.json_response({"metadata": {"resourceVersion": "1"}, "items": []})
        look = looks.pop(0)
        return look if isinstance(look, web.Response) else web.json_response(look)

    async def scenario() -> int:
        async with (
            api_server(folder, answer) as config,
            Client(await access.load(str(config)), give_up_after=0.1) as client,
        ):
            return await follow_job(client, "team", "a", console)

    console = plain()
    console.file = printed = io.StringIO()
    if terminal:
        console = Console(file=printed, force_terminal=True, soft_wrap=True, width=100, height=50)
    code = asyncio.run(scenario())
    assert (looks, watches) == ([], [])
    return code, printed.getvalue()


def test_on_a_terminal_the_whole_sentence_is_there(tmp_path: Path) -> None:
    """The sentence says what a person has to do, so it is never cut, however narrow the terminal is."""
    code, printed = followed(tmp_path, [job("waits"), job(SENTENCE, "Failed")], [], terminal=True)
    assert code == 1
    assert SENTENCE in " ".join(printed.split())


def test_of_a_run_without_an_end_the_step_alone_is_told(tmp_path: Path) -> None:
    def at(step: int, percent: float | None, *holds: str) -> Raw:
        reported = JobProgress(step=step, loss=2.5, percent=percent, at=AT)
        return job("Trains.", *holds, progress=reported)

    seen = [at(12, None), at(13, 1.5), at(14, 2.0, "Complete")]
    code, printed = followed(tmp_path, [at(11, None), seen[0]], [lines(*seen[1:])])
    assert (code, printed.splitlines()) == (
        0,
        ["Training  Trains. step 12 loss 2.5", "Training  Trains. step 13 (1%) loss 2.5",
         "Training  Trains. step 14 (2%) loss 2.5"],
    )  # fmt: skip


@pytest.mark.parametrize(
    "refusal",
    [
        pytest.param(lambda: no_success(503, "the API server is shutting down"), id="ends"),
        pytest.param(lambda: no_success(429, "too many requests"), id="busy"),
        pytest.param(lambda: web.Response(text=json.dumps(STARTS) + "\n"), id="in the stream"),
    ],
)
def test_an_api_server_that_is_away_for_a_while_ends_nothing(
    tmp_path: Path, refusal: Callable[[], web.Response], caplog: pytest.LogCaptureFixture
) -> None:
    """The error message is printed once, and the command continues to follow the job."""
    away = [no_success(503, "not yet") for _ in range(4)]  # This is longer than the client retries a request.
    looks = [job("waits"), job("waits"), job("waits"), *away, job("is over", "Complete")]
    code, printed = followed(tmp_path, looks, [refusal(), lines(job("trains"))])
    assert (code, [line.split()[-1] for line in printed.splitlines()]) == (0, ["waits", "trains", "over"])
    records = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.getMessage() for record in records] == ["team/a: not yet; retrying until the API server answers"]
