"""What a script keeps of torch's: modules and optimizers, taken apart into tensors and values."""

from __future__ import annotations

import dataclasses
import inspect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
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

from concertina_state.catalogue import live
from concertina_state.errors import BadInput
from concertina_state.tensors import NAMES
from trainingjob._objects import Kept
from trainingjob._refusals import INSTEAD

WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""What DDP, torch.compile and others put into the names of what they wrap: without them a name says the same in any
world, and whether it was wrapped or not."""
EXTRA_STATE = "_extra_state"
"""The last part of its name, as torch has it."""
DTYPES = {name: dtype for dtype, name in NAMES.items()}


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
        takes = inspect.signature(module.state_dict).parameters
        self._can_keep = "keep_vars" in takes or "kwargs" in takes  # a module may have a state_dict of its own

    def arrays(self) -> dict[str, Tensor]:
        return self.now()[0]

    def alike(self) -> dict[str, Tensor]:
        """Not its buffers: each rank may have its own running means."""
        return {
            name: parameter.detach()
            for name, parameter in _parameters(self.module)
            if not isinstance(parameter, DTensor)
        }

    def now(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Beside arrays it has extra state."""
        # Parameters themselves: a view of each, which torch makes else, takes longer than to copy a small one.
        state = self.module.state_dict(keep_vars=True) if self._can_keep else self.module.state_dict()
        if state.keys() != self._plain.keys():
            self._plain = plain_names(self.module, state)
        arrays: dict[str, Tensor] = {}
        extra: dict[str, Any] = {}
        seen: set[tuple[int, torch.Size]] = set()
        for full, value in state.items():
            name = self._plain[full]
            if not _is_array(name, value):
                extra[name] = value
                continue
            place = (live(value).data_ptr(), value.shape)
            if place not in seen or not value.numel():  # tied weights are one tensor with several names
                arrays[name] = value
            seen.add(place)
        return arrays, extra

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


class KeptOptimizer:
    def __init__(self, name: str, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        """`names`: of parameters, by their ids."""
        self.name, self.optimizer = name, optimizer
        self._parameters: list[tuple[str, Tensor, dict[str, Any]]] = [
            (names.get(id(parameter), f"{number}.{index}"), parameter, group)
            for number, group in enumerate(optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
        ]

    def arrays(self) -> dict[str, Tensor]:
        return {
            f"{name}.{key}": value
            for name, parameter, _ in self._parameters
            for key, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }

    def alike(self) -> dict[str, Tensor]:
        return {}

    def now(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        groups = _options(self.optimizer)
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
        own = {key: value for key, value in self.optimizer.state.items() if not isinstance(key, Tensor)}
        kept = {"groups": groups, "sizes": self._sizes(), "moments": list(moments.items()), "others": others}
        return self.arrays(), {**kept, "own": own}

    def _sizes(self) -> list[int]:
        return [len(group["params"]) for group in self.optimizer.param_groups]

    def prepare(self, values: Mapping[str, Any]) -> None:
        if values.get("sizes", self._sizes()) != self._sizes():  # older ones did not say them
            raise BadInput(
                f"{self.name} was saved with groups of {values['sizes']} parameters and has groups of "
                f"{self._sizes()} now: {INSTEAD}."
            )
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
        self.optimizer.state.update(values.get("own", {}))


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

    def arrays(self) -> dict[str, Tensor]:
        self._state = get_model_state_dict(self.module)
        return {name: value for name, value in self._state.items() if isinstance(value, Tensor)}

    def alike(self) -> dict[str, Tensor]:
        return {}

    def now(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Beside arrays it has extra state."""
        return self.arrays(), {name: value for name, value in self._state.items() if not isinstance(value, Tensor)}

    def prepare(self, values: Any) -> None:
        pass

    def load(self, values: Mapping[str, Any] | None) -> None:
        """`values`: None of states that older versions saved."""
        if lacking := sorted((values or {}).keys() - self._state.keys()):
            raise BadInput(f"a module has no {lacking[0]}, of which a state was saved: {INSTEAD}.")
        set_model_state_dict(self.module, self._state | dict(values or {}))


class KeptFsdp1Optimizer:
    def __init__(self, name: str, optimizer: Optimizer, module: Module) -> None:
        self.name, self.optimizer, self.module = name, optimizer, module
        self._state: dict[str, Any] = {}

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

    def now(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        arrays = self.arrays()
        groups = _options(self.optimizer)
        others = {
            name: rest
            for name, state in self._state["state"].items()
            if (rest := {key: value for key, value in state.items() if not isinstance(value, Tensor)})
        }
        return arrays, {"groups": groups, "others": others}

    def prepare(self, values: Mapping[str, Any] | list[dict[str, Any]]) -> None:
        groups = _groups(values)
        if len(groups) != len(self.optimizer.param_groups):
            raise BadInput(
                f"{self.name} was saved with {len(groups)} groups of parameters and has "
                f"{len(self.optimizer.param_groups)} now: {INSTEAD}."
            )

    def load(self, values: Mapping[str, Any] | list[dict[str, Any]]) -> None:
        for name, rest in values["others"].items() if isinstance(values, Mapping) else ():
            self._state["state"][name].update(rest)
        set_optimizer_state_dict(self.module, self.optimizer, self._state)
        for group, saved in zip(self.optimizer.param_groups, _groups(values), strict=True):
            group.update(saved)


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Of each group."""
    return [{key: value for key, value in g.items() if key != "params"} for g in optimizer.param_groups]


def _groups(values: Mapping[str, Any] | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A list is what older versions saved."""
    return values if isinstance(values, list) else cast(list[dict[str, Any]], values["groups"])


def kept_of_torch(objects: Mapping[str, Any]) -> dict[str, Kept]:
    """Of those that are modules and optimizers."""
    modules = {name: value for name, value in objects.items() if isinstance(value, Module)}
    names = {
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
    return kept


def _parameters(module: Module) -> Iterator[tuple[str, Tensor]]:
    found = dict(module.named_parameters())
    plain = plain_names(module, found)
    return ((plain[name], parameter) for name, parameter in found.items())


def _is_fsdp1(module: Module) -> bool:
    return any(isinstance(each, FullyShardedDataParallel) for each in module.modules())


def _kept_optimizer(name: str, optimizer: Optimizer, names: Mapping[int, str], flat: Sequence[Module]) -> Kept:
    """`flat`: modules of FSDP1."""
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    whose = (module for module in flat if any(id(parameter) in trained for parameter in module.parameters()))
    module = next(whose, None)
    return KeptOptimizer(name, optimizer, names) if module is None else KeptFsdp1Optimizer(name, optimizer, module)
