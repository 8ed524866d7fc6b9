"""Interface of a changing state to its snapshots."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any, Protocol

from concertina_state.format.shardfile import Layout

Arrival = Callable[[], float]
"""Function that waits until a copy has arrived, and returns the seconds that a device took for it.

The result is 0 if the caller of `copy_to` made the copy.
"""


class SnapshotSource(Protocol):
    """Contents of a snapshot: arrays that change, and the place of each in a file."""

    @property
    def layout(self) -> Layout: ...

    def views(self, file: mmap.mmap) -> Any:
        """Return views of the places in the mapped file, for `copy_to`."""
        ...

    def copy_to(self, views: Any) -> Arrival:
        """Copy the present contents of the arrays into the views, or have a device copy them."""
        ...

    def before_change(self) -> None:
        """Order the following work of devices, which may change the arrays, after the last copy."""
        ...
