"""Definitions of all metrics of a training pod: name, type, labels and meaning (see docs/reference/metrics.md)."""

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
    """Definition of one metric."""

    name: str
    """Name as Prometheus stores it. The name of a counter ends in _total."""
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()
    """Names of the metric's own labels. Every metric also has the labels of the pod."""


POD_LABELS = ("namespace", "trainingjob", "replica")
WORKER_LABEL = "local_rank"
"""Label that identifies a worker, for metrics with one series per worker."""
STEP_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0),
    *(20.0, 30.0, 60.0, 120.0, 300.0),
)
"""Upper bounds in seconds of the buckets of step durations.

A step of a small model takes milliseconds, and one of a large model a minute.
"""

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

ROUND = _gauge("concertina_agent_round", "Highest round that the agent has seen.")
STEP = _gauge(
    "concertina_training_step", "Steps finished since the run began. For counted steps: since the workers started."
)
STEPS = _gauge("concertina_training_steps", "Steps of the whole run, if known.")
SAMPLES = _gauge("concertina_training_samples", "Samples consumed since the run began.")
RUN_TOKENS = _gauge(
    "concertina_training_run_tokens", "Tokens trained on since the run began. Replayed tokens count once."
)
TOKENS = _counter(
    "concertina_training_tokens",
    "Tokens of the reported steps, including replayed steps, without the first step of each round.",
)
TOKENS_PER_SECOND = _gauge("concertina_training_tokens_per_second", "Tokens trained on per second by all workers.")
LOSS = _gauge(
    "concertina_training_loss",
    "Mean loss of the tokens of the last step. NaN if it is not finite; absent if the worker reports no loss.",
)
VALIDATION_LOSS = _gauge("concertina_training_validation_loss", "Validation loss of the last evaluation.")
VALIDATION_PERPLEXITY = _gauge(
    "concertina_training_validation_perplexity", "exp of the validation loss, for losses of tokens."
)
VALIDATION_SET_LOSS = _gauge(
    "concertina_training_validation_set_loss",
    "Loss of each set in trainer.evaluation.sets in the last evaluation, by name.",
    "name",
)
VALIDATION_ACCURACY = _gauge(
    "concertina_training_validation_accuracy_ratio",
    "Share of the validation tokens that the model predicts correctly, from 0 to 1, for losses of tokens.",
)
VALIDATION_SET_ACCURACY = _gauge(
    "concertina_training_validation_set_accuracy_ratio",
    "Token accuracy of each set in trainer.evaluation.sets in the last evaluation, by name.",
    "name",
)
VALIDATION_BITS_PER_BYTE = _gauge(
    "concertina_training_validation_bits_per_byte",
    "Validation loss in bits per byte of text; absent if the bytes of the data are not known.",
)
VALIDATION_SET_BITS_PER_BYTE = _gauge(
    "concertina_training_validation_set_bits_per_byte",
    "Bits per byte of each set in trainer.evaluation.sets in the last evaluation, by name.",
    "name",
)
VALIDATION_STEP = _gauge("concertina_training_validation_step", "Step after which the validation loss was measured.")
LEARNING_RATE = _gauge("concertina_training_learning_rate", "Learning rate of the last step.")
GRADIENT_NORM = _gauge("concertina_training_gradient_norm", "Gradient norm of the last step.")
METRIC = _gauge(
    "concertina_training_metric", "Other values that the worker reports, by name, for at most 32 names.", "name"
)
MFU = _gauge(
    "concertina_training_mfu_ratio",
    "Share of the devices' peak arithmetic that training uses, from 0 to 1. Causal attention is counted "
    "(docs/accounting.md).",
)
STEP_SECONDS = _family(
    "concertina_training_step_seconds",
    MetricKind.HISTOGRAM,
    "Duration of a step in seconds, without the first step of each round.",
)
PART_SECONDS = _counter(
    "concertina_training_step_part_seconds",
    "Seconds of these steps by part, on rank 0. The remaining time of a step is a wait for other ranks.",
    "part",
)
BUSY_SECONDS = _counter(
    "concertina_training_busy_seconds",
    "Seconds of steps in which a rank did not wait for other ranks: of rank 0 (coordinator), of the median "
    "rank and of the slowest rank.",
    "of",
)
DATA_WAIT_SECONDS = _counter("concertina_training_data_wait_seconds", "Seconds that training waited for data.")
SAVE_WAIT_SECONDS = _counter(
    "concertina_training_save_wait_seconds", "Seconds that training waited for snapshots and checkpoints."
)
SLOWEST_SAVE = _gauge(
    "concertina_training_slowest_save_seconds", "Duration of the slowest snapshot of this round in seconds."
)
START_SECONDS = _gauge("concertina_training_start_seconds", "Seconds of this round's start, by part.", "part")
SNAPSHOT_STEP = _gauge("concertina_training_snapshot_step", "Step of the newest snapshot that is complete on peers.")
SNAPSHOT_AGE = _gauge("concertina_training_snapshot_age_seconds", "Seconds since that snapshot was complete on peers.")
CHECKPOINT_STEP = _gauge(
    "concertina_training_checkpoint_step", "Step of the checkpoint that LATEST names in durable storage."
)

