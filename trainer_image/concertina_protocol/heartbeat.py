"""Current phase and step of a worker, in a small file that the worker rewrites and its agent reads.

The agent reads the file a few times a second. A line on the worker channel for each part of each step would cost the
agent more time than many steps take. A heartbeat costs the worker about a microsecond (one write to a file in memory),
and the agent one read a tick. The module uses the standard library only and supports Python 3.9 and later. A user's own
script may write the file too (its path is in CONCERTINA_HEARTBEAT).
"""

from __future__ import annotations

import dataclasses
import os
import struct
import time
from collections.abc import Mapping
from typing import Optional

from concertina_protocol import Heartbeat
from concertina_protocol.codec.typed_json import OpenEnum

VARIABLE = "CONCERTINA_HEARTBEAT"
_LAYOUT = struct.Struct("<16sqdd")
"""Layout of the file: phase, step, CLOCK_MONOTONIC when the phase was entered, and seconds of own work."""


READS = 20
"""Maximum number of reads, so that the agent does not wait for a script that writes all the time."""


class WorkerPhase(OpenEnum):
    """Phase of a worker; the phases of a step are in the order in which a worker passes them."""

    STARTING = "starting"
    RESTORING = "restoring"
    CHECKPOINTING = "checkpointing"
    EVALUATING = "evaluating"
    LOADING_DATA = "loading data"
    COMPUTING = "computing"
    REDUCING = "reducing"
    TRAINING = "training"
    """Phase in messages, for a worker that is within a step or between two steps."""
    COMPILING = "compiling"
    """Phase of a script that compiles within a step."""
    BETWEEN_STEPS = "between steps"
    """Phase of a script that does not report: only its optimizer steps are known, not what it does between them."""


class HeartbeatWriter:
    """The worker's end, which does nothing if there is no path or the file cannot be opened."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._file: Optional[int] = None
        self.busy = 0.0
        """Seconds of this round's finished steps, except the first, in which this worker did not wait for others.

        A straggler has more of them than the other ranks. The next call of `enter` writes the value.
        """
        try:
            self._file = os.open(environment[VARIABLE], os.O_WRONLY | os.O_CREAT, 0o600)
        except (KeyError, OSError):
            return

    def enter(self, phase: WorkerPhase, step: int) -> None:
        """Record that the worker enters `phase` and has finished `step` steps."""
        if self._file is not None:
            os.pwrite(self._file, _LAYOUT.pack(phase.encode()[:16], step, time.monotonic(), self.busy), 0)


@dataclasses.dataclass(frozen=True)
class HeartbeatFile:
    """The agent's end for one worker of one round."""

    rank: int
    path: str

    def read(self, now: float) -> Optional[Heartbeat]:
        """Return the worker's heartbeat, or None if none has been written yet.

        Args:
            now: Current CLOCK_MONOTONIC, which the agent and the worker share.
        """
        content = settled_content(self.path, _LAYOUT.size)
        if len(content) != _LAYOUT.size:
            return None
        phase, step, entered_at, busy = _LAYOUT.unpack(content)
        return Heartbeat(
            self.rank, step, phase.rstrip(b"\0").decode(errors="replace"), max(0.0, now - entered_at), busy
        )


def settled_content(path: str, size: int) -> bytes:
    """Return the first bytes of a small file that another process rewrites, or nothing if it can't be read.

    The file is read until two reads agree, because a write may be in progress.
    """
    before, content = b"", _content(path, size)
    for _ in range(READS):
        if before == content:
            break
        before, content = content, _content(path, size)
    return content


def _content(path: str, size: int) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(size) or b""
    except OSError:
        return b""
