"""`concertina checkpoint create` when others request checkpoints too."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from builders.api_server import api_server
from concertina.api import CHECKPOINT_NOW
from concertina.cli.checkpoint_create import ask
from concertina.terminal.cluster_connection import Target, UserError

THEIRS = "theirs"
Look = tuple[str | None, str, str]
"""Annotation, the request in the status, and that request's state."""


def asked(folder: Path, *looks: Look) -> None:
    """Run the command with `looks` at the job, one after the other; "ours" is the id of the command's own request."""
    left, ids = list(looks), {"ours": "", THEIRS: THEIRS}

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.method == "PATCH":
            ids["ours"] = (await request.json())["metadata"]["annotations"][CHECKPOINT_NOW]
            return web.json_response({})
        annotated, whose, state = left.pop(0)
        annotations = {} if annotated is None else {CHECKPOINT_NOW: ids[annotated]}
        seen: dict[str, Any] = {"id": ids.get(whose, whose), "state": state, "step": 5, "message": f"{whose} {state}"}
        job = {"metadata": {"name": "a", "annotations": annotations}}
        return web.json_response({**job, "status": {"checkpointRequest": seen} if whose else {}})

    async def scenario() -> None:
        async with api_server(folder, answer) as config:
            await ask(Target(config, None, "team"), "a", wait=True)

    asyncio.run(scenario())
    assert not left


OURS: list[Look] = [("ours", "", ""), ("ours", "older", "Done"), ("ours", "ours", "Pending")]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("concertina.cli.checkpoint_create.LOOK_SECONDS", 0.0)


@pytest.mark.parametrize(
    "looks",
    [
        pytest.param([*OURS, ("ours", "ours", "Done")], id="alone"),
        pytest.param([*OURS, (THEIRS, "ours", "Pending"), (THEIRS, THEIRS, "Pending")], id="seen before"),
        pytest.param([(THEIRS, "older", "Done"), (THEIRS, THEIRS, "Pending")], id="never seen"),
        pytest.param([*OURS, (THEIRS, "ours", "Done")], id="fulfilled before theirs was seen"),
    ],
)
def test_who_asks_later_takes_the_place_of_who_asked_before(
    looks: list[Look], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any later checkpoint fulfils both requests."""
    if looks[-1][2] != "Done":
        looks = [*looks, (THEIRS, THEIRS, "Done")]
    asked(tmp_path, *looks)
    assert capsys.readouterr().out.splitlines()[-1] == f"{looks[-1][1]} Done."


@pytest.mark.parametrize("looks", [[("ours", "", "")], [(THEIRS, "ours", "Pending")]])
def test_what_is_refused_is_refused_to_both(looks: list[Look], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint was made: theirs Refused"):
        asked(tmp_path, *looks, (THEIRS, THEIRS, "Refused"))


@pytest.mark.parametrize("looks", [[], OURS])
def test_a_request_that_was_taken_back_is_not_waited_for(looks: list[Look], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="was removed from the job"):
        asked(tmp_path, *looks, (None, looks[-1][1] if looks else "older", "Pending"))
