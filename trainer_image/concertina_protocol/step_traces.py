"""Paths of the traces of a worker's steps, from when they are written until they are fetched.

The module uses the standard library only and supports Python 3.9 and later.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Mapping

NAME = re.compile("[0-9a-f]{1,32}")
MOST_STEPS = 100
MOST_BYTES = 32 * 1024 * 1024
"""Maximum size of one rank's compressed trace: it is in the pod's volume, which may be memory."""


def folder(volume: Path) -> Path:
    """Return the folder of traces in a volume."""
    return volume / "traces"


def folder_of_worker(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of traces, derived from a worker's environment.

    Raises:
        KeyError: If the worker has no agent.
    """
    from concertina_protocol.heartbeat import VARIABLE

    return folder(Path(environment[VARIABLE]).parents[1])


def trace_file(where: Path, name: str, rank: int) -> Path:
    """Return the path of a trace: gzip-compressed JSON with `rank`, torch's `trace` and its `flightRecorder`."""
    return where / f"{name}-rank-{rank}.json.gz"


def wanted_file(trace: Path) -> Path:
    """Return the path of a file that exists while someone waits for the trace; without it, no trace is written."""
    return trace.with_name(f"{trace.name}.wanted")


def error_file(trace: Path) -> Path:
    """Return the path of a file that, instead of a trace, contains the reason why there is none, in a sentence."""
    return trace.with_name(f"{trace.name}.error")
