"""Where a worker is, in a few bytes that it rewrites as it goes and its agent reads a few times a second.

A line on the worker channel for each part of each step would cost the agent more than many a step takes; this costs the
worker about a microsecond (one write to a file in memory), and the agent a read a tick. Standard library only, Python
3.9+; a script of one's own may write it too (the path is in CONCERTINA_HEARTBEAT).
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
"""Phase, step, CLOCK_MONOTONIC when it was entered, seconds of own work."""


READS = 20
"""At most: a script that does nothing but write is not waited for."""


class WorkerPhase(OpenEnum):
    """Where a worker is; what it goes through in a step stands in that order."""

    STARTING = "starting"
    RESTORING = "restoring"
    CHECKPOINTING = "checkpointing"
    EVALUATING = "evaluating"
    LOADING_DATA = "loading data"
    COMPUTING = "computing"
    REDUCING = "reducing"
    TRAINING = "training"
    """In messages: within a step, or between two."""
    COMPILING = "compiling"
    """Of a script, within a step."""


class HeartbeatWriter:
    """The worker's end. Without a path (or a place to write) it does nothing."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._file: Optional[int] = None
        self.busy = 0.0
        """Seconds of this round's finished steps, the first one apart, that this worker did not spend waiting for
        others; a straggler is one that has more of them than the rest. Written by the next `enter`."""
        try:
            self._file = os.open(environment[VARIABLE], os.O_WRONLY | os.O_CREAT, 0o600)
        except (KeyError, OSError):
            return

    def enter(self, phase: WorkerPhase, step: int) -> None:
        """From now on it is in `phase`, `step` steps being finished."""
        if self._file is not None:
            os.pwrite(self._file, _LAYOUT.pack(phase.encode()[:16], step, time.monotonic(), self.busy), 0)


@dataclasses.dataclass(frozen=True)
class HeartbeatFile:
    """The agent's end; of one worker of one round."""

    rank: int
    path: str

    def read(self, now: float) -> Optional[Heartbeat]:
        """None where nothing was written yet. `now`: CLOCK_MONOTONIC, which agent and worker share."""
        before, content = b"", self._content()
        for _ in range(READS):  # a write may be under way
            if before == content:
                break
            before, content = content, self._content()
        if len(content) != _LAYOUT.size:
            return None
        phase, step, at, busy = _LAYOUT.unpack(content)
        return Heartbeat(self.rank, step, phase.rstrip(b"\0").decode(errors="replace"), max(0.0, now - at), busy)

    def _content(self) -> bytes:
        try:
            with open(self.path, "rb", buffering=0) as file:
                return file.read(_LAYOUT.size) or b""
        except OSError:
            return b""
