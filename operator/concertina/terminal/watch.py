"""Repeated reads of a job's status and of its trainers' logs. Drills and the demo wait for events with this watch."""

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
    """Error for an event that did not happen within its time limit.

    The message contains the expected event and the current message of the job.
    """


class JobWatch:
    """Context manager that reads a job's status and logs while its `async with` block runs.

    During an outage of the API server, it continues to try.
    """

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
            on_look: Called with the status after each read.
            on_step: Called once for each log line about a step.
        """
        self._client, self._namespace, self._name = client, namespace, name
        self._on_look, self._on_step = on_look, on_step
        self.job: Raw = {}
        """Most recently read object of the job."""
        self.status = JobStatus()
        """Most recently read status of the job."""
        self.seen_at = 0.0
        self.pods: dict[str, str] = {}
        """Names of the job's running pods, by the pods' uid."""
        self.starts: dict[int, RoundStarted] = {}
        """Log line that reports the first step of each round, by round number."""
        self.step = 0
        """Highest step that any of the logs has reported."""
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
        """Call `look` repeatedly, and return its first truthy result.

        Args:
            event: Description of the expected event, for the error message.
            seconds: Time limit in seconds.
            look: Function to call.

        Raises:
            Late: When the time limit is exceeded.
        """
        deadline = time.monotonic() + seconds
        while not (result := look()):
            if time.monotonic() > deadline:
                raise Late(f"{event} did not happen within {seconds:g} s. The job's status:  {show.said(self.status)}")
            if self._polling.done():
                self._polling.result()
            await asyncio.sleep(LOOK_EVERY / 4)
        return result

    @property
    def bundled(self) -> bool:
        """True if the job uses the bundled trainer, so that its log can be parsed."""
        return "trainer" in self.job["spec"]

    def training(self) -> bool:
        return show.word(self.status) == "Training"

    def first_start(self, above: int, since: float) -> RoundStarted | None:
        """Return the earliest log line that reports the first step of a matching round; None if there is none.

        A round matches if its number is larger than `above` and its first step ended after the Unix time `since`.
        """
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
        """Read a pod's log until the pod no longer exists.

        If the stream ends, for example because the API server is down, it is opened again.
        """
        while uid in self.pods:
            with suppress(ApiError):
                async for line in self._client.logs(self._namespace, pod, TRAINER, follow=True, tail=200):
                    self._read_line(line)
            await asyncio.sleep(LOOK_EVERY)

    def _read_line(self, text: str) -> None:
        """Process one log line.

        Steps that are already known are skipped, because a reopened stream repeats its last lines.
        """
        line = log_lines.parse(text)
        if isinstance(line, RoundStarted):
            self.starts[line.round] = line
        if isinstance(line, StepDoneLine) and line not in self._reported_steps:
            self._reported_steps.add(line)
            self.step = max(self.step, line.step)
            self._on_step(line)
