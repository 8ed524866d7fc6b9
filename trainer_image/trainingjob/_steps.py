"""Commits for a framework that has its own training loop.

A step is committed when the next step begins. Work that follows a step, such as a validation, is then finished.
"""

from __future__ import annotations

from typing import Any

from trainingjob._objects import RandomNumbers
from trainingjob._state import State


class StepCommitter:
    """Commits the steps of a framework's loop."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.committed = 0
        """Number of committed steps."""
        self._random: dict[str, Any] | None = None
        """Random numbers to restore once the first batch has been fetched."""

    def restore(self) -> None:
        """Restore the state, and set the number of committed steps to the restored step."""
        self.committed = self._state.restore(default=0)
        self._random = RandomNumbers().state_dict() if self.committed else None

    def begin_step(self, finished: int) -> None:
        """Commit the previous step. Call this method once the batch of the next step has been fetched.

        Args:
            finished: Number of finished steps.
        """
        if self._random is not None:  # fetching has drawn numbers, which it had done before that step was saved
            RandomNumbers().load_state_dict(self._random)
            self._random = None
        self.commit(finished)

    def commit(self, finished: int, durable: bool = False) -> None:
        """Commit the last finished step, unless it has been committed already.

        Args:
            finished: Number of finished steps.
            durable: See `State.commit`.
        """
        if finished > self.committed:
            self.committed = finished
            self._state.commit(finished - 1, durable=durable)
