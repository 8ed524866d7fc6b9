"""What a script keeps of torch's: modules and optimizers, taken apart into tensors and values."""

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

from concertina_state.catalogue import check_kind, live
from concertina_state.errors import BadInput
from concertina_state.tensors import NAMES
from trainingjob._groups import check_by_position, matched
from trainingjob._objects import Kept, KeptStateful
from trainingjob._refusals import INSTEAD
from trainingjob._save_points import innermost

WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""What DDP, torch.compile and others put into the names of what they wrap: without them a name says the same in any
world, and whether it was wrapped or not."""
EXTRA_STATE = "_extra_state"
"""The last part of its name, as torch has it."""
DTYPES = {name: dtype for dtype, name in NAMES.items()}
PLAIN = (Tensor, torch.nn.Parameter)


def plain_names(module: Module, names: Iterable[str]) -> dict[str, str]:
    """By names in the module. It may call a part of its own as wrappers call theirs: where two would have the same name
    without it, only what torch's wrappers have put there is left out."""
    plain = {name: ".".join(part for part in name.split(".") if part not in WRAPPERS) for name in names}
    count = Counter(plain.values())
    return {name: short if count[short] == 1 else _unwrapped(module, name) for name, short in plain.items()}


def _unwrapped(module: Module, name: str) -> str:
    at: Module | None = module
    own: list[str] = []
    for part in name.split("."):
        wraps = part != "module" or isinstance(at, (DataParallel, DistributedDataParallel))
        if part not in WRAPPERS or not wraps:
            own.append(part)
        at = None if at is None else at._modules.get(part)
    return ".".join(own)


