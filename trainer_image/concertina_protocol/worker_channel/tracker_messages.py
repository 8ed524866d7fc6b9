"""Messages between an agent and its tracking process, which sends the run's records to a tracking tool.

TrackerHello   ->                     the first line
TrackingState  ->                     whenever the state has changed
               <-  ShipAll            the agent is about to exit: send the remaining records, then exit
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
    """Number of the spool's first record that the tracking tool does not have yet."""
    error: str = ""
    """Sentence that says why the last attempt to send records failed, or ""."""
    dropped: int = 0
    """Number of records that were deleted before they were sent, because the spool was full."""


@dataclasses.dataclass(frozen=True)
class ShipAll:
    """Request to send the remaining records to the tracking tool and exit."""


Message = Union[TrackerHello, TrackingState, ShipAll]
KINDS: Dict[str, Type[Any]] = {"TrackerHello": TrackerHello, "TrackingState": TrackingState, "ShipAll": ShipAll}
"""Class of each message, by the name in its lines. A name never changes, even if the class is renamed."""
