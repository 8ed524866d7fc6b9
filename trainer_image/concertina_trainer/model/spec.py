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
"""Function that returns the values of a box of a tensor, float32.

Its arguments are the tensor's name, its whole shape, the box, and the run's seed.
"""


@dataclasses.dataclass(frozen=True)
class DataShape:
    """Shape of the data that a model has to fit."""

    sequence_length: int
    """`trainer.model.sequenceLength`: predictions per sequence. A sequence has one element more."""
    vocab_size: int
    """Upper bound (exclusive) of tokens, or of frames' targets; 0 for frames without targets."""
    width: int = 0
    """Numbers per frame; 0 if the data are tokens."""


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """Functions that define a custom model."""

    build: Callable[[Options, DataShape], nn.Module]
    """Return the whole model for `trainer.model.options`.

    Called under `torch.device("meta")`: values are filled in later.
    """
    loss: Callable[[Any, Microbatch], Tensor]
    """Return the sum of each prediction's loss times its weight, for the module and a microbatch. A scalar."""
    blocks: Callable[[Any], Iterable[nn.Module]] = lambda module: ()
    """Return the parts of the module that are gathered, and whose activations are recomputed, one at a time.

    No block may be within another. A small model needs none.
    """
    initial: Initial | None = None
    """Function for initial values. Absent: `concertina_trainer.model.initial.usual`.

    It also fills the module's buffers in each round, which are constants.
    """
    flops: Callable[[Options, DataShape], float] | None = None
    """Return the operations of one element, forward and backward. Absent: the run has no MFU."""
