"""Entry point of `concertina-operator`: create and connect all components."""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import itertools
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Hashable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from concertina import backoff, metrics
from concertina.agents.connections import AgentConnections
from concertina.controller import master_keys, operator_log, serving, tracing
from concertina.controller.cache.cluster_cache import ClusterCache
from concertina.controller.health import ProcessHealth, served
from concertina.controller.job_metrics import JobCollector, phase_of
from concertina.controller.master_keys import MasterKeyError, MasterKeys
from concertina.controller.queue import KeyedQueue
from concertina.controller.queue_watch import QueueWatch
from concertina.controller.reconcile import Reconciler
from concertina.controller.settings import LEASE, OperatorSettings, OperatorSettingsError, from_environment
from concertina.controller.status_patches import StatusWriter
from concertina.controller.token_reviews import TokenReviews
from concertina.controller.workload_writes import WorkloadWriter
from concertina.controller.writes import ObjectWriter
from concertina.kube.access import NoAccess
from concertina.kube.client import Client
from concertina.kube.errors import ApiError, Forbidden
from concertina.kube.manifests.names import SELECTOR
from concertina.kube.parse.views import OwnedPod, node_view, pod_view
from concertina.kube.reflector import Reflector
from concertina.kube.resources import NODES, PODS, Raw
from concertina.kube.watch import trainingjobs
from concertina.kube.watch.event_recorder import Events
from concertina.kube.watch.gang_apis import served_gang_apis
from concertina.kube.watch.lease import Lease, LeaseLost
from concertina.kube.watch.namespaces import SelectedNamespaces
from concertina.kube.watch.service_account import operator_access
from concertina.kube.watch.trainingjobs import Follower, TrainingJobs
from concertina.plan.facts.decision import Phase
from concertina.plan.observed import NodeView
from concertina.plan.plan import plan
from concertina_protocol import descriptors
from concertina_protocol.log import log_event

GIVE_UP_SECONDS = 10.0
"""Seconds without the API server after which a planning pass is aborted. A later pass observes the job again."""
COLLECT = (50_000, 20, 20)
"""Thresholds of Python's cyclic garbage collector (`gc.set_threshold`).

With the defaults and a thousand jobs, the collector used a quarter of the operator's processor time, up to 0.75 s at a
time. Nearly all objects that the operator drops are in no cycle, so they are freed without the collector.
"""
FIRST_SECONDS, LONGEST_SECONDS = 0.2, 30.0
"""Shortest and longest delay in seconds before the operator restarts a background task or repeats the look-up of a job.
"""
SERVER_VERSION_SECONDS = 3600.0
"""Seconds between two requests for the API server's version."""
GANG_APIS_SECONDS = 60.0
"""Seconds between two requests for the gang scheduling APIs that the API server serves."""
STEADY_SECONDS = 60.0
"""Seconds for which a background task must run to reset its count of consecutive failures."""


def main() -> None:
    """Run the operator until SIGTERM or SIGINT (exit code 0), or until the Lease is lost (exit code 1).

    After exit code 1, the kubelet restarts the container.
    """
    text = "Serve TrainingJobs until SIGTERM. Environment variables configure it: install it by its Helm chart."
    argparse.ArgumentParser(prog="concertina-operator", description=text).parse_args()
    descriptors.raise_limit()
    # Parsing an integer takes time that grows with the square of its length, and agents may send any integer.
    sys.set_int_max_str_digits(sys.int_info.str_digits_check_threshold)
    gc.set_threshold(*COLLECT)
    gc.freeze()  # imported objects never become garbage
    try:
        settings = from_environment()
        operator_log.configure(settings.log_level, settings.log_format)
        sys.exit(asyncio.run(serve(settings)))
    except (OperatorSettingsError, NoAccess, MasterKeyError) as error:
        sys.exit(f"concertina-operator: {error}")


async def serve(settings: OperatorSettings) -> int:
    """Run the operator until it is stopped, and return the exit code of the process."""
    stop = asyncio.Event()
    _on_signals(stop)
    access = await operator_access()
    looks: list[serving.Look] = []
    metrics.LEADER.labels(LEASE).set(0)
    async with (
        exporting(settings.tracing) as trace,
        Client(access, give_up_after=GIVE_UP_SECONDS) as client,
        Client(access, give_up_after=0.0) as pods,
        # Lease renewals must not wait for other requests
        Client(access, give_up_after=GIVE_UP_SECONDS) as lease_client,
        # other requests must not wait for reviews of unknown tokens
        Client(access, give_up_after=GIVE_UP_SECONDS) as reviewer,
        serving.endpoints(settings, looks, TokenReviews(reviewer)),
    ):
        lease = Lease(lease_client, settings.namespace, settings.lease, settings.identity)
        health = ProcessHealth(lease)
        jobs = TrainingJobs(client, settings.identity, settings.watch_namespaces)
        async with served(settings.health, health), jobs.running():
            _on_signals(stop)  # kopf has replaced the signal handlers
            jobs.ended.add_done_callback(functools.partial(_kopf_ended, stop))
            if not await _unless(stop, lease.acquire()):
                return int(jobs.ended.done())
            try:
                # Read the keys only now: they may have changed while another operator was the leader.
                keys = await master_keys.read(client, settings)
                operator = Operator(settings, client, pods, lease, keys, trace)
                looks.append(operator.look)
                return max(await operator.run(stop, jobs, health.synced), int(jobs.ended.done()))
            finally:
                await lease.release()


