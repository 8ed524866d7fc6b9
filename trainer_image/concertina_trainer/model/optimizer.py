"""Optimizers on each rank's own shards, and the learning rate as a pure function of the step."""

from __future__ import annotations

import contextlib
import fnmatch
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from concertina_state.errors import InvalidInput
from concertina_trainer.config.optimizer_config import OptimizerConfig, Schedule, StatePrecision
from concertina_trainer.config.optimizer_kinds import OPTIMIZERS, OptimizerName
from concertina_trainer.model import muon

BUCKET = 4 << 20
"""Number of elements to update at a time, if the update needs temporary tensors."""
EMA = "ema"
"""Name of the average of the weights, as a kind of moment, in the names of a saved state."""
EXPERT_BIASES = (
    ".experts.gate_up_bias", ".experts.down_bias", ".experts.gate_up_proj_bias", ".experts.down_proj_bias",
)  # fmt: skip
"""Ends of the names of biases that have a row for each expert, in the decoder and in transformers."""
EXPERTS, OF_EXPERTS = ".experts.", 3
"""Part of the names of experts' weights, and number of dimensions of a weight with a matrix for each expert."""
ARGUMENTS = {"epsilon": "eps"}
"""Names in torch of the hyperparameters whose names differ there."""
REMAINING: Mapping[Schedule, Callable[[float], float]] = {
    Schedule.cosine: lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    Schedule.linear: lambda progress: 1 - progress,
    Schedule.constant: lambda progress: 1.0,
    Schedule.warmup_stable_decay: lambda progress: 1 - math.sqrt(progress),
}
"""Functions that describe how the learning rate falls from its peak to its minimum, keyed by schedule.

Each function maps the progress of the schedule (0 to 1) to the learning rate (1 is the peak, 0 is the minimum).
"""


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """Return the learning rate of step `step` of `steps`, counted from 0.

    The rate rises linearly during the warm-up. Then it follows the schedule, which ends at the last step.
    """
    warmup, minimum = config.resolved_warmup_steps(steps), config.min_learning_rate
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    begin = warmup
    if config.schedule is Schedule.warmup_stable_decay:
        begin = max(warmup, steps - 1 - config.resolved_decay_steps(steps))
    progress = min(1.0, max(0, step - begin) / max(1, steps - 1 - begin))
    return minimum + (config.learning_rate - minimum) * REMAINING[config.schedule](progress)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, in the DTensor's memory. A plain tensor is returned itself.

    If gradients are enabled, the shard becomes a node of autograd's graph, and the call takes twenty times as long.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def first_holder(tensor: Tensor) -> bool:
    """Return whether this rank is the first of the ranks that hold the same shard of `tensor`.

    Several ranks hold the same shard if the DTensor is replicated in a dimension of its mesh.
    """
    if not isinstance(tensor, DTensor):
        return True
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return all(
        coordinate_index == 0 or not isinstance(placement, Replicate)
        for coordinate_index, placement in zip(coordinate, tensor.placements, strict=True)
    )


class Parameters(Protocol):
    """Interface to the parameters of a model on one rank. The parameters may be sharded."""

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]: ...

    def embeddings(self) -> Collection[str]:
        """Return the names of the parameters that are tables of embeddings."""
        ...

    def blocks(self) -> Collection[str]:
        """Return the prefixes of the names of parameters in blocks. A prefix is a block's name in the whole model.

        A prefix has no dot at its end.
        """
        ...

    def counts(self, name: str, parameter: Tensor) -> bool:
        """Return whether this rank is the first of the ranks that hold the same shard of the parameter."""
        ...


class Settings(NamedTuple):
    """Optimizer settings of one parameter, such as its weight decay."""

    weight_decay: float
    learning_rate_factor: float


def settings(config: OptimizerConfig, name: str, parameter: Tensor, embeddings: Collection[str]) -> Settings:
    """Return the settings of a parameter: those of the first group that matches its name, or the defaults.

    By default, matrices decay. Embeddings, and vectors such as norms and biases, do not. The biases of a layer's
    experts are one tensor of two dimensions, and do not decay either.
    """
    is_matrix = parameter.dim() > 1 and name not in embeddings and not name.endswith(EXPERT_BIASES)
    decay = config.resolved_weight_decay if is_matrix else 0.0
    for group in config.groups:
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in group.names):
            return Settings(decay if group.weight_decay is None else group.weight_decay, group.learning_rate_factor)
    return Settings(decay, 1.0)