# --- durable storage, by every agent that ships to it -----------------------------------------------------------------

SHIPPED = _counter("concertina_checkpoint_shards_shipped", "Shards that the agent stored in durable storage.")
SHIPPED_BYTES = _counter("concertina_checkpoint_shipped_bytes", "Bytes of these shards.")
SHIP_SECONDS = _counter(
    "concertina_checkpoint_ship_seconds",
    "Seconds of uploads, failed attempts included. Training does not wait for them.",
)
STORAGE_FAILURES = _counter(
    "concertina_checkpoint_storage_failures", "Requests that storage refused or failed. The agent retries them."
)

# --- workers, by every agent ------------------------------------------------------------------------------------------

WORKERS_RUNNING = _gauge("concertina_worker_running", "Running workers.")
WORKER_RANK = _gauge("concertina_worker_rank", "Rank of the worker in this round. Only with spec.metrics.perRank.")
WORKER_CPU = _counter(
    "concertina_worker_cpu_seconds", "Processor time of the workers and of the processes that they started."
)
WORKER_MEMORY = _gauge(
    "concertina_worker_resident_memory_bytes", "Memory of these processes. Shared pages count in each of them."
)
WORKER_PEAK = _gauge(
    "concertina_worker_resident_memory_peak_bytes", "Peak memory of each of these processes, added up."
)
WORKER_READ = _counter(
    "concertina_worker_storage_read_bytes", "Bytes that these processes read from storage, not from caches."
)
WORKER_WRITTEN = _counter("concertina_worker_storage_written_bytes", "Bytes that these processes wrote to storage.")
WORKER_THREADS = _gauge("concertina_worker_threads", "Threads of these processes.")
WORKERS_REPLACED = _counter(
    "concertina_worker_replaced", "Workers that were killed because they could not enter the next round.", "reason"
)

# --- the pod ----------------------------------------------------------------------------------------------------------

NETWORK_RECEIVED = _counter(
    "concertina_pod_network_received_bytes",
    "Bytes that the pod received, without loopback and RDMA. With hostNetwork, those of the node.",
)
NETWORK_SENT = _counter(
    "concertina_pod_network_sent_bytes",
    "Bytes that the pod sent, without loopback and RDMA. With hostNetwork, those of the node.",
)
AGENT_CPU = _counter("concertina_agent_cpu_seconds", "Processor time of the agent itself.")
AGENT_MEMORY = _gauge("concertina_agent_resident_memory_bytes", "Memory of the agent itself.")

# --- GPUs, where there is NVML ----------------------------------------------------------------------------------------

GPU_LABELS = ("gpu", "UUID", "device", "modelName", "Hostname")
"""Labels of GPU metrics, with the names that DCGM's exporter uses."""
GPU_UTILIZATION = _gauge(
    "concertina_gpu_utilization_ratio", "Share of the time in which a kernel ran, from 0 to 1.", *GPU_LABELS
)
GPU_MEMORY_USED = _gauge("concertina_gpu_memory_used_bytes", "GPU memory in use by all processes.", *GPU_LABELS)
GPU_MEMORY_TOTAL = _gauge("concertina_gpu_memory_total_bytes", "Memory of the GPU.", *GPU_LABELS)
GPU_SM_CLOCK = _gauge("concertina_gpu_sm_clock_hertz", "Clock of the multiprocessors.", *GPU_LABELS)
GPU_MEMORY_CLOCK = _gauge("concertina_gpu_memory_clock_hertz", "Clock of the memory.", *GPU_LABELS)
GPU_TEMPERATURE = _gauge("concertina_gpu_temperature_celsius", "Temperature of the chip.", *GPU_LABELS)
GPU_POWER = _gauge("concertina_gpu_power_watts", "Power draw.", *GPU_LABELS)
GPU_ECC = _counter(
    "concertina_gpu_ecc_errors",
    "Memory errors since the driver was loaded, by kind: corrected or uncorrected.",
    *GPU_LABELS,
    "kind",
)
GPU_XID = _counter("concertina_gpu_xid_errors", "Critical XIDs since the agent started, by number.", *GPU_LABELS, "xid")
GPU_SAMPLE_AGE = _gauge(
    "concertina_gpu_sample_age_seconds", "Seconds since the GPUs were last read. It grows while a driver hangs."
)

ALL = tuple(_FAMILIES)
