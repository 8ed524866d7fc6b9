"""Print everything of a process that can change the numbers or the connections of a worker."""

import gc
import json
import os
import signal
import threading
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR2)
SETTINGS = (
    torch.are_deterministic_algorithms_enabled, torch.get_default_device, torch.get_default_dtype,
    torch.get_deterministic_debug_mode, torch.get_float32_matmul_precision, torch.get_num_interop_threads,
    torch.get_num_threads, torch.initial_seed, torch.is_anomaly_enabled, torch.is_grad_enabled,
    torch.is_inference_mode_enabled, torch.is_warn_always_enabled, torch.cuda.is_initialized, gc.isenabled,
    gc.get_threshold, os.getcwd, threading.enumerate,
)  # fmt: skip


def main(entered: float | None = None) -> int:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # as a worker begins
    settings = {setting.__name__: str(setting()) for setting in SETTINGS}
    propagator = DTensor._op_dispatcher.sharding_propagator
    found = {
        **settings,
        # Python's own generator has another seed after each fork.
        "random numbers": [torch.get_rng_state().tolist(), str(np.random.get_state())],
        "groups": [dist.is_initialized(), *map(str, distributed_c10d._world.pg_names.values())],
        "sharding": str(propagator._propagate_tensor_meta_cached.cache_info()),
        "variables": dict(os.environ),
        "files": sorted(filter(is_file, map(read, Path("/proc/self/fd").iterdir()))),
        "handlers": [str(signal.getsignal(number)) for number in SIGNALS],
        "ignored signals": [line for line in Path("/proc/self/status").read_text().splitlines() if "SigIgn" in line],
        "nice": os.nice(0),
        "umask": os.umask(0o22),
    }
    print(json.dumps(found))
    return 0


def read(link: Path) -> str:
    return os.readlink(link) if link.is_symlink() else ""


def is_file(target: str) -> bool:
    """Return whether a file is a socket or a file on a disk, other than that of the output."""
    return target.startswith(("socket:", "/")) and target != read(Path("/proc/self/fd/1"))
