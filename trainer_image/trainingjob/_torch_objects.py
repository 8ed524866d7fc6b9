"""Adapters for torch's modules, optimizers and schedulers."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from concertina_state.errors import InvalidInput
from concertina_state.state_index import check_kind, live
from concertina_state.tensors import NAMES
from trainingjob._adapter import StateAdapter, StatefulAdapter
from trainingjob._groups import check_by_position, match_groups
from trainingjob._refusals import INSTEAD
from trainingjob._save_points import innermost

WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""Parts of names that DDP, torch.compile and others add to a module that they wrap.

Without these parts, a tensor has the same name in a world of any size, with or without a wrapper.
"""
EXTRA_STATE = "_extra_state"
"""Last part of the name of a module's extra state in torch."""
DTYPES = {name: dtype for dtype, name in NAMES.items()}
"""Dtypes of torch by their names in safetensors."""
PLAIN = (Tensor, torch.nn.Parameter)
"""Types of tensors that are no subclass with an inner structure."""


def plain_names(module: Module, names: Iterable[str]) -> dict[str, str]:
    """Return the names of a module's tensors without the parts that wrappers such as DDP add.

    A module may itself have a child called `module`, the name that wrappers use. If two tensors would get the same
    plain name because of that, only the parts that torch's own wrappers have added are removed.

    Args:
        module: The module.
        names: Full names of tensors in the module.

    Returns:
        Plain names, keyed by full name.
    """
    plain = {name: ".".join(part for part in name.split(".") if part not in WRAPPERS) for name in names}
    count = Counter(plain.values())
    return {name: short if count[short] == 1 else _unwrapped(module, name) for name, short in plain.items()}


def _unwrapped(module: Module, name: str) -> str:
    """Return a tensor's name without the parts that torch's own wrappers have added."""
    parent: Module | None = module
    parts: list[str] = []
    for part in name.split("."):
        wraps = part != "module" or isinstance(parent, (DataParallel, DistributedDataParallel))
        if part not in WRAPPERS or not wraps:
            parts.append(part)
        parent = None if parent is None else parent._modules.get(part)
    return ".".join(parts)


class ModuleAdapter:
    """Adapter for a module whose parameters and buffers are plain tensors or DTensors."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self._plain_names: dict[str, str] = {}
        """Plain name by full name, as of the last `_take_apart`."""
        self._parameter_names: set[str] = set()
        self._tensors: dict[str, Tensor] = {}
        """Tensors by full name, as of the last `_take_apart`."""
        self._extra_state: dict[str, Any] = {}
        options = inspect.signature(module.state_dict).parameters
        self._has_keep_vars = "keep_vars" in options or "kwargs" in options  # a module may override state_dict

    def arrays(self) -> dict[str, Tensor]:
        return self.contents()[0]

    def replicated_arrays(self) -> dict[str, Tensor]:
        return {
            inner: tensor
            for name, parameter in _parameters(self.module)
            if not isinstance(parameter, DTensor)
            for inner, tensor in flattened(name, parameter.detach())
        }

    def buffers(self) -> dict[str, Tensor]:
        return {
            inner: tensor
            for full, value in self._tensors.items()
            if self._is_buffer(full, value)
            for inner, tensor in flattened(self._plain_names[full], value)
        }

    def contents(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the parameters and the extra state, both keyed by plain name."""
        arrays: dict[str, Tensor] = {}
        self._take_apart()
        for full, value in self._tensors.items():
            if not self._is_buffer(full, value):
                arrays.update(flattened(self._plain_names[full], value))
        return arrays, {self._plain_names[full]: value for full, value in self._extra_state.items()}

    def _take_apart(self) -> None:
        """Read the tensors and the extra state of the module.

        If a tensor has several names (tied weights), only the first is used.
        """
        # With keep_vars, these are the parameters themselves: to make a view of each takes longer than to copy it.
        state = self.module.state_dict(keep_vars=True) if self._has_keep_vars else self.module.state_dict()
        if state.keys() != self._plain_names.keys():
            self._plain_names = plain_names(self.module, state)
            self._parameter_names = {name for name, _ in self.module.named_parameters(remove_duplicate=False)}
        self._tensors, self._extra_state = {}, {}
        places: set[tuple[int, torch.Size]] = set()
        for full, value in state.items():
            if not _is_array(full, value):
                self._extra_state[full] = value
                continue
            local = live(value)
            place = (id(value) if can_flatten(local) else local.data_ptr(), value.shape)
            if place not in places or not local.numel():
                self._tensors[full] = value
            places.add(place)

    def _is_buffer(self, full: str, value: Tensor) -> bool:
        """Return whether a tensor may have different values on different ranks, such as a running mean."""
        return full not in self._parameter_names and not isinstance(value, (DTensor, ShardedTensor))

    def prepare(self, values: Any) -> None:
        pass

    def load(self, values: Mapping[str, Any]) -> None:
        if values:
            full_names = {plain: full for full, plain in plain_names(self.module, self.module.state_dict()).items()}
            if missing := sorted(values.keys() - full_names.keys()):
                raise InvalidInput(f"a module no longer has {missing[0]}, which was saved: {INSTEAD}.")
            self.module.load_state_dict({full_names[name]: value for name, value in values.items()}, strict=False)


