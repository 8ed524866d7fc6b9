"""All metrics of a training pod, with name, type, labels and meaning; docs/metrics.md lists them too."""

from __future__ import annotations

import dataclasses
import enum


class MetricKind(str, enum.Enum):
    """Type of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclasses.dataclass(frozen=True)
class MetricFamily:
    """One metric."""

    name: str
    """Name as Prometheus stores it. That of a counter ends in _total."""
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()
    """Labels in addition to those of the pod, which all metrics have."""


POD_LABELS = ("namespace", "trainingjob", "replica")
WORKER_LABEL = "local_rank"
"""Label of a worker's metrics, if metrics are served for each worker."""
STEP_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0),
    *(20.0, 30.0, 60.0, 120.0, 300.0),
)
"""Buckets in seconds. A step of a small model takes milliseconds, and one of a large model a minute."""

_FAMILIES: list[MetricFamily] = []


def _family(name: str, kind: MetricKind, help: str, *labels: str) -> MetricFamily:
    family = MetricFamily(name, kind, help, labels)
    _FAMILIES.append(family)
    return family


def _counter(name: str, help: str, *labels: str) -> MetricFamily:
    return _family(f"{name}_total", MetricKind.COUNTER, help, *labels)


def _gauge(name: str, help: str, *labels: str) -> MetricFamily:
    return _family(name, MetricKind.GAUGE, help, *labels)


# --- training, by the agent that has rank 0 ---------------------------------------------------------------------------

ROUND = _gauge("concertina_agent_round", "The highest round that this agent has seen.")
STEP = _gauge("concertina_training_step", "Steps finished since the run began.")
STEPS = _gauge("concertina_training_steps", "Steps of the whole run.")
SAMPLES = _gauge("concertina_training_samples", "Samples consumed since the run began.")
RUN_TOKENS = _gauge("concertina_training_run_tokens", "Tokens trained on since the run began, each once.")
TOKENS = _counter("concertina_training_tokens", "Tokens of the steps seen, those trained again too.")
TOKENS_PER_SECOND = _gauge("concertina_training_tokens_per_second", "Tokens of a second, of all workers together.")
LOSS = _gauge("concertina_training_loss", "Mean loss of the last step's tokens.")
VALIDATION_LOSS = _gauge("concertina_training_validation_loss", "The same of the documents that were set aside.")
VALIDATION_STEP = _gauge("concertina_training_validation_step", "The step after which that was measured.")
LEARNING_RATE = _gauge("concertina_training_learning_rate", "Of the last step.")
GRADIENT_NORM = _gauge("concertina_training_gradient_norm", "Of the last step.")
METRIC = _gauge("concertina_training_metric", "What else the worker reports, by its name for it.", "name")
MFU = _gauge("concertina_training_mfu_ratio", "Part of the devices' peak arithmetic that training uses, 0 to 1.")
STEP_SECONDS = _family(
    "concertina_training_step_seconds", MetricKind.HISTOGRAM, "Seconds of a step; the first one of a round is left out."
)
PART_SECONDS = _counter("concertina_training_step_part_seconds", "Seconds of steps by part, on rank 0.", "part")
BUSY_SECONDS = _counter(
    "concertina_training_busy_seconds", "Seconds of steps not spent waiting for other ranks, by whose.", "of"
)
DATA_WAIT_SECONDS = _counter("concertina_training_data_wait_seconds", "Seconds that training waited for data.")
SAVE_WAIT_SECONDS = _counter(
    "concertina_training_save_wait_seconds", "Seconds that training waited for snapshots and checkpoints."
)
SLOWEST_SAVE = _gauge("concertina_training_slowest_save_seconds", "What the slowest snapshot of this round took.")
START_SECONDS = _gauge("concertina_training_start_seconds", "Seconds of this round's start by part.", "part")
SNAPSHOT_STEP = _gauge("concertina_training_snapshot_step", "Newest snapshot that is complete on peers.")
SNAPSHOT_AGE = _gauge("concertina_training_snapshot_age_seconds", "Since that was first so, in this round.")
CHECKPOINT_STEP = _gauge("concertina_training_checkpoint_step", "What LATEST names in durable storage.")

