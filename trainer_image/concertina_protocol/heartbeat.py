"""Heartbeat of a worker: its present phase and step, in a small file that the worker writes and its agent reads.

The agent reads the file a few times per second. If workers sent a message for each part of each step instead, the agent
could need more time for the messages than the steps take. Writing a heartbeat takes the worker about a microsecond,
because the file is in memory. The module uses the standard library only and supports Python 3.9 and later. A user's
script may write the file too; its path is in CONCERTINA_HEARTBEAT.
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
"""Layout of the file: phase, step, CLOCK_MONOTONIC at the beginning of the phase, and seconds of the worker's own
work."""


READS = 20
"""Maximum number of attempts to read the file without a change in between.

Without a maximum, a script that writes the file all the time could delay the agent forever.
"""


class WorkerPhase(OpenEnum):
    """Phase of a worker. The phases of a step are listed in the order in which a worker goes through them."""

    STARTING = "starting"
    RESTORING = "restoring"
    CHECKPOINTING = "checkpointing"
    EVALUATING = "evaluating"
    LOADING_DATA = "loading data"
    COMPUTING = "computing"
    REDUCING = "reducing"
    TRAINING = "training"
    """Phase of a worker that is within a step or between two steps. It is used in messages, and never in the file."""
    COMPILING = "compiling"
    """Phase of a script that compiles during a step."""
    BETWEEN_STEPS = "between steps"
    """Phase of a script that does not report phases.

    The agent knows the optimizer steps of such a script, but not what the script does between them.
    """


class HeartbeatWriter:
    """Writer of a worker's heartbeat. Without a path, or if the file cannot be opened, the writer does nothing."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._file: Optional[int] = None
        self.busy = 0.0
        """Seconds in which this worker did not wait for other ranks, in this round's finished steps except the first.

        A rank with more of these seconds than other ranks is a straggler. The next call of `enter` writes this value
        into the file.
        """
        try:
            self._file = os.open(environment[VARIABLE], os.O_WRONLY | os.O_CREAT, 0o600)
        except (KeyError, OSError):
            return

    def enter(self, phase: WorkerPhase, step: int) -> None:
        """Record that the worker enters a phase. `step` is the number of steps that the worker has finished."""
        if self._file is not None:
            os.pwrite(self._file, _LAYOUT.pack(phase.encode()[:16], step, time.monotonic(), self.busy), 0)


@dataclasses.dataclass(frozen=True)
class HeartbeatFile:
    """Reader of the heartbeat of one worker in one round, for the worker's agent.

    A round is a period in which a fixed set of replicas trains.
    """

    rank: int
    path: str

    def read(self, now: float) -> Optional[Heartbeat]:
        """Return the worker's heartbeat, or None if the worker has not written any.

        Args:
            now: Present CLOCK_MONOTONIC, which is the same clock for the agent and the worker.
        """
        content = settled_content(self.path, _LAYOUT.size)
        if len(content) != _LAYOUT.size:
            return None
        phase, step, entered_at, busy = _LAYOUT.unpack(content)
        return Heartbeat(
            self.rank, step, phase.rstrip(b"\0").decode(errors="replace"), max(0.0, now - entered_at), busy
        )


def settled_content(path: str, size: int) -> bytes:
    """Return the first `size` bytes of a file that another process rewrites, or b"" if the file can't be read.

    The file is read until two reads give the same result, because a write may be in progress.
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
