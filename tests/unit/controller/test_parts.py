"""The operator's parts run without end: one that ends by an error is begun again and named; a lost Lease ends them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from builders.counted import counted
from concertina.controller import operator
from concertina.controller.settings import from_environment
from concertina.kube.access import NoAccess
from concertina.kube.watch.lease import LeaseLost

ENVIRONMENT = {
    "CONCERTINA_NAMESPACE": "concertina",
    "CONCERTINA_MASTER_KEY_SECRET": "key",
    "CONCERTINA_IMAGE_AGENT": "agent",
}


def test_a_kubeconfig_by_which_kopf_would_never_connect_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = {"name": "c", "context": {"cluster": "c", "user": "c"}}
    cluster = {"server": "https://127.0.0.1:1", "tls-server-name": "kube.example"}
    clusters, users = [{"name": "c", "cluster": cluster}], [{"name": "c", "user": {}}]
    config = {"current-context": "c", "contexts": [named], "clusters": clusters, "users": users}
    (tmp_path / "config").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(NoAccess, match=r"tls-server-name \(kube\.example\)"):
        asyncio.run(asyncio.wait_for(operator.serve(from_environment(ENVIRONMENT)), 5.0))


def test_a_part_that_ends_is_begun_again_and_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(operator, "FIRST_SECONDS", 0.001)
    begun, ended = 0, counted("concertina_parts_ended_total", part="pods")

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
    assert counted("concertina_parts_ended_total", part="pods") == ended + 3
    lines = [line for line in capsys.readouterr().err.splitlines() if "part ended" in line]
    assert len(lines) == 3
    assert "RecursionError('too deep')" in lines[0]
    assert '"times_in_a_row":3' in lines[2].replace(" ", "")
