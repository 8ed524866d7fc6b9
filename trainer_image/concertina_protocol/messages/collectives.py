"""Collectives that ranks have called, as torch's flight recorder shows them when a round hangs.

A round is a period in which a fixed set of replicas trains.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Optional

from concertina_protocol.codec.typed_json import Absent

MOST_GROUPS = 16
"""Maximum number of process groups that a rank reports. Groups in which it waits come first."""
MOST_OPERATIONS = 8
"""Maximum number of collectives that a rank names in each process group."""
MOST_MISSING = 8
"""Maximum number of ranks that a report about a hang names."""


@dataclasses.dataclass(frozen=True)
class GroupCalls:
    """Collectives that one rank has called in one process group. The first collective of a group has number 1."""

    group: str
    """Name of the group, which is the same on all ranks of the group."""
    title: str
    """Description of the group, such as mesh_shard, or "" if it has none."""
    ranks: tuple[int, ...]
    """First rank, last rank and common distance of the group's ranks, or () if their distances differ."""
    called: int
    """Number of the newest collective that this rank has called."""
    waits_for: Annotated[Optional[int], Absent(0)] = None
    """Number of the oldest collective that this rank has called and that has not completed, or None if all have."""
    operations: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Name of each collective, such as all_reduce, keyed by its number.

    The entries are this rank's newest collectives, and the one that the rank waits for.
    """


@dataclasses.dataclass(frozen=True)
class HungCollective:
    """Collective that does not complete in a round that hangs.

    A round is a period in which a fixed set of replicas trains.
    """

    operation: str
    """Name of the collective, such as all_reduce."""
    number: int
    """Number of the collective in its process group, counted from 1."""
    group: str
    """Description of the process group, or its name if it has none."""
    waiting: int
    """Number of ranks that have called the collective and wait."""
    missing: tuple[int, ...] = ()
    """Ranks that have not called the collective: the lowest ones, at most MOST_MISSING."""
    missing_count: int = 0
    """Number of all ranks that have not called the collective."""
    instead: str = ""
    """Name of the collective that the missing ranks have called in place of this one, or "" if there is none."""
    silent: tuple[int, ...] = ()
    """Ranks of the group whose flight recorder did not answer: the lowest ones, at most MOST_MISSING."""