def _is_array(name: str, value: Any) -> bool:
    """Return whether an entry of a module's state is saved as an array.

    A module's extra state may be a tensor, but is not saved as an array. Each call of `state_dict` creates a new
    tensor, so this tensor can't be filled in place. It is passed to the module's `load_state_dict` instead.
    """
    return isinstance(value, Tensor) and name.rpartition(".")[2] != EXTRA_STATE


@dataclasses.dataclass(frozen=True)
class OptimizerMoment:
    """Tensor that an optimizer keeps for a parameter, such as Adam's running averages of the gradient."""

    key: str
    dtype: str
    shape: tuple[int, ...] | None
    """Shape of the moment; None if it has the shape and the sharding of the parameter."""
    subclass: Mapping[str, Any] | None = None
    """Facts from which a tensor subclass can be created again; None for a plain tensor."""


class OptimizerAdapter:
    """Adapter for an optimizer. Its moments are saved under the names of their parameters."""

    def __init__(self, name: str, optimizer: Optimizer, names: Callable[[], Mapping[int, str]]) -> None:
        """Create the adapter of an optimizer.

        Args:
            name: Name of the optimizer in the `State`.
            optimizer: The optimizer.
            names: Function that returns the parameters' names, keyed by `id(parameter)`.
        """
        self.name, self.optimizer, self._names = name, optimizer, names
        self._parameters: list[tuple[str, Tensor, dict[str, Any]]] = []
        """Name, tensor and parameter group of each parameter, in the order of the groups."""
        self.source_groups: Sequence[int] = []
        """For each present group, the index of the saved group whose options it gets."""
        self.saved_group_count = 0

    def arrays(self) -> dict[str, Tensor]:
        return {
            inner: tensor
            for name, parameter, _ in self._list_parameters()
            for key, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
            for inner, tensor in flattened(f"{name}.{key}", value)
        }

    def replicated_arrays(self) -> dict[str, Tensor]:
        """Return the moments that every rank holds in full, keyed by name.

        Moments can differ between ranks although the weights are the same, for example if ranks step by their own
        gradients and then average the weights.
        """
        return {
            name: tensor for name, tensor in self.arrays().items() if not isinstance(tensor, (DTensor, ShardedTensor))
        }

    def buffers(self) -> dict[str, Tensor]:
        return {}

    def contents(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the moments, and the values from which `prepare` and `load` restore the optimizer's other state."""
        arrays = self.arrays()
        moments: list[tuple[list[tuple[Any, ...]], list[int]]] = []
        others: dict[int, dict[str, Any]] = {}
        indexes_by_kinds: dict[str, list[int]] = {}
        for index, (name, parameter, _) in enumerate(self._parameters):
            state = self.optimizer.state.get(parameter, {})
            kinds = [
                dataclasses.astuple(_moment(f"{self.name}.{name}.{key}", key, value, parameter))
                for key, value in state.items()
                if isinstance(value, Tensor)
            ]
            if (indexes := indexes_by_kinds.get(repr(kinds))) is None:
                indexes = indexes_by_kinds[repr(kinds)] = []
                moments.append((kinds, indexes))
            indexes.append(index)
            if rest := {key: value for key, value in state.items() if not isinstance(value, Tensor)}:
                others[index] = rest
        own = {key: value for key, value in self.optimizer.state.items() if not isinstance(key, Tensor)}
        return arrays, {
            "kind": kind_of(self.optimizer),
            "groups": _options(self.optimizer),
            "names": self._group_names(),
            "moments": moments,
            "others": others,
            "own": own,
        }

    def _list_parameters(self) -> list[tuple[str, Tensor, dict[str, Any]]]:
        """Return all parameters of the optimizer, including those that were added or replaced since the last call."""
        ids = [id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]]
        if ids != [id(parameter) for _, parameter, _ in self._parameters]:
            names = self._names()
            self._parameters = [
                (names.get(id(parameter), f"{number}.{index}"), parameter, group)
                for number, group in enumerate(self.optimizer.param_groups)
                for index, parameter in enumerate(group["params"])
            ]
        return self._parameters

    def _group_names(self) -> list[list[str]]:
        names = (name for name, _, _ in self._list_parameters())
        return [list(itertools.islice(names, len(group["params"]))) for group in self.optimizer.param_groups]

    def prepare(self, values: Mapping[str, Any]) -> None:
        _check_kind(self.name, self.optimizer, values)
        saved = list(zip(values["names"], values["groups"]))
        self.source_groups, self.saved_group_count = match_groups(self.name, saved, self._group_names()), len(saved)
        by_name = {name: (parameter, group) for name, parameter, group in self._parameters}
        saved_names = [name for names in values["names"] for name in names]
        for kinds, indexes in values["moments"]:
            for index in indexes:
                parameter, group = by_name[saved_names[index]]
                state = self.optimizer.state[parameter]
                for moment in (OptimizerMoment(*kind) for kind in kinds):
                    if moment.key not in state:
                        state[moment.key] = _empty_moment(self.name, moment, parameter, group)

    def load(self, values: Mapping[str, Any]) -> None:
        for group, source in zip(self.optimizer.param_groups, self.source_groups):
            group.update(copy.deepcopy(values["groups"][source]))
        by_name = {name: parameter for name, parameter, _ in self._parameters}
        saved_names = [name for names in values["names"] for name in names]
        for index, rest in values["others"].items():
            self.optimizer.state[by_name[saved_names[index]]].update(rest)
        self.optimizer.state.update(values["own"])


