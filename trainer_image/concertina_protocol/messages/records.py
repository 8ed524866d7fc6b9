"""Parts of the messages of the operator and agents: snapshots, checkpoints, members, and the source of a state.

A snapshot is a copy of the training state in node memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Optional

from concertina_protocol.codec.typed_json import Absent, OpenEnum
from concertina_protocol.messages.undone import Undone


class State(OpenEnum):
    """State of an agent, and of a member in a round.

    A round is a period in which a fixed set of replicas trains.
    """

    IDLE = "idle"
    PREPARED = "prepared"
    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    DRAINED = "drained"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


class RestoreSource(OpenEnum):
    """Source of the state with which a round begins.

    A round is a period in which a fixed set of replicas trains.
    """

    FRESH = "Fresh"
    MEMORY = "Memory"
    STORAGE = "Storage"


class StorageHealth(OpenEnum):
    """Health of durable storage."""

    UNKNOWN = "Unknown"
    """Storage has not been checked yet."""
    READY = "Ready"
    ERROR = "Error"


@dataclasses.dataclass(frozen=True)
class SnapshotId:
    """Identity of a snapshot: the state of all ranks after one step, saved in `shards` shard files.

    All shard files of a snapshot are of the same round, step and layout. A round is a period in which a fixed set of
    replicas trains.

    A snapshot is a copy of the training state in node memory.
    """

    round: int
    step: int
    layout: str
    """Digest of the names, dtypes and global shapes of the tensors, and of the way in which ranks divide them."""
    shards: int


@dataclasses.dataclass(frozen=True)
class HeldSnapshot:
    """Complete and verified shards of one snapshot that an agent has, including copies of another replica's shards.

    A snapshot is a copy of the training state in node memory.
    """

    id: SnapshotId
    shards: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class BestCheckpoint:
    """Checkpoint with the lowest evaluation loss in a run's folder."""

    uid: str
    round: int
    step: int
    loss: float
    of: str = ""
    """Digest of the documents and settings of the evaluation. Losses with different digests can't be compared."""


@dataclasses.dataclass(frozen=True)
class Durable:
    """Checkpoint in durable storage from which a job continues: the one that the file `LATEST` names."""

    uid: str
    round: int
    step: int
    uri: str
    """URI of the checkpoint's own folder."""
    complete: bool = False
    """True if this is a checkpoint of the run's last step. If a job is created again and `LATEST` names such a
    checkpoint, the job is complete at once."""
    at: Annotated[Optional[float], Absent(0.0)] = None
    """Time at which the checkpoint became durable, in Unix seconds."""
    best: Optional[BestCheckpoint] = None
    """Best checkpoint of the folder when this one was published, or None unless `checkpoint.keepBest` is set."""

    @property
    def best_uri(self) -> str:
        """URI of the best checkpoint's own folder, or "" if there is none."""
        if self.best is None:
            return ""
        return f"{self.uri.rsplit('/', 3)[0]}/{self.best.uid}/round-{self.best.round}/step-{self.best.step}"


@dataclasses.dataclass(frozen=True)
class Storage:
    """Facts that an agent knows about durable storage, such as the newest checkpoint there.

    A message contains None instead of this object if the job has no checkpoint.uri, or if it runs a user's own command
    that does not use storage.
    """

    state: StorageHealth
    latest: Optional[Durable] = None
    message: str = ""
    """Sentence that says what to do if the state is Error."""
    round: Annotated[Optional[int], Absent(-1)] = None
    """Number of the round in which the agent received this information.

    If the agent checked storage by itself, the value is the highest round that the agent had seen by then. An agent
    with an early version 1 of the protocol sends None.
    """


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Replica that may become a member of a round.

    A round is a period in which a fixed set of replicas trains.
    """

    replica: str
    """Name of the pod, which is unique for each attempt of a replica."""
    address: str
    """Address of the agent as host:port."""


@dataclasses.dataclass(frozen=True)
class Member:
    """Replica that is a member of a round.

    A round is a period in which a fixed set of replicas trains.
    """

    replica: str
    instance: str
    address: str
    first_rank: int
    workers: int
    node: str = ""
    """Name of the member's node, or "" if the operator does not send it (early version 1)."""
    zone: str = ""
    """Zone of the member's node, or "" if the node has no zone label."""


@dataclasses.dataclass(frozen=True)
class Rollback:
    """Decision of the operator that all states trained after `step` are invalid."""

    step: int
    skipped: tuple[tuple[int, int], ...] = ()
    """All positions of the data to skip from now on, as ranges [begin, end), including those of earlier rollbacks."""
    damaged: Optional[Durable] = None
    """Damaged checkpoint that is the cause of the rollback, or None for another cause.

    If this field is set, `step` is the step of the checkpoint from which the job continues instead.
    """

    def undoes(self, uid: str) -> bool:
        """Return whether this rollback makes states of the job with uid `uid` invalid.

        If the cause is a damaged checkpoint of another job, the states of this job remain valid.
        """
        return self.damaged is None or self.damaged.uid == uid


@dataclasses.dataclass(frozen=True)
class Restore:
    """Source of the state with which a round begins.

    If `source` is Memory, `holders` lists for each shard the members that hold it. An agent fetches a shard from the
    nearest holder first. If that fails, the agent tries the next holder. If `source` is Storage, `durable` names the
    checkpoint.

    The new round continues from the step `step` of round `base_round`. Snapshots of earlier rounds with a later step
    are invalid and are deleted.

    A round is a period in which a fixed set of replicas trains.
    """

    source: RestoreSource
    step: int = 0
    id: Optional[SnapshotId] = None
    holders: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """Names of the replicas that hold each shard, by the shard's number as a string."""
    durable: Optional[Durable] = None
    skipped: tuple[tuple[int, int], ...] = ()
    """Positions of the data to skip, in addition to those that the saved state lists."""
    undone: Optional[Undone] = None
    """States that the last rollback of this job made invalid, or None.

    If `source` is Storage and `durable` is one of these states, the round restores the newest checkpoint that is still
    valid.
    """
    undone_before: tuple[Undone, ...] = ()
    """States that earlier rollbacks of this job made invalid.

    An operator with an early version 1 of the protocol does not send this field.
    """
    damaged: tuple[str, ...] = ()
    """URIs of damaged checkpoints of this or another job, none of which is to be read again."""

    @property
    def all_undone(self) -> tuple[Undone, ...]:
        """States that any rollback of this job made invalid."""
        return self.undone_before + ((self.undone,) if self.undone else ())

    def voids(self, durable: Durable) -> bool:
        """Return whether a rollback of this job made the checkpoint `durable` invalid."""
        return any(undone.covers(durable.round, durable.step) for undone in self.all_undone)

    def bars(self, durable: Durable, uid: str) -> bool:
        """Return whether the job with uid `uid` must not continue from the checkpoint `durable`.

        The result is True if a rollback of this job has undone the checkpoint, or if the checkpoint is damaged.
        """
        return durable.uri in self.damaged or (durable.uid == uid and self.voids(durable))
