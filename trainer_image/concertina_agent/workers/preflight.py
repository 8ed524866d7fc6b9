"""Preflight of this pod's GPUs, in a child process that ends before the replica becomes ready.

The agent has no torch, and the process from which workers are forked must not open a GPU. The child process therefore
imports torch itself. The child writes its report into a file of the volume. After a restart of the container, the agent
uses the report of the first preflight. If a preflight has caused the end of its container, the agent does not repeat
the preflight.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

from concertina_agent.workers.child_processes import Reaper
from concertina_agent.workers.workers import Process, StartError, start_command
from concertina_protocol.waiting import within

VARIABLE = "CONCERTINA_PREFLIGHT"
"""Environment variable with the devices to test.

The value `false` turns the preflight off. The value `none` means that the pod requests no device.
"""
DEVICES = "cuda"
LIMIT_SECONDS = 120.0
"""Seconds after which the child is killed. Its own deadline is shorter, but begins after the import of torch."""
EXIT_SECONDS = 5.0
"""Seconds within which the child has to end after its report. A driver that hangs may never let it end."""
LOOK_SECONDS = 0.1
"""Seconds between two checks for the child's report."""
MOST_BYTES, MOST_CHARACTERS = 1 << 16, 800
REPORT, ATTEMPT = "preflight.json", "preflight.started"


@dataclasses.dataclass(frozen=True)
class PreflightOutcome:
    """Outcome of a preflight."""

    fault: str = ""
    """Part of a sentence that names the faulty GPUs, or "" if no GPU is faulty."""
    warnings: str = ""
    """Part of a sentence that names GPUs that are slow or not completely tested, or "". It is only logged."""
    skipped: str = ""
    """Reason why no GPU, or not every GPU, was tested, or "" if all were."""
    seconds: float = 0.0
    """Seconds from the start of the child process to its end."""


def skipped_because(environment: Mapping[str, str], device_files: Path = Path("/dev")) -> str:
    """Return the reason why this pod needs no preflight, or "" if it needs one."""
    devices = environment.get(VARIABLE) or DEVICES
    if devices == "false":
        return "failurePolicy.gpuPreflight is false"
    if devices == "none":
        return "the pod template requests no device"
    if devices == DEVICES and not any(device_files.glob("nvidia[0-9]*")) and not (device_files / "kfd").exists():
        return "this pod has no GPU"
    return ""


async def preflight(environment: Mapping[str, str], volume: Path, reaper: Reaper) -> PreflightOutcome:
    """Test this pod's GPUs, or return the outcome of the test that an earlier container of the pod has made.

    If the child process can't be started, or dies, this does not count as a fault of the GPUs.
    """
    path, attempt, begin = volume / REPORT, volume / ATTEMPT, time.monotonic()
    if (earlier := _read(path)) is not None:
        return earlier
    if attempt.exists():
        return PreflightOutcome(skipped="an earlier preflight of this pod ended without a report")
    line = [sys.executable, "-m", "concertina_state.preflight", str(path), environment.get(VARIABLE) or DEVICES]
    try:
        attempt.touch()
        process = start_command(line, environment, reaper, "[preflight] ")
    except (StartError, OSError) as error:
        return PreflightOutcome(skipped=str(error))
    with contextlib.suppress(asyncio.TimeoutError):
        await within(LIMIT_SECONDS, _until_written(path, process))
    with contextlib.suppress(asyncio.TimeoutError):  # the workers need the memory of the GPUs
        process.send_signal(signal.SIGKILL)
        await within(EXIT_SECONDS, asyncio.shield(process.ended))
    end = f"ended with code {process.ended.result()}" if process.ended.done() else "does not end"
    outcome = _read(path) or PreflightOutcome(skipped=f"its process {end}, and has written no report")
    return dataclasses.replace(outcome, seconds=round(time.monotonic() - begin, 2))


async def _until_written(path: Path, process: Process) -> None:
    while not process.ended.done() and _read(path) is None:
        await asyncio.sleep(LOOK_SECONDS)


def _read(path: Path) -> Optional[PreflightOutcome]:
    """Return the outcome in a report of a preflight, or None if there is no valid report."""
    try:
        with path.open("rb") as file:
            report: Mapping[str, Any] = json.loads(file.read(MOST_BYTES))
        faults, warnings = ("; ".join(map(str, report[field]))[:MOST_CHARACTERS] for field in ("faults", "warnings"))
        return PreflightOutcome(faults, warnings, str(report["skipped"])[:MOST_CHARACTERS])
    except (OSError, ValueError, KeyError, TypeError):
        return None
