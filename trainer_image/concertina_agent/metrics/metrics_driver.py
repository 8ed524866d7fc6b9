"""Collection of the metrics for a scrape.

Facts about training are read on the agent's event loop. Data of the kernel and of GPUs are read in other threads.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Optional

import concertina_protocol as p
from concertina_agent.core import events as e
from concertina_agent.core.agent_state import AgentState
from concertina_agent.metrics import families as f
from concertina_agent.metrics import worker_processes
from concertina_agent.metrics.endpoint import Endpoint
from concertina_agent.metrics.exposition import MetricSample, render
from concertina_agent.metrics.gpus import Gpus
from concertina_agent.metrics.training import Training
from concertina_agent.metrics.worker_processes import ProcessUsage, WorkerProcess
from concertina_agent.settings import AgentSettings, MetricsSettings
from concertina_agent.transfers.uploads import Shipping
from concertina_protocol.log import log_event
from concertina_protocol.waiting import within

FACTS_SECONDS = 2.0
"""Seconds within which the agent's event loop must return the facts. After this time, the scrape fails."""
KEPT_SECONDS = 1.0
"""Seconds for which the collected metrics are reused, so that more frequent scrapes do not take more time."""


@dataclasses.dataclass(frozen=True)
class _Facts:
    samples: tuple[MetricSample, ...]
    workers: tuple[WorkerProcess, ...]


_USED = {
    f.WORKERS_RUNNING: "running",
    f.WORKER_CPU: "cpu_seconds",
    f.WORKER_MEMORY: "resident_bytes",
    f.WORKER_PEAK: "peak_bytes",
    f.WORKER_READ: "read_bytes",
    f.WORKER_WRITTEN: "written_bytes",
    f.WORKER_THREADS: "threads",
}
"""For each metric of a worker, the name of the field of `ProcessUsage` with its value."""


