"""The interface by which `State` takes an object apart into arrays and values, and restores it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class StateAdapter(Protocol):
    """Interface by which `State` saves and restores one object of a script, such as a model or an optimizer.

    The object's content is divided into arrays and values. Arrays are large tensors: each is saved as boxes
    (rectangular parts) of a global array, so that any number of ranks can restore it. Values are all other content.
    Each rank saves its own values, as text (see `_values`).
    """

    def arrays(self) -> Mapping[str, Any]:
        """Return the object's arrays, keyed by name.

        An array is the object's own tensor (no copy), a Buffer, or an ArrayShard of one. To restore the object, `State`
        writes into these arrays and then calls `load`.
        """
        ...

    def replicated_arrays(self) -> Mapping[str, Any]:
        """Return the arrays that must have the same content on every rank, keyed by name."""
        ...

    def buffers(self) -> Mapping[str, Any]:
        """Return the object's own tensors that may differ between ranks, such as running means, keyed by name.

        The result of `arrays` does not contain these tensors. Call `arrays` or `contents` first: this method returns
        the tensors that the last call of `arrays` or `contents` found in the object.
        """
        ...

    def contents(self) -> tuple[Mapping[str, Any], Any]:
        """Return the object's arrays, keyed by name, and this rank's other values."""
        ...

    def prepare(self, values: Any) -> None:
        """Create the arrays that the saved object contained, so that `State` can write the saved content into them.

        Raises:
            InvalidInput: The values are those of another kind of object.
        """
        ...

    def load(self, values: Any) -> None:
        """Restore the object's values, after `State` has written the saved content into the object's arrays.

        Raises:
            InvalidInput: The values do not fit the object.
        """
        ...


class StatefulAdapter:
    """Adapter for an object with `state_dict` and `load_state_dict`, such as a scheduler or a data loader."""

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
