"""`concertina logs`: the containers 'trainer' of a job's pods, merged by time, each line after its replica and rank."""

from __future__ import annotations

import asyncio
import heapq
import sys
from collections.abc import AsyncIterator, Container, Iterable
from dataclasses import dataclass

from concertina.api import TRAINER
from concertina.api.status import JobStatus, rfc3339, unix_seconds
from concertina.kube.client import Client, once_reachable
from concertina.kube.errors import ApiError, Gone, Unreachable
from concertina.kube.manifests.names import INDEX, JOB
from concertina.kube.parse.views import status_of
from concertina.kube.resources import PODS, TRAINING_JOBS, Raw
from concertina.terminal.characters import harmless
from concertina.terminal.cluster_connection import Target, UserError
from concertina.terminal.follow import states
from concertina.terminal.log_entries import LogEntry, LogFilter, LogReader, split
from concertina.terminal.show import ended

MOST_STREAMS = 64
"""Logs that are read at a time: a job may have a thousand replicas, and each is a connection through the API server."""
WATCH_AGAIN_SECONDS = 1.0
"""Until a watch that broke, or could not be had, is tried again."""
BEFORE_FAILURE = 10.0
"""Seconds of the log that are shown from before a failure."""


@dataclass(frozen=True)
class LogOptions:
    """What to print."""

    replica: int | None
    """Index; None: of all."""
    wanted: LogFilter
    tail: int | None
    """Lines of each replica to begin with."""
    since_failure: bool
    as_json: bool


async def print_logs(target: Target, job: str, asked: LogOptions, follow: bool) -> None:
    async with target.connect() as (client, namespace):
        status = status_of(await client.get(TRAINING_JOBS, namespace, job))
        logs = Logs(client, namespace, job, asked, status)
        await (logs.follow() if follow else logs.print_all())


class Logs:
    def __init__(self, client: Client, namespace: str, job: str, asked: LogOptions, status: JobStatus) -> None:
        """Raises UserError where what is asked for can't be."""
        self._client, self._namespace, self._job, self._asked = client, namespace, job, asked
        self._world, self._failure = status.world, status.last_failure
        if asked.since_failure and self._failure is None:
            raise UserError(f"{job} has had no failure; without --since-failure all is printed.")
        failed_at = unix_seconds(self._failure.at) if self._failure else 0.0
        self._since = rfc3339(int(failed_at - BEFORE_FAILURE)) if asked.since_failure else ""
        self._labels = f"{JOB}={job}" + (f",{INDEX}={asked.replica}" if asked.replica is not None else "")

    async def print_all(self) -> None:
        found = (await self._client.list_all(PODS, self._namespace, self._labels))[0]
        pods = self._most_telling([pod for pod in found if _has_log(pod)])
        self._print_what_is_gone({pod["metadata"]["name"] for pod in pods})
        if not pods:
            which = f"replica {self._asked.replica}" if self._asked.replica is not None else "replicas"
            raise UserError(f"{self._job} has no {which} with a log yet; `concertina status {self._job}` says why.")
        async for entry in merged([self._whole(pod) for pod in pods]):
            self._print(entry)

    async def follow(self) -> None:
        """Until the job is over and all has been printed; a pod that comes later, and a container that is started
        again, is printed from its start on."""
        streams: set[asyncio.Task[None]] = set()

        async def print_one(pod: str, tail: int | None) -> None:
            async for entry in self._entries(pod, True, tail):
                self._print(entry)

        async with asyncio.TaskGroup() as printing:

            async def each_pod() -> None:
                async for pod, tail in self._starting():
                    if len(streams) >= MOST_STREAMS:
                        say(f"{pod}: {MOST_STREAMS} logs are followed at a time; --replica names one")
                        continue
                    task = printing.create_task(print_one(pod, tail))
                    streams.add(task)
                    task.add_done_callback(streams.discard)

            pods = printing.create_task(each_pod())
            async for state in states(self._client, self._namespace, self._job):
                self._world = status_of(state).world
                if ended(status_of(state)):
                    break
            pods.cancel()

    def _most_telling(self, pods: list[Raw]) -> list[Raw]:
        """The one that has the wanted rank, the one that failed and the coordinator are among them."""
        rank = self._asked.wanted.rank
        asked = "" if rank is None else self._world.replica_of(rank)
        first = (asked, self._failure.replica if self._failure else "", self._world.coordinator)
        if len(pods) > MOST_STREAMS:
            say(f"{len(pods)} replicas have logs; here are {MOST_STREAMS} of them, --replica names another")
        return chosen(pods, first)

    def _print_what_is_gone(self, there: Iterable[str]) -> None:
        """The pod that failed is often gone, and its log with it: its last words stand in the status."""
        failure = self._failure
        if not self._asked.since_failure or failure is None or not failure.replica or failure.replica in there:
            return
        words = "it printed last:" if failure.last_lines else "what it printed is not known."
        say(f"{failure.replica}, which failed ({failure.message.rstrip('.')}), has no log any more; {words}")
        for line in failure.last_lines:
            self._print(LogEntry(failure.at, failure.replica, failure.round, None, None, line, None))

    def _print(self, entry: LogEntry) -> None:
        if self._asked.wanted.has(entry):
            sys.stdout.write((entry.json(self._job) if self._asked.as_json else entry.line()) + "\n")
            sys.stdout.flush()

    async def _whole(self, pod: Raw) -> AsyncIterator[LogEntry]:
        """After a failure that its container was started again for, what was printed before that, too."""
        name = pod["metadata"]["name"]
        if self._asked.since_failure and _restarts(pod):
            async for entry in self._entries(name, False, self._asked.tail, previous=True):
                yield entry
        async for entry in self._entries(name, False, self._asked.tail):
            yield entry

    async def _entries(
        self, pod: str, follow: bool, tail: int | None, previous: bool = False
    ) -> AsyncIterator[LogEntry]:
        """A log that breaks off ends there, with a sentence."""
        reader, since = LogReader(pod, self._world), self._since
        try:
            async for line in self._client.logs(
                self._namespace, pod, TRAINER, follow, tail, since, timestamps=True, previous=previous
            ):
                yield reader.read(*split(line))
        except ApiError as error:
            say(f"{pod}: its log ends here: {error}")

    async def _starting(self) -> AsyncIterator[tuple[str, int | None]]:
        """Names of the pods whose container 'trainer' has started, once for each time that it has, and how many lines
        to begin with: all of what has begun since."""
        seen: dict[str, int] = {}  # how often it was started again, by uid

        def begun(pod: Raw) -> bool:
            return _has_log(pod) and seen.get(pod["metadata"]["uid"], -1) < _restarts(pod)

        while True:
            pods, version = await once_reachable(
                "the replicas", lambda: self._client.list_all(PODS, self._namespace, self._labels)
            )
            for pod in self._most_telling(list(filter(begun, pods))):
                tail = None if pod["metadata"]["uid"] in seen else self._asked.tail
                seen[pod["metadata"]["uid"]] = _restarts(pod)
                yield pod["metadata"]["name"], tail
            try:
                async for event, pod in self._client.watch(PODS, self._namespace, version, self._labels):
                    if event in ("ADDED", "MODIFIED") and begun(pod):
                        seen[pod["metadata"]["uid"]] = _restarts(pod)
                        yield pod["metadata"]["name"], None
            except Gone:
                continue
            except Unreachable:
                await asyncio.sleep(WATCH_AGAIN_SECONDS)


