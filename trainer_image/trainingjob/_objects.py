"""Adapters for objects of a script that do not need torch. `_torch_objects` has the adapters for torch's objects."""

from __future__ import annotations

import hashlib
import random
import struct
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

from concertina_state.errors import InvalidInput
from trainingjob._adapter import StateAdapter, StatefulAdapter
from trainingjob._arrays import is_array, leaf
from trainingjob._leaf import Leaf
from trainingjob._ranks import LEAVE_OUT
from trainingjob._refusals import INSTEAD, NotSavable

ARRAY = "$array"
"""Placeholder for an array in the values of a dict."""


class DictAdapter:
    """Adapter for a dict that holds arrays, also within nested dicts, lists and tuples.

    When the dict is restored, saved content is written into the existing arrays if they are writable. All other values
    in the dict are replaced.
    """

    def __init__(self, tree: MutableMapping[str, Any]) -> None:
        self._tree = tree
        self._leaf_by_path: dict[str, Leaf] = {}

    def arrays(self) -> dict[str, Any]:
        self._leaf_by_path = dict(_leaves(self._tree, ""))
        return {path: leaf.array for path, leaf in self._leaf_by_path.items()}

    def replicated_arrays(self) -> dict[str, Any]:
        return {path: leaf.array for path, leaf in self._leaf_by_path.items() if leaf.whole}

    def buffers(self) -> dict[str, Any]:
        return {}

    def contents(self) -> tuple[dict[str, Any], Any]:
        return self.arrays(), _without_arrays(self._tree)

    def prepare(self, values: Any) -> None:
        pass

    def load(self, values: Any) -> None:
        self._restored(self._tree, values, "")

    def _restored(self, tree: Any, values: Any, path: str) -> Any:
        """Return the restored value for `tree`, a part of the dict.

        If `tree` is mutable, it is updated in place and returned.

        Raises:
            InvalidInput: An array was saved at `path`, and the dict has no array there now.
        """
        if isinstance(values, str) and values == ARRAY:
            if path not in self._leaf_by_path:
                raise InvalidInput(f"{path} was saved as an array, but is not an array now: {INSTEAD}.")
            return self._leaf_by_path[path].filled()
        if isinstance(tree, list) and isinstance(values, list) and not any(_has_array(value) for value in values):
            tree[:] = values
            return tree
        kinds = (list, tuple, Mapping)
        if not any(isinstance(tree, kind) and isinstance(values, kind) for kind in kinds):
            return values
        old = dict(_children(tree))
        new = {key: self._restored(old.get(key), value, _path(path, key)) for key, value in _children(values)}
        if isinstance(tree, MutableMapping):
            if path:  # at the top, a script may keep more than it did
                tree.clear()
            for key, value in new.items():  # not by `update`, which adds in a Counter
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
    """Yield the path and the leaf of each array in a tree of dicts, lists and tuples."""
    if is_array(tree):
        yield path, leaf(tree)
        return
    for key, value in _children(tree):
        yield from _leaves(value, _path(path, key))


def _path(path: str, key: Any) -> str:
    return f"{path}/{key}" if path else str(key)


def _children(tree: Any) -> Iterable[tuple[Any, Any]]:
    """Return the keys and values directly below a dict, list or tuple. For any other value, the result is empty."""
    return tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()


def _without_arrays(tree: Any) -> Any:
    """Return a copy of a tree of dicts, lists and tuples, in which ARRAY replaces each array."""
    if is_array(tree):
        return ARRAY
    if isinstance(tree, Mapping):
        values = {key: _without_arrays(value) for key, value in tree.items()}
        return Counter(values) if isinstance(tree, Counter) else values
    if isinstance(tree, list):
        return [_without_arrays(value) for value in tree]
    return tuple(map(_without_arrays, tree)) if isinstance(tree, tuple) else tree


