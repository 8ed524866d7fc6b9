"""Dashboard that compares the replicas and workers of one job.

With spec.metrics.perRank, each worker has a line of its own.
"""

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
    "Replicas and workers of one job side by side. With spec.metrics.perRank, each worker has its own line.",
    (
        *job.VARIABLES,
        Variable("replica", f"concertina_agent_round{{{job.CHOSEN}}}", several=True),
    ),
    (
        Section(
            "Workers",
            (
                Panel("Running workers", "A worker that is missing does not train.", _workers("running")),
                Panel("CPU", "Processors that the workers use.", _worker_rate("cpu_seconds_total")),
                Panel(
                    "Memory",
                    "Memory of the workers and their child processes.",
                    _workers("resident_memory_bytes"),
                    Unit.BYTES,
                ),
                Panel(
                    "Peak memory",
                    "Peak memory, added up over processes.",
                    _workers("resident_memory_peak_bytes"),
                    Unit.BYTES,
                ),
                Panel("Threads", "Threads of the workers and their child processes.", _workers("threads")),
                Panel(
                    "Rank",
                    "Rank of each worker in this round. Needs spec.metrics.perRank.",
                    (Query(f"concertina_worker_rank{{{CHOSEN}}}", "rank"),),
                    kind=Kind.TABLE,
                ),
                Panel(
                    "Read from storage",
                    "Bytes read from storage, without reads from caches.",
                    _worker_rate("storage_read_bytes_total"),
                    Unit.BYTES_PER_SECOND,
                ),
                Panel("Written to storage", "", _worker_rate("storage_written_bytes_total"), Unit.BYTES_PER_SECOND),
                Panel(
                    "Workers replaced",
                    "Workers that were killed because they could not enter the next round, by reason.",
                    (Query(_by("replica, reason", "concertina_worker_replaced_total"), "{{replica}} {{reason}}"),),
                ),
                Panel(
                    "Step",
                    "Steps that the replica with rank 0 reports.",
                    (Query(_by("replica", "concertina_training_step"), REPLICA),),
                ),
            ),
        ),
        Section(
            "Network and agents",
            (
                Panel(
                    "Network in",
                    "Network traffic of the pod without loopback and RDMA. With hostNetwork, that of the node.",
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
                    "Bytes per second.",
                    (Query(_rate("replica", "concertina_checkpoint_shipped_bytes_total"), REPLICA),),
                    Unit.BYTES_PER_SECOND,
                ),
                Panel(
                    "Requests that storage refused",
                    "Refused requests per second. The agent retries them.",
                    (Query(_rate("replica", "concertina_checkpoint_storage_failures_total"), REPLICA),),
                    Unit.PER_SECOND,
                ),
                Panel(
                    "Round",
                    "Highest round that each agent has seen. An agent with a lower number is not in the round.",
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
                Panel("GPU memory", "GPU memory in use by all processes.", _gpus("memory_used_bytes"), Unit.BYTES),
                Panel("Total GPU memory", "", _gpus("memory_total_bytes"), Unit.BYTES),
                Panel(
                    "Clock of the multiprocessors",
                    "Clock of the multiprocessors. A low clock at full load means throttling.",
                    _gpus("sm_clock_hertz"),
                    Unit.HERTZ,
                ),
                Panel("Clock of the memory", "", _gpus("memory_clock_hertz"), Unit.HERTZ),
                Panel("Temperature", "", _gpus("temperature_celsius"), Unit.CELSIUS),
                Panel("Power", "", _gpus("power_watts"), Unit.WATTS),
                Panel(
                    "ECC errors",
                    "Memory errors since the driver was loaded. Check the node if there are uncorrected ones.",
                    (Query(_by("replica, UUID, kind", "concertina_gpu_ecc_errors_total"), f"{REPLICA} {{{{kind}}}}"),),
                ),
                Panel(
                    "Critical XIDs",
                    "Critical XIDs since the agent started, by number.",
                    (
                        Query(
                            _by("replica, UUID, xid", "concertina_gpu_xid_errors_total"), f"{REPLICA} XID {{{{xid}}}}"
                        ),
                    ),
                ),
                Panel(
                    "Time since the GPUs were last read",
                    "The time grows while a GPU hangs.",
                    (Query(_by("replica", "concertina_gpu_sample_age_seconds"), REPLICA),),
                    Unit.SECONDS,
                ),
            ),
        ),
    ),
)
