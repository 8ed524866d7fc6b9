"""GPUs and networks for which plans are computed, with the vendors' data. notebook/planner.md lists the sources."""

from __future__ import annotations

import dataclasses
import enum

from concertina_trainer.ladder import GIB, usable_memory
from concertina_trainer.model.flops import PEAK_FLOPS


class GpuName(enum.StrEnum):
    a100 = "A100"
    h100 = "H100"
    h200 = "H200"
    b200 = "B200"


class FabricName(enum.StrEnum):
    """Kind of network between nodes, and its rate in Gbit/s for each GPU."""

    ethernet100 = "Ethernet-100"
    ethernet400 = "Ethernet-400"
    infiniband200 = "InfiniBand-200"
    infiniband400 = "InfiniBand-400"
    infiniband800 = "InfiniBand-800"


@dataclasses.dataclass(frozen=True)
class Gpu:
    name: GpuName
    device: str
    """Name that the driver gives the device."""
    memory: int
    """Memory in bytes, as the driver reports it, in whole GiB. Workers choose their settings by the same number."""
    memory_rate: float
    """Memory bandwidth in bytes per second."""
    nvlink: float
    """Bytes per second, in each direction, between this GPU and the other GPUs of its node.

    The link is NVLink.
    """
    host_link: float
    """Bytes per second, in each direction, between the GPU and host memory: 16 lanes of PCIe."""
    kernels: float
    """Fraction of the GPU's peak rate at which it computes matrix products and attention.

    The value was fitted to some of the published runs in benchmarks/planning.py, and checked against the other runs.
    The values of H200 and B200 are assumptions, because there were no runs on these GPUs.
    """
    precise_flops: float
    """Floating-point operations that the GPU can do per second in float32, without tensor cores."""

    @property
    def usable(self) -> float:
        """Bytes of the GPU's memory that tensors can use."""
        return usable_memory(self.memory)

    @property
    def flops(self) -> float:
        """Floating-point operations that the GPU can do per second, for dense matrix products in bfloat16."""
        return PEAK_FLOPS[self.device]


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(GpuName.a100, "NVIDIA A100-SXM4-80GB", 79 * GIB, 2.0e12, 300e9, 32e9, 0.75, 19.5e12),
        Gpu(GpuName.h100, "NVIDIA H100 80GB HBM3", 79 * GIB, 3.35e12, 450e9, 64e9, 0.55, 67e12),
        Gpu(GpuName.h200, "NVIDIA H200", 139 * GIB, 4.8e12, 450e9, 64e9, 0.55, 67e12),
        Gpu(GpuName.b200, "NVIDIA B200", 178 * GIB, 8.0e12, 900e9, 64e9, 0.5, 75e12),
    )
}
FABRICS = {
    FabricName.ethernet100: 12.5e9,
    FabricName.ethernet400: 50e9,
    FabricName.infiniband200: 25e9,
    FabricName.infiniband400: 50e9,
    FabricName.infiniband800: 100e9,
}
"""Bytes per second of each kind of network, in each direction and for each GPU."""

REACHED = 0.8
"""Fraction of a link's rate that large collectives achieve."""
HOST_MEMORY_RATE = 40e9
"""Bytes per second that the CPU optimizer of one rank reads and writes in host memory.

The value is an assumption. It requires enough threads.
"""
LATENCY = 10e-6
"""Latency of a collective in seconds, for each doubling of its number of ranks."""
