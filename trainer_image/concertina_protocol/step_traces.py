"""Where a trace of a worker's steps lies, from when it is written until it is fetched. Standard library only, Python
3.9+."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Mapping

NAME = re.compile("[0-9a-f]{1,32}")
MOST_STEPS = 100
MOST_BYTES = 32 * 1024 * 1024
"""Of one rank's trace, compressed: it lies in the pod's volume, which may be memory."""


def folder(volume: Path) -> Path:
    return volume / "traces"


def folder_of_worker(environment: Mapping[str, str] = os.environ) -> Path:
    """The same, as a worker knows it. Raises KeyError where it has no agent."""
    from concertina_protocol.heartbeat import VARIABLE

    return folder(Path(environment[VARIABLE]).parents[1])


def trace_file(where: Path, name: str, rank: int) -> Path:
    """JSON, compressed by gzip: `rank`, torch's `trace` and its `flightRecorder`."""
    return where / f"{name}-rank-{rank}.json.gz"


def wanted_file(trace: Path) -> Path:
    """Is there as long as somebody waits for the trace: without it none is made."""
    return trace.with_name(f"{trace.name}.wanted")


def error_file(trace: Path) -> Path:
    """Instead of a trace: why there is none, in a sentence."""
    return trace.with_name(f"{trace.name}.error")
