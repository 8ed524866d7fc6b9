"""Parts of the operator, which run forever: one that fails is restarted and named, and a lost Lease ends them all."""

from __future__ import annotations

import asyncio

import pytest

from builders.counted import counted
from concertina.controller import operator
from concertina.kube.watch.lease import LeaseLost


def test_a_part_that_ends_is_begun_again_and_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(operator, "FIRST_SECONDS", 0.001)
    begun, ended = 0, counted("concertina_background_task_restarts_total", part="pods")

    async def part() -> None:
        nonlocal begun
        begun += 1
        if begun == 1:
            raise RecursionError("too deep")
        if begun == 4:
            raise LeaseLost("another operator has it")

    with pytest.raises(LeaseLost):
        asyncio.run(operator._kept_running("pods/team-a", part))
    assert begun == 4
    assert counted("concertina_background_task_restarts_total", part="pods") == ended + 3
    lines = [line for line in capsys.readouterr().err.splitlines() if "part ended" in line]
    assert len(lines) == 3
    assert "RecursionError('too deep')" in lines[0]
    assert '"times_in_a_row":3' in lines[2].replace(" ", "")