class SchedulerAdapter(StatefulAdapter):
    """Adapter for a learning-rate scheduler, which keeps one value for each parameter group of its optimizer."""

    def __init__(self, name: str, scheduler: Any, optimizer: OptimizerAdapter | Fsdp1OptimizerAdapter) -> None:
        super().__init__(scheduler)
        self._name, self._optimizer = name, optimizer

    def load(self, values: Any) -> None:
        check_by_position(self._name, values, self._optimizer.source_groups, self._optimizer.saved_group_count)
        super().load(values)


def _moment(path: str, key: str, value: Tensor, parameter: Tensor) -> OptimizerMoment:
    """Return the description of a moment, from which an empty moment can be created in a restore.

    Args:
        path: Name of the moment in an error message.
        key: Key of the moment in the optimizer's state of the parameter.
        value: The moment.
        parameter: The parameter.

    Raises:
        InvalidInput: The moment's dtype can't be saved.
    """
    shape = None if value.shape == parameter.shape else tuple(value.shape)
    if not can_flatten(value):
        if value.dtype not in NAMES:
            raise InvalidInput(f"{path} has the dtype {value.dtype}, which can't be saved.")
        return OptimizerMoment(key, NAMES[value.dtype], shape)
    attributes, context = cast(Any, value).__tensor_flatten__()
    inner = {name: getattr(value, name) for name in attributes}
    parts = {name: [str(tensor.dtype).rpartition(".")[2], list(tensor.shape)] for name, tensor in inner.items()}
    kind = type(value)
    return OptimizerMoment(key, str(value.dtype), shape, {
        "module": kind.__module__, "name": kind.__qualname__, "context": context, "tensors": parts,
    })  # fmt: skip


def _empty_moment(optimizer: str, moment: OptimizerMoment, parameter: Tensor, group: Mapping[str, Any]) -> Tensor:
    if moment.subclass is not None:
        return _empty_subclass(optimizer, moment.subclass, parameter, moment.shape)
    dtype = DTYPES[moment.dtype]
    if moment.shape is None:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    # As torch.optim has it: a count of steps is on the CPU unless the kernel reads it.
    on_device = moment.shape or group.get("capturable") or group.get("fused")
    return torch.zeros(moment.shape, dtype=dtype, device=parameter.device if on_device else "cpu")


