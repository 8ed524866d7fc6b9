"""The contents of a `State`: the objects of a script, as arrays, buffers and values."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from concertina_state.errors import InvalidInput
from trainingjob._adapter import StateAdapter, StatefulAdapter
from trainingjob._counted import SampleCounter
from trainingjob._objects import DictAdapter, RandomNumbers, adapters_of
from trainingjob._ranks import Ranks
from trainingjob._refusals import INSTEAD, NotSavable
from trainingjob._world import World

if TYPE_CHECKING:
    from trainingjob._loaders import Loaders
    from trainingjob._save_points import SavePoints

RESERVED = {"random": "random numbers are", "loaders": "positions of `batches` are"}
"""Names that no object of a script may have. The value says what `State` saves under the name."""


class Contents:
    """Objects that a script has given to its `State`, such as the model and the optimizer."""

    def __init__(self, world: World, ranks: Ranks) -> None:
        self._world, self._ranks = world, ranks
        self._adapters: dict[str, StateAdapter] = {}
        self._loaders: Loaders | None = None
        self.save_points: SavePoints | None = None
        """Commits after which the state can be saved. None if torch is not used: each commit is a save point then."""
        self.sample_counters: list[SampleCounter] = []

    def add(self, objects: Mapping[str, Any]) -> None:
        """Add objects, keyed by name. See `State.add`.

        Raises:
            NotSavable: An object has no state or can't be saved, or its name is reserved.
        """
        for reserved, description in RESERVED.items():
            if reserved in objects:
                raise NotSavable(
                    f"the name {reserved} is reserved, because {description} saved under it: "
                    "give this object another name"
                )
        added = adapters_of(objects, self._ranks.with_torch, self._adapters)
        self._watch(objects, added)
        self._adapters = {**self._adapters, **added}
        self._adapters.pop("random", None)
        # Random numbers are restored last, because restoring other objects may draw some.
        self._adapters["random"] = StatefulAdapter(RandomNumbers())

    def _watch(self, objects: Mapping[str, Any], added: Mapping[str, StateAdapter]) -> None:
        """Refuse tensors that can't be saved, and begin to count the steps of the optimizers among the objects."""
        if "torch" not in sys.modules:
            return
        from torch.optim import Optimizer

        from trainingjob._loaders import Loaders
        from trainingjob._save_points import SavePoints
        from trainingjob._torch_objects import check_kinds

        check_kinds(added)
        self.save_points = self.save_points or SavePoints()
        self.save_points.watch(value for value in objects.values() if isinstance(value, Optimizer))
        if self._loaders is None:
            self._loaders = Loaders()
            self._adapters["loaders"] = StatefulAdapter(self._loaders)

    def batches(self, loader: Any) -> Iterator[Any]:
        """Return an iterator over one pass of a data loader. See `State.batches`.

        Raises:
            NotSavable: torch was not imported when the `State` was created.
        """
        if self._loaders is None:
            raise NotSavable(
                "State.batches() needs a torch.utils.data.DataLoader: import torch before you create State"
            )
        return self._loaders.batches(loader)

    @property
    def samples(self) -> int:
        """Number of samples that the script has consumed, summed over its data iterators that count them."""
        return sum(counter.samples for counter in self.sample_counters)

    @property
    def names_without_dicts(self) -> set[str]:
        """Names of the saved objects, such as a model, that must have every saved array when a state is restored.

        A dict is not among them, because a script may restore fewer arrays into a dict than it has saved.
        """
        return {name for name, adapter in self._adapters.items() if not isinstance(adapter, DictAdapter)}

    # --- to save ----------------------------------------------------------------------------------------------------

    def current(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return all arrays, keyed by full name, and this rank's values, keyed by the object's name."""
        arrays: dict[str, Any] = {}
        values: dict[str, Any] = {}
        for name, adapter in self._adapters.items():
            own_arrays, values[name] = adapter.contents()
            arrays |= self._with_full_names(name, own_arrays)
        return arrays, values

    def arrays(self) -> dict[str, Any]:
        """Return all arrays of all objects, keyed by full name."""
        return self._collected({name: adapter.arrays() for name, adapter in self._adapters.items()})

    def buffers(self) -> dict[str, Any]:
        """Return the buffers of all modules, keyed by full name.

        Call `current` or `arrays` first: this method returns the buffers that the last call of `current` or `arrays`
        found in the modules.
        """
        return self._collected({name: adapter.buffers() for name, adapter in self._adapters.items()})

    def check_replicated(self) -> None:
        """Check that arrays that every rank holds in full have the same content on all ranks.

        Each rank saves only a part of such an array. If its content differed between ranks, the saved array would be a
        mixture. All ranks must call this method.

        Raises:
            InvalidInput: An array differs between ranks.
        """
        if self._world.size == 1:
            return
        arrays = self._collected({name: adapter.replicated_arrays() for name, adapter in self._adapters.items()})
        differing = self._ranks.differing(arrays)
        if differing:
            raise InvalidInput(
                f"{differing[0]} differs between ranks, and is not marked as sharded. If it is sharded, "
                "make it a DTensor (torch.distributed.tensor); for an array in a dict, use "
                "trainingjob.ArrayShard. If not, keep it the same on all ranks, for example with "
                f"DistributedDataParallel. ({len(differing)} of {len(arrays)} differ.)"
            )

    def _collected(self, arrays_by_object: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        collected: dict[str, Any] = {}
        for name, arrays in arrays_by_object.items():
            collected |= self._with_full_names(name, arrays)
        return collected

    def _with_full_names(self, name: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arrays of one object, keyed by full name, in the form that `StateIndex` requires."""
        named = {f"{name}.{key}": array for key, array in arrays.items()}
        return {path: self._ranks.array(array, path) for path, array in named.items()}

    # --- to restore -------------------------------------------------------------------------------------------------

    def check_names(self, values: Mapping[str, Any], step: int) -> None:
        """Check that the saved state of this step has the same objects as this script.

        Args:
            values: Saved values, keyed by the object's name.
            step: Step of the saved state, for the error message.

        Raises:
            InvalidInput: An object is missing in the saved state or in this script.
        """
        if left_out := sorted(values.keys() - self._adapters.keys() - {"loaders"}):
            raise InvalidInput(f"the saved state of step {step} also has {', '.join(left_out)}: {INSTEAD}.")
        if missing := [name for name in self._adapters if name not in values]:
            raise InvalidInput(f"the saved state of step {step} has no {', '.join(missing)}: {INSTEAD}.")

    def prepare(self, values: Mapping[str, Any]) -> None:
        """Create the arrays that the saved objects had, so that the saved content can be written into them."""
        for name, adapter in self._adapters.items():
            adapter.prepare(values[name])

    def load(self, values: Mapping[str, Any]) -> None:
        """Restore the values of all objects, after the saved content has been written into their arrays."""
        for name, adapter in self._adapters.items():
            adapter.load(values[name])

    def end_restore(self) -> None:
        """Begin to track the positions of data loaders and the steps of optimizers, from the restored state on."""
        if self._loaders is not None:
            self._loaders.remember_random_numbers()
        if self.save_points is not None:
            self.save_points.pass_commit()  # torch makes a step of an FSDP1 optimizer that has no moments yet
