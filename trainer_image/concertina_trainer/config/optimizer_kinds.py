"""Registry of the optimizers that `trainer.optimizer.name` can name.

Each optimizer is a class of `torch.optim`. The updates of all optimizers except Muon are element-wise. A rank can
therefore update its own shards, and the result does not depend on how weights are sharded (decision "Optimizers are
torch's, on local tensors"). For Muon, ranks gather whole matrices (decision "Muon orthogonalizes whole matrices in
float32"). The module does not import torch.
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
    muon = "Muon"


@dataclasses.dataclass(frozen=True)
class OptimizerKind:
    """One optimizer: its state, and its hyperparameters."""

    moments: Mapping[str, str | None]
    """Moments (tensors in the shape of the parameter), keyed by torch's name for the moment.

    Moments are 0 before the first step. A value other than None is the name of a hyperparameter: the moment exists only
    if this hyperparameter is not 0.
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
    """Names of further boolean arguments of torch's class, to which True is passed."""
    others: OptimizerName | None = None
    """Optimizer of all parameters that are not matrices of blocks, if this optimizer updates only such matrices.

    If `others` is set, `moments`, `fused` and `switches` describe the optimizer `others`.
    """
    of_matrices: tuple[str, ...] = ()
    """Names of the moments of matrices of blocks, if `others` is set."""


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
    OptimizerName.muon: OptimizerKind(
        _ADAM,
        ("betas", "momentum"),
        {"momentum": 0.95, "nesterov": True, **_ADAM_DEFAULTS},
        decoupled=True,
        fused=True,
        others=OptimizerName.adamw,
        of_matrices=("momentum_buffer",),
    ),
}

ITERATIONS = 5
"""Number of Newton-Schulz iterations by which Muon orthogonalizes a matrix, as in torch.optim.Muon."""

HYPERPARAMETERS = tuple(sorted({name for kind in OPTIMIZERS.values() for name in kind.defaults}))
"""Names of the fields of OptimizerConfig that are hyperparameters of some optimizers only."""


def with_hyperparameter(name: str) -> list[str]:
    """Return the names of the optimizers that have this hyperparameter."""
    return [optimizer.value for optimizer, kind in OPTIMIZERS.items() if name in kind.defaults]
