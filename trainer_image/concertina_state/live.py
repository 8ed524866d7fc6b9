"""Interface between the changing state of a training process and its snapshots.

A snapshot is a copy of the training state in node memory.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any, Protocol

from concertina_state.format.shardfile import Layout

Arrival = Callable[[], float]
"""Function that waits until a copy is complete, and returns the seconds that a device took for the copy.

The result is 0 if no device made the copy.
"""


class SnapshotSource(Protocol):
    """Source of a snapshot: arrays that training changes, and the position of each array in the snapshot's file.

    A snapshot is a copy of the training state in node memory.
    """

    @property
    def layout(self) -> Layout: ...

    def views(self, file: mmap.mmap) -> Any:
        """Return a view of the bytes of each array in the mapped file `file`. `copy_to` writes into these views."""
        ...

    def copy_to(self, views: Any) -> Arrival:
        """Copy the present contents of the arrays into the views, or make a device start that copy."""
        ...

    def before_change(self) -> None:
        """Make devices finish their copies before they execute later work, which may change the arrays."""
        ...
