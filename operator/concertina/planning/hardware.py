"""GPUs and networks for plans, with their vendors' figures (docs/planner.md names the sources)."""

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
    """Network between nodes, for each GPU."""

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
    """Memory in bytes, in whole GiB, as the driver reports it: workers choose their settings by the same number."""
    memory_rate: float
    """Memory bandwidth in bytes per second."""
    nvlink: float
    """Bytes per second in each direction to the GPUs of its node."""
    host_link: float
    """Bytes per second to the host's memory, or from there: PCIe's 16 lanes."""
    kernels: float
    """Share of the peak that matrix products and attention reach. The share was set by some of the published runs of
    benchmarks/planning.py, and checked by the other runs. There were no runs on H200 and B200, so their values are
    assumed.
    """

    @property
    def usable(self) -> float:
        """Bytes that tensors can use."""
        return usable_memory(self.memory)

    @property
    def flops(self) -> float:
        """Floating-point operations per second of dense bfloat16 products."""
        return PEAK_FLOPS[self.device]


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(GpuName.a100, "NVIDIA A100-SXM4-80GB", 79 * GIB, 2.0e12, 300e9, 32e9, 0.75),
        Gpu(GpuName.h100, "NVIDIA H100 80GB HBM3", 79 * GIB, 3.35e12, 450e9, 64e9, 0.55),
        Gpu(GpuName.h200, "NVIDIA H200", 139 * GIB, 4.8e12, 450e9, 64e9, 0.55),
        Gpu(GpuName.b200, "NVIDIA B200", 178 * GIB, 8.0e12, 900e9, 64e9, 0.5),
    )
}
FABRICS = {
    FabricName.ethernet100: 12.5e9,
    FabricName.ethernet400: 50e9,
    FabricName.infiniband200: 25e9,
    FabricName.infiniband400: 50e9,
    FabricName.infiniband800: 100e9,
}
"""Bytes per second in each direction."""

REACHED = 0.8
"""Share of a link's rate that large collectives reach."""
HOST_MEMORY_RATE = 40e9
"""Bytes per second of a GPU's share of its node's memory and processors: assumed, with enough threads."""
LATENCY = 10e-6
"""Seconds for each doubling of a collective's ranks."""
