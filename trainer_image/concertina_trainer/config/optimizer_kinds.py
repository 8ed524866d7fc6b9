"""Registry of the optimizers that `trainer.optimizer.name` can name.

Each optimizer is a class of `torch.optim` whose update is element-wise. A rank can therefore update its own shards, and
the result does not depend on how weights are sharded (decision "Optimizers are torch's, on local tensors"). The module
does not import torch.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any


class OptimizerName(enum.StrEnum):
    """Names of the classes of `torch.optim`."""

    adamw = "AdamW"
    adam = "Adam"
    nadam = "NAdam"
    radam = "RAdam"
    rmsprop = "RMSprop"
    adagrad = "Adagrad"
    sgd = "SGD"


@dataclasses.dataclass(frozen=True)
class OptimizerKind:
    """One optimizer: its state, and its hyperparameters."""

    moments: Mapping[str, str | None]
    """Moments: tensors in the shape of the parameter, by the names that torch gives them.

    They are 0 before the first step. If the value is the name of a hyperparameter, the moment exists only if the
    hyperparameter is not 0.
    """
    averages: tuple[str, ...]
    """Hyperparameters that are averaging factors of moments."""
    defaults: Mapping[str, Any]
    """Hyperparameters of OptimizerConfig that apply to this optimizer, with their defaults."""
    decoupled: bool = False
    """Whether the weights decay apart from the gradient (as in AdamW). If not, the decay is added to the gradient."""
    fused: bool = False
    """Whether torch has kernels that update all tensors at once, without temporary tensors, on CPUs and GPUs."""
    switches: tuple[str, ...] = ()
    """Other arguments of torch's class that are True."""


_BETAS = [0.9, 0.95]
_ADAM = {"exp_avg": None, "exp_avg_sq": None}
_ADAM_DEFAULTS = {"betas": _BETAS, "epsilon": 1e-8}
_DECOUPLED = ("decoupled_weight_decay",)

OPTIMIZERS: Mapping[OptimizerName, OptimizerKind] = {
    OptimizerName.adamw: OptimizerKind(_ADAM, ("betas",), _ADAM_DEFAULTS, decoupled=True, fused=True),
    OptimizerName.adam: OptimizerKind(_ADAM, ("betas",), _ADAM_DEFAULTS, fused=True),
    OptimizerName.nadam: OptimizerKind(_ADAM, ("betas",), _ADAM_DEFAULTS, decoupled=True, switches=_DECOUPLED),
    OptimizerName.radam: OptimizerKind(_ADAM, ("betas",), _ADAM_DEFAULTS, decoupled=True, switches=_DECOUPLED),
    OptimizerName.rmsprop: OptimizerKind(
        {"square_avg": None, "momentum_buffer": "momentum"},
        ("alpha", "momentum"),
        {"alpha": 0.99, "momentum": 0.0, "epsilon": 1e-8},
    ),
    OptimizerName.adagrad: OptimizerKind({"sum": None}, (), {"epsilon": 1e-10}),
    OptimizerName.sgd: OptimizerKind(
        {"momentum_buffer": "momentum"}, ("momentum",), {"momentum": 0.9, "nesterov": False}, fused=True
    ),
}

HYPERPARAMETERS = tuple(sorted({name for kind in OPTIMIZERS.values() for name in kind.defaults}))
"""Fields of OptimizerConfig that apply to some optimizers only."""


def with_hyperparameter(name: str) -> list[str]:
    """Return the names of the optimizers that have this hyperparameter."""
    return [optimizer.value for optimizer, kind in OPTIMIZERS.items() if name in kind.defaults]
