"""Scripts that were written for srun or mpirun, and frameworks that know several launchers."""

import asyncio
import os
import re
import subprocess
import sys

import pytest

from builders.train.replicas import IMPORTED, running
from concertina_agent.workers.environment import worker_environment
from concertina_protocol import Assign, Member, Restore

ONLY_SLURM_OR_MPI = """
import os, socket, sys
torchruns = [os.environ.pop(n) for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")]
if int(torchruns[0]) % 2:  # as a script for srun has it
    rank, world, local = (int(os.environ[n]) for n in ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"))
    node = rank // int(os.environ["SLURM_NTASKS_PER_NODE"])
    assert node == int(os.environ["SLURM_NODEID"]) < int(os.environ["SLURM_JOB_NUM_NODES"])
else:  # as a script for mpirun has it
    rank, world, local = (int(os.environ["OMPI_COMM_WORLD_" + n]) for n in ("RANK", "SIZE", "LOCAL_RANK"))
import torch
import torch.distributed as dist
address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
dist.init_process_group("gloo", init_method=f"tcp://{address}:{port}", rank=rank, world_size=world)
ranks = torch.tensor([rank])
dist.all_reduce(ranks)
ports = [0]
if rank == 0:  # a store of its own, on another port
    store = dist.TCPStore(address, 0, world, is_master=True, wait_for_workers=False)
    ports = [store.port]
dist.broadcast_object_list(ports, src=0)
if rank:
    store = dist.TCPStore(address, ports[0], world, is_master=False)
store.set(f"local-{rank}", str(local))
dist.barrier()
locals_ = "".join(store.get(f"local-{n}").decode() for n in range(world))
print("SUM", ranks.item(), "LOCAL", locals_)
for number in range(300):
    print("LINE", number)
dist.barrier()
dist.destroy_process_group()
"""


def test_a_script_for_srun_or_mpirun_finds_its_ranks(folder):
    async def body() -> None:
        async with running(folder, 2, ["--", sys.executable, "-c", ONLY_SLURM_OR_MPI], workers=2, **IMPORTED) as job:
            await job.begin(1, job[0], job[1])
            async with asyncio.timeout(200):
                while not all(
                    replica.report and replica.report.state == "succeeded" for replica in job.replicas.values()
                ):
                    assert not any(replica.report and replica.report.failures for replica in job.replicas.values())
                    await asyncio.sleep(0.05)
            for index in (0, 1):
                lines = job[index].log().splitlines()
                for rank in (2 * index, 2 * index + 1):
                    assert f"[rank {rank}] SUM 6 LOCAL 0101" in lines
                    numbers = [int(n) for n in re.findall(rf"^\[rank {rank}\] LINE (\d+)$", job[index].log(), re.M)]
                    assert numbers == list(range(300)), "lines were lost, cut or out of order"

    asyncio.run(body())


FRAMEWORKS = """
import lightning
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
world = dict(accelerator="cpu", devices=2, num_nodes=3, logger=False)
chosen = lightning.Trainer(**world)._accelerator_connector.cluster_environment
assert isinstance(chosen, TorchElasticEnvironment), chosen
asked = SLURMEnvironment(auto_requeue=False)
asked.validate_settings(num_devices=2, num_nodes=3)
for each in (chosen, asked):
    assert (each.global_rank(), each.world_size(), each.local_rank(), each.node_rank()) == (5, 6, 1, 2), each
    assert (each.main_address, each.main_port) == ("127.0.0.9", 20001), each
assert SLURMEnvironment.job_id() is None
"""


@pytest.mark.long(law="tests/train/scripts/test_environments.py::test_a_script_for_srun_or_mpirun_finds_its_ranks")
def test_frameworks_that_know_several_launchers_agree():
    members = tuple(Member(f"a-{n}", "i", f"127.0.0.{n}:1", 2 * n, 2) for n in range(3))
    assign = Assign("u", 1, "c", members, "127.0.0.9:20001", Restore("Fresh"))
    environment = worker_environment(os.environ, assign, 2, 1, agent_store=False)
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FRAMEWORKS], env=environment, capture_output=True, text=True, timeout=200
    )
    assert run.returncode == 0, run.stderr