def chosen(pods: list[Raw], first: Container[str | None]) -> list[Raw]:
    """As many as are read at a time, in order of index; those in `first`, and then those of the lowest indexes."""
    found = sorted(pods, key=lambda pod: (pod["metadata"]["name"] not in first, _index(pod)))
    return sorted(found[:MOST_STREAMS], key=_index)


async def merged(logs: list[AsyncIterator[LogEntry]]) -> AsyncIterator[LogEntry]:
    """In order of time, each log in its own order; of each one line is held."""
    heads: list[tuple[float, int, LogEntry]] = []

    async def advance(number: int) -> None:
        entry = await anext(logs[number], None)
        if entry is not None:
            heapq.heappush(heads, (entry.seconds, number, entry))

    await asyncio.gather(*(advance(number) for number in range(len(logs))))
    while heads:
        _, number, entry = heapq.heappop(heads)
        yield entry
        await advance(number)


def say(sentence: str) -> None:
    """Beside what is printed."""
    sys.stderr.write(f"{harmless(sentence)}\n")


def _has_log(pod: Raw) -> bool:
    """Whether the container 'trainer' has started (the API server refuses to read a log before)."""
    containers = pod.get("status", {}).get("containerStatuses") or []
    return any(c["name"] == TRAINER and "waiting" not in c["state"] for c in containers)


def _restarts(pod: Raw) -> int:
    """How often the container 'trainer' was started again in its pod."""
    containers = pod.get("status", {}).get("containerStatuses") or []
    return next((int(c.get("restartCount") or 0) for c in containers if c["name"] == TRAINER), 0)


def _index(pod: Raw) -> tuple[int, str]:
    index = str((pod["metadata"].get("labels") or {}).get(INDEX, ""))
    return int(index) if index.isdecimal() else 0, str(pod["metadata"]["name"])
