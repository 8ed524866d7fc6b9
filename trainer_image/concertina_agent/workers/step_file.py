"""The agent's end of the count of a script's optimizer steps (see `optimizer_steps`)."""

from __future__ import annotations

import dataclasses
from typing import Optional

from concertina_agent.core.events import StepCount
from concertina_agent.workers.optimizer_steps import LAYOUT
from concertina_protocol.heartbeat import settled_content

SUFFIX = ".steps"
"""Ending of the file's name, after that of the worker's heartbeat."""


@dataclasses.dataclass(frozen=True)
class StepFile:
    """File of one worker of one round."""

    rank: int
    path: str

    def read(self, now: float) -> Optional[StepCount]:
        """Return the worker's steps, or None if none has been counted.

        Args:
            now: Current CLOCK_MONOTONIC, which the agent and the worker share.
        """
        content = settled_content(self.path, LAYOUT.size)
        if len(content) != LAYOUT.size:
            return None
        steps, first_at, moved_at, seconds, name = LAYOUT.unpack(content)
        if steps < 1 or seconds < 0:
            return None
        optimizer = name.rstrip(b"\0").decode(errors="replace")
        return StepCount(self.rank, steps, first_at, seconds, optimizer or "Optimizer", max(0.0, now - moved_at))