def is_matrix(name: str, dimensions: int, blocks: Collection[str], embeddings: Collection[str]) -> bool:
    """Return whether a parameter is a matrix of a block, or a tensor with one matrix of a block for each expert.

    Muon updates these parameters. `blocks` and `embeddings` are those of the model (see Parameters).
    """
    in_block = any(name.startswith(f"{block}.") for block in blocks) and name not in embeddings
    if dimensions == OF_EXPERTS:
        return in_block and EXPERTS in name
    return in_block and dimensions == OF_EXPERTS - 1 and not name.endswith(EXPERT_BIASES)


def check_groups(config: OptimizerConfig, trained: Collection[str]) -> None:
    """Check that each pattern of a parameter group matches a trained parameter of the whole model.

    Raises:
        InvalidInput: When a pattern matches none.
    """
    for number, group in enumerate(config.groups):
        for pattern in group.names:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in trained):
                raise InvalidInput(
                    f"trainer.optimizer.groups[{number}].names has {pattern}, which matches no trained parameter: "
                    f"correct or remove it. The model's parameters are {', '.join(sorted(trained))[:1000]}."
                )


class LocalOptimizer:
    """Optimizer of this rank's shards, as plain tensors.

    The update is element-wise, so no rank needs the shard of another rank. Plain tensors avoid DTensor's dispatch,
    which takes longer than the arithmetic of a small model. The constructor creates the optimizer state with the given
    number of steps (decision "Optimizers are torch's, on local tensors"). With Muon, the matrices of blocks are an
    exception: ranks gather them (see `muon`).

    With `exact`, the resulting bits do not depend on how a parameter is cut into shards. torch's fused kernels on CPU
    do not have this property, because they compute the last few elements of a tensor with different instructions.
    """

    def __init__(self, model: Parameters, config: OptimizerConfig, step: int, exact: bool = False) -> None:
        self._config, self._fused = config, config.kind.fused and not exact
        self._blocks, self._embeddings = model.blocks(), model.embeddings()
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._matrices = {name: p for name, p in trained.items() if config.kind.others and self._is_matrix(name, p)}
        """Parameters that Muon updates, in the same order on all ranks.

        A rank without elements takes part in the communication about the matrix.

        They include parameters of which this rank has no elements.
        """
        if config.kind.others and not self._matrices:
            raise InvalidInput(
                f"trainer.optimizer.name {config.name.value} updates the matrices of blocks, and the model has none "
                "that is trained: return blocks with matrices from ModelSpec.blocks, or choose another optimizer."
            )
        self._sharded = {name: p for name, p in trained.items() if local(p.detach()).numel()}
        self._counted = {name for name, p in self._sharded.items() if model.counts(name, p)}
        self._local = {name: nn.Parameter(local(p.detach())) for name, p in self._sharded.items()}
        if not self._local:
            raise InvalidInput(
                "there are more workers than trainable rows of weights: use fewer replicas or a larger model."
            )
        self._rounded = config.moments_precision is StatePrecision.bfloat16
        self.moment_dtype = torch.bfloat16 if self._rounded else torch.get_default_dtype()
        self._moments: dict[str, dict[str, Tensor]] = {}
        for name, p in self._local.items():
            for kind in config.moments(self._is_matrix(name, p)):
                moment = torch.zeros_like(p, dtype=self.moment_dtype, requires_grad=False)
                self._moments.setdefault(kind, {})[name] = moment
        self._averages = {
            name: torch.zeros_like(p, requires_grad=False)
            for name, p in (self._local.items() if config.ema_decay is not None else ())
        }
        self._settings = {name: settings(config, name, p, self._embeddings) for name, p in self._local.items()}
        whole = self._fused and not self._rounded
        elementwise = {name: p for name, p in self._local.items() if name not in self._matrices}
        self._parts = [_Part(self._torch_optimizer(names), names) for names in _buckets(elementwise, whole) if names]
        for part in self._parts:
            for name in part.names:
                part.optimizer.state[self._local[name]] = {
                    kind: self._moments[kind][name] for kind in self._kinds_of(name)
                }
        self.set_step(step)

    def _is_matrix(self, name: str, parameter: Tensor) -> bool:
        return is_matrix(name, parameter.dim(), self._blocks, self._embeddings)

    def kinds(self, name: str, dimensions: int) -> dict[str, torch.dtype]:
        """Return the dtype of each kind of moment that ranks have of a trained parameter.

        `name` and `dimensions` are those of a parameter of the whole model. The average of the weights is a kind of its
        own, `ema`.
        """
        moments = self._config.moments(is_matrix(name, dimensions, self._blocks, self._embeddings))
        average = {} if self._config.ema_decay is None else {EMA: torch.get_default_dtype()}
        return dict.fromkeys(moments, self.moment_dtype) | average

    def _torch_optimizer(self, names: Iterable[str]) -> torch.optim.Optimizer:
        by_settings: dict[Settings, list[nn.Parameter]] = {}
        for name in names:
            by_settings.setdefault(self._settings[name], []).append(self._local[name])
        groups = [
            {"params": parameters, "weight_decay": decay, "learning_rate_factor": factor}
            for (decay, factor), parameters in by_settings.items()
        ]
        elementwise, values = self._config.kind.others or self._config.name, self._config.hyperparameters
        hyperparameters = {ARGUMENTS.get(field, field): values[field] for field in OPTIMIZERS[elementwise].defaults}
        how = {"fused" if self._fused else "foreach": True} | dict.fromkeys(self._config.kind.switches, True)
        optimizer: torch.optim.Optimizer = getattr(torch.optim, elementwise.value)(
            groups, lr=0.0, **hyperparameters, **how
        )
        return optimizer

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Return this rank's shards of the moments, keyed by kind (such as `exp_avg`) and then by parameter name.

        The average of the weights is a kind of its own, `ema`. Parameters of which this rank has no elements are left
        out. `kinds` says which kinds a parameter has.
        """
        return {**self._moments, **({EMA: self._averages} if self._averages else {})}

    @torch.no_grad()
    def begin_averages(self) -> None:
        """Set the averages of the weights to the present weights."""
        for name, average in self._averages.items():
            average.copy_(self._local[name])

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Return a context in which the weights and their averages are exchanged.

        The exchange happens piece by piece, so no second copy of all weights is needed.
        """
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, average in self._averages.items():
            weights = self._local[name].clone()
            self._local[name].copy_(average)
            average.copy_(weights)

    def set_step(self, step: int) -> None:
        """Set the part of the optimizer state that follows from the number of steps. This part is not saved."""
        self._step, scalars = step, {}
        if self._config.name is not OptimizerName.sgd:
            # float32, because the fused kernel on a GPU reads the step as float32, whatever torch's default dtype is.
            scalars["step"] = torch.tensor(float(step), dtype=torch.float32)
        if self._config.name is OptimizerName.nadam:
            scalars["mu_product"] = _momentum_product(step, self._config.hyperparameters["betas"][0])
        for part in self._parts:
            for name in part.names:
                parameter = self._local[name]
                # The host reads the scalars, except those of fused kernels.
                device = parameter.device if self._fused else torch.device("cpu")
                part.optimizer.state[parameter] |= {
                    key: scalar.to(device, copy=True) for key, scalar in scalars.items()
                }

    @torch.no_grad()
    def gradients(self) -> list[Tensor]:
        """Return the gradients of this rank's shards."""
        return [local(p.grad) for p in self._sharded.values() if p.grad is not None]

    @torch.no_grad()
    def counted_gradients(self) -> list[Tensor]:
        """Return the gradients of the shards of which this rank is the first holder.

        Several ranks may hold copies of a shard. With this method, a sum over all ranks counts each gradient once.
        """
        return [local(p.grad) for n, p in self._sharded.items() if p.grad is not None and n in self._counted]

    def drop_gradients(self) -> None:
        for parameter in (*self._sharded.values(), *self._matrices.values()):
            parameter.grad = None

    @torch.no_grad()
    def update(self, rate: float, gradient_scale: float) -> None:
        """Apply one step with the learning rate `rate`, and drop the gradients.

        The gradients have already been reduced over ranks. The method first multiplies the gradients by
        `gradient_scale`.
        """
        for name, parameter in self._sharded.items():
            self._local[name].grad = local(parameter.grad) if parameter.grad is not None else None
        matrices = [(name, p, local(p.grad)) for name, p in self._matrices.items() if p.grad is not None]
        self.drop_gradients()
        gradients = [p.grad for p in self._local.values() if p.grad is not None]
        if gradient_scale != 1.0 and gradients:
            torch._foreach_mul_(gradients, gradient_scale)
        for part in self._parts:
            for group in part.optimizer.param_groups:
                group["lr"] = rate * group["learning_rate_factor"]
            with self._computed_with(part) if self._rounded else contextlib.nullcontext():
                part.optimizer.step()
            for name in part.names:
                self._local[name].grad = None
        for name, matrix, gradient in matrices:
            self._update_matrix(rate, name, matrix, gradient)
        if self._averages:
            decay = self._config.resolved_ema_decay(self._step)
            weights = [self._local[name].detach() for name in self._averages]
            torch._foreach_lerp_(list(self._averages.values()), weights, 1 - decay)
        self._step += 1

    @property
    def communicates(self) -> bool:
        """True if ranks communicate in an update."""
        return bool(self._matrices)

    def finish(self) -> None:
        """Wait until the device has finished the last update."""
        if next(iter(self._local.values())).is_cuda:
            torch.cuda.current_stream().synchronize()

    def _update_matrix(self, rate: float, name: str, matrix: nn.Parameter, gradient: Tensor) -> None:
        """Update this rank's shard of a matrix by Muon. `gradient` is the gradient's shard, and is overwritten."""
        if name not in self._local:
            muon.direction(gradient, matrix)
            return
        values, shard, (decay, factor) = self._config.hyperparameters, self._local[name], self._settings[name]
        [moment] = self._config.kind.of_matrices
        update = muon.advanced(self._moments[moment][name], gradient, values["momentum"], values["nesterov"])
        shard.grad = None
        direction = muon.direction(update, matrix)
        shard.mul_(1 - rate * factor * decay)
        shard.add_(direction, alpha=-rate * factor * muon.scale(matrix.shape))

    @contextlib.contextmanager
    def _computed_with(self, part: _Part) -> Iterator[None]:
        """Return a context in which torch updates a group of parameters with moments of the weights' precision.

        At the end, the new moments are rounded to bfloat16.

        Rounding to the nearest number is enough, because the averaging factors are limited
        (`optimizer_config.MOST_AVERAGING`).
        """
        for name in part.names:
            parameter = self._local[name]
            for kind in self._kinds_of(name):
                part.optimizer.state[parameter][kind] = self._moments[kind][name].to(parameter.dtype)
        yield
        for name in part.names:
            state = part.optimizer.state[self._local[name]]
            for kind in self._kinds_of(name):
                state[kind] = self._moments[kind][name].copy_(state[kind])

    def _kinds_of(self, name: str) -> list[str]:
        return [kind for kind, moments in self._moments.items() if name in moments]


class _Part(NamedTuple):
    """Group of parameters that one call of torch's optimizer updates together."""

    optimizer: torch.optim.Optimizer
    names: list[str]


def _buckets(parameters: Mapping[str, Tensor], whole: bool) -> list[list[str]]:
    """Divide parameters into lists that are updated one after another, to limit the memory of temporary tensors.

    The parameters of a list together have BUCKET elements or a little more. With `whole`, there is only one list.
    """
    buckets: list[list[str]] = [[]]
    elements = 0
    for name, parameter in parameters.items():
        if elements >= BUCKET and not whole:
            buckets.append([])
            elements = 0
        buckets[-1].append(name)
        elements += parameter.numel()
    return buckets


def _momentum_product(step: int, beta: float) -> Tensor:
    """Return NAdam's product of momentums after `step` steps, computed as torch's NAdam does it.

    Each momentum is below 1, so the product is 0 after at most a few thousand steps.
    """
    product, decay = torch.ones((), dtype=torch.float32), 4e-3
    for number in range(1, step + 1):
        product *= beta * (1.0 - 0.5 * 0.96 ** (number * decay))
        if not product:
            break
    return product
