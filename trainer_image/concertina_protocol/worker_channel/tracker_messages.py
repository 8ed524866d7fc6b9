"""Messages between an agent and its tracking process, which ships the spool to a tracker.

TrackerHello   ->                     the first line
TrackingState  ->                     whenever it has changed
               <-  ShipAll            the agent is about to exit: ship the remaining records, then exit
"""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Type, Union


@dataclasses.dataclass(frozen=True)
class TrackerHello:
    """First message of the tracking process."""

    pid: int


@dataclasses.dataclass(frozen=True)
class TrackingState:
    """State of the tracking process."""

    shipped: int
    """Number of the first record of the spool that the tracker does not have."""
    error: str = ""
    """Reason why the last attempt failed, in a sentence."""
    dropped: int = 0
    """Number of records that were deleted because the spool was full."""


@dataclasses.dataclass(frozen=True)
class ShipAll:
    """Request to ship the remaining records and exit."""


Message = Union[TrackerHello, TrackingState, ShipAll]
KINDS: Dict[str, Type[Any]] = {"TrackerHello": TrackerHello, "TrackingState": TrackingState, "ShipAll": ShipAll}
"""Message classes by their names on the wire. These names are stable, even if a class is renamed."""
