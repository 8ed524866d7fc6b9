"""The process group, the device mesh, and how the model is cut over it (FSDP2)."""

from __future__ import annotations

import datetime
import fcntl
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from concertina_trainer.config import ModelConfig, Precision
from concertina_trainer.model.decoder import Decoder
from concertina_trainer.parallel.step_times import StepTimes, measure

GROUP_TIMEOUT = datetime.timedelta(minutes=10)
RESHARD_ABOVE = 100_000_000
"""Parameters from which on a block's weights are freed between forward and backward: below, memory is no matter and
gathering them again is."""
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class DistContext:
    """This rank's place in the process group of a round."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    times: StepTimes


def interface_of(address: str) -> str:
    """The network interface that has this IP address; "" where none has. Names of nodes may not resolve."""
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


def join(environment: Mapping[str, str]) -> DistContext:
    """Join the round's process group: the store is served by the lead's agent, under a prefix for this round."""
    rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    if interface := interface_of(environment.get("CONCERTINA_POD_IP") or environment["MASTER_ADDR"]):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(environment["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    store = TCPStore(
        environment["MASTER_ADDR"],
        int(environment["MASTER_PORT"]),
        is_master=False,
        timeout=GROUP_TIMEOUT,
        wait_for_workers=False,
    )
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore(f"round-{environment['CONCERTINA_ROUND']}", store),
        rank=rank,
        world_size=size,
        timeout=GROUP_TIMEOUT,
        device_id=device if device.type == "cuda" else None,
    )
    mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("data",))
    return DistContext(rank, size, device, mesh, StepTimes(device))


def sharded_model(config: ModelConfig, precision: Precision, world: DistContext) -> Decoder:
    """The model cut over the mesh, its memory allocated and not yet filled.

    Gradients come out as plain sums over ranks, on every module (neither setting is recursive): the loss is already
    divided by the global token count, and gloo has no pre-multiplied sum."""
    with torch.device("meta"):
        model = Decoder(config)
    reshard = sum(p.numel() for p in model.parameters()) > RESHARD_ABOVE
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype(precision, world.device), reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=world.mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=world.mesh, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            measure(module, world.times)
    model.to_empty(device=world.device)
    return model


def compute_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """What matrix products run in; weights and optimizer state are float32."""
    if precision is Precision.auto:
        half = device.type == "cuda" and torch.cuda.is_bf16_supported()
        return torch.bfloat16 if half else torch.float32
    return torch.bfloat16 if precision is Precision.bfloat16 else torch.float32


def make_deterministic() -> None:
    """Kernels that give the same bits each time, or an error that names the operation. Before CUDA is used."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010  # a property, of the module
    torch.backends.cudnn.benchmark = False


PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}
"""Dense bfloat16 operations a second by device, as the vendor states them."""


def peak_flops(world: DistContext) -> float | None:
    """Of all devices together; None where the device is not in the table."""
    name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else ""
    return next((world.size * peak for model, peak in PEAK_FLOPS.items() if model in name), None)


def token_flops(config: ModelConfig, model: Decoder) -> float:
    """Operations of one token's forward and backward: 6 a weight, and attention's 12 * layers * dim * length / 2."""
    weights = sum(p.numel() for p in model.parameters())  # of the whole model, however it is cut
    return 6.0 * weights + 6.0 * config.layers * config.dim * config.sequence_length