def _empty_subclass(
    optimizer: str, subclass: Mapping[str, Any], parameter: Tensor, shape: tuple[int, ...] | None
) -> Tensor:
    """Create an empty tensor of a tensor subclass.

    The class must have been imported already. A class name in a saved state must not cause an import, which would run
    code.

    Raises:
        InvalidInput: The class has not been imported.
    """
    kind = getattr(sys.modules.get(subclass["module"]), subclass["name"], None)
    if not (isinstance(kind, type) and issubclass(kind, Tensor) and hasattr(kind, "__tensor_unflatten__")):
        raise InvalidInput(
            f"{optimizer} was saved with moments of the type {subclass['module']}.{subclass['name']}, which "
            f"this script does not import: {INSTEAD}."
        )
    inner = {
        name: torch.zeros(size, dtype=getattr(torch, dtype), device=parameter.device)
        for name, (dtype, size) in subclass["tensors"].items()
    }
    outer = torch.empty(shape, device="meta") if shape is not None else parameter
    made: Tensor = kind.__tensor_unflatten__(inner, subclass["context"], outer.shape, outer.stride())
    return made


class Fsdp1ModuleAdapter:
    """Adapter for a module that is sharded by FSDP1.

    FSDP1 flattens parameters, so a rank's part is not a box (rectangular part) of any parameter. torch converts the
    module's parameters to shards that are boxes, and back. These shards are copies.
    """

    def __init__(self, module: Module) -> None:
        self.module = module
        self._state: dict[str, Any] = {}

    def arrays(self) -> dict[str, Tensor]:
        self._state = get_model_state_dict(self.module)
        return {name: value for name, value in self._state.items() if isinstance(value, (DTensor, ShardedTensor))}

    def replicated_arrays(self) -> dict[str, Tensor]:
        return {}

    def buffers(self) -> dict[str, Tensor]:
        """Return the buffers, and the parameters that FSDP1 has not sharded, keyed by name."""
        return {
            name: value
            for name, value in self._state.items()
            if isinstance(value, Tensor) and not isinstance(value, (DTensor, ShardedTensor))
        }

    def contents(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the shards of the parameters, and the extra state."""
        return self.arrays(), {name: value for name, value in self._state.items() if not isinstance(value, Tensor)}

    def prepare(self, values: Any) -> None:
        pass

    def load(self, values: Mapping[str, Any]) -> None:
        if missing := sorted(values.keys() - self._state.keys()):
            raise InvalidInput(f"a module no longer has {missing[0]}, which was saved: {INSTEAD}.")
        set_model_state_dict(self.module, self._state | dict(values))


class Fsdp1OptimizerAdapter:
    """Adapter for an optimizer of a module that is sharded by FSDP1."""

    def __init__(self, name: str, optimizer: Optimizer, module: Module) -> None:
        self.name, self.optimizer, self.module = name, optimizer, module
        self._state: dict[str, Any] = {}
        self.source_groups: Sequence[int] = []
        """For each present group, the index of the saved group whose options it gets."""
        self.saved_group_count = 0

    def arrays(self) -> dict[str, Tensor]:
        self._state = get_optimizer_state_dict(self.module, self.optimizer)  # creates moments that do not exist yet
        moments = cast(Mapping[str, Mapping[str, Any]], self._state["state"])
        return {
            f"{name}.{key}": value
            for name, state in moments.items()
            for key, value in state.items()
            if isinstance(value, Tensor)
        }

    def replicated_arrays(self) -> dict[str, Tensor]:
        return {}

    def buffers(self) -> dict[str, Tensor]:
        return {}

    def contents(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        arrays = self.arrays()
        groups = _options(self.optimizer)
        others = {
            name: rest
            for name, state in self._state["state"].items()
            if (rest := {key: value for key, value in state.items() if not isinstance(value, Tensor)})
        }
        facts = {"kind": kind_of(self.optimizer), "groups": groups, "names": self._group_names()}
        return arrays, {**facts, "others": others}

    def _group_names(self) -> list[list[str]]:
        return [list(group["params"]) for group in self._state["param_groups"]]

    def prepare(self, values: Mapping[str, Any]) -> None:
        _check_kind(self.name, self.optimizer, values)
        self.arrays()
        saved = list(zip(values["names"], values["groups"]))
        self.source_groups, self.saved_group_count = match_groups(self.name, saved, self._group_names()), len(saved)

    def load(self, values: Mapping[str, Any]) -> None:
        for name, rest in values["others"].items():
            self._state["state"][name].update(rest)
        set_optimizer_state_dict(self.module, self.optimizer, self._state)
        for group, source in zip(self.optimizer.param_groups, self.source_groups):
            group.update(copy.deepcopy(values["groups"][source]))


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options of each parameter group."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def kind_of(optimizer: Optimizer) -> str:
    """Return the name of an optimizer's class. If a framework wraps the optimizer, the wrapper is ignored."""
    return type(innermost(optimizer)).__qualname__


def _check_kind(name: str, optimizer: Optimizer, values: Mapping[str, Any]) -> None:
    """Refuse saved values of another optimizer class, because its moments and options have other meanings.

    Raises:
        InvalidInput: The saved values are those of another optimizer class.
    """
    if (saved := values["kind"]) != (now := kind_of(optimizer)):
        raise InvalidInput(f"{name} was saved as a {saved} but is now a {now}: {INSTEAD}.")


def can_flatten(tensor: Tensor) -> bool:
    """Return whether torch can split a tensor of a subclass into plain tensors. DTensors are excluded."""
    return type(tensor) not in PLAIN and not isinstance(tensor, DTensor) and is_traceable_wrapper_subclass(tensor)


def flattened(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the plain tensors that hold the content of `tensor`, each with its name.

    For a plain tensor, this is the tensor itself. Quantized weights and 8-bit moments are subclasses that consist of
    several tensors (`__tensor_flatten__`).
    """
    if not can_flatten(tensor):
        yield name, tensor
        return
    attributes, _ = cast(Any, tensor).__tensor_flatten__()
    for attribute in attributes:
        yield from flattened(f"{name}.{attribute}", getattr(tensor, attribute))


def check_kinds(adapters: Mapping[str, StateAdapter]) -> None:
    """Check that all existing tensors of the objects have types that can be saved.

    Raises:
        InvalidInput: A tensor has a type that can't be saved.
    """
    for prefix, adapter in adapters.items():
        if isinstance(adapter, Fsdp1OptimizerAdapter):
            continue  # to take its state apart, torch would make a step
        for name, value in {**adapter.arrays(), **adapter.buffers()}.items():
            if isinstance(value, Tensor):
                check_kind(f"{prefix}.{name}", value)


def torch_adapters_of(objects: Mapping[str, Any], existing: Mapping[str, StateAdapter]) -> dict[str, StateAdapter]:
    """Return adapters for the modules, optimizers and schedulers among the objects, keyed by the object's name.

    Args:
        objects: The objects that a script adds to its `State`.
        existing: The adapters that the `State` already has. The optimizer of a new scheduler may be among their
            objects.
    """
    modules = {name: value for name, value in objects.items() if isinstance(value, Module)}

    def names() -> dict[int, str]:
        return {
            id(parameter): f"{prefix}.{plain}"
            for prefix, module in modules.items()
            for plain, parameter in _parameters(module)
        }

    fsdp1_modules = [module for module in modules.values() if _is_fsdp1(module)]
    adapters: dict[str, StateAdapter] = {
        name: Fsdp1ModuleAdapter(module) if module in fsdp1_modules else ModuleAdapter(module)
        for name, module in modules.items()
    }
    for name, value in objects.items():
        if isinstance(value, Optimizer):
            adapters[name] = _optimizer_adapter(name, value, names, fsdp1_modules)
    adapter_by_optimizer = {
        id(innermost(adapter.optimizer)): adapter
        for adapter in {**existing, **adapters}.values()
        if isinstance(adapter, (OptimizerAdapter, Fsdp1OptimizerAdapter))
    }
    for name, value in objects.items():
        optimizer = adapter_by_optimizer.get(id(innermost(getattr(value, "optimizer", None))))
        if isinstance(value, (LRScheduler, ReduceLROnPlateau)) and optimizer is not None:
            adapters[name] = SchedulerAdapter(name, value, optimizer)
    return adapters


def _parameters(module: Module) -> Iterator[tuple[str, Tensor]]:
    """Return the parameters of a module with their plain names."""
    named = dict(module.named_parameters())
    plain = plain_names(module, named)
    return ((plain[name], parameter) for name, parameter in named.items())


def _is_fsdp1(module: Module) -> bool:
    return any(isinstance(child, FullyShardedDataParallel) for child in module.modules())


def _optimizer_adapter(
    name: str, optimizer: Optimizer, names: Callable[[], Mapping[int, str]], fsdp1_modules: Sequence[Module]
) -> StateAdapter:
    """Return an adapter for an optimizer: another class of adapter if the optimizer trains an FSDP1 module."""
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    modules = (module for module in fsdp1_modules if any(id(parameter) in trained for parameter in module.parameters()))
    module = next(modules, None)
    if module is None:
        return OptimizerAdapter(name, optimizer, names)
    return Fsdp1OptimizerAdapter(name, optimizer, module)
