"""What snapshots ask of a state that changes."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from concertina_state.format.shardfile import Layout

Arrival: TypeAlias = Callable[[], float]
"""Waits until a copy is where it belongs. Returns how many seconds a device took for it: 0 where the caller of
`copy_to` did it."""


class SnapshotSource(Protocol):
    """What is saved: arrays that change, and the place of each in a file."""

    @property
    def layout(self) -> Layout: ...

    def views(self, file: mmap.mmap) -> Any:
        """Of the places, for `copy_to`."""
        ...

    def copy_to(self, views: Any) -> Arrival:
        """What the arrays hold now."""
        ...

    def before_change(self) -> None:
        """What is told a device from now on may change the arrays: it is done after the last copy."""
        ...
