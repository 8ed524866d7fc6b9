"""Paths of the traces of a worker's steps. A trace is in the pod's volume until it is fetched.

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
"""Maximum size in bytes of one rank's compressed trace. The pod's volume, which contains it, may be memory."""


def folder(volume: Path) -> Path:
    """Return the folder of traces in a volume."""
    return volume / "traces"


def folder_of_worker(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of traces that a worker uses, given the environment variables of that worker.

    Raises:
        KeyError: If the process was not started by an agent.
    """
    from concertina_protocol.heartbeat import VARIABLE

    return folder(Path(environment[VARIABLE]).parents[1])


def trace_file(where: Path, name: str, rank: int) -> Path:
    """Return the path of a rank's trace, which is gzip-compressed JSON.

    Its fields are `rank`, torch's `trace` and torch's `flightRecorder`.
    """
    return where / f"{name}-rank-{rank}.json.gz"


def wanted_file(trace: Path) -> Path:
    """Return the path of the file that exists as long as a client waits for the trace.

    Without this file, no trace is written.
    """
    return trace.with_name(f"{trace.name}.wanted")


def error_file(trace: Path) -> Path:
    """Return the path of a file that is written instead of a trace if the trace fails.

    The file contains the reason as a sentence.
    """
    return trace.with_name(f"{trace.name}.error")