def exporting(on: bool) -> AbstractAsyncContextManager[tracing.Export | None]:
    """Return a context manager that yields the function that exports traces, or None if tracing is off."""
    if not on:
        return nullcontext()
    # Import only when needed: the import delays a new operator, which may have to recover jobs.
    from concertina.controller import otlp_traces

    return otlp_traces.exporting()


def _kopf_ended(stop: asyncio.Event, ended: asyncio.Task[None]) -> None:
    """Stop the operator if kopf has ended, because kopf can't be restarted within a process."""
    if not stop.is_set():
        log_event("ended", task="kopf", error=repr(None if ended.cancelled() else ended.exception()))
        stop.set()


Part = Callable[[], Coroutine[Any, Any, None]]


async def _kept_running(name: str, part: Part) -> None:
    """Run a background task forever.

    If the task ends or fails with an unexpected error, it is restarted with increasing delays.

    Raises:
        LeaseLost: When the task raises it.
    """
    ends = metrics.BACKGROUND_TASK_RESTARTS.labels(name.partition("/")[0])
    failures = 0
    while True:
        begun = time.monotonic()
        try:
            await part()
            error = None
        except LeaseLost:
            raise
        except Exception as failure:
            error = failure
        failures = failures + 1 if time.monotonic() - begun < STEADY_SECONDS else 1
        ends.inc()
        log_event("part ended", part=name, error=repr(error), times_in_a_row=failures)
        await asyncio.sleep(backoff.seconds(failures - 1, FIRST_SECONDS, LONGEST_SECONDS))


