"""World, agent and job settings of a `State`, and the collective by which its ranks agree on a save."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from concertina_state.errors import InvalidInput
from concertina_state.format.shardfile import Continued
from concertina_state.lineage import Origin
from concertina_state.saving import StepFlags
from trainingjob import _connection
from trainingjob._channel import Channel
from trainingjob._folder import Folder
from trainingjob._ranks import Gather, GatheringRanks, Ranks, StateIndex, all_alike, halves
from trainingjob._world import World


@dataclasses.dataclass(frozen=True)
class Session:
    """World, agent and settings of a `State`, which do not change while the process runs."""

    world: World
    ranks: Ranks
    agent: Channel | Folder
    """The agent, or the folder that takes its place outside of a job."""
    checkpoint: Mapping[str, Any]
    """`spec.checkpoint` of the job; empty if the job has no durable storage."""

    @property
    def rank_name(self) -> str:
        """Prefix of the names of arrays that this rank saves only for itself."""
        return name_of(self.world.rank)


@dataclasses.dataclass(frozen=True)
class StartPoint:
    """Step and origin of the state from which this round continues, as later snapshots record them.

    A round is a period in which a fixed set of replicas trains. A snapshot is a copy of the training state in node
    memory.
    """

    step: int = 0
    """Finished steps."""
    position: int = 0
    """Consumed samples."""
    origin: Origin = Origin()  # noqa: RUF009 (frozen)
    """Rounds and data that have led to the state."""
    continued: Continued | None = None
    """Checkpoint of another job that the run has begun with."""


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Result of the collective by which the ranks agree on a save. It is the same on all ranks."""

    flags: StepFlags
    every: int
    """Number of commits until the next snapshot, as rank 0 has decided."""
    layout: str
    """Digest of the arrays that all ranks hold."""
    pending: bool
    """True if gradients of some rank wait for an optimizer step."""
    buffers_alike: bool
    """True if all ranks have the same buffers."""


def ranks_of(world: World, gather: Gather | None) -> Ranks:
    """Return the communication between ranks, by torch.distributed or by the script's function `gather`.

    Raises:
        InvalidInput: There are several ranks, and they have no way to communicate.
    """
    if gather is None and "torch" in sys.modules:
        from trainingjob._torch_ranks import TorchRanks

        return TorchRanks(world)
    if gather is None and world.size > 1:
        raise InvalidInput(
            f"{world.size} processes share one state, but have no way to communicate: import torch and call "
            "torch.distributed.init_process_group() before you create State, or use State(gather=...) with "
            "a function that takes each rank's bytes and returns those of all ranks "
            "(MPI.COMM_WORLD.allgather, trainingjob.jax.gather)."
        )
    return GatheringRanks(world, gather or (lambda data: [data]))


def open_session(world: World, ranks: Ranks, folder: Path) -> Session:
    """Return the session of this process, with its world, agent and settings.

    Args:
        world: Rank of this process, and number of ranks.
        ranks: Communication between the ranks.
        folder: Folder for snapshots outside of a job.

    Raises:
        InvalidInput: Another process saves to the folder.
    """
    agent = _connection.agent_channel() or Folder(folder, world, ranks.same)
    return Session(world, ranks, agent, _connection.checkpoint_settings())


def name_of(rank: int) -> str:
    """Return the prefix of the names of arrays that the given rank saves only for itself."""
    return f"rank-{rank}"


def agree(
    session: Session, flags: StepFlags, index: StateIndex, every: int = 0, digest: int = 0, pending: bool = False
) -> Agreement:
    """Exchange between all ranks what they must know to save a step, and return the result.

    The exchange is a sum of a few numbers, and it is the only collective operation of a save.

    Args:
        session: The session.
        flags: This rank's flags.
        index: Index of the arrays that this rank has.
        every: Commits until the next snapshot. The value of rank 0 counts.
        digest: Checksum of this rank's buffers, which may be the same on all ranks.
        pending: Whether gradients of this rank wait for an optimizer step.
    """
    rank, size = session.world.rank, session.world.size
    layout = int(index.digest[:8], 16)
    counts = [float(count) for count in (*dataclasses.astuple(flags), every if rank == 0 else 0, layout, pending)]
    *totals, low, low_squared, high, high_squared = session.ranks.sums([*counts, *halves(digest)])
    *flag_totals, agreed_every, layout_total, pending_total = (round(total) for total in totals)
    alike = all_alike(size, low, low_squared) and all_alike(size, high, high_squared)
    return Agreement(StepFlags(*flag_totals), agreed_every, f"{layout_total:x}", pending_total > 0, alike)
