"""Memory that GPUs write by themselves, without a thread of the host: page-locked, known to CUDA."""

from __future__ import annotations

import contextlib
import weakref

import torch
from torch import Tensor


def pin(memory: Tensor, owner: object) -> None:
    """`memory`, until `owner` goes, which must hold it. Where that can't be (a limit of locked memory), copies into it
    keep the host waiting; they are the same else."""
    cudart = torch.cuda.cudart()
    if int(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) != 0:
        with contextlib.suppress(RuntimeError):  # what failed would be raised by the next kernel that is started
            torch.zeros(1, device="cuda")
        return
    ended = weakref.finalize(owner, cudart.cudaHostUnregister, memory.data_ptr())
    ended.atexit = False  # the process's own end frees it too, and CUDA may have gone by then
