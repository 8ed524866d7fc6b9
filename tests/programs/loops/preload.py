"""Imports for the parent process that all scripts are forked from.

This module only imports. A tensor operation would start threads that do not survive a fork.
"""

# ruff: noqa: F401

import numpy.ma
import numpy.random
import torch._dynamo.backends.debugging
import torch._inductor.config
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import torch.optim.swa_utils
import torch.utils._device

import concertina_state.checkpoints.reader
import concertina_state.saving
import concertina_trainer.store
import trainingjob._data
import trainingjob._loaders
import trainingjob._order
import trainingjob._state
import trainingjob._torch_objects
import trainingjob._torch_ranks
from loops import frameworks, run
