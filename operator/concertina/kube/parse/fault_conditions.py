"""Node conditions that say that a node's hardware or kernel is faulty, as set by well-known tools and clouds.

Each entry is a type, which stands for type=True, or type=status. Conditions for problems that may pass, such as
MemoryPressure, are left out.
"""

from __future__ import annotations

DRILL = "ConcertinaDrill"
"""Condition with which the drill `faulty-node` plays a fault for one job. Its message is the job, as namespace/name."""
FAULT_CONDITIONS = (
    # node-problem-detector
    "KernelDeadlock",
    "ReadonlyFilesystem",
    # AKS, on nodes with GPUs
    "GPUMissing",
    "XIDErrors",
    "NVLinkStatusInactive",
    "IBLinkFlapping",
    # EKS node monitoring agent
    "AcceleratedHardwareReady=False",
    # Nebius
    "NebiusGPUError",
)
