"""What happens to a job while it is drilled: its status, looked at again and again, and the trainers' logs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Self, TypeVar

from concertina.api import TRAINER
from concertina.api.status import JobStatus
from concertina.drill.target import DrillTarget
from concertina.kube.errors import ApiError
from concertina_protocol import log_lines
from concertina_protocol.log_lines import RoundStarted, StepDone

LOOK_EVERY = 0.2  # seconds
T = TypeVar("T")


class Late(Exception):
    """What was waited for did not come; the sentence says what, and what the job says instead."""


class Watch:
    """From `async with` on; outages of the API server are waited out."""

    def __init__(self, target: DrillTarget) -> None:
        self._site = target
        self.status = JobStatus()
        """As last seen."""
        self.seen_at = 0.0
        self.bundled = False
        """Whether the bundled trainer runs, whose log can be read."""
        self.pods: dict[str, str] = {}
        """Names by uid, of those at work."""
        self.starts: dict[int, RoundStarted] = {}
        """By round."""
        self.step = 0
        """The highest in any log."""
        self._following: dict[str, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        await self._look()
        self._looking = asyncio.create_task(self._look_on())
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [self._looking, *self._following.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def until(self, what: str, seconds: float, look: Callable[[], T | None]) -> T:
        """The first truthy answer. Raises Late."""
        give_up = time.monotonic() + seconds
        while not (answer := look()):
            if time.monotonic() > give_up:
                raise Late(f"{what} did not come within {seconds:g} s; the job says: {self.words()}")
            if self._looking.done():
                self._looking.result()
            await asyncio.sleep(LOOK_EVERY / 4)
        return answer

    def words(self) -> str:
        """What the operator says of the job."""
        ready = self.status.condition("Ready")
        return f"{ready.reason}: {ready.message}" if ready else "nothing yet"

    def training(self) -> bool:
        ready = self.status.condition("Ready")
        return ready is not None and ready.reason == "Training"

    def first_start(self, above: int, since: float) -> RoundStarted | None:
        """The first round above that number that has made a step since then."""
        later = [start for number, start in self.starts.items() if number > above and start.at > since]
        return min(later, key=lambda start: start.at, default=None)

    async def _look_on(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY)
            with suppress(ApiError):
                await self._look()

    async def _look(self) -> None:
        job = await self._site.job()
        self.status = JobStatus.model_validate(job.get("status") or {})
        self.bundled = "trainer" in job["spec"]
        pods = [pod for pod in await self._site.pods() if pod.get("status", {}).get("phase") == "Running"]
        self.pods = {pod["metadata"]["uid"]: pod["metadata"]["name"] for pod in pods}
        self.seen_at = time.time()
        for uid, name in self.pods.items():
            if uid not in self._following:
                self._following[uid] = asyncio.create_task(self._follow(uid, name))

    async def _follow(self, uid: str, pod: str) -> None:
        """Until the pod is gone; a stream that breaks (a node is silent, the API server is away) is opened again."""
        while uid in self.pods:
            with suppress(ApiError):
                async for line in self._site.client.logs(self._site.namespace, pod, TRAINER, follow=True, tail=200):
                    self._read(line)
            await asyncio.sleep(LOOK_EVERY)

    def _read(self, text: str) -> None:
        line = log_lines.parse(text)
        if isinstance(line, RoundStarted):
            self.starts[line.round] = line
        if isinstance(line, StepDone):
            self.step = max(self.step, line.step)
