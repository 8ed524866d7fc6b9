"""Reading of the file in which a script's optimizer steps are counted, for the agent (see `optimizer_steps`)."""

from __future__ import annotations

import dataclasses
from typing import Optional

from concertina_agent.core.events import StepCount
from concertina_agent.workers.optimizer_steps import LAYOUT
from concertina_protocol.heartbeat import settled_content

SUFFIX = ".steps"
"""Suffix of the file's name, which otherwise is that of the worker's heartbeat."""


@dataclasses.dataclass(frozen=True)
class StepFile:
    """File in which the optimizer steps of one worker's script are counted, in one round.

    A round is a period in which a fixed set of replicas trains.
    """

    rank: int
    path: str

    def read(self, now: float) -> Optional[StepCount]:
        """Return the counted steps of the worker, or None if no step has been counted.

        Args:
            now: Present CLOCK_MONOTONIC, which is the same clock for the agent and the worker.
        """
        content = settled_content(self.path, LAYOUT.size)
        if len(content) != LAYOUT.size:
            return None
        steps, first_at, moved_at, seconds, name = LAYOUT.unpack(content)
        if steps < 1 or seconds < 0:
            return None
        optimizer = name.rstrip(b"\0").decode(errors="replace")
        return StepCount(self.rank, steps, first_at, seconds, optimizer or "Optimizer", max(0.0, now - moved_at))
