"""Page-locked host memory, into which a GPU can copy data without a thread of the host."""

from __future__ import annotations

import contextlib
import weakref

import torch
from torch import Tensor


def pin(memory: Tensor, owner: object) -> None:
    """Page-lock `memory` and register it with CUDA.

    The memory stays page-locked until the object `owner` is destroyed. `owner` must have a reference to `memory`. If
    the registration fails, for example because of a limit on locked memory, copies into the memory block the host, but
    are correct.
    """
    cudart = torch.cuda.cudart()
    if int(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) != 0:
        with contextlib.suppress(RuntimeError):  # otherwise the next kernel launch would raise this error
            torch.zeros(1, device="cuda")
        return
    ended = weakref.finalize(owner, cudart.cudaHostUnregister, memory.data_ptr())
    ended.atexit = False  # the end of the process frees the memory anyway, and CUDA may have shut down by then