class Operator:
    """Components that run only while this process holds the Lease: reflectors, queue, kopf and agent connections."""

    def __init__(
        self,
        settings: OperatorSettings,
        client: Client,
        pods: Client,
        lease: Lease,
        keys: MasterKeys,
        trace: tracing.Export | None,
    ) -> None:
        """Create the components of the operator, and connect them with each other. No component runs yet.

        Args:
            settings: Settings of the operator.
            client: Client for planning passes and watches.
            pods: Client for background writes.
            lease: Lease that this process holds.
            keys: Master keys.
            trace: Function that exports traces, or None if tracing is off.
        """
        self._settings = settings
        self._client = client
        self._lease = lease
        self._keys = keys
        self._connections = AgentConnections(self._agent_changed, may_act=lambda: lease.held)
        self._selected: SelectedNamespaces | None = None
        if settings.namespace_selector:
            self._selected = SelectedNamespaces(
                client, settings.namespace_selector, self._begin_to_serve, self._cease_to_serve
            )
        self._cache = ClusterCache(
            self._job_changed,
            self._connections.views,
            tuple(keys.by_id),
            self._connections.hearing,
            nodes_watched=settings.watch_nodes,
            serves=lambda namespace: self._selected is None or namespace in self._selected,
            later=asyncio.get_running_loop().call_later,
            changed_a_little=lambda uid: self._agent_changed(uid, at_once=False),
        )
        self._events = Events(client, settings.identity)
        namespaces: tuple[str | None, ...] = settings.watch_namespaces or (None,)
        self._pods: dict[str | None, Reflector[OwnedPod]] = {
            namespace: Reflector(client, PODS, pod_view, self._cache.on_pod, namespace, SELECTOR)
            for namespace in namespaces
        }
        as_node = functools.partial(
            node_view, notice_taints=settings.notice_taints, fault_conditions=settings.fault_conditions
        )
        self._nodes: Reflector[NodeView] | None = None
        if settings.watch_nodes:
            self._nodes = Reflector(client, NODES, as_node, self._cache.on_node)
        self._queues = QueueWatch(client, self._cache, namespaces, may_act=lambda: lease.held)
        self._reconciler = Reconciler(
            cache=self._cache,
            connections=self._connections,
            client=client,
            status=StatusWriter(client, self._cache, self._events),
            objects=ObjectWriter(
                pods,
                self._cache,
                settings.pods,
                keys,
                self._assume,
                WorkloadWriter(pods, self._cache, self._queues.assume),
            ),
            events=self._events,
            plan=plan,
            keys=keys,
            trace=trace,
            may_act=lambda: lease.held,
            changed_within=lambda uid, seconds: self._queue.add_within(uid, seconds),
            look_for_queues=self._queues.look,
        )
        self._queue = KeyedQueue(self._reconciler.run, self._lane)
        self._job_versions: dict[str | None, str] = {}
        """resourceVersion of the first list of jobs, by namespace (None: all namespaces).

        The watch continues from this version.
        """
        self._checks: dict[str, asyncio.Task[None]] = {}
        """Tasks that check whether a job still exists, by the job's uid."""
        self._listings: set[asyncio.Task[None]] = set()
        """Tasks that list the jobs of namespaces that the operator begins to serve."""

    async def run(self, stop: asyncio.Event, jobs: TrainingJobs, synced: asyncio.Event) -> int:
        """Run until `stop` is set (exit code 0) or a background task ends (exit code 1). Return the exit code.

        Args:
            stop: Event that ends the operator.
            jobs: Watch of TrainingJobs.
            synced: Event to set once the caches contain all objects that existed before this operator started.
        """
        parts = [asyncio.create_task(_kept_running(name, part), name=name) for name, part in self._parts().items()]
        try:
            if not await _unless(stop, self._sync()):
                return 0
            synced.set()
            self._queue.start()
            follower = Follower(
                self._job_versions,
                ready=lambda namespace: self._pods[namespace].synced.wait(),
                on_job=self._cache.on_job,
                on_deleted=self._on_deleted,
                on_listed=self._on_listed,
            )
            jobs.follow(follower)
            return await self._watch_over(parts, stop)
        finally:
            await self._queue.close()  # first, because no pass may run after other components are closed
            self._reconciler.close()
            self._connections.close()
            for task in (*self._checks.values(), *self._listings):
                task.cancel()
            for task in parts:
                task.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    def _parts(self) -> dict[str, Part]:
        """Return the coroutine functions of the background tasks, keyed by name.

        The tasks run while this process is the leader.
        """
        parts: dict[str, Part] = {
            **{f"pods/{namespace or '*'}": pods.run for namespace, pods in self._pods.items()},
            "events": self._events.run,
            "stalls": self._connections.notice_stalls,
            "lease": self._lease.keep,
            "server version": self._watch_server_version,
            "queues": self._queues.run,
            "orphaned workloads": self._queues.drop_orphans,
            "gang APIs": self._watch_gang_apis,
        }
        if self._nodes is not None:
            parts["nodes"] = self._nodes.run
        if self._selected is not None:
            parts["namespaces"] = self._selected.reflector.run
        if self._settings.makes_master_key:
            parts["master key"] = functools.partial(master_keys.keep, self._client, self._settings, self._keys)
        return parts

    async def _watch_server_version(self) -> None:
        """Request the API server's version periodically, because a cluster may be upgraded while the operator runs."""
        while True:
            try:
                self._cache.on_server_version(await self._client.server_version())
            except ApiError as error:
                log_event("server version unknown", error=str(error))
            await asyncio.sleep(SERVER_VERSION_SECONDS)

    async def _watch_gang_apis(self) -> None:
        """Check every minute which gang scheduling APIs are served, because schedulers may be installed and removed."""
        while True:
            try:
                self._cache.on_gang_apis(await served_gang_apis(self._client))
            except ApiError as error:
                log_event("gang APIs unknown", error=str(error))
            await asyncio.sleep(GANG_APIS_SECONDS)

    async def _sync(self) -> None:
        """Wait until the caches contain all objects that existed before this operator started.

        No planning pass may start before that. Namespaces in `watchNamespaces` whose pods the operator has no
        permission to list are not waited for. `TrainingJobs` reports the jobs of these namespaces later.
        """
        if self._selected is not None:
            await self._selected.reflector.synced.wait()
        pods = (
            reflector.synced if namespace is None else reflector.answered for namespace, reflector in self._pods.items()
        )
        nodes = () if self._nodes is None else (self._nodes.synced,)
        # A pass that does not know the queues would create pods without quota.
        await asyncio.gather(*(synced.wait() for synced in (*nodes, *pods, self._queues.known)))
        for namespace, reflector in self._pods.items():
            if reflector.synced.is_set():
                await self._list_jobs_at_start(namespace)
            else:
                log_event("namespace not served until the operator may list its pods", namespace=namespace)
        log_event("started", identity=self._settings.identity, jobs=sum(1 for _ in self._cache.jobs()))

    async def _list_jobs_at_start(self, namespace: str | None) -> None:
        try:
            listed = await trainingjobs.list_jobs(self._client, namespace, self._cache.on_job)
        except Forbidden:
            if namespace is not None:
                return
            listed = await trainingjobs.list_jobs_once_allowed(self._client, None, self._cache.on_job)
        self._job_versions[namespace] = listed.version

    async def _watch_over(self, parts: list[asyncio.Task[None]], stop: asyncio.Event) -> int:
        """Wait until `stop` is set or a background task ends, and return the exit code of the process."""
        stopped = asyncio.create_task(stop.wait())
        done, _ = await asyncio.wait([stopped, *parts], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        for task in done - {stopped}:
            error = None if task.cancelled() else task.exception()
            if isinstance(error, LeaseLost):
                log_event("lease lost", message=str(error))
                os._exit(1)  # exit immediately, because two operators must not do the same work
            log_event("ended", task=task.get_name(), error=repr(error))
        return 0 if done <= {stopped} else 1

    def look(self) -> JobCollector:
        """Update the operator's gauges for a scrape by Prometheus, and return a collector of the jobs' metrics."""
        metrics.LEADER.labels(LEASE).set(self._lease.held)
        self._queue.set_gauges()
        self._connections.set_gauges()
        metrics.JOBS_OF_ANOTHER_OPERATOR.set(len(self._reconciler.of_another))
        jobs = [job.view for job in self._cache.jobs()]
        phases = Counter(phase_of(job.status) for job in jobs)
        metrics.set_all(metrics.JOBS, {phase.value: phases[phase.value] for phase in Phase})
        return JobCollector(jobs)

    # --- callbacks of the parts -----------------------------------------------------------------------------------

    def _lane(self, uid: str) -> Hashable:
        """Return the group in which the job waits for a planning pass. Different groups take turns."""
        job = self._cache.job(uid)
        return job.lane if job else None

    def _job_changed(self, uid: str) -> None:
        self._queue.add_after(uid, self._cache.gap(uid))

    def _agent_changed(self, uid: str, at_once: bool) -> None:
        if at_once:
            self._job_changed(uid)
        else:
            self._queue.add_within(uid, self._cache.progress_every)

    def _assume(self, pod: Raw) -> None:
        reflector = self._pods.get(pod["metadata"]["namespace"]) or self._pods[None]
        reflector.assume(pod)

    def _on_deleted(self, uid: str) -> None:
        self._reconciler.forget(uid)
        self._queue.forget(uid)

    def _begin_to_serve(self, namespace: str) -> None:
        """List the jobs of a namespace that the operator begins to serve.

        The watch has already reported these jobs, but the operator ignored them, because it did not serve the namespace
        then.
        """
        listing = asyncio.create_task(self._list_jobs_of(namespace))
        self._listings.add(listing)
        listing.add_done_callback(self._listings.discard)

    def _cease_to_serve(self, namespace: str) -> None:
        for job in [job.view for job in self._cache.jobs() if job.view.namespace == namespace]:
            self._reconciler.release(job.uid)
            self._queue.forget(job.uid)

    async def _list_jobs_of(self, namespace: str) -> None:
        await trainingjobs.list_jobs_once_allowed(self._client, namespace, self._cache.on_job)
        log_event("namespace served", namespace=namespace)

    def _on_listed(self, namespace: str | None, uids: set[str]) -> None:
        """Check whether each cached job that is missing from a new list still exists.

        The list is of one namespace, or of all namespaces if `namespace` is None. A missing job was created after the
        list, or the watch missed its deletion. kopf never reports a missed deletion (decision "kopf through its public
        API").
        """
        for job in [job.view for job in self._cache.jobs()]:
            if job.uid not in uids and namespace in (None, job.namespace):
                if (under_way := self._checks.get(job.uid)) is not None:
                    under_way.cancel()  # the answer of the earlier look-up may be older than the list
                check = self._checks[job.uid] = asyncio.create_task(self._check(job.uid))
                check.add_done_callback(functools.partial(self._checked, job.uid))

    def _checked(self, uid: str, check: asyncio.Task[None]) -> None:
        if self._checks.get(uid) is check:
            del self._checks[uid]

    async def _check(self, uid: str) -> None:
        """Check whether a job still exists, and remove it from the cache if not. Retry until the API server responds.

        A deleted job for which there is nothing to do would otherwise stay in the cache.
        """
        for failures in itertools.count():
            try:
                if not await self._reconciler.check(uid):
                    self._queue.forget(uid)
                return
            except ApiError as error:
                if failures == 0:
                    log_event("not looked up", uid=uid, message=error.message)
                await asyncio.sleep(backoff.seconds(failures, FIRST_SECONDS, LONGEST_SECONDS))


def _on_signals(stop: asyncio.Event) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Run `work`, cancel it if `stop` is set before it finishes, and return whether it finished."""
    task, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        task.cancel()
        stopped.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)


if __name__ == "__main__":
    main()
