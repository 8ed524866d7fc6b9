"""The variables that a worker is started with: torchrun's, mpirun's and srun's names for the same facts. Pure.

Of mpirun's and srun's names only those that count: who am I, of how many. Those that speak of a scheduler
(SLURM_JOB_ID, SLURM_JOB_NODELIST, OMPI_MCA_*, PMIX_*) are left alone: scripts take them as leave to call scontrol, to
requeue, or to start MPI, and there is none (decision "Names of places, not of schedulers"). Frameworks that know all
three prefer torchrun's.
"""

from __future__ import annotations

from collections.abc import Mapping

from concertina_protocol import Assign
from concertina_protocol.addresses import split

VARYING = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ROLE_NAME", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID",
    "SLURM_NODEID", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_NTASKS_PER_NODE", "CONCERTINA_ROUND",
    "CONCERTINA_SOCKET", "CONCERTINA_SNAPSHOTS", "CONCERTINA_HEARTBEAT",
)  # fmt: skip
"""What each worker has of its own: nobody else knows it before."""


def worker_defaults(workers: int) -> dict[str, str]:
    """Of a replica with so many workers, where the template says nothing else."""
    # As torchrun has it; and what a worker has printed should not die with it.
    return {"PYTHONUNBUFFERED": "1", **({"OMP_NUM_THREADS": "1"} if workers > 1 else {})}


def worker_environment(
    base: Mapping[str, str], assign: Assign, me: int, local_rank: int, agent_store: bool
) -> dict[str, str]:
    """`base` with what the worker `local_rank` of members[me] needs; `agent_store`: MASTER_PORT is served already."""
    member = assign.members[me]
    rank, world = member.first_rank + local_rank, sum(m.workers for m in assign.members)
    host, port = split(assign.store)
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": member.workers,
        "GROUP_RANK": me,
        "GROUP_WORLD_SIZE": len(assign.members),
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world,
        "TORCHELASTIC_RESTART_COUNT": assign.round,
        "TORCHELASTIC_MAX_RESTARTS": 1 << 30,
        "TORCHELASTIC_USE_AGENT_STORE": agent_store,
        "OMPI_COMM_WORLD_RANK": rank,
        "OMPI_COMM_WORLD_SIZE": world,
        "OMPI_COMM_WORLD_LOCAL_RANK": local_rank,
        "OMPI_COMM_WORLD_LOCAL_SIZE": member.workers,
        "SLURM_PROCID": rank,
        "SLURM_NTASKS": world,
        "SLURM_LOCALID": local_rank,
        "SLURM_NODEID": me,
        "SLURM_NNODES": len(assign.members),
        "SLURM_JOB_NUM_NODES": len(assign.members),
        "SLURM_NTASKS_PER_NODE": member.workers,
        "CONCERTINA_ROUND": assign.round,
    }
    strings = {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": assign.uid,
    }
    return {
        **worker_defaults(member.workers),
        **base,
        **strings,
        **{name: str(value) for name, value in numbers.items()},
    }
