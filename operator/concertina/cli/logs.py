"""`concertina logs`: print the logs of a job's containers `trainer`, merged by time.

Each line begins with the name of the replica and the rank.
"""

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
"""Largest number of logs that are read at the same time.

A job may have a thousand replicas, and each log needs a connection through the API server.
"""
WATCH_AGAIN_SECONDS = 1.0
"""Seconds before a broken watch is opened again."""
BEFORE_FAILURE = 10.0
"""With `--since-failure`, the number of seconds before the failure at which the log begins."""


@dataclass(frozen=True)
class LogOptions:
    """Options of `concertina logs`."""

    replica: int | None
    """Index of the replica whose log to print; None for all replicas."""
    wanted: LogFilter
    tail: int | None
    """Number of lines to print from the end of each present log; None for all lines."""
    since_failure: bool
    as_json: bool


async def print_logs(target: Target, job: str, options: LogOptions, follow: bool) -> None:
    async with target.connect() as (client, namespace):
        status = status_of(await client.get(TRAINING_JOBS, namespace, job))
        logs = Logs(client, namespace, job, options, status)
        await (logs.follow() if follow else logs.print_all())


class Logs:
    """Reader of the logs of a job's replicas, which prints them merged by time."""

    def __init__(self, client: Client, namespace: str, job: str, options: LogOptions, status: JobStatus) -> None:
        """Prepare to print the logs of a job.

        Raises:
            UserError: When `--since-failure` is given but the job has had no failure.
        """
        self._client, self._namespace, self._job, self._options = client, namespace, job, options
        self._world, self._failure = status.world, status.last_failure
        if options.since_failure and self._failure is None:
            raise UserError(f"{job} has had no failure; to print all lines, omit --since-failure.")
        failed_at = unix_seconds(self._failure.at) if self._failure else 0.0
        self._since = rfc3339(int(failed_at - BEFORE_FAILURE)) if options.since_failure else ""
        self._labels = f"{JOB}={job}" + (f",{INDEX}={options.replica}" if options.replica is not None else "")

    async def print_all(self) -> None:
        """Print the present logs.

        Raises:
            UserError: When no replica has a log yet.
        """
        job_pods = (await self._client.list_all(PODS, self._namespace, self._labels))[0]
        pods = self._select([pod for pod in job_pods if _has_log(pod)])
        self._print_lost_log({pod["metadata"]["name"] for pod in pods})
        if not pods:
            which = f"replica {self._options.replica}" if self._options.replica is not None else "replicas"
            raise UserError(f"{self._job} has no {which} with a log yet; `concertina status {self._job}` says why.")
        async for entry in merged([self._pod_entries(pod) for pod in pods]):
            self._print(entry)

    async def follow(self) -> None:
        """Print the logs until the job has ended and all lines are printed.

        The logs of pods that are created later, and of containers that are restarted, are printed from their first
        line.
        """
        streams: set[asyncio.Task[None]] = set()

        async def print_pod(pod: str, tail: int | None) -> None:
            async for entry in self._entries(pod, True, tail):
                self._print(entry)

        async with asyncio.TaskGroup() as printing:

            async def start_streams() -> None:
                async for pod, tail in self._started_pods():
                    if len(streams) >= MOST_STREAMS:
                        say(
                            f"{pod}: at most {MOST_STREAMS} logs are followed at a time; choose a replica with "
                            "--replica"
                        )
                        continue
                    task = printing.create_task(print_pod(pod, tail))
                    streams.add(task)
                    task.add_done_callback(streams.discard)

            pods = printing.create_task(start_streams())
            async for state in states(self._client, self._namespace, self._job):
                self._world = status_of(state).world
                if ended(status_of(state)):
                    break
            pods.cancel()

    def _select(self, pods: list[Raw]) -> list[Raw]:
        """Return the pods whose logs are read, at most MOST_STREAMS.

        The pod with the requested rank, the pod that failed, and the pod of the coordinator (rank 0) are always
        included.
        """
        rank = self._options.wanted.rank
        rank_replica = "" if rank is None else self._world.replica_of(rank)
        preferred = (rank_replica, self._failure.replica if self._failure else "", self._world.coordinator)
        if len(pods) > MOST_STREAMS:
            say(f"{len(pods)} replicas have logs, and only {MOST_STREAMS} are shown; choose another one with --replica")
        return chosen(pods, preferred)

    def _print_lost_log(self, present_pods: Iterable[str]) -> None:
        """Print the last lines of the failed replica's log, from the job's status, if its pod no longer exists.

        A failed pod is often deleted together with its log.
        """
        failure = self._failure
        if not self._options.since_failure or failure is None or not failure.replica or failure.replica in present_pods:
            return
        introduction = "it printed last:" if failure.last_lines else "its output is not known."
        say(f"{failure.replica}, which failed ({failure.message.rstrip('.')}), has no log anymore; {introduction}")
        for line in failure.last_lines:
            self._print(LogEntry(failure.at, failure.replica, failure.round, None, None, line, None))

    def _print(self, entry: LogEntry) -> None:
        if self._options.wanted.has(entry):
            sys.stdout.write((entry.json(self._job) if self._options.as_json else entry.line()) + "\n")
            sys.stdout.flush()

    async def _pod_entries(self, pod: Raw) -> AsyncIterator[LogEntry]:
        """Yield the log entries of a pod.

        With `--since-failure`, the log from before the container's last restart comes first.
        """
        name = pod["metadata"]["name"]
        if self._options.since_failure and _restarts(pod):
            async for entry in self._entries(name, False, self._options.tail, previous=True):
                yield entry
        async for entry in self._entries(name, False, self._options.tail):
            yield entry

    async def _entries(
        self, pod: str, follow: bool, tail: int | None, previous: bool = False
    ) -> AsyncIterator[LogEntry]:
        """Yield the entries of the log of a pod's container `trainer`.

        If the log can't be read any further, the iterator ends, and a sentence on stderr gives the reason.
        """
        reader, since = LogReader(pod, self._world), self._since
        try:
            async for line in self._client.logs(
                self._namespace, pod, TRAINER, follow, tail, since, timestamps=True, previous=previous
            ):
                yield reader.read(*split(line))
        except ApiError as error:
            say(f"{pod}: the log ends here: {error}")

    async def _started_pods(self) -> AsyncIterator[tuple[str, int | None]]:
        """Yield each pod whose container `trainer` has started, and how many of its last lines to print first.

        A pod is yielded again after each restart of that container. The number is None for all lines since the start.
        """
        restarts_by_uid: dict[str, int] = {}  # restarts of the container, by the pod's uid

        def has_started(pod: Raw) -> bool:
            return _has_log(pod) and restarts_by_uid.get(pod["metadata"]["uid"], -1) < _restarts(pod)

        while True:
            pods, version = await once_reachable(
                "the replicas", lambda: self._client.list_all(PODS, self._namespace, self._labels)
            )
            for pod in self._select(list(filter(has_started, pods))):
                tail = None if pod["metadata"]["uid"] in restarts_by_uid else self._options.tail
                restarts_by_uid[pod["metadata"]["uid"]] = _restarts(pod)
                yield pod["metadata"]["name"], tail
            try:
                async for event, pod in self._client.watch(PODS, self._namespace, version, self._labels):
                    if event in ("ADDED", "MODIFIED") and has_started(pod):
                        restarts_by_uid[pod["metadata"]["uid"]] = _restarts(pod)
                        yield pod["metadata"]["name"], None
            except Gone:
                continue
            except Unreachable:
                await asyncio.sleep(WATCH_AGAIN_SECONDS)


