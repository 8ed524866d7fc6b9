"""Memory that GPUs write without a thread of the host: page-locked and registered with CUDA."""

from __future__ import annotations

import contextlib
import weakref

import torch
from torch import Tensor


def pin(memory: Tensor, owner: object) -> None:
    """Pin `memory` until `owner`, which must hold it, is destroyed.

    If that fails (a limit of locked memory), copies into the memory block the host, and are otherwise the same.
    """
    cudart = torch.cuda.cudart()
    if int(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) != 0:
        with contextlib.suppress(RuntimeError):  # the next kernel launch would raise the error of the registration
            torch.zeros(1, device="cuda")
        return
    ended = weakref.finalize(owner, cudart.cudaHostUnregister, memory.data_ptr())
    ended.atexit = False  # the end of the process frees it too, and CUDA may be gone by then
