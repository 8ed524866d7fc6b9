"""Group of background tasks. An error in a task is never lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Optional

from concertina_protocol.log import log_event

AGAIN_SECONDS = 0.2
"""Seconds after which tasks that were cancelled and have not ended are cancelled again."""


class TaskGroup:
    """Group of background tasks with names.

    If a task raises an unexpected error, the group writes the error to the log and passes it to the function `failed`.
    """

    def __init__(self, failed: Optional[Callable[[BaseException], None]] = None) -> None:
        """Create an empty group.

        The function `failed` is called with each unexpected error of a task. Omit `failed` if an error of one task does
        not concern the rest of the agent, for example if each task serves one connection.
        """
        self.failed = failed
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(lambda _: self._ended(name, task))
        return task

    @contextlib.contextmanager
    def alongside(self, name: str, work: Coroutine[Any, Any, None]) -> Iterator[None]:
        """Run a task in the background until the `with` block ends."""
        task = self.start(name, work)
        try:
            yield
        finally:
            task.cancel()

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Cancel all tasks, and wait until they have ended.

        Tasks are cancelled repeatedly. Before Python 3.12, asyncio.wait_for loses a cancellation that coincides with
        the end of the operation that it waits for.
        """
        while self._tasks:
            self.cancel()
            await asyncio.wait(self._tasks, timeout=AGAIN_SECONDS)

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        log_event("task_failed", task=name, error=f"{type(error).__name__}: {error}")
        if self.failed is not None:
            self.failed(error)
