"""What a script keeps, taken apart: large arrays by name, which are saved as boxes, and everything else as values.
Without torch, which has its own `_torch_objects`."""

from __future__ import annotations

import hashlib
import random
import struct
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any, Protocol

from concertina_state.errors import BadInput
from trainingjob._arrays import Leaf, is_array, leaf
from trainingjob._ranks import LEAVE_OUT
from trainingjob._refusals import INSTEAD, NotSavable


class Kept(Protocol):
    """One of a script's objects."""

    def arrays(self) -> Mapping[str, Any]:
        """Live tensors, Buffers and Parts of these: what is written into them is in the object, once it has been
        loaded."""
        ...

    def alike(self) -> Mapping[str, Any]:
        """Of these, those of which each rank has to have the same."""
        ...

    def buffers(self) -> Mapping[str, Any]:
        """Return live tensors beside the arrays that `arrays` or `now` gave last: a module's buffers, of which each
        rank may have its own."""
        ...

    def now(self) -> tuple[Mapping[str, Any], Any]:
        """Its arrays, and what it has beside them: for `_values`, of this rank."""
        ...

    def prepare(self, values: Any) -> None:
        """Make the arrays that an object with these values had, so that they can be filled."""
        ...

    def load(self, values: Any) -> None:
        """After the arrays have been filled."""
        ...


ARRAY = "$array"
"""In the place of an array, in the values of a dict."""


class KeptDict:
    """Arrays in dicts, lists and tuples: those that can be written to are filled, the rest is replaced."""

    def __init__(self, tree: MutableMapping[str, Any]) -> None:
        self.tree = tree
        self._leaves: dict[str, Leaf] = {}

    def arrays(self) -> dict[str, Any]:
        self._leaves = dict(_leaves(self.tree, ""))
        return {path: each.array for path, each in self._leaves.items()}

    def alike(self) -> dict[str, Any]:
        return {path: each.array for path, each in self._leaves.items() if each.whole}

    def buffers(self) -> dict[str, Any]:
        return {}

    def now(self) -> tuple[dict[str, Any], Any]:
        return self.arrays(), _without_arrays(self.tree)

    def prepare(self, values: Any) -> None:
        pass

    def load(self, values: Any) -> None:
        self._put_back(self.tree, values, "")

    def _put_back(self, tree: Any, values: Any, path: str) -> Any:
        """What stands in the place of `tree` from now on."""
        if isinstance(values, str) and values == ARRAY:
            if path not in self._leaves:
                raise BadInput(f"{path} was saved as an array, and is none now: {INSTEAD}.")
            return self._leaves[path].filled()
        if isinstance(tree, list) and isinstance(values, list) and not any(_has_array(each) for each in values):
            tree[:] = values
            return tree
        kinds = (list, tuple, Mapping)
        if not any(isinstance(tree, kind) and isinstance(values, kind) for kind in kinds):
            return values
        old = dict(_below(tree))
        new = {key: self._put_back(old.get(key), value, _path(path, key)) for key, value in _below(values)}
        if isinstance(tree, MutableMapping):
            if path:  # above, a script may keep more than it did
                tree.clear()
            for key, value in new.items():  # a Counter's `update` adds
                tree[key] = value
            return tree
        if isinstance(tree, list):
            tree[:] = new.values()
            return tree
        if isinstance(tree, tuple) and hasattr(tree, "_make"):  # a namedtuple
            return tree._make(new.values())
        frozen: Any = type(tree)
        return frozen(new) if isinstance(tree, Mapping) else tuple(new.values())


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, Leaf]]:
    if is_array(tree):
        yield path, leaf(tree)
        return
    for key, value in _below(tree):
        yield from _leaves(value, _path(path, key))


def _path(path: str, key: Any) -> str:
    return f"{path}/{key}" if path else str(key)


def _below(tree: Any) -> Iterable[tuple[Any, Any]]:
    return tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()


