"""Readings of the GPUs of this pod. A separate thread reads them, because a failing driver may answer late or never."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Optional

from concertina_agent.metrics import families as f
from concertina_agent.metrics import gpu_faults
from concertina_agent.metrics.exposition import MetricSample
from concertina_agent.metrics.nvml import LIBRARY, GpuIdentity, Nvml, NvmlError, Reading
from concertina_protocol.log import log_event

LOOK_SECONDS = 10.0
"""Seconds between two readings."""
FRESH_SECONDS = 60.0
"""Maximum age in seconds of a reading.

The server does not return an older reading, because the values may have changed.
"""
MOST_XIDS = 64
"""Maximum number of different XIDs that are counted separately for a GPU. All other XIDs are counted together."""
OTHER = "other"


class Gpus:
    """Readings of this pod's GPUs."""

    def __init__(
        self, node: str, library: str = LIBRARY, on_fault: Callable[[str], None] = lambda clause: None
    ) -> None:
        """Prepare to read the GPUs. Nothing is read before `start`.

        Args:
            node: Name of the node, for the metrics.
            library: Path of NVML.
            on_fault: Function that the reading thread calls for each fault of a GPU, with part of a sentence that
                describes the fault.
        """
        self._node, self._library, self._on_fault = node, library, on_fault
        self._errors: dict[GpuIdentity, Optional[int]] = {}
        """Number of uncorrected memory errors of each GPU at the first reading, or at the last reported fault."""
        self._looked: tuple[float, tuple[tuple[GpuIdentity, Reading], ...]] = (float("-inf"), ())
        """Time of the last reading in monotonic seconds, and the readings.

        The tuple is replaced as a whole, so any thread may read it.
        """
        self._xids: dict[tuple[GpuIdentity, str], int] = {}

    def start(self) -> None:
        threading.Thread(target=self._run, name="gpus", daemon=True).start()

    def _run(self) -> None:
        try:
            nvml = Nvml(self._library)
        except NvmlError as error:
            return log_event("no_nvml", why=str(error))
        while nvml.gpus:
            readings = tuple(nvml.read())
            self._looked = time.monotonic(), readings
            self._look_for_errors(readings)
            self._wait(nvml, time.monotonic() + LOOK_SECONDS)
        return None

    def _wait(self, nvml: Nvml, until: float) -> None:
        while (remaining_seconds := until - time.monotonic()) > 0:
            if not nvml.hears_of_xids:
                time.sleep(remaining_seconds)
            elif gpu_and_xid := nvml.wait_for_xid(remaining_seconds):
                self._count(*gpu_and_xid)

    def _look_for_errors(self, readings: tuple[tuple[GpuIdentity, Reading], ...]) -> None:
        for gpu, reading in readings:
            before = self._errors.get(gpu)
            if before is None:  # a first reading may fail
                self._errors[gpu] = reading.uncorrected
            if clause := gpu_faults.of_errors(gpu, before, reading.uncorrected):
                self._errors[gpu] = reading.uncorrected
                self._on_fault(clause)

    def _count(self, gpu: GpuIdentity, xid: int) -> None:
        key = gpu, str(xid)
        if key not in self._xids and sum(counted_gpu == gpu for counted_gpu, _ in self._xids) >= MOST_XIDS:
            key = gpu, OTHER
        self._xids = {**self._xids, key: self._xids.get(key, 0) + 1}
        log_event("xid", gpu=gpu.uuid, xid=xid)
        if clause := gpu_faults.of_xid(gpu, xid):
            self._on_fault(clause)

    def samples(self, now: float) -> Iterator[MetricSample]:
        """Yield the metrics of the GPUs. Without GPUs, there are none.

        Args:
            now: Present monotonic time in seconds.
        """
        read_at, readings = self._looked
        if not readings:
            return
        yield MetricSample(f.GPU_SAMPLE_AGE, max(0.0, now - read_at))
        for gpu, reading in readings if now - read_at <= FRESH_SECONDS else ():
            yield from self._samples_of_gpu(gpu, reading)
        for (gpu, xid), count in self._xids.items():
            yield MetricSample(f.GPU_XID, count, (*self._labels(gpu), xid))

    def _samples_of_gpu(self, gpu: GpuIdentity, reading: Reading) -> Iterator[MetricSample]:
        labels = self._labels(gpu)
        gauges = {
            f.GPU_UTILIZATION: reading.utilization,
            f.GPU_MEMORY_USED: reading.memory_used,
            f.GPU_MEMORY_TOTAL: reading.memory_total,
            f.GPU_SM_CLOCK: reading.sm_clock,
            f.GPU_MEMORY_CLOCK: reading.memory_clock,
            f.GPU_TEMPERATURE: reading.temperature,
            f.GPU_POWER: reading.power,
        }
        for family, value in gauges.items():
            if value is not None:
                yield MetricSample(family, value, labels)
        for kind, errors in (("corrected", reading.corrected), ("uncorrected", reading.uncorrected)):
            if errors is not None:
                yield MetricSample(f.GPU_ECC, errors, (*labels, kind))

    def _labels(self, gpu: GpuIdentity) -> tuple[str, ...]:
        return (str(gpu.index), gpu.uuid, gpu.device, gpu.model, self._node)