# --- durable storage, by every agent that ships to it -----------------------------------------------------------------

SHIPPED = _counter("concertina_checkpoint_shards_shipped", "Shards that were put into durable storage.")
SHIPPED_BYTES = _counter("concertina_checkpoint_shipped_bytes", "Their bytes.")
SHIP_SECONDS = _counter("concertina_checkpoint_ship_seconds", "Seconds that shipping took, attempts that failed too.")
STORAGE_FAILURES = _counter("concertina_checkpoint_storage_failures", "What durable storage did not do when asked.")

# --- workers, by every agent ------------------------------------------------------------------------------------------

WORKERS_RUNNING = _gauge("concertina_worker_running", "Workers that run.")
WORKER_RANK = _gauge("concertina_worker_rank", "The worker's rank in this round.")
WORKER_CPU = _counter("concertina_worker_cpu_seconds", "Processor time of workers and what they started.")
WORKER_MEMORY = _gauge("concertina_worker_resident_memory_bytes", "Memory of these processes, shared pages in each.")
WORKER_PEAK = _gauge("concertina_worker_resident_memory_peak_bytes", "The most that each of them had, added up.")
WORKER_READ = _counter("concertina_worker_storage_read_bytes", "Bytes that they read from storage, not from caches.")
WORKER_WRITTEN = _counter("concertina_worker_storage_written_bytes", "Bytes that they wrote to storage.")
WORKER_THREADS = _gauge("concertina_worker_threads", "Threads of these processes.")
WORKERS_REPLACED = _counter(
    "concertina_worker_replaced", "Workers that were killed because they could not enter the next round.", "reason"
)

# --- the pod ----------------------------------------------------------------------------------------------------------

NETWORK_RECEIVED = _counter("concertina_pod_network_received_bytes", "Bytes that came in, loopback apart.")
NETWORK_SENT = _counter("concertina_pod_network_sent_bytes", "Bytes that went out, loopback apart.")
AGENT_CPU = _counter("concertina_agent_cpu_seconds", "Processor time of the agent itself.")
AGENT_MEMORY = _gauge("concertina_agent_resident_memory_bytes", "Memory of the agent itself.")

# --- GPUs, where there is NVML ----------------------------------------------------------------------------------------

GPU_LABELS = ("gpu", "UUID", "device", "modelName", "Hostname")
"""Labels of GPU metrics, with the names that DCGM's exporter uses."""
GPU_UTILIZATION = _gauge("concertina_gpu_utilization_ratio", "Part of the time in which a kernel ran.", *GPU_LABELS)
GPU_MEMORY_USED = _gauge("concertina_gpu_memory_used_bytes", "Memory in use, by whomever.", *GPU_LABELS)
GPU_MEMORY_TOTAL = _gauge("concertina_gpu_memory_total_bytes", "Memory of the GPU.", *GPU_LABELS)
GPU_SM_CLOCK = _gauge("concertina_gpu_sm_clock_hertz", "Clock of the multiprocessors.", *GPU_LABELS)
GPU_MEMORY_CLOCK = _gauge("concertina_gpu_memory_clock_hertz", "Clock of the memory.", *GPU_LABELS)
GPU_TEMPERATURE = _gauge("concertina_gpu_temperature_celsius", "Temperature of the chip.", *GPU_LABELS)
GPU_POWER = _gauge("concertina_gpu_power_watts", "Power drawn.", *GPU_LABELS)
GPU_ECC = _counter("concertina_gpu_ecc_errors", "Memory errors since the driver was loaded.", *GPU_LABELS, "kind")
GPU_XID = _counter("concertina_gpu_xid_errors", "Critical XIDs since this agent started.", *GPU_LABELS, "xid")
GPU_SAMPLE_AGE = _gauge("concertina_gpu_sample_age_seconds", "Since the GPUs were last asked; grows if one hangs.")

ALL = tuple(_FAMILIES)
