"""Imports of everything that a worker or the uploader needs, made once in the parent that they are forked from.

This module only imports. A tensor operation would start threads that do not survive a fork, and hang every child. The
parent's environment must have OMP_NUM_THREADS=1 and OPENBLAS_NUM_THREADS=1 (otherwise `import torch` leaves a second
thread), and PYTORCH_NVML_BASED_CUDA_CHECK=1 so that asking for GPUs does not open one.
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
import concertina_trainer.warm_up
import concertina_trainer.worker
from concertina_trainer.model import own

own.preload()