class KeptModule:
    def __init__(self, module: Module) -> None:
        self.module = module
        self._plain: dict[str, str] = {}
        """Names, as they are in the module and without wrappers."""
        self._parameters: set[str] = set()
        self._tensors: dict[str, Tensor] = {}
        self._extra: dict[str, Any] = {}
        takes = inspect.signature(module.state_dict).parameters
        self._can_keep = "keep_vars" in takes or "kwargs" in takes  # a module may have a state_dict of its own

    def arrays(self) -> dict[str, Tensor]:
        return self.now()[0]

    def alike(self) -> dict[str, Tensor]:
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
            for inner, tensor in flattened(self._plain[full], value)
        }

    def now(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Beside arrays it has extra state."""
        arrays: dict[str, Tensor] = {}
        self._take_apart()
        for full, value in self._tensors.items():
            if not self._is_buffer(full, value):
                arrays.update(flattened(self._plain[full], value))
        return arrays, {self._plain[full]: value for full, value in self._extra.items()}

    def _take_apart(self) -> None:
        """Find the tensors of the module's state by their full names (of tied ones, the first), and its extra state."""
        # Parameters themselves: a view of each, which torch makes else, takes longer than to copy a small one.
        state = self.module.state_dict(keep_vars=True) if self._can_keep else self.module.state_dict()
        if state.keys() != self._plain.keys():
            self._plain = plain_names(self.module, state)
            self._parameters = {name for name, _ in self.module.named_parameters(remove_duplicate=False)}
        self._tensors, self._extra = {}, {}
        seen: set[tuple[int, torch.Size]] = set()
        for full, value in state.items():
            if not _is_array(full, value):
                self._extra[full] = value
                continue
            local = live(value)
            place = (id(value) if can_flatten(local) else local.data_ptr(), value.shape)
            if place not in seen or not local.numel():
                self._tensors[full] = value
            seen.add(place)

    def _is_buffer(self, full: str, value: Tensor) -> bool:
        """Whether the ranks may hold different values, such as running means."""
        return full not in self._parameters and not isinstance(value, (DTensor, ShardedTensor))

    def prepare(self, values: Any) -> None:
        pass

    def load(self, values: Mapping[str, Any]) -> None:
        if values:
            named = {plain: name for name, plain in plain_names(self.module, self.module.state_dict()).items()}
            if lacking := sorted(values.keys() - named.keys()):
                raise BadInput(f"a module has no {lacking[0]}, of which a state was saved: {INSTEAD}.")
            self.module.load_state_dict({named[name]: value for name, value in values.items()}, strict=False)


def _is_array(name: str, value: Any) -> bool:
    """Extra state may be a tensor, which is made for whoever asks: only the module itself takes it back."""
    return isinstance(value, Tensor) and name.rpartition(".")[2] != EXTRA_STATE


@dataclasses.dataclass(frozen=True)
class Moment:
    """A tensor that an optimizer keeps for a parameter."""

    key: str
    dtype: str
    shape: tuple[int, ...] | None
    """None: that of the parameter, and cut as it is."""
    subclass: Mapping[str, Any] | None = None
    """How a tensor subclass is put together again; None for a plain tensor."""


class KeptOptimizer:
    def __init__(self, name: str, optimizer: Optimizer, names: Callable[[], Mapping[int, str]]) -> None:
        """`names` returns the names of parameters by their ids."""
        self.name, self.optimizer, self._names = name, optimizer, names
        self._parameters: list[tuple[str, Tensor, dict[str, Any]]] = []
        self.sources: Sequence[int] = []
        """For each group, the number of the saved group whose options it takes."""
        self.saved_groups = 0

    def arrays(self) -> dict[str, Tensor]:
        return {
            inner: tensor
            for name, parameter, _ in self._list_parameters()
            for key, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
            for inner, tensor in flattened(f"{name}.{key}", value)
        }

    def alike(self) -> dict[str, Tensor]:
        """Moments of parameters that all ranks have whole: ranks that step by gradients of their own and average
        weights have the same weights, and other moments."""
        return {
            name: tensor for name, tensor in self.arrays().items() if not isinstance(tensor, (DTensor, ShardedTensor))
        }

    def buffers(self) -> dict[str, Tensor]:
        return {}

    def now(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        arrays = self.arrays()
        moments: list[tuple[list[tuple[Any, ...]], list[int]]] = []
        others: dict[int, dict[str, Any]] = {}
        by_kinds: dict[str, list[int]] = {}
        for index, (name, parameter, _) in enumerate(self._parameters):
            state = self.optimizer.state.get(parameter, {})
            kinds = [
                dataclasses.astuple(_moment(f"{self.name}.{name}.{key}", key, value, parameter))
                for key, value in state.items()
                if isinstance(value, Tensor)
            ]
            if (indexes := by_kinds.get(repr(kinds))) is None:
                indexes = by_kinds[repr(kinds)] = []
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
        """With those that were added or replaced since the last call."""
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
        saved = list(zip(values["names"], values["groups"], strict=True))
        self.sources, self.saved_groups = matched(self.name, saved, self._group_names()), len(saved)
        by_name = {name: (parameter, group) for name, parameter, group in self._parameters}
        saved_names = [name for names in values["names"] for name in names]
        for kinds, indexes in values["moments"]:
            for index in indexes:
                parameter, group = by_name[saved_names[index]]
                state = self.optimizer.state[parameter]
                for moment in (Moment(*kind) for kind in kinds):
                    if moment.key not in state:
                        state[moment.key] = _empty_moment(self.name, moment, parameter, group)

    def load(self, values: Mapping[str, Any]) -> None:
        for group, source in zip(self.optimizer.param_groups, self.sources, strict=True):
            group.update(copy.deepcopy(values["groups"][source]))
        by_name = {name: parameter for name, parameter, _ in self._parameters}
        saved_names = [name for names in values["names"] for name in names]
        for index, rest in values["others"].items():
            self.optimizer.state[by_name[saved_names[index]]].update(rest)
        self.optimizer.state.update(values["own"])


class KeptScheduler(KeptStateful):
    """A learning-rate scheduler, which keeps a value for each group of its optimizer by position."""

    def __init__(self, name: str, scheduler: Any, optimizer: KeptOptimizer | KeptFsdp1Optimizer) -> None:
        super().__init__(scheduler)
        self._name, self._optimizer = name, optimizer

    def load(self, values: Any) -> None:
        check_by_position(self._name, values, self._optimizer.sources, self._optimizer.saved_groups)
        super().load(values)


def _moment(path: str, key: str, value: Tensor, parameter: Tensor) -> Moment:
    """Describe a moment. `path`: its name, for an error."""
    shape = None if value.shape == parameter.shape else tuple(value.shape)
    if not can_flatten(value):
        if value.dtype not in NAMES:
            raise BadInput(f"{path} has the dtype {value.dtype}, which can't be saved.")
        return Moment(key, NAMES[value.dtype], shape)
    attributes, context = cast(Any, value).__tensor_flatten__()
    inner = {name: getattr(value, name) for name in attributes}
    parts = {name: [str(tensor.dtype).rpartition(".")[2], list(tensor.shape)] for name, tensor in inner.items()}
    kind = type(value)
    return Moment(key, str(value.dtype), shape, {
        "module": kind.__module__, "name": kind.__qualname__, "context": context, "tensors": parts,
    })  # fmt: skip


def _empty_moment(optimizer: str, moment: Moment, parameter: Tensor, group: Mapping[str, Any]) -> Tensor:
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
    """Put together a tensor subclass that the optimizer's own module has defined. A saved name imports nothing."""
    kind = getattr(sys.modules.get(subclass["module"]), subclass["name"], None)
    if not (isinstance(kind, type) and issubclass(kind, Tensor) and hasattr(kind, "__tensor_unflatten__")):
        raise BadInput(
            f"{optimizer} was saved with moments of the type {subclass['module']}.{subclass['name']}, which this "
            f"script doesn't have: {INSTEAD}."
        )
    inner = {
        name: torch.zeros(size, dtype=getattr(torch, dtype), device=parameter.device)
        for name, (dtype, size) in subclass["tensors"].items()
    }
    outer = torch.empty(shape, device="meta") if shape is not None else parameter
    made: Tensor = kind.__tensor_unflatten__(inner, subclass["context"], outer.shape, outer.stride())
    return made


class KeptFsdp1Module:
    """FSDP1 flattens parameters, so that what a rank has is no box of any: torch takes them apart into shards, which
    are copies, and puts them back."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self._state: dict[str, Any] = {}

    def arrays(self) -> dict[str, Tensor]:
        self._state = get_model_state_dict(self.module)
        return {name: value for name, value in self._state.items() if isinstance(value, (DTensor, ShardedTensor))}

    def alike(self) -> dict[str, Tensor]:
        return {}

    def buffers(self) -> dict[str, Tensor]:
        """And parameters that FSDP1 has not cut. Of the state that `arrays` has taken apart."""
        return {
            name: value
            for name, value in self._state.items()
            if isinstance(value, Tensor) and not isinstance(value, (DTensor, ShardedTensor))
        }

    def now(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Beside arrays it has extra state."""
        return self.arrays(), {name: value for name, value in self._state.items() if not isinstance(value, Tensor)}

    def prepare(self, values: Any) -> None:
        pass

    def load(self, values: Mapping[str, Any]) -> None:
        if lacking := sorted(values.keys() - self._state.keys()):
            raise BadInput(f"a module has no {lacking[0]}, of which a state was saved: {INSTEAD}.")
        set_model_state_dict(self.module, self._state | dict(values))


class KeptFsdp1Optimizer:
    def __init__(self, name: str, optimizer: Optimizer, module: Module) -> None:
        self.name, self.optimizer, self.module = name, optimizer, module
        self._state: dict[str, Any] = {}
        self.sources: Sequence[int] = []
        """For each group, the number of the saved group whose options it takes."""
        self.saved_groups = 0

    def arrays(self) -> dict[str, Tensor]:
        self._state = get_optimizer_state_dict(self.module, self.optimizer)  # which makes moments where there are none
        moments = cast(Mapping[str, Mapping[str, Any]], self._state["state"])
        return {
            f"{name}.{key}": value
            for name, state in moments.items()
            for key, value in state.items()
            if isinstance(value, Tensor)
        }

    def alike(self) -> dict[str, Tensor]:
        return {}

    def buffers(self) -> dict[str, Tensor]:
        return {}

    def now(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
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
        saved = list(zip(values["names"], values["groups"], strict=True))
        self.sources, self.saved_groups = matched(self.name, saved, self._group_names()), len(saved)

    def load(self, values: Mapping[str, Any]) -> None:
        for name, rest in values["others"].items():
            self._state["state"][name].update(rest)
        set_optimizer_state_dict(self.module, self.optimizer, self._state)
        for group, source in zip(self.optimizer.param_groups, self.sources, strict=True):
            group.update(copy.deepcopy(values["groups"][source]))


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Of each group."""
    return [{key: value for key, value in g.items() if key != "params"} for g in optimizer.param_groups]


def kind_of(optimizer: Optimizer) -> str:
    """The name of its class, without that of a framework's wrapper."""
    return type(innermost(optimizer)).__qualname__


def _check_kind(name: str, optimizer: Optimizer, values: Mapping[str, Any]) -> None:
    """Moments and options of one class mean nothing to another. Raises BadInput."""
    if (saved := values["kind"]) != (now := kind_of(optimizer)):
        raise BadInput(f"{name} was saved as a {saved} and is a {now} now: {INSTEAD}.")


def can_flatten(tensor: Tensor) -> bool:
    """Whether it is of a subclass that torch can take apart into tensors, other than a DTensor."""
    return type(tensor) not in PLAIN and not isinstance(tensor, DTensor) and is_traceable_wrapper_subclass(tensor)


def flattened(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that hold the content of `tensor`, by name: itself, or what its subclass consists of.

    Quantized weights and 8-bit moments are subclasses of tensors that hold others (`__tensor_flatten__`)."""
    if not can_flatten(tensor):
        yield name, tensor
        return
    attributes, _ = cast(Any, tensor).__tensor_flatten__()
    for attribute in attributes:
        yield from flattened(f"{name}.{attribute}", getattr(tensor, attribute))


def check_kinds(objects: Mapping[str, Kept]) -> None:
    """Raise BadInput for tensors whose type can't be saved, as far as they are there already."""
    for prefix, kept in objects.items():
        if isinstance(kept, KeptFsdp1Optimizer):
            continue  # torch makes a step to take its state apart
        for name, value in {**kept.arrays(), **kept.buffers()}.items():
            if isinstance(value, Tensor):
                check_kind(f"{prefix}.{name}", value)


def kept_of_torch(objects: Mapping[str, Any], optimizers: Mapping[str, Kept]) -> dict[str, Kept]:
    """Return those that are modules, optimizers or schedulers. `optimizers`: kept already."""
    modules = {name: value for name, value in objects.items() if isinstance(value, Module)}

    def names() -> dict[int, str]:
        return {
            id(parameter): f"{prefix}.{plain}"
            for prefix, module in modules.items()
            for plain, parameter in _parameters(module)
        }

    flat = [value for value in modules.values() if _is_fsdp1(value)]
    kept: dict[str, Kept] = {
        name: KeptFsdp1Module(module) if module in flat else KeptModule(module) for name, module in modules.items()
    }
    for name, value in objects.items():
        if isinstance(value, Optimizer):
            kept[name] = _kept_optimizer(name, value, names, flat)
    of_optimizer = {
        id(innermost(each.optimizer)): each
        for each in {**optimizers, **kept}.values()
        if isinstance(each, (KeptOptimizer, KeptFsdp1Optimizer))
    }
    for name, value in objects.items():
        optimizer = of_optimizer.get(id(innermost(getattr(value, "optimizer", None))))
        if isinstance(value, (LRScheduler, ReduceLROnPlateau)) and optimizer is not None:
            kept[name] = KeptScheduler(name, value, optimizer)
    return kept


def _parameters(module: Module) -> Iterator[tuple[str, Tensor]]:
    found = dict(module.named_parameters())
    plain = plain_names(module, found)
    return ((plain[name], parameter) for name, parameter in found.items())


def _is_fsdp1(module: Module) -> bool:
    return any(isinstance(each, FullyShardedDataParallel) for each in module.modules())


def _kept_optimizer(
    name: str, optimizer: Optimizer, names: Callable[[], Mapping[int, str]], flat: Sequence[Module]
) -> Kept:
    """`flat`: modules of FSDP1."""
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    whose = (module for module in flat if any(id(parameter) in trained for parameter in module.parameters()))
    module = next(whose, None)
    return KeptOptimizer(name, optimizer, names) if module is None else KeptFsdp1Optimizer(name, optimizer, module)