def _has_array(values: Any) -> bool:
    """Return whether the saved values describe a tree that contains an array."""
    return (isinstance(values, str) and values == ARRAY) or any(_has_array(value) for _, value in _children(values))


class RandomNumbers:
    """States of the random number generators in this process and on its GPU.

    The generators are Python's, and also numpy's and torch's if the script has imported these libraries.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the generators, keyed by library.

        The state is None if the script has not imported the library.
        """
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        version, numbers, gauss = random.getstate()
        return {
            "python": (version, struct.pack(f"<{len(numbers)}I", *numbers), gauss),
            "numpy": numpy.random.get_state() if numpy else None,
            "torch": torch.get_rng_state() if torch else None,
            "cuda": torch.cuda.get_rng_state() if torch and torch.cuda.is_available() else None,
        }

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Set the random number generators of this process to the saved states `values`."""
        version, numbers, gauss = values["python"]
        random.setstate((version, struct.unpack(f"<{len(numbers) // 4}I", numbers), gauss))
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        if numpy and values["numpy"] is not None:
            numpy.random.set_state(values["numpy"])
        if torch and values["torch"] is not None:
            torch.set_rng_state(values["torch"])
            if values["cuda"] is not None and torch.cuda.is_available():
                torch.cuda.set_rng_state(values["cuda"])

    def reseed(self, rank: int) -> None:
        """Seed the generators of an additional rank, which has taken over the states of another rank.

        Without new seeds, the two ranks would draw the same random numbers.
        """
        digest = hashlib.sha256(repr(random.getstate()).encode() + str(rank).encode()).digest()
        random.seed(digest)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(int.from_bytes(digest[8:12], "little"))
        if torch := sys.modules.get("torch"):
            torch.manual_seed(int.from_bytes(digest[:8], "little"))


def adapters_of(
    objects: Mapping[str, Any], with_torch: bool, existing: Mapping[str, StateAdapter]
) -> dict[str, StateAdapter]:
    """Return an adapter for each object, keyed by the object's name.

    Args:
        objects: The objects that a script adds to its `State`.
        with_torch: Whether the ranks communicate by torch.distributed, so that tensors can be saved.
        existing: The adapters of the objects that the `State` has already.

    Raises:
        NotSavable: An object has no state, or a state that can't be saved.
    """
    for name, value in objects.items():
        _check_supported(name, value)
    torch_adapters: Mapping[str, StateAdapter] = {}
    if "torch" in sys.modules:
        from trainingjob._torch_objects import torch_adapters_of

        torch_adapters = torch_adapters_of(objects, existing)
    if torch_adapters and not with_torch:
        raise NotSavable(f"{next(iter(torch_adapters))} is an object of torch: {LEAVE_OUT}")
    return {name: torch_adapters.get(name) or _adapter_of(name, value) for name, value in objects.items()}


def _check_supported(name: str, value: Any) -> None:
    """Refuse objects of libraries that divide states among ranks in ways that `State` does not support.

    Raises:
        NotSavable: The object belongs to such a library.
    """
    modules = [base.__module__ for base in type(value).__mro__]
    if any(module.startswith("deepspeed.") for module in modules):
        raise NotSavable(
            f"{name} is an engine of DeepSpeed, which shards states in its own way: save it "
            "with DeepSpeed's checkpoints"
        )
    if "torch.distributed.optim.zero_redundancy_optimizer" in modules:
        raise NotSavable(
            f"{name} is a ZeroRedundancyOptimizer, and the moments on each rank can't be read from the "
            "others: shard the model with fully_shard, which also shards its optimizer, or use the inner "
            "optimizer without it"
        )


def _adapter_of(name: str, value: Any) -> StateAdapter:
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return StatefulAdapter(value)
    if isinstance(value, MutableMapping):
        return DictAdapter(value)
    raise NotSavable(
        f"{name} is a {type(value).__qualname__}, which has no state: use a module, an optimizer, a dict of "
        "arrays, or an object with state_dict() and load_state_dict()"
    )
