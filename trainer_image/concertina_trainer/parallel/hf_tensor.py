"""Tensor parallelism of models of transformers, by the plan that transformers has for each model.

A plan gives a style, such as `colwise`, to some of the model's modules. The functions here read only these names, and
divide the modules themselves (decision "Models of transformers are divided by their own plans"). Within attention and
feed-forward, the ranks of a tensor group have different heads and columns. All other modules compute the same on all
ranks of the group.

A plan that does not fit its model would give wrong numbers without an error. The trainer therefore checks two things at
the beginning of each round:

- Before the first step, the logits of a few tokens must be the same with divided weights and with whole weights.
- After the first backward pass, the ranks of a group must have equal gradients of the weights of which each rank has a
  whole copy. If the plan says that the ranks add up these gradients, the gradients must differ.

A round is a period in which a fixed set of replicas trains.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from concertina_state.errors import InvalidInput

PROBE_LENGTH = 16
"""Number of tokens whose logits are compared."""
SAME_LOGITS = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Largest difference of logits that count as the same, relative to the largest logit, keyed by dtype."""
SAME_ROUNDED_LOGITS = 1e-1
"""Largest difference of logits that count as the same in half precision, relative to the largest logit."""
SAME_GRADIENTS = 1e-2
"""Largest difference of two sums of elements of equal gradients, relative to the norm of the gradients."""
SUMS = 4
"""Number of sums of a gradient that the ranks compare.

Sum i adds every fourth element, beginning with element i.
"""
ADDED_UP = "replicated_with_grad_allreduce"
"""Style of a module whose weights each rank has in full, but applies only to the rank's own heads."""


class _Style(NamedTuple):
    """Division of the weights of a module, and of its input and output, over the tensor group."""

    kind: type[nn.Module]
    weight: Shard
    bias: Placement
    given_input: Placement
    """Layout of the input with which the module is called."""
    own_input: Placement
    """Layout of the input with which the module computes."""
    output: Placement


_WHOLE, _COLUMNS = Replicate(), Shard(-1)
_STYLES = {
    "colwise": _Style(nn.Linear, Shard(0), Shard(0), _WHOLE, _WHOLE, _COLUMNS),
    "colwise_gather_output": _Style(nn.Linear, Shard(0), Shard(0), _WHOLE, _WHOLE, _WHOLE),
    "colwise_rep": _Style(nn.Linear, Shard(0), Shard(0), _WHOLE, _WHOLE, _WHOLE),
    "rowwise": _Style(nn.Linear, Shard(1), _WHOLE, _COLUMNS, _COLUMNS, _WHOLE),
    "rowwise_split_input": _Style(nn.Linear, Shard(1), _WHOLE, _WHOLE, _COLUMNS, _WHOLE),
    "rowwise_rep": _Style(nn.Linear, Shard(1), _WHOLE, _WHOLE, _COLUMNS, _WHOLE),
    "embedding_rowwise": _Style(nn.Embedding, Shard(0), _WHOLE, _WHOLE, _WHOLE, _WHOLE),
}
"""Styles by their names in transformers. Two of them have an older name too, which ends in `rep`."""


