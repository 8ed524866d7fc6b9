"""Rank of this process among the workers of its job. Standard library only, Python 3.9+."""

from __future__ import annotations

import dataclasses
import os


@dataclasses.dataclass(frozen=True)
class World:
    """Rank of this process, and number of workers of the job. Both stay the same within a round.

    A round is a period in which a fixed set of replicas trains.
    """

    rank: int = 0
    """Number of this worker among all workers, from 0."""
    size: int = 1
    """Number of workers in the job."""
    local_rank: int = 0
    """Number of this worker within its replica, from 0."""
    local_size: int = 1
    """Number of workers in this replica."""
    replica: int = 0
    """Number of this replica among those that take part, from 0."""
    replicas: int = 1
    """Number of replicas that take part."""
    round: int = 0
    """Number of the round, which grows each time the world changes; 0 outside of a job."""


def world() -> World:
    """Return the rank of this process and the number of workers of the job.

    The values are read from environment variables, so the call is cheap. Under plain torchrun, these are the variables
    that torchrun sets. Outside of a job and torchrun, the result describes a single worker.
    """

    def number(name: str, default: int) -> int:
        return int(os.environ.get(name) or default)

    return World(
        rank=number("RANK", 0),
        size=number("WORLD_SIZE", 1),
        local_rank=number("LOCAL_RANK", 0),
        local_size=number("LOCAL_WORLD_SIZE", 1),
        replica=number("GROUP_RANK", 0),
        replicas=number("GROUP_WORLD_SIZE", 1),
        round=number("CONCERTINA_ROUND", 0),
    )
