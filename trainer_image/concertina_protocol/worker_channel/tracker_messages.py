"""What an agent and its tracking process, which ships the spool to a tracker, say to each other.

TrackerHello   ->                     the first line
TrackingState  ->                     whenever it has changed
               <-  ShipAll            the agent is about to end: ship what is there, and then end
"""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Type, Union


@dataclasses.dataclass(frozen=True)
class TrackerHello:
    pid: int


@dataclasses.dataclass(frozen=True)
class TrackingState:
    shipped: int
    """Number of the first record of the spool that is not with the tracker."""
    error: str = ""
    """Why the last try went wrong, in a sentence."""
    dropped: int = 0
    """Records that were given up, the spool being full."""


@dataclasses.dataclass(frozen=True)
class ShipAll:
    """And end, when nothing is left."""


Message = Union[TrackerHello, TrackingState, ShipAll]
KINDS: Dict[str, Type[Any]] = {"TrackerHello": TrackerHello, "TrackingState": TrackingState, "ShipAll": ShipAll}
"""By the names that lines have for them: these stay, whatever a class is called."""
