"""Child process of the preflight, from the agent's side. The child is a small program in the place of the test."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from builders.agent import Driver
from concertina_agent import settings
from concertina_agent.core import events as e
from concertina_agent.metrics.metrics_driver import MetricsDriver
from concertina_agent.transfers.uploads import Shipping
from concertina_agent.workers import preflight
from concertina_agent.workers.child_processes import Reaper
from concertina_agent.workers.preflight import PreflightOutcome

REPORT = '{"faults": ["GPU 0 computes wrongly"], "warnings": ["GPU 1 is slow"], "skipped": ""}'
WRITES = f"""
import os, sys, time
path = sys.argv[1]
open(path + ".part", "w").write({REPORT!r})
os.replace(path + ".part", path)
"""


def outcome(folder: Path, program: str) -> PreflightOutcome:
    package = folder / "programs" / "concertina_state"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").touch()
    (package / "preflight.py").write_text(program)

    async def play() -> PreflightOutcome:
        reaper = Reaper()
        reaper.start()
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(package.parent)}
        return await preflight.preflight(environment, folder, reaper)

    return asyncio.run(play())


@pytest.mark.parametrize("then", ["", "time.sleep(600)"], ids=["ends", "hangs in its exit"])
def test_the_report_counts_as_soon_as_it_is_written(tmp_path: Path, then: str) -> None:
    seen = outcome(tmp_path, WRITES + then)
    assert (seen.fault, seen.warnings, seen.skipped) == ("GPU 0 computes wrongly", "GPU 1 is slow", "")


def test_a_child_that_hangs_before_its_report_is_no_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "LIMIT_SECONDS", 0.5)
    seen = outcome(tmp_path, "import time; time.sleep(600)")
    assert (seen.fault, seen.skipped) == ("", "its process ended with code -9, and has written no report")


def test_a_preflight_without_a_report_is_not_repeated_in_the_next_container(tmp_path: Path) -> None:
    assert (
        outcome(tmp_path, "raise SystemExit(3)").skipped == "its process ended with code 3, and has written no report"
    )
    assert outcome(tmp_path, WRITES) == PreflightOutcome(
        skipped="an earlier preflight of this pod ended without a report"
    )


@pytest.mark.parametrize(
    ("value", "reported"), [("none", []), ("false", [e.GpuFaultSeen("GPU 0")]), (None, [e.GpuFaultSeen("GPU 0")])]
)
def test_a_pod_that_requests_no_device_ignores_errors_of_gpus_that_it_sees(
    tmp_path: Path, value: str | None, reported: list[e.Event]
) -> None:
    preflight_variable = {} if value is None else {preflight.VARIABLE: value}
    environment = {
        "CONCERTINA_UID": "uid", "CONCERTINA_REPLICA": "r0", "CONCERTINA_POD_IP": "127.0.0.1",
        "PATH": os.environ["PATH"], "CONCERTINA_VOLUME": str(tmp_path), "CONCERTINA_TRAINER": "{}",
        **preflight_variable,
    }  # fmt: skip

    async def play() -> list[e.Event]:
        seen: list[e.Event] = []
        agent = Driver().core
        metrics = MetricsDriver(settings.read(environment, ()), agent, dict, Shipping(), seen.append)
        metrics._on_gpu_fault("GPU 0")
        await asyncio.sleep(0)
        agent.gpu_fault = "GPU 0"
        metrics._on_gpu_fault("GPU 1")
        await asyncio.sleep(0)
        return seen

    assert asyncio.run(play()) == reported


def test_a_pod_that_requests_no_device_skips_the_preflight(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    assert preflight.skipped_because({}, tmp_path) == ""
    assert preflight.skipped_because({preflight.VARIABLE: "none"}, tmp_path) == "the pod template requests no device"
