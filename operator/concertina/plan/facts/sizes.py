"""Valid world sizes, in replicas: whole numbers of blocks between the least and the most wanted."""

from __future__ import annotations

from concertina.api.spec import JobSpec
from concertina_trainer.layouts import nearest_sizes


def most(spec: JobSpec) -> int:
    """The largest valid size that the spec wants; 0 where no block fits."""
    return spec.replicas - spec.replicas % spec.replica_step


def least(spec: JobSpec) -> int:
    """The smallest valid size that the spec allows: minReplicas rounded up, but never more than the most."""
    floor = min(spec.min_replicas, most(spec))
    return min(most(spec), -(-floor // spec.replica_step) * spec.replica_step)


def fitting(available: int, spec: JobSpec) -> int:
    """The largest valid size of at most `available` replicas; 0 where that is below the least."""
    size = min(available, most(spec))
    size -= size % spec.replica_step
    return size if size and size >= least(spec) else 0


def rounding(spec: JobSpec) -> str:
    """Why the most is not spec.replicas, in a sentence with the nearest valid sizes; empty where it is."""
    if most(spec) == spec.replicas:
        return ""
    near = " and ".join(map(str, nearest_sizes(spec.replicas, spec.replica_step)))
    return (
        f"spec.replicas is {spec.replicas}, but only multiples of {spec.replica_step} replicas make whole blocks "
        f"(parallelism needs {spec.parallelism.block} ranks together, {spec.workers} in a replica); next to it: {near}"
    )
