"""Records that the operator and the agents share: snapshots, checkpoints, members, and the source of a state."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Optional

from concertina_protocol.codec.typed_json import Absent, OpenEnum
from concertina_protocol.messages.undone import Undone


class State(OpenEnum):
    """State of an agent, and of a member in a round."""

    IDLE = "idle"
    PREPARED = "prepared"
    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    DRAINED = "drained"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


class RestoreSource(OpenEnum):
    """Source of the state that a round begins with."""

    FRESH = "Fresh"
    MEMORY = "Memory"
    STORAGE = "Storage"


class StorageHealth(OpenEnum):
    """Health of durable storage."""

    UNKNOWN = "Unknown"
    """State until storage has been checked for the first time."""
    READY = "Ready"
    ERROR = "Error"


@dataclasses.dataclass(frozen=True)
class SnapshotId:
    """Identity of one state of the whole world: `shards` shard files of the same round, step and layout."""

    round: int
    step: int
    layout: str
    """Digest of the names, dtypes and global shapes of the tensors, and of how they are divided into shards."""
    shards: int


@dataclasses.dataclass(frozen=True)
class HeldSnapshot:
    """Shards of one snapshot that an agent holds complete and verified, its own or as a copy of a peer's."""

    id: SnapshotId
    shards: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Durable:
    """Checkpoint that `LATEST` names in durable storage."""

    uid: str
    round: int
    step: int
    uri: str
    """URI of the checkpoint's own folder."""
    complete: bool = False
    """Whether this is the run's last step. A re-created job with such a checkpoint is complete at once."""
    at: Annotated[Optional[float], Absent(0.0)] = None
    """Time at which the checkpoint became durable, in Unix seconds."""


@dataclasses.dataclass(frozen=True)
class Storage:
    """Latest information that an agent has about durable storage.

    A Storage is None if the job has no checkpoint.uri, or runs a user's own command.
    """

    state: StorageHealth
    latest: Optional[Durable] = None
    message: str = ""
    """Sentence that says what to do, if the state is Error."""
    round: Annotated[Optional[int], Absent(-1)] = None
    """Round to which this information belongs, or None if the agent does not say (early version 1).

    It is the round that the agent was a member of when it last received this information, or the highest round that it
    had seen when it checked storage by itself.
    """


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Replica that may become a member of a round."""

    replica: str
    """Pod name, unique per attempt."""
    address: str
    """host:port of the agent."""


@dataclasses.dataclass(frozen=True)
class Member:
    """Replica that is a member of a round."""

    replica: str
    instance: str
    address: str
    first_rank: int
    workers: int
    node: str = ""
    """Name of the member's node, or empty if the operator does not send it (early version 1)."""
    zone: str = ""
    """Zone of the member's node, or empty if the node has no zone label."""


@dataclasses.dataclass(frozen=True)
class Rollback:
    """Decision that state trained after `step` must not be trusted."""

    step: int
    skipped: tuple[tuple[int, int], ...] = ()
    """All positions, as ranges [begin, end), that are skipped from now on, including those of earlier rollbacks."""
    damaged: Optional[Durable] = None
    """Checkpoint that cannot be read completely, if that is the cause; `step` is that of the one to read instead."""

    def undoes(self, uid: str) -> bool:
        """Return whether states of this job become void.

        A damaged checkpoint of another job voids none of them.
        """
        return self.damaged is None or self.damaged.uid == uid


@dataclasses.dataclass(frozen=True)
class Restore:
    """Source of a round's state.

    With Memory, `holders` lists for every shard the members that hold it. The agent tries the nearest one first and
    skips a holder that fails. With Storage, `durable` names the checkpoint. (base_round, step) becomes the base of the
    new round: snapshots of lower rounds with a later step are void and are deleted.
    """

    source: RestoreSource
    step: int = 0
    id: Optional[SnapshotId] = None
    holders: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """Replica names by shard number, which is a string."""
    durable: Optional[Durable] = None
    skipped: tuple[tuple[int, int], ...] = ()
    """Positions that are skipped, in addition to those that the state itself lists."""
    undone: Optional[Undone] = None
    """States that the last rollback of this job made void.

    With Storage, if `durable` was undone, the round restores the newest checkpoint that was not.
    """
    undone_before: tuple[Undone, ...] = ()
    """States that earlier rollbacks made void, without those of the last one.

    An early version 1 did not send this field.
    """
    damaged: tuple[str, ...] = ()
    """URIs of checkpoints, of this job or another, that cannot be read completely. None of them is read again."""

    @property
    def all_undone(self) -> tuple[Undone, ...]:
        """States that any rollback of this job made void."""
        return self.undone_before + ((self.undone,) if self.undone else ())

    def voids(self, durable: Durable) -> bool:
        """Return whether a rollback has undone a checkpoint of this job."""
        return any(undone.covers(durable.round, durable.step) for undone in self.all_undone)

    def bars(self, durable: Durable, uid: str) -> bool:
        """Return whether the job with this uid must not continue from a checkpoint.

        It must not if the checkpoint was undone or is damaged.
        """
        return durable.uri in self.damaged or (durable.uid == uid and self.voids(durable))
