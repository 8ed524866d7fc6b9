"""A framework's steps, where its loop is its own: each is committed when the next one begins, so that what is due after
it (a validation, a log) has been done."""

from __future__ import annotations

from typing import Any

from trainingjob._objects import RandomNumbers
from trainingjob._state import State


class Steps:
    def __init__(self, state: State) -> None:
        self._state = state
        self.done = 0
        """That are committed."""
        self._random: dict[str, Any] | None = None

    def restore(self) -> None:
        self.done = self._state.restore(default=0)
        self._random = RandomNumbers().state_dict() if self.done else None

    def begin(self, finished: int) -> None:
        """Another step, after so many; its batch has been fetched."""
        if self._random is not None:  # fetching has drawn, as it had before that step was saved
            RandomNumbers().load_state_dict(self._random)
            self._random = None
        self.commit(finished)

    def commit(self, finished: int, durable: bool = False) -> None:
        """As far as it is not."""
        if finished > self.done:
            self.done = finished
            self._state.commit(finished - 1, durable=durable)
