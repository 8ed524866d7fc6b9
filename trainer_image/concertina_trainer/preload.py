"""Imports of all modules that a worker or the uploader needs, in the parent process from which they are forked.

The parent imports the modules once, so the processes that it forks start fast. This module must only import. A tensor
operation would start threads, which do not survive a fork, and every child would hang. The parent's environment must
have these variables:

- OMP_NUM_THREADS=1 and OPENBLAS_NUM_THREADS=1. Otherwise `import torch` starts a second thread.
- PYTORCH_NVML_BASED_CUDA_CHECK=1. Otherwise the check for GPUs opens a GPU in the parent.
"""

# ruff: noqa: F401

# torch imports these lazily, at FSDP's first wrap and at the first step, where each costs up to 2 s.
import numpy.ma
import numpy.random
import torch._dynamo
import torch._inductor.config
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor
import torch.nn.attention.flex_attention
import torch.utils._device

import concertina_trainer.store
import concertina_trainer.uploader
import concertina_trainer.worker
from concertina_trainer.model import own
from concertina_trainer.parallel import compiled

own.preload()
compiled.preload()