class DividedModel:
    """Model of transformers whose weights are divided over a tensor group, and the checks of its plan."""

    def __init__(self, model: Any, mesh: DeviceMesh) -> None:
        """Divide the weights over the tensor group `mesh`. Call this before FSDP shards the parts.

        Each rank cuts its part from a whole weight, so the ranks do not communicate. The weights of which each rank has
        a whole copy become DTensors too, because the trainer sees from a DTensor which ranks have copies.

        Raises:
            InvalidInput: When the model has no plan or the trainer does not support its plan, or when the size of the
                group does not divide a width.
        """
        self._mesh = mesh
        self._is_whole = False
        """Whether the modules compute with whole weights, for the check of the logits."""
        self._gradients: dict[str, Tensor] | None = {}
        """Norm and sums of this rank's gradient of each weight that every rank has in full, float64 `[1 + SUMS]`.

        None after the check.
        """
        styles = _styles(model)
        _distribute(model, mesh, styles)
        self._grad_placements: dict[str, Placement] = {}
        for name, module in model.named_modules():
            keys = [key for key, _ in module.named_parameters(recurse=False)]
            if style := _STYLES.get(styles.get(name, "")):
                module.forward = functools.partial(self._divided, module, style, module.forward)
            elif keys:
                placement = Partial() if styles.get(name) == ADDED_UP else Replicate()
                names = {key: f"{name}.{key}" for key in keys}
                self._grad_placements |= dict.fromkeys(names.values(), placement)
                module.forward = functools.partial(self._with_copies, module, names, module.forward)
        self._hook = model.register_forward_pre_hook(self._check_logits, with_kwargs=True)

    def _divided(self, module: nn.Module, style: _Style, forward: Callable[[Any], Any], x: Tensor) -> Tensor:
        """Compute a module whose weights are divided over the tensor group."""
        if self._is_whole:
            with _replaced(module, {key: p.full_tensor() for key, p in _weights(module)}):
                whole: Tensor = forward(x)
                return whole
        given = DTensor.from_local(x, self._mesh, [style.given_input], run_check=False)
        output = forward(given.redistribute(placements=[style.own_input]))
        local: Tensor = output.redistribute(placements=[style.output]).to_local()
        return local

    def _with_copies(
        self, module: nn.Module, names: Mapping[str, str], forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Compute a module with this rank's copies of the module's weights, as plain tensors.

        `names` are the names of the weights.
        """
        copies = {}
        for key, weight in _weights(module):
            name = names[key]
            copies[key] = weight.to_local(grad_placements=[self._grad_placements[name]])
            if self._gradients is not None and copies[key].requires_grad:
                copies[key].register_hook(functools.partial(self._record, name))
        with _replaced(module, copies):
            return forward(*args, **kwargs)

    def _record(self, name: str, gradient: Tensor) -> None:
        if self._gradients is None:
            return
        elements = gradient.detach().flatten()
        sums = [elements[i::SUMS].sum(dtype=torch.float64) for i in range(SUMS)]
        row = torch.stack([torch.linalg.vector_norm(elements, dtype=torch.float64), *sums])
        self._gradients[name] = self._gradients[name] + row if name in self._gradients else row

    @torch.no_grad()
    def _check_logits(self, model: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Check, before the first forward pass, that divided weights give the logits of whole weights.

        All ranks of the group must run this check, because it gathers weights. If logits are not finite, the check is
        skipped, and the loss shows the problem.

        Raises:
            InvalidInput: When the check fails.
        """
        self._hook.remove()
        tokens = kwargs["input_ids"]
        if isinstance(tokens, FakeTensor):  # `concertina plan`
            return
        vocabulary = model.config.get_text_config().vocab_size
        probe = torch.linspace(0, vocabulary - 1, PROBE_LENGTH, device=tokens.device).long()[None]
        divided = model(input_ids=probe, use_cache=False, return_dict=True).logits
        self._is_whole = True
        try:
            whole = model(input_ids=probe, use_cache=False, return_dict=True).logits
        finally:
            self._is_whole = False
        difference, largest = float((divided - whole).abs().max()), float(whole.abs().max())
        if difference > SAME_LOGITS.get(whole.dtype, SAME_ROUNDED_LOGITS) * largest:
            raise InvalidInput(
                f"the plan of transformers for the tensor parallelism of {type(model).__name__} is wrong for this "
                f"configuration: it changes logits by up to {difference:.2g}, and the largest logit is {largest:.2g}. "
                "Remove parallelism.tensor."
            )

    @torch.no_grad()
    def check_gradients(self) -> None:
        """Check, after the first backward pass, the gradients of the weights that each rank of the group has in full.

        All ranks of the group must call this method.

        Raises:
            InvalidInput: When ranks have different gradients of a weight although the plan does not sum them over
                ranks, or equal gradients although the plan sums them.
        """
        if not self._gradients:
            return
        rows, self._gradients = self._gradients, None
        nothing = torch.zeros(1 + SUMS, dtype=torch.float64, device=self._mesh.device_type)
        own = torch.stack([rows.get(name, nothing) for name in self._grad_placements])
        of_ranks = [torch.empty_like(own) for _ in range(self._mesh.size())]
        dist.all_gather(of_ranks, own, group=self._mesh.get_group())
        norms, sums = torch.stack(of_ranks).split([1, SUMS], dim=-1)
        difference = (sums.amax(0) - sums.amin(0)).amax(-1)
        norm = norms.amax(0).squeeze(-1)
        for (name, placement), spread, size in zip(
            self._grad_placements.items(), difference.tolist(), norm.tolist(), strict=True
        ):
            if not 0 < size < float("inf"):  # no gradient, or the loss shows that values are not finite
                continue
            if (spread > SAME_GRADIENTS * size) != placement.is_partial():
                has, plan = ("equal", "adds them up") if placement.is_partial() else ("different", "says nothing of it")
                raise InvalidInput(
                    f"the workers of a tensor group have {has} gradients of {name}, and the plan of transformers "
                    f"{plan}: the plan is wrong for this configuration. Remove parallelism.tensor."
                )


def _styles(model: Any) -> dict[str, str]:
    """Return the styles of the modules that the model's plan names, keyed by the module's name.

    Raises:
        InvalidInput: When the model has no plan, or when the plan has a style that the trainer does not support.
    """
    plan, kind = model.tp_plan or {}, type(model).__name__
    styles = {}
    parts = {**dict(model.named_modules()), **dict(model.named_parameters())}
    for name, part in parts.items():
        style = plan.get(".".join("*" if key.isdigit() else key for key in name.split(".")))
        if style is None:
            continue
        is_supported = isinstance(part, _STYLES[style].kind) if style in _STYLES else style == ADDED_UP
        if not is_supported:
            raise InvalidInput(
                f"the plan of transformers for the tensor parallelism of {kind} has the style {style} for {name}, "
                f"which the trainer does not support for a {type(part).__name__}: remove parallelism.tensor."
            )
        styles[name] = style
    if not any(style in _STYLES and _STYLES[style].weight == Shard(1) for style in styles.values()):
        # The plans of some models divide only the embedding and the output layer.
        raise InvalidInput(
            f"transformers has no plan for the tensor parallelism of the layers of {kind}: remove parallelism.tensor."
        )
    return styles


def _distribute(model: Any, mesh: DeviceMesh, styles: Mapping[str, str]) -> None:
    """Replace each parameter by a DTensor. Modules that share a parameter also share the DTensor.

    Raises:
        InvalidInput: When the size of the group does not divide a width. Also when two modules share a weight that the
            plan divides in two different ways.
    """
    modules = dict(model.named_modules())
    distributed: dict[nn.Parameter, nn.Parameter] = {}
    for name, module in modules.items():
        style = _STYLES.get(styles.get(name, ""))
        for key, parameter in list(module.named_parameters(recurse=False)):
            placement = (style.weight if key == "weight" else style.bias) if style else _WHOLE
            # The columns of queries, keys and values are heads.
            width = getattr(modules[name.rpartition(".")[0]], "head_dim", 1) if style and style.output.is_shard() else 1
            if isinstance(placement, Shard) and parameter.size(placement.dim) % (mesh.size() * width):
                raise InvalidInput(
                    f"parallelism.tensor is {mesh.size()}, and must divide the "
                    f"{parameter.size(placement.dim) // width} {'columns' if width == 1 else 'heads'} of "
                    f"{name}.{key}: choose another parallelism.tensor, or remove it."
                )
            if parameter not in distributed:
                part = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
                distributed[parameter] = nn.Parameter(part, parameter.requires_grad)
            weight = module._parameters[key] = distributed[parameter]
            assert isinstance(weight, DTensor)
            if weight.placements != (placement,):
                raise InvalidInput(
                    f"{name}.{key} of {type(model).__name__} is the weight of two modules, which the plan of "
                    "transformers divides in two ways: remove parallelism.tensor."
                )


def _weights(module: Any) -> list[tuple[str, DTensor]]:
    """Return the module's own weights, with their names in the module. FSDP has already gathered the weights."""
    return [(key, weight) for key, weight in module._parameters.items() if isinstance(weight, DTensor)]


@contextlib.contextmanager
def _replaced(module: Any, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Return a context in which a module computes with other weights."""
    weights = {key: module._parameters[key] for key in tensors}
    module._parameters.update(tensors)
    try:
        yield
    finally:
        module._parameters.update(weights)
