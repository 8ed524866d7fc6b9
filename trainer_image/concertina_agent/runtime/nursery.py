"""Background tasks, none of which ends unseen."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Optional

from concertina_protocol.log import log_event

AGAIN_SECONDS = 0.2
"""Until tasks that have not ended are cancelled again."""


class TaskGroup:
    """Each task has a name, and ends in one of three ways: done, cancelled, or with an error that nobody foresaw, which
    is logged and told to `failed`."""

    def __init__(self, failed: Optional[Callable[[BaseException], None]] = None) -> None:
        """`failed`: None where an error concerns nobody but the task, such as one that serves a connection."""
        self.failed = failed
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(lambda _: self._ended(name, task))
        return task

    @contextlib.contextmanager
    def alongside(self, name: str, work: Coroutine[Any, Any, None]) -> Iterator[None]:
        """While the block runs."""
        task = self.start(name, work)
        try:
            yield
        finally:
            task.cancel()

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Cancel all, and wait for their ends. More than once, as before Python 3.12 asyncio.wait_for loses a
        cancellation that meets the end of what it waits for."""
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
