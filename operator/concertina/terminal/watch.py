"""Watch of a job that is drilled or shown: its status, read repeatedly, and the trainers' logs."""

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
    """Error for an event that did not come in time.

    The message says what was waited for, and what the job says instead.
    """


class JobWatch:
    """Watch of a job from `async with` on. Outages of the API server are waited out."""

    def __init__(
        self,
        client: Client,
        namespace: str,
        name: str,
        on_look: Callable[[JobStatus], object] = lambda status: None,
        on_step: Callable[[StepDoneLine], object] = lambda step: None,
    ) -> None:
        """Create a watch.

        Args:
            client: Client of the cluster.
            namespace: Namespace of the job.
            name: Name of the job.
            on_look: Called with the status at each reading.
            on_step: Called once with each line of a step.
        """
        self._client, self._namespace, self._name = client, namespace, name
        self._on_look, self._on_step = on_look, on_step
        self.job: Raw = {}
        """The job as last read."""
        self.status = JobStatus()
        """Status of the job as last read."""
        self.seen_at = 0.0
        self.pods: dict[str, str] = {}
        """Names of the running pods by uid."""
        self.starts: dict[int, RoundStarted] = {}
        """Log lines about the first step of each round, by round."""
        self.step = 0
        """Highest step in any log."""
        self._reported_steps: set[StepDoneLine] = set()
        self._following: dict[str, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        await self._read_job()
        self._polling = asyncio.create_task(self._poll())
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [self._polling, *self._following.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def until(self, event: str, seconds: float, look: Callable[[], T | None]) -> T:
        """Wait for the first truthy result of `look`, and return it.

        Args:
            event: Event that is waited for, in words.
            seconds: Time limit in seconds.
            look: Function that is called until its result is truthy.

        Raises:
            Late: When the time is over.
        """
        deadline = time.monotonic() + seconds
        while not (result := look()):
            if time.monotonic() > deadline:
                raise Late(f"{event} did not come within {seconds:g} s; the job says: {show.said(self.status)}")
            if self._polling.done():
                self._polling.result()
            await asyncio.sleep(LOOK_EVERY / 4)
        return result

    @property
    def bundled(self) -> bool:
        """Whether the job runs the bundled trainer, whose log can be read."""
        return "trainer" in self.job["spec"]

    def training(self) -> bool:
        return show.word(self.status) == "Training"

    def first_start(self, above: int, since: float) -> RoundStarted | None:
        """Return the first round above `above` whose first step was done after the Unix time `since`, or None."""
        later = [start for number, start in self.starts.items() if number > above and start.at > since]
        return min(later, key=lambda start: start.at, default=None)

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY)
            with suppress(ApiError):
                await self._read_job()

    async def _read_job(self) -> None:
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
        """Read a pod's log until the pod is gone.

        A stream that breaks (a silent node, an API server that is away) is opened again.
        """
        while uid in self.pods:
            with suppress(ApiError):
                async for line in self._client.logs(self._namespace, pod, TRAINER, follow=True, tail=200):
                    self._read_line(line)
            await asyncio.sleep(LOOK_EVERY)

    def _read_line(self, text: str) -> None:
        """Handle a line of a log. A stream that is opened again repeats its last lines, so duplicates are ignored."""
        line = log_lines.parse(text)
        if isinstance(line, RoundStarted):
            self.starts[line.round] = line
        if isinstance(line, StepDoneLine) and line not in self._reported_steps:
            self._reported_steps.add(line)
            self.step = max(self.step, line.step)
            self._on_step(line)