def _without_arrays(tree: Any) -> Any:
    if is_array(tree):
        return ARRAY
    if isinstance(tree, Mapping):
        found = {key: _without_arrays(value) for key, value in tree.items()}
        return Counter(found) if isinstance(tree, Counter) else found
    if isinstance(tree, list):
        return [_without_arrays(value) for value in tree]
    return tuple(map(_without_arrays, tree)) if isinstance(tree, tuple) else tree


def _has_array(values: Any) -> bool:
    return (isinstance(values, str) and values == ARRAY) or any(_has_array(each) for _, each in _below(values))


class KeptStateful:
    """Anything with state_dict and load_state_dict: schedulers, samplers, data loaders, scalers."""

    def __init__(self, stateful: Any) -> None:
        self.stateful = stateful

    def arrays(self) -> dict[str, Any]:
        return {}

    def alike(self) -> dict[str, Any]:
        return {}

    def buffers(self) -> dict[str, Any]:
        return {}

    def now(self) -> tuple[dict[str, Any], Any]:
        return {}, self.stateful.state_dict()

    def prepare(self, values: Any) -> None:
        pass

    def load(self, values: Any) -> None:
        self.stateful.load_state_dict(values)


class RandomNumbers:
    """Of Python, and of numpy and torch as far as the script has imported them: in this process and on its GPU."""

    def state_dict(self) -> dict[str, Any]:
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        version, numbers, gauss = random.getstate()
        return {
            "python": (version, struct.pack(f"<{len(numbers)}I", *numbers), gauss),
            "numpy": numpy.random.get_state() if numpy else None,
            "torch": torch.get_rng_state() if torch else None,
            "cuda": torch.cuda.get_rng_state() if torch and torch.cuda.is_available() else None,
        }

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        version, numbers, gauss = values["python"]
        random.setstate((version, struct.unpack(f"<{len(numbers) // 4}I", numbers), gauss))
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        if numpy and values["numpy"] is not None:
            numpy.random.set_state(values["numpy"])
        if torch and values["torch"] is not None:
            torch.set_rng_state(values["torch"])
            if values["cuda"] is not None and torch.cuda.is_available():
                torch.cuda.set_rng_state(values["cuda"])

    def draw_others(self, rank: int) -> None:
        """Than the rank whose numbers these are."""
        drawn = hashlib.sha256(repr(random.getstate()).encode() + str(rank).encode()).digest()
        random.seed(drawn)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(int.from_bytes(drawn[8:12], "little"))
        if torch := sys.modules.get("torch"):
            torch.manual_seed(int.from_bytes(drawn[:8], "little"))


def kept(objects: Mapping[str, Any], with_torch: bool, before: Mapping[str, Kept]) -> dict[str, Kept]:
    """`with_torch`: tensors can be saved. `before`: what the state keeps already. Raises NotSavable for what has no
    state."""
    for name, value in objects.items():
        _check_known(name, value)
    of_torch: Mapping[str, Kept] = {}
    if "torch" in sys.modules:
        from trainingjob._torch_objects import kept_of_torch

        of_torch = kept_of_torch(objects, before)
    if of_torch and not with_torch:
        raise NotSavable(f"{next(iter(of_torch))} is torch's: {LEAVE_OUT}")
    return {name: of_torch.get(name) or _kept(name, value) for name, value in objects.items()}


def _check_known(name: str, value: Any) -> None:
    modules = [each.__module__ for each in type(value).__mro__]
    if any(module.startswith("deepspeed.") for module in modules):
        raise NotSavable(f"{name} is DeepSpeed's, which cuts states in its own way: save it by DeepSpeed's checkpoints")
    if "torch.distributed.optim.zero_redundancy_optimizer" in modules:
        raise NotSavable(
            f"{name} is a ZeroRedundancyOptimizer, which keeps each rank's moments where no other finds them: cut the "
            "model by fully_shard, which cuts its optimizer's state too, or give the optimizer itself"
        )


def _kept(name: str, value: Any) -> Kept:
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return KeptStateful(value)
    if isinstance(value, MutableMapping):
        return KeptDict(value)
    raise NotSavable(
        f"{name} is a {type(value).__qualname__}, which has no state: give a module, an optimizer, a dict of arrays, "
        "or what has state_dict() and load_state_dict()"
    )
