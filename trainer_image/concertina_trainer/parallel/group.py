"""Process group of a round (a period in which a fixed set of replicas trains), and this rank's position in it."""

from __future__ import annotations

import datetime
import fcntl
import itertools
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from concertina_state import process_groups
from concertina_trainer.config.parallelism import ParallelismConfig
from concertina_trainer.degrees import Degrees
from concertina_trainer.parallel.mesh import Meshes
from concertina_trainer.parallel.step_times import StepTimes

_ROUNDS = itertools.count()
"""Numbers of the rounds of this process.

Names of meshes contain these numbers instead of the job's round numbers, because compiled code contains the names of
meshes. A new process begins with 0 in any round, so it finds its code in the compiler's cache.
"""
GROUP_TIMEOUT = datetime.timedelta(minutes=10)
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class DistContext:
    """Position of this rank in the process group of a round, and the parallel layout of the group.

    A round is a period in which a fixed set of replicas trains.
    """

    rank: int
    size: int
    device: torch.device
    parallelism: ParallelismConfig
    degrees: Degrees
    meshes: Meshes
    times: StepTimes

    @staticmethod
    def of(
        rank: int,
        size: int,
        device: torch.device,
        parallelism: ParallelismConfig,
        routed: bool = False,
        round: int = 0,
    ) -> DistContext:
        """Return the context of a rank whose process has joined the process group.

        `routed` says whether the model has experts.

        Raises:
            InvalidInput: When the number of ranks is not a multiple of the layout's block (`ParallelismConfig.block`).
        """
        degrees = Degrees.of(parallelism, size)
        meshes = Meshes.of(degrees, device.type, parallelism, routed, round)
        return DistContext(rank, size, device, parallelism, degrees, meshes, StepTimes(device))

    @property
    def data_rank(self) -> int:
        """Index of the share of each global batch that this rank computes, from 0 to `data_size` - 1.

        Ranks of the same pipeline, context and tensor group have the same index, because they compute the same
        sequences.
        """
        return self.rank // self.degrees.group

    @property
    def data_size(self) -> int:
        return self.degrees.data

    @property
    def cut(self) -> str:
        """Description of the parallel layout, for comparing states.

        If two states have the same description, each rank has the same part of each tensor in both states.
        """
        parallelism = self.parallelism
        return f"{self.degrees}, stages of a rank {parallelism.stages_per_rank}, expert {parallelism.expert}"

    @property
    def alike(self) -> list[list[int]]:
        """Groups of ranks that compute with the same weights on different tokens.

        All ranks of one group have the same position in the tensor dimension and in the pipeline dimension.
        """
        groups: dict[tuple[int, int], list[int]] = {}
        for rank in range(self.size):
            position = self.degrees.place(rank)
            groups.setdefault((position.pipeline, position.tensor), []).append(rank)
        return list(groups.values())


def of_first_rank(world: DistContext, value: Any) -> Any:
    """Return the `value` that rank 0 has passed, on all ranks, by a broadcast."""
    box = [value]
    dist.broadcast_object_list(box, src=0, device=world.device)
    return box[0]


def interface_of(address: str) -> str:
    """Return the name of the network interface with this IP address, or "" if there is none.

    Without a configured interface, gloo resolves the name of the node, which may not be in DNS.
    """
    if address.startswith("127."):
        return "lo"
    if ":" in address:
        packed = socket.inet_pton(socket.AF_INET6, address).hex()
        with open("/proc/net/if_inet6") as table:
            return next((line.split()[5] for line in table if line.startswith(packed)), "")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    return ""


def socket_variables(interface: str) -> dict[str, str]:
    """Return the environment variables that make gloo and NCCL use only this network interface.

    NCCL reads a name as a prefix, so that eth1 also means eth10, unless "=" precedes it. Gloo's names are exact.
    """
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}


def join(environment: Mapping[str, str], parallelism: ParallelismConfig, routed: bool) -> DistContext:
    """Join the process group of the round, and return this rank's position in it.

    `routed` says whether the model has experts. Groups have different names in each round, so that the use of a group
    of an earlier round is an error. The agent of the coordinator (rank 0) serves the TCPStore. The keys of this round
    have a prefix of their own.

    Raises:
        InvalidInput: When the number of ranks is not a multiple of the layout's block (`ParallelismConfig.block`).
    """
    rank, size, round = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "CONCERTINA_ROUND"))
    if interface := interface_of(environment.get("CONCERTINA_POD_IP") or environment["MASTER_ADDR"]):
        for name, value in socket_variables(interface).items():
            os.environ.setdefault(name, value)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(environment["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    process_groups.number_groups(round)
    store = TCPStore(
        environment["MASTER_ADDR"],
        int(environment["MASTER_PORT"]),
        is_master=False,
        timeout=GROUP_TIMEOUT,
        wait_for_workers=False,
    )
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore(f"round-{round}", store),
        rank=rank,
        world_size=size,
        timeout=GROUP_TIMEOUT,
        device_id=device if device.type == "cuda" else None,
    )
    return DistContext.of(rank, size, device, parallelism, routed, next(_ROUNDS))


def make_deterministic() -> None:
    """Make torch use kernels that give the same bits each time.

    Call this function before CUDA is used.

    An operation without such a kernel raises an error, which names the operation.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010  # a property, of the module
    torch.backends.cudnn.benchmark = False
