"""Node conditions that report faulty hardware or a faulty kernel, as set by well-known tools and clouds.

Each entry is TYPE=STATUS, or only TYPE, which means TYPE=True. Conditions for problems that may pass, such as
MemoryPressure, are left out.
"""

from __future__ import annotations

DRILL = "ConcertinaDrill"
"""Condition with which the drill `faulty-node` simulates a fault for one job.

The condition's message is the job, in the form namespace/name.
"""
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
