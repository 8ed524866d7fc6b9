"""What happens to a job that is drilled or shown: its status, looked at again and again, and the trainers' logs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Self, TypeVar

from concertina.api import TRAINER
from concertina.api.status import JobStatus
from concertina.kube.client import Client
from concertina.kube.errors import ApiError
from concertina.kube.manifests.names import JOB
from concertina.kube.parse.views import status_of
from concertina.kube.resources import PODS, TRAINING_JOBS, Raw
from concertina.terminal import show
from concertina_protocol import log_lines
from concertina_protocol.log_lines import RoundStarted, StepDoneLine

LOOK_EVERY = 0.2  # seconds
T = TypeVar("T")


class Late(Exception):
    """What was waited for did not come; the sentence says what, and what the job says instead."""


class JobWatch:
    """From `async with` on; outages of the API server are waited out."""

    def __init__(
        self,
        client: Client,
        namespace: str,
        name: str,
        on_look: Callable[[JobStatus], object] = lambda status: None,
        on_step: Callable[[StepDoneLine], object] = lambda step: None,
    ) -> None:
        """`on_look`: told of the status at each look; `on_step`: of each step's line, once."""
        self._client, self._namespace, self._name = client, namespace, name
        self._on_look, self._on_step = on_look, on_step
        self.job: Raw = {}
        """As last seen."""
        self.status = JobStatus()
        """The same."""
        self.seen_at = 0.0
        self.pods: dict[str, str] = {}
        """Names by uid, of those at work."""
        self.starts: dict[int, RoundStarted] = {}
        """By round."""
        self.step = 0
        """The highest in any log."""
        self._heard: set[StepDoneLine] = set()
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
                raise Late(f"{what} did not come within {seconds:g} s; the job says: {show.said(self.status)}")
            if self._looking.done():
                self._looking.result()
            await asyncio.sleep(LOOK_EVERY / 4)
        return answer

    @property
    def bundled(self) -> bool:
        """Whether the bundled trainer runs, whose log can be read."""
        return "trainer" in self.job["spec"]

    def training(self) -> bool:
        return show.word(self.status) == "Training"

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
        self.job = await self._client.get(TRAINING_JOBS, self._namespace, self._name)
        self.status = status_of(self.job)
        pods, _ = await self._client.list_all(PODS, self._namespace, f"{JOB}={self._name}")
        running = [pod for pod in pods if pod.get("status", {}).get("phase") == "Running"]
        self.pods = {pod["metadata"]["uid"]: pod["metadata"]["name"] for pod in running}
        self.seen_at = time.time()
        self._on_look(self.status)
        for uid, name in self.pods.items():
            if uid not in self._following:
                self._following[uid] = asyncio.create_task(self._follow(uid, name))

    async def _follow(self, uid: str, pod: str) -> None:
        """Until the pod is gone; a stream that breaks (a node is silent, the API server is away) is opened again."""
        while uid in self.pods:
            with suppress(ApiError):
                async for line in self._client.logs(self._namespace, pod, TRAINER, follow=True, tail=200):
                    self._read(line)
            await asyncio.sleep(LOOK_EVERY)

    def _read(self, text: str) -> None:
        """A stream that is opened again tells its last lines again."""
        line = log_lines.parse(text)
        if isinstance(line, RoundStarted):
            self.starts[line.round] = line
        if isinstance(line, StepDoneLine) and line not in self._heard:
            self._heard.add(line)
            self.step = max(self.step, line.step)
            self._on_step(line)
