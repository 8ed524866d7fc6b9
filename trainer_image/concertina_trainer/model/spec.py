"""Interface of a custom model: `trainer.model.entrypoint` names a ModelSpec."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from concertina_state.format.read_plan import Box
from concertina_trainer.data.read.batches import Microbatch

__all__ = ["Box", "DataShape", "Initial", "Microbatch", "ModelSpec"]

Options = Mapping[str, Any]
Initial = Callable[[str, Sequence[int], Box, int], Tensor]
"""Function that returns the initial values of a box of a tensor, float32.

Its arguments are the tensor's name, its whole shape, the box (a range of indices in each dimension), and the run's
seed.
"""


@dataclasses.dataclass(frozen=True)
class DataShape:
    """Sizes of the training data, which a custom model must accept."""

    sequence_length: int
    """`trainer.model.sequenceLength`: number of predictions per sequence. A sequence has one element more."""
    vocab_size: int
    """Upper bound (exclusive) of token ids, or 0 if the data have no token ids."""
    widths: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Width of each other field of the data, keyed by name: the length of a vector, or 0 for a single number."""


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """Functions that define a custom model."""

    build: Callable[[Options, DataShape], nn.Module]
    """Returns the whole model for `trainer.model.options`.

    The trainer calls this function under `torch.device("meta")`, and fills in the values of parameters later.
    """
    loss: Callable[[Any, Microbatch], Tensor]
    """Return the loss of a microbatch, a scalar tensor: the sum of each prediction's loss times its weight."""
    blocks: Callable[[Any], Iterable[nn.Module]] = lambda module: ()
    """Return the blocks of the module, such as its layers.

    FSDP gathers the weights of one block at a time, and activation checkpointing recomputes one block at a time. No
    block may be within another block. A small model needs no blocks.
    """
    initial: Initial | None = None
    """Function for initial values. Default: `concertina_trainer.model.initial.usual`.

    In each round the function also fills the module's buffers, because buffers are constants that are not saved.
    """
    flops: Callable[[Options, DataShape], float] | None = None
    """Returns the operations for one element (token or frame), forward and backward. Absent: the run has no MFU."""
