"""Activation functions for the gate of a feed-forward network."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor

from concertina_trainer.config.model_config import Activation

ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    Activation.silu: F.silu,
    Activation.gelu_tanh: functools.partial(F.gelu, approximate="tanh"),
}
