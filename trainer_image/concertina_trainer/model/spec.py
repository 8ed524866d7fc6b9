"""What the trainer must know of a model of one's own: `trainer.model.entrypoint` names a ModelSpec."""

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
"""Of a tensor's name and whole shape, a box of it, and the run's seed: the values of that box alone, float32."""


@dataclasses.dataclass(frozen=True)
class DataShape:
    """What a model has to fit."""

    sequence_length: int
    """`trainer.model.sequenceLength`: predictions of a sequence, which has one element more."""
    vocab_size: int
    """Tokens are below this; of frames, their targets: 0 where they have none."""
    width: int = 0
    """Numbers of a frame; 0: the data are tokens."""


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    build: Callable[[Options, DataShape], nn.Module]
    """The whole model, of `trainer.model.options`. It is called under `torch.device("meta")`: values come later."""
    loss: Callable[[Any, Microbatch], Tensor]
    """Of the module and a microbatch: each prediction's loss times its weight, added up. A scalar."""
    blocks: Callable[[Any], Iterable[nn.Module]] = lambda module: ()
    """Parts of the module that are gathered, and whose activations are computed again, one at a time; none within
    another. Of small models there need be none."""
    initial: Initial | None = None
    """Absent: `concertina_trainer.model.initial.usual`. Where the module has buffers they are filled by it in each
    round, as constants are."""
    flops: Callable[[Options, DataShape], float] | None = None
    """Of one element, forward and backward. Absent: the run has no MFU."""
