"""Errors of GPUs that indicate faulty hardware. The module has no side effects.

An XID is an error code of NVIDIA's driver. Most XIDs are caused by the program that runs on the GPU, for example 13 and
31 (an access to a wrong address), so they say nothing about the hardware. Source: NVIDIA's XID catalogue.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Optional

from concertina_agent.metrics.nvml import GpuIdentity

HARDWARE_XIDS: Mapping[int, str] = {
    48: "uncorrectable memory error",
    62: "a controller of the GPU stopped",
    64: "a faulty memory row can't be replaced",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    92: "many corrected memory errors",
    94: "memory error that ended one process",
    95: "memory error that was not contained",
    119: "the GPU's system processor does not answer",
    120: "the GPU's system processor failed",
    140: "unrecovered memory error",
    143: "the GPU can't be initialized",
}
"""XIDs whose cause is the hardware, each with its meaning."""


def of_xid(gpu: GpuIdentity, xid: int) -> str:
    """Return part of a sentence about an XID that indicates faulty hardware, or "" for any other XID."""
    meaning = HARDWARE_XIDS.get(xid)
    return f"{_name(gpu)} reports XID {xid} ({meaning})" if meaning else ""


def of_errors(gpu: GpuIdentity, before: Optional[int], now: Optional[int]) -> str:
    """Return part of a sentence about new uncorrected memory errors, or "" if there are none.

    Args:
        gpu: The GPU.
        before: Number of errors when the agent started, or None if it is not known.
        now: Present number of errors, or None if it is not known.
    """
    if before is None or now is None or now <= before:
        return ""
    return f"{_name(gpu)} has had {now - before} uncorrected memory errors since the replica started"


def _name(gpu: GpuIdentity) -> str:
    return f"GPU {gpu.index} ({gpu.model or 'unknown model'}, {gpu.uuid or 'unknown UUID'})"
