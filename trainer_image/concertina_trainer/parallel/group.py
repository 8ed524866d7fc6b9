"""Process group of a round, and this rank's position in it."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore, distributed_c10d
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor._redistribute import _gen_transform_infos, clear_redistribute_planner_cache
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from concertina_protocol.lost_peer import LOST_PEER
from concertina_trainer.config.parallelism import ParallelismConfig
from concertina_trainer.degrees import Degrees
from concertina_trainer.parallel.mesh import Meshes
from concertina_trainer.parallel.step_times import StepTimes

MOST_GROUPS = 1 << 16
"""Bound of the number of groups of a round."""
GROUP_TIMEOUT = datetime.timedelta(minutes=10)
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class DistContext:
    """Position of this rank in the process group of a round."""

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
        """Return the context in the process group that has been joined; `routed` is for a model with experts.

        Raises:
            InvalidInput: When the world is no whole number of blocks.
        """
        degrees = Degrees.of(parallelism, size)
        meshes = Meshes.of(degrees, device.type, parallelism, routed, round)
        return DistContext(rank, size, device, parallelism, degrees, meshes, StepTimes(device))

    @property
    def data_rank(self) -> int:
        """Index of the share of each batch that this rank computes, of `data_size`.

        The ranks of one group compute the same.
        """
        return self.rank // self.degrees.group

    @property
    def data_size(self) -> int:
        return self.degrees.data

    @property
    def cut(self) -> str:
        """Description of which parts of the state each rank has."""
        parallelism = self.parallelism
        return f"{self.degrees}, stages of a rank {parallelism.stages_per_rank}, expert {parallelism.expert}"

    @property
    def alike(self) -> list[list[int]]:
        """Groups of ranks that compute with the same weights on different tokens.

        All ranks of one group have the same tensor-parallel rank and the same pipeline rank.
        """
        groups: dict[tuple[int, int], list[int]] = {}
        for rank in range(self.size):
            position = self.degrees.place(rank)
            groups.setdefault((position.pipeline, position.tensor), []).append(rank)
        return list(groups.values())


def of_first_rank(world: DistContext, value: Any) -> Any:
    """Return rank 0's value on all ranks."""
    box = [value]
    dist.broadcast_object_list(box, src=0, device=world.device)
    return box[0]


def interface_of(address: str) -> str:
    """Return the network interface with this IP address, or "" if there is none. Names of nodes may not resolve."""
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
    """Return the variables that make the backends use only this interface.

    NCCL reads a name as a prefix, so that eth1 also means eth10, unless "=" precedes it. Gloo's names are exact.
    """
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}


def join(environment: Mapping[str, str], parallelism: ParallelismConfig, routed: bool) -> DistContext:
    """Join the round's process group. `routed` is for a model with experts.

    The coordinator's agent serves the store, under a prefix for this round.

    Raises:
        InvalidInput: When the world is no whole number of blocks.
    """
    rank, size, round = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "CONCERTINA_ROUND"))
    if interface := interface_of(environment.get("CONCERTINA_POD_IP") or environment["MASTER_ADDR"]):
        for name, value in socket_variables(interface).items():
            os.environ.setdefault(name, value)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(environment["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    # Each group of a round has another name than any of an earlier round, so that one that something has kept is an
    # error, and never a group of this round.
    distributed_c10d._world.group_count = round * MOST_GROUPS
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
    return DistContext.of(rank, size, device, parallelism, routed, round)


def abort() -> None:
    """Make all collectives of this process raise, those of other threads too.

    NCCL has an abort (private API of torch). That of gloo leaves a collective that waits for a rank which is alive, as
    the other survivors are, waiting until the timeout of the group. Gloo does raise if a connection ends. So each
    connection of this process ends here, that to the store too, for which a rank may be waiting. A reader of data opens
    its connections again.
    """
    if torch.cuda.is_available() and dist.is_initialized():
        distributed_c10d._abort_process_group()
        return
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.stat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                is_internet = connection.family in (socket.AF_INET, socket.AF_INET6)
                if is_internet and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    connection.shutdown(socket.SHUT_RDWR)


def lost_peer(error: Exception, aborted: bool) -> bool:
    """Return whether an error only says that a peer is gone, or that the groups of this process were aborted.

    After any other error, as of a device or of memory, the process can't be trusted.
    """
    if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
        return False
    return aborted or any(sign in str(error) for sign in LOST_PEER)


def leave() -> None:
    """Close all groups, and free what DTensor has cached for their meshes, which no other round uses."""
    if dist.is_initialized():
        dist.destroy_process_group()
    _clear_sharding_prop_cache()
    DTensor._op_dispatcher.sharding_propagator._propagate_tensor_meta_cached.cache_clear()
    _gen_transform_infos.cache_clear()
    clear_redistribute_planner_cache()
    MeshTopoInfo.build_from_mesh.cache_clear()


def make_deterministic() -> None:
    """Use kernels that give the same bits each time, or an error that names the operation.

    Call this before CUDA is used.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010  # a property, of the module
    torch.backends.cudnn.benchmark = False
