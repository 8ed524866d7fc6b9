"""The interface by which `State` takes an object apart into arrays and values, and restores it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class StateAdapter(Protocol):
    """One object of a script, as `State` saves and restores it.

    Arrays are large: each is saved as boxes of a global array, and may be cut in another way when it is restored.
    Values are everything else. Each rank saves its own, as text (see `_values`).
    """

    def arrays(self) -> Mapping[str, Any]:
        """Return the object's arrays by name: live tensors, Buffers, and ArrayShards of these.

        To restore the object, `State` writes into these arrays and then calls `load`.
        """
        ...

    def replicated_arrays(self) -> Mapping[str, Any]:
        """Return those of the arrays that must have the same content on every rank."""
        ...

    def buffers(self) -> Mapping[str, Any]:
        """Return live tensors that may differ between ranks, such as the running means of a module.

        They belong to the state that the last call of `arrays` or `contents` read, and are not among its arrays.
        """
        ...

    def contents(self) -> tuple[Mapping[str, Any], Any]:
        """Return the object's arrays, and this rank's values beside them."""
        ...

    def prepare(self, values: Any) -> None:
        """Create the arrays that an object with these saved values had, so that they can be filled.

        Raises:
            InvalidInput: The values are those of another kind of object.
        """
        ...

    def load(self, values: Any) -> None:
        """Restore the object from its arrays, which have been filled by now, and from its saved values.

        Raises:
            InvalidInput: The values do not fit the object.
        """
        ...


class StatefulAdapter:
    """An object with `state_dict` and `load_state_dict`: a scheduler, a sampler, a data loader or a scaler."""

    def __init__(self, stateful: Any) -> None:
        self.stateful = stateful

    def arrays(self) -> dict[str, Any]:
        return {}

    def replicated_arrays(self) -> dict[str, Any]:
        return {}

    def buffers(self) -> dict[str, Any]:
        return {}

    def contents(self) -> tuple[dict[str, Any], Any]:
        return {}, self.stateful.state_dict()

    def prepare(self, values: Any) -> None:
        pass

    def load(self, values: Any) -> None:
        self.stateful.load_state_dict(values)