class MetricsDriver:
    """Collector of the metrics, and the HTTP server that serves them."""

    def __init__(
        self,
        settings: AgentSettings,
        agent: AgentState,
        running: Callable[[], Mapping[int, tuple[int, ...]]],
        shipping: Shipping,
        emit: Callable[[e.Event], None],
    ) -> None:
        """Prepare to collect metrics. The HTTP server begins to listen in `start`.

        Args:
            settings: Settings of the agent.
            agent: State of the agent, which is only read.
            running: Function that returns the process ids of each running worker, keyed by the worker's rank.
            shipping: Counters of the uploads.
            emit: Function that passes events to the state machine.
        """
        self._settings, self._agent, self._running, self._shipping = settings, agent, running, shipping
        self._training = Training()
        self._counted: Optional[p.Progress] = None
        """Last recorded progress of a script whose optimizer steps are counted, or None."""
        self._workers = worker_processes.WorkerProcesses()
        self._replaced = collections.Counter({why.value: 0 for why in p.Replaced})
        self._gpus = Gpus(settings.metrics.node if settings.metrics else "", on_fault=self._on_gpu_fault)
        self._emit, self._main_loop = emit, asyncio.get_running_loop()
        self._loop: Optional[asyncio.AbstractEventLoop] = None
        self._cached_text, self._cached_at = b"", float("-inf")

    def start(self) -> None:
        """Start to read the GPUs and to serve the metrics. Call this on the agent's event loop.

        If the metrics cannot be served, the agent continues without them.
        """
        self._gpus.start()
        settings = self._settings.metrics
        if settings is None:
            return
        self._loop = asyncio.get_running_loop()
        try:
            Endpoint(self._settings.pod_ip, settings.port, settings.token, self._text).start()
        except OSError as error:
            log_event("metrics_not_served", port=settings.port, error=str(error))

    def _on_gpu_fault(self, clause: str) -> None:
        """Emit GpuFaultSeen. This method is called in the thread that reads the GPUs."""
        if self._agent.gpu_fault or not self._settings.requests_devices:
            return
        log_event("gpu_fault", what=clause)
        self._main_loop.call_soon_threadsafe(self._emit, e.GpuFaultSeen(clause))

    def on_event(self, event: e.Event) -> None:
        """Record the facts for the metrics from an event that the agent has processed."""
        if isinstance(event, e.WorkerMessage) and isinstance(event.message, p.Progress) and self._loop is not None:
            r = self._agent.current(event.round)
            if r is not None and r.workers.progress is event.message:
                self._training.on_progress(event.round, event.message, time.monotonic())
        elif isinstance(event, e.Tick) and event.counts and self._loop is not None:
            self._count_steps()
        elif isinstance(event, e.WorkersGone):
            self._replaced.update(why.value for why in event.replaced)

    def _count_steps(self) -> None:
        """Record the progress of a script that does not report its steps, from the count of its optimizer steps."""
        r = self._agent.round
        progress = r.workers.progress if r is not None else None
        if r is not None and progress is not None and progress.optimizer and progress is not self._counted:
            self._counted = progress
            self._training.on_progress(r.assign.round, progress, time.monotonic())

    # --- in the thread of the endpoint ------------------------------------------------------------------------------

    async def _text(self) -> bytes:
        settings, now = self._settings.metrics, time.monotonic()
        assert settings is not None
        assert self._loop is not None
        if now >= self._cached_at + KEPT_SECONDS:
            future = asyncio.run_coroutine_threadsafe(self._facts(), self._loop)
            facts = await within(FACTS_SECONDS, asyncio.wrap_future(future))
            uses = self._workers.look(facts.workers)
            samples = (
                *facts.samples,
                *_worker_samples(uses, settings.per_rank),
                *_pod_samples(),
                *self._gpus.samples(now),
            )
            self._cached_text, self._cached_at = render(samples, _base(settings, self._settings.replica)), now
        return self._cached_text

    # --- on the agent's loop ----------------------------------------------------------------------------------------

    async def _facts(self) -> _Facts:
        agent, r = self._agent, self._agent.round
        coordinator, progress = (r.coordinator, r.workers.progress) if r else (None, None)
        first = r.assign.members[r.me].first_rank if r else 0
        workers = tuple(WorkerProcess(rank - first, rank, pids) for rank, pids in self._running().items())
        busy = coordinator.watchdog.busy if coordinator else None
        samples = [MetricSample(f.ROUND, agent.seen[0]), *self._training.samples(progress, busy, time.monotonic())]
        if coordinator is not None and agent.latest is not None:
            samples.append(MetricSample(f.CHECKPOINT_STEP, agent.latest.step))
        if agent.uploads.storage is not None:
            families = (f.SHIPPED, f.SHIPPED_BYTES, f.SHIP_SECONDS, f.STORAGE_FAILURES)
            samples += map(MetricSample, families, dataclasses.astuple(self._shipping))
        samples += (MetricSample(f.WORKERS_REPLACED, n, (why,)) for why, n in self._replaced.items())
        return _Facts(tuple(samples), workers)


def _base(settings: MetricsSettings, replica: str) -> tuple[tuple[str, str], ...]:
    return tuple(zip(f.POD_LABELS, (settings.namespace, settings.job, replica)))


def _worker_samples(uses: Mapping[int, ProcessUsage], per_rank: bool) -> Iterator[MetricSample]:
    """Yield the metrics of each worker. Without `per_rank`, yield the sums over all workers."""
    for local_rank, use in uses.items() if per_rank else ():
        more = ((f.WORKER_LABEL, str(local_rank)),)
        if use.running:
            yield MetricSample(f.WORKER_RANK, use.rank, more=more)
        for family, name in _USED.items():
            yield MetricSample(family, getattr(use, name), more=more)
    if not per_rank:
        for family, name in _USED.items():
            yield MetricSample(family, sum(getattr(use, name) for use in uses.values()))


def _pod_samples() -> Iterator[MetricSample]:
    cpu, resident = worker_processes.own()
    yield MetricSample(f.AGENT_CPU, cpu)
    yield MetricSample(f.AGENT_MEMORY, resident)
    bytes_of_network = worker_processes.network()
    if bytes_of_network is not None:
        received, sent = bytes_of_network
        yield MetricSample(f.NETWORK_RECEIVED, received)
        yield MetricSample(f.NETWORK_SENT, sent)
