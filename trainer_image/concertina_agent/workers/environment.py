"""Environment variables of a worker, under the names that torchrun, mpirun and srun use.

Of the variables of mpirun and srun, only those that identify a rank and the size of the world are set. Variables that
describe a scheduler (SLURM_JOB_ID, SLURM_JOB_NODELIST, OMPI_MCA_*, PMIX_*) are not set: scripts that find them call
scontrol, requeue the job or start MPI, which do not exist here (decision "Workers get no variables of scheduler jobs").
A framework that knows the variables of several of these launchers uses the variables of torchrun. The module has no
side effects.
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
    "CONCERTINA_STEP_FILE",
)  # fmt: skip
"""Names of the variables that differ between workers. Their values are not known before a worker starts."""


def worker_defaults(workers: int) -> dict[str, str]:
    """Return environment variables for the workers of a replica. Variables that the pod template sets take precedence.

    `workers` is the number of workers of the replica.
    """
    # torchrun sets OMP_NUM_THREADS in the same way. PYTHONUNBUFFERED prevents the loss of printed lines when a worker
    # dies.
    return {"PYTHONUNBUFFERED": "1", **({"OMP_NUM_THREADS": "1"} if workers > 1 else {})}


def worker_environment(
    base: Mapping[str, str], assign: Assign, me: int, local_rank: int, agent_store: bool
) -> dict[str, str]:
    """Return the environment variables of one worker: `base`, and variables of the round such as RANK.

    The worker has the local rank `local_rank` in the replica `assign.members[me]`. Set `agent_store` if the agent
    serves the c10d store at MASTER_PORT.
    """
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