def chosen(pods: list[Raw], first: Container[str | None]) -> list[Raw]:
    """Return at most MOST_STREAMS of `pods`, sorted by replica index.

    Pods whose names are in `first` are preferred, then pods with low indexes.
    """
    ranked = sorted(pods, key=lambda pod: (pod["metadata"]["name"] not in first, _index(pod)))
    return sorted(ranked[:MOST_STREAMS], key=_index)


async def merged(logs: list[AsyncIterator[LogEntry]]) -> AsyncIterator[LogEntry]:
    """Merge logs in order of time.

    The order within each log stays the same. Only one line of each log is in memory.
    """
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
    """Write a sentence to stderr."""
    sys.stderr.write(f"{harmless(sentence)}\n")


def _has_log(pod: Raw) -> bool:
    """Return whether the container `trainer` has started. The API server refuses to read a log before that."""
    containers = pod.get("status", {}).get("containerStatuses") or []
    return any(c["name"] == TRAINER and "waiting" not in c["state"] for c in containers)


def _restarts(pod: Raw) -> int:
    """Return the number of restarts of the container `trainer` in its pod."""
    containers = pod.get("status", {}).get("containerStatuses") or []
    return next((int(c.get("restartCount") or 0) for c in containers if c["name"] == TRAINER), 0)


def _index(pod: Raw) -> tuple[int, str]:
    index = str((pod["metadata"].get("labels") or {}).get(INDEX, ""))
    return int(index) if index.isdecimal() else 0, str(pod["metadata"]["name"])
