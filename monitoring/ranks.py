"""Replicas and workers of one job side by side. With spec.metrics.perRank each worker has a line of its own."""

from __future__ import annotations

from monitoring import job
from monitoring.boards import Board, Kind, Panel, Query, Section, Unit, Variable
from monitoring.promql import RECENT

CHOSEN = f'{job.CHOSEN}, replica=~"$replica"'
REPLICA, WORKER = "{{replica}}", "{{replica}} {{local_rank}}"
GPU = "{{replica}} {{gpu}}"


def _by(labels: str, metric: str) -> str:
    return f"sum by ({labels}) ({metric}{{{CHOSEN}}})"


def _rate(labels: str, metric: str) -> str:
    return f"sum by ({labels}) (rate({metric}{{{CHOSEN}}}[{RECENT}]))"


def _workers(name: str) -> tuple[Query, ...]:
    return (Query(_by("replica, local_rank", f"concertina_worker_{name}"), WORKER),)


def _worker_rate(name: str) -> tuple[Query, ...]:
    return (Query(_rate("replica, local_rank", f"concertina_worker_{name}"), WORKER),)


def _gpus(name: str) -> tuple[Query, ...]:
    return (Query(_by("replica, gpu, UUID", f"concertina_gpu_{name}"), GPU),)


RANKS = Board(
    "ranks",
    "Replicas and workers of one job side by side. With spec.metrics.perRank each worker has a line of its own.",
    (
        *job.VARIABLES,
        Variable("replica", f"concertina_agent_round{{{job.CHOSEN}}}", several=True),
    ),
    (
        Section(
            "Workers",
            (
                Panel("Workers that run", "One that is not there trains nothing.", _workers("running")),
                Panel("CPU", "Processors that are busy for the workers.", _worker_rate("cpu_seconds_total")),
                Panel(
                    "Memory",
                    "Of the workers and what they have started.",
                    _workers("resident_memory_bytes"),
                    Unit.BYTES,
                ),
                Panel(
                    "Most memory so far",
                    "Added up over processes.",
                    _workers("resident_memory_peak_bytes"),
                    Unit.BYTES,
                ),
                Panel("Threads", "Of the workers and what they have started.", _workers("threads")),
                Panel(
                    "Rank",
                    "Of each worker in this round; with spec.metrics.perRank.",
                    (Query(f"concertina_worker_rank{{{CHOSEN}}}", "rank"),),
                    kind=Kind.TABLE,
                ),
                Panel(
                    "Read from storage",
                    "Not from caches.",
                    _worker_rate("storage_read_bytes_total"),
                    Unit.BYTES_PER_SECOND,
                ),
                Panel("Written to storage", "", _worker_rate("storage_written_bytes_total"), Unit.BYTES_PER_SECOND),
                Panel(
                    "Workers replaced",
                    "Killed because they could not enter the next round, by reason.",
                    (Query(_by("replica, reason", "concertina_worker_replaced_total"), "{{replica}} {{reason}}"),),
                ),
                Panel(
                    "Step",
                    "By the replica with rank 0.",
                    (Query(_by("replica", "concertina_training_step"), REPLICA),),
                ),
            ),
        ),
        Section(
            "Network and agents",
            (
                Panel(
                    "Network in",
                    "Of the pod, loopback apart; with hostNetwork the node's. RDMA is not in it.",
                    (Query(_rate("replica", "concertina_pod_network_received_bytes_total"), REPLICA),),
                    Unit.BYTES_PER_SECOND,
                ),
                Panel(
                    "Network out",
                    "Likewise.",
                    (Query(_rate("replica", "concertina_pod_network_sent_bytes_total"), REPLICA),),
                    Unit.BYTES_PER_SECOND,
                ),
                Panel(
                    "Shards to durable storage",
                    "Bytes a second.",
                    (Query(_rate("replica", "concertina_checkpoint_shipped_bytes_total"), REPLICA),),
                    Unit.BYTES_PER_SECOND,
                ),
                Panel(
                    "What storage refused",
                    "Times a second; the agent asks again.",
                    (Query(_rate("replica", "concertina_checkpoint_storage_failures_total"), REPLICA),),
                    Unit.PER_SECOND,
                ),
                Panel(
                    "Round",
                    "The highest that each agent has seen. One that lags is not in the round.",
                    (Query(_by("replica", "concertina_agent_round"), REPLICA),),
                ),
                Panel(
                    "Agents' own CPU",
                    "Processors.",
                    (Query(_rate("replica", "concertina_agent_cpu_seconds_total"), REPLICA),),
                ),
                Panel(
                    "Agents' own memory",
                    "",
                    (Query(_by("replica", "concertina_agent_resident_memory_bytes"), REPLICA),),
                    Unit.BYTES,
                ),
            ),
        ),
        Section(
            "GPUs",
            (
                Panel(
                    "GPU utilisation", "Part of the time in which a kernel ran.", _gpus("utilization_ratio"), Unit.RATIO
                ),
                Panel("GPU memory", "In use, by whomever.", _gpus("memory_used_bytes"), Unit.BYTES),
                Panel("GPU memory there is", "", _gpus("memory_total_bytes"), Unit.BYTES),
                Panel(
                    "Clock of the multiprocessors", "Low at full load: throttled.", _gpus("sm_clock_hertz"), Unit.HERTZ
                ),
                Panel("Clock of the memory", "", _gpus("memory_clock_hertz"), Unit.HERTZ),
                Panel("Temperature", "", _gpus("temperature_celsius"), Unit.CELSIUS),
                Panel("Power", "", _gpus("power_watts"), Unit.WATTS),
                Panel(
                    "ECC errors",
                    "Since the driver was loaded. Uncorrected ones: the node has to be looked at.",
                    (Query(_by("replica, UUID, kind", "concertina_gpu_ecc_errors_total"), f"{REPLICA} {{{{kind}}}}"),),
                ),
                Panel(
                    "Critical XIDs",
                    "Since the agent began, by number.",
                    (
                        Query(
                            _by("replica, UUID, xid", "concertina_gpu_xid_errors_total"), f"{REPLICA} XID {{{{xid}}}}"
                        ),
                    ),
                ),
                Panel(
                    "GPUs last asked",
                    "It grows where one hangs.",
                    (Query(_by("replica", "concertina_gpu_sample_age_seconds"), REPLICA),),
                    Unit.SECONDS,
                ),
            ),
        ),
    ),
)
