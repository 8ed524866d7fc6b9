"""Print as JSON what this interpreter offers to GPU checks: `python -m builders.gpu.probe MODULE ...`

It runs in a process of its own, with the environment of a check, because CUDA or torch may hang or crash.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import platform
import sys
from collections.abc import Callable


def _takes_given_microbatches() -> bool:
    """Return whether a pipeline's schedule runs microbatches that were cut before, not equal parts of a batch."""
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

    schedules = PipelineScheduleSingle, PipelineScheduleMulti
    return all("arg_mbs" in inspect.signature(schedule.step).parameters for schedule in schedules)


def _names_mesh_dimensions() -> bool:
    """Return whether FSDP takes names of a mesh's dimensions. torchtitan 0.3.0 imports their class."""
    import torch.distributed.fsdp

    return hasattr(torch.distributed.fsdp, "DataParallelMeshDims")


TORCH_FEATURES: dict[str, Callable[[], bool]] = {
    "pipelines of given microbatches": _takes_given_microbatches,
    "DataParallelMeshDims, as torchtitan 0.3.0 needs": _names_mesh_dimensions,
}
"""For each feature that an older torch lacks: whether this torch has it."""


def _torch() -> dict[str, object]:
    import torch
    import torch.distributed

    cuda = torch.cuda.is_available()
    devices = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count() if cuda else 0)]
    cards = [
        {"name": device.name, "memory_gib": device.total_memory / 2**30, "capability": (device.major, device.minor)}
        for device in devices
    ]
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "cards": cards,
        "features": [name for name, is_there in TORCH_FEATURES.items() if is_there()],
    }


def main() -> None:
    offered: dict[str, object] = {
        "python": platform.python_version(),
        "missing_packages": [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None],
    }
    if importlib.util.find_spec("torch") is not None:
        offered |= _torch()
    offered["added_names"] = getattr(sys.modules.get("sitecustomize"), "added", [])
    print(json.dumps(offered))


if __name__ == "__main__":
    main()
