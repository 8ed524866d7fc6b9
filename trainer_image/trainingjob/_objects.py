"""What a script keeps, taken apart: large tensors by name, which are saved as boxes, and everything else as values."""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn import Module
from torch.optim import Optimizer

from concertina_state.tensors import NAMES

WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""What DDP, torch.compile and others put into the names of what they wrap: without them a name says the same in any
world, and whether it was wrapped or not."""
DTYPES = {name: dtype for dtype, name in NAMES.items()}


class Kept(Protocol):
    """One of a script's objects."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Live: what is written into them is in the object."""
        ...

    def values(self) -> Any:
        """For `_values`; of this rank."""
        ...

    def prepare(self, values: Any) -> None:
        """Make the tensors that an object with these values had, so that they can be filled."""
        ...

    def load(self, values: Any) -> None:
        """After the tensors have been filled."""
        ...


def plain_name(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


class KeptModule:
    def __init__(self, module: Module) -> None:
        self.module = module

    def _entries(self) -> Iterator[tuple[str, Any]]:
        for name, value in self.module.state_dict().items():
            yield plain_name(name), value

    def tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        seen: set[tuple[int, torch.Size]] = set()
        for name, value in self._entries():
            if not isinstance(value, Tensor):
                continue
            place = (_address(value), value.shape)
            if place not in seen or not value.numel():  # tied weights are one tensor with several names
                found[name] = value
            seen.add(place)
        return found

    def values(self) -> dict[str, Any]:
        """Extra state that is no tensor."""
        return {name: value for name, value in self._entries() if not isinstance(value, Tensor)}

    def prepare(self, values: Any) -> None:
        pass

    def load(self, values: Mapping[str, Any]) -> None:
        if values:
            named = {plain_name(name): name for name in self.module.state_dict()}
            self.module.load_state_dict({named[name]: value for name, value in values.items()}, strict=False)


@dataclasses.dataclass(frozen=True)
class Moment:
    """A tensor that an optimizer keeps for a parameter."""

    key: str
    dtype: str
    shape: tuple[int, ...] | None
    """None: that of the parameter, and cut as it is."""


class KeptOptimizer:
    def __init__(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        """`names`: of parameters, by their ids."""
        self.optimizer = optimizer
        self._parameters: list[tuple[str, Tensor, dict[str, Any]]] = [
            (names.get(id(parameter), f"{number}.{index}"), parameter, group)
            for number, group in enumerate(optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
        ]

    def tensors(self) -> dict[str, Tensor]:
        return {
            f"{name}.{key}": value
            for name, parameter, _ in self._parameters
            for key, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }

    def values(self) -> dict[str, Any]:
        groups = [{key: value for key, value in g.items() if key != "params"} for g in self.optimizer.param_groups]
        moments: dict[tuple[Any, ...], list[int]] = {}
        others: dict[int, dict[str, Any]] = {}
        for index, (_, parameter, _) in enumerate(self._parameters):
            state = self.optimizer.state.get(parameter, {})
            kinds = tuple(
                (key, NAMES[value.dtype], None if value.shape == parameter.shape else tuple(value.shape))
                for key, value in state.items()
                if isinstance(value, Tensor)
            )
            moments.setdefault(kinds, []).append(index)
            if rest := {key: value for key, value in state.items() if not isinstance(value, Tensor)}:
                others[index] = rest
        return {"groups": groups, "moments": list(moments.items()), "others": others}

    def prepare(self, values: Mapping[str, Any]) -> None:
        for kinds, indexes in values["moments"]:
            for index in indexes:
                _, parameter, group = self._parameters[index]
                state = self.optimizer.state[parameter]
                for moment in (Moment(*kind) for kind in kinds):
                    if moment.key not in state:
                        state[moment.key] = _empty_moment(moment, parameter, group)

    def load(self, values: Mapping[str, Any]) -> None:
        for group, saved in zip(self.optimizer.param_groups, values["groups"], strict=True):
            group.update(saved)
        for index, rest in values["others"].items():
            self.optimizer.state[self._parameters[index][1]].update(rest)


def _empty_moment(moment: Moment, parameter: Tensor, group: Mapping[str, Any]) -> Tensor:
    dtype = DTYPES[moment.dtype]
    if moment.shape is None:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    # As torch.optim has it: a count of steps is on the CPU unless the kernel reads it.
    on_device = moment.shape or group.get("capturable") or group.get("fused")
    return torch.zeros(moment.shape, dtype=dtype, device=parameter.device if on_device else "cpu")


class KeptFsdp1Module:
    """FSDP1 flattens parameters, so that what a rank has is no box of any: torch takes them apart into shards, which
    are copies, and puts them back."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self._state: dict[str, Any] = {}

    def tensors(self) -> dict[str, Tensor]:
        self._state = get_model_state_dict(self.module)
        return {name: value for name, value in self._state.items() if isinstance(value, Tensor)}

    def values(self) -> Any:
        return None

    def prepare(self, values: Any) -> None:
        pass

    def load(self, values: Any) -> None:
        set_model_state_dict(self.module, self._state)


class KeptFsdp1Optimizer:
    def __init__(self, optimizer: Optimizer, module: Module) -> None:
        self.optimizer, self.module = optimizer, module
        self._state: dict[str, Any] = {}

    def tensors(self) -> dict[str, Tensor]:
        self._state = get_optimizer_state_dict(self.module, self.optimizer)  # which makes moments where there are none
        moments = cast(Mapping[str, Mapping[str, Any]], self._state["state"])
        return {
            f"{name}.{key}": value
            for name, state in moments.items()
            for key, value in state.items()
            if isinstance(value, Tensor)
        }

    def values(self) -> Any:
        return [{key: value for key, value in g.items() if key != "params"} for g in self.optimizer.param_groups]

    def prepare(self, values: Any) -> None:
        pass

    def load(self, values: list[dict[str, Any]]) -> None:
        set_optimizer_state_dict(self.module, self.optimizer, self._state)
        for group, saved in zip(self.optimizer.param_groups, values, strict=True):
            group.update(saved)


class KeptDict:
    """Arrays in dicts and lists, which are changed in place: arrays are filled, the rest is replaced."""

    def __init__(self, tree: MutableMapping[str, Any]) -> None:
        self.tree = tree

    def tensors(self) -> dict[str, Tensor]:
        return dict(_arrays(self.tree, ""))

    def values(self) -> Any:
        return _without_arrays(self.tree)

    def prepare(self, values: Any) -> None:
        pass

    def load(self, values: Any) -> None:
        _put_back(self.tree, values)


ARRAY = "$array"
"""In the place of an array, in the values of a dict."""


def _arrays(tree: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    tensor = _as_tensor(tree)
    if tensor is not None:
        yield path, tensor
    for key, value in _below(tree):
        yield from _arrays(value, f"{path}/{key}" if path else str(key))


def _below(tree: Any) -> Iterable[tuple[Any, Any]]:
    return tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list) else ()


def _without_arrays(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: _without_arrays(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_without_arrays(value) for value in tree]
    return ARRAY if _as_tensor(tree) is not None else tree


def _put_back(tree: Any, values: Any) -> None:
    if isinstance(tree, list) and ARRAY not in values and not any(_below(value) for value in values):
        tree[:] = values
        return
    for key, value in _below(values):
        if isinstance(value, (dict, list)) and isinstance(tree[key], (MutableMapping, list)):
            _put_back(tree[key], value)
        elif value != ARRAY:
            tree[key] = value


def _as_tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray) and value.flags.writeable and value.dtype.kind in "biuf":
        return torch.from_numpy(value)
    return None


class KeptStateful:
    """Anything with state_dict and load_state_dict: schedulers, samplers, data loaders, scalers."""

    def __init__(self, stateful: Any) -> None:
        self.stateful = stateful

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def values(self) -> Any:
        return self.stateful.state_dict()

    def prepare(self, values: Any) -> None:
        pass

    def load(self, values: Any) -> None:
        self.stateful.load_state_dict(values)


class RandomNumbers:
    """Of Python, numpy and torch, in this process and on its GPU."""

    def state_dict(self) -> dict[str, Any]:
        numpy = sys.modules.get("numpy")
        return {
            "python": random.getstate(),
            "numpy": numpy.random.get_state() if numpy else None,
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        }

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        random.setstate(values["python"])
        numpy = sys.modules.get("numpy")
        if numpy and values["numpy"] is not None:
            numpy.random.set_state(values["numpy"])
        torch.set_rng_state(values["torch"])
        if values["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(values["cuda"])


def kept(objects: Mapping[str, Any]) -> dict[str, Kept]:
    """Raises TypeError for what has no state."""
    names = {
        id(parameter): f"{prefix}.{plain_name(name)}"
        for prefix, module in objects.items()
        if isinstance(module, Module)
        for name, parameter in module.named_parameters()
    }
    flat = [value for value in objects.values() if isinstance(value, Module) and _is_fsdp1(value)]
    return {name: _kept(name, value, names, flat) for name, value in objects.items()}


def _is_fsdp1(module: Module) -> bool:
    return any(isinstance(each, FullyShardedDataParallel) for each in module.modules())


def _kept(name: str, value: Any, names: Mapping[int, str], flat: Sequence[Module]) -> Kept:
    """`flat`: modules of FSDP1."""
    if any(each.__module__.startswith("deepspeed.") for each in type(value).__mro__):
        raise TypeError(f"{name} is DeepSpeed's, which cuts states in its own way: save it by DeepSpeed's checkpoints")
    if isinstance(value, Module):
        return KeptFsdp1Module(value) if value in flat else KeptModule(value)
    if isinstance(value, Optimizer):
        kept = {id(parameter) for group in value.param_groups for parameter in group["params"]}
        whose = (module for module in flat if any(id(parameter) in kept for parameter in module.parameters()))
        module = next(whose, None)
        return KeptOptimizer(value, names) if module is None else KeptFsdp1Optimizer(value, module)
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return KeptStateful(value)
    if isinstance(value, MutableMapping):
        return KeptDict(value)
    raise TypeError(
        f"{name} is a {type(value).__qualname__}, which has no state: give a module, an optimizer, a dict of arrays, "
        "or what has state_dict() and load_state_dict()"
    )


def _address(tensor: Tensor) -> int:
    local = getattr(tensor, "_local_tensor", tensor)
    return int(local.data_ptr())
