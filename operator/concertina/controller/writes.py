"""Pods and Secrets are written beside the passes: a job recovers while the API server is slow to take its pods, or
refuses them. All jobs together have SLOTS of these writes under way, in turns, and one job at most its window."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterable
from dataclasses import dataclass, field

from concertina.controller.turns import Turns
from concertina.controller.world import Job
from concertina.plan.types import Action, CreatePod, CreateRendezvous, DeletePod

SLOTS = 16
SMALLEST, FIRST, LARGEST = 1, 8, 64
"""Creates of one job that are under way at most: after one was refused, at first, and in the end. It grows by one with
each that is taken, so a quota is not asked a thousand times (Kubernetes' Job controller starts slowly, too)."""


@dataclass
class _Window:
    under_way: dict[Hashable, asyncio.Task[None]] = field(default_factory=dict)
    size: int = FIRST


class Writes:
    """`write` does one action and says whether it was taken; it may raise, which `failed` hears. `changed` is called
    after each create, as the next one may have waited for it."""

    def __init__(
        self,
        write: Callable[[Job, Action], Awaitable[bool]],
        failed: Callable[[Job, Action, Exception], Awaitable[None]],
        changed: Callable[[str], None],
    ) -> None:
        self._write = write
        self._failed = failed
        self._changed = changed
        self._turns = Turns(SLOTS)
        self._windows: dict[str, _Window] = {}

    def start(self, job: Job, actions: Iterable[Action]) -> None:
        """Begin what is not under way already, as far as the window goes; the rest is planned again by a later pass."""
        window = self._windows.setdefault(job.view.uid, _Window())
        for action in actions:
            key = _key(action)
            full = isinstance(action, CreatePod | CreateRendezvous) and _creates(window) >= window.size
            if key not in window.under_way and not full:
                window.under_way[key] = asyncio.create_task(self._do(job, window, key, action))
        self._drop_idle(job.view.uid, window)

    def forget(self, uid: str) -> None:
        """The job is gone. What is under way for it comes to its own end."""
        self._windows.pop(uid, None)

    def close(self) -> None:
        for window in self._windows.values():
            for task in window.under_way.values():
                task.cancel()

    async def _do(self, job: Job, window: _Window, key: Hashable, action: Action) -> None:
        creates = isinstance(action, CreatePod | CreateRendezvous)
        error: Exception | None = None
        try:
            async with self._turns.turn(job.view.uid):
                taken = await self._write(job, action)
        except Exception as raised:
            error, taken = raised, False
        finally:
            del window.under_way[key]
        if creates:
            window.size = min(window.size + 1, LARGEST) if taken else SMALLEST
            self._changed(job.view.uid)
        if error is not None:
            await self._failed(job, action, error)
        self._drop_idle(job.view.uid, window)

    def _drop_idle(self, uid: str, window: _Window) -> None:
        """What is as at first need not be remembered."""
        if not window.under_way and window.size >= FIRST and self._windows.get(uid) is window:
            del self._windows[uid]


def _creates(window: _Window) -> int:
    return sum(isinstance(key, CreatePod | CreateRendezvous) for key in window.under_way)


def _key(action: Action) -> Hashable:
    """The same for two actions of which one is enough: a pod is made once, whatever nodes the later plan avoids."""
    if isinstance(action, CreatePod):
        return CreatePod(action.index, action.attempt)
    if isinstance(action, DeletePod):
        return DeletePod(action.name, action.uid, "", action.force)
    return action
