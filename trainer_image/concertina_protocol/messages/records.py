"""What the operator and the agents both speak of: snapshots, checkpoints, members, and where state comes from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Optional

from concertina_protocol.codec.typed_json import Absent, OpenEnum
from concertina_protocol.messages.undone import Undone


class State(OpenEnum):
    """Of an agent, and of a member in a round."""

    IDLE = "idle"
    PREPARED = "prepared"
    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    DRAINED = "drained"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


class RestoreSource(OpenEnum):
    FRESH = "Fresh"
    MEMORY = "Memory"
    STORAGE = "Storage"


class StorageHealth(OpenEnum):
    UNKNOWN = "Unknown"
    """Until the first look."""
    READY = "Ready"
    ERROR = "Error"


@dataclasses.dataclass(frozen=True)
class SnapshotId:
    """One state of the whole world: `shards` shard files, all of the same round, step and layout."""

    round: int
    step: int
    layout: str
    """Digest of names, dtypes, global shapes and how they are cut into shards."""
    shards: int


@dataclasses.dataclass(frozen=True)
class HeldSnapshot:
    """Shards of one snapshot that an agent holds complete and checked, its own or as a peer's copy."""

    id: SnapshotId
    shards: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Durable:
    """What `LATEST` names in durable storage."""

    uid: str
    round: int
    step: int
    uri: str
    """The checkpoint's own folder."""
    complete: bool = False
    """The run's last step: a re-created job with it is complete at once."""
    at: Annotated[Optional[float], Absent(0.0)] = None
    """Unix seconds when it became durable."""


@dataclasses.dataclass(frozen=True)
class Storage:
    """What an agent last learned about durable storage.

    None: the job has no checkpoint.uri, or runs a command of its own."""

    state: StorageHealth
    latest: Optional[Durable] = None
    message: str = ""
    """With Error: a sentence that says what to do."""
    round: Annotated[Optional[int], Absent(-1)] = None
    """As of which round: the one that the agent was a member of when it last learnt this, or the highest it had seen
    when it looked by itself. None where it does not say (version 1 at first)."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    replica: str
    """Pod name, unique per attempt."""
    address: str
    """host:port of the agent."""


@dataclasses.dataclass(frozen=True)
class Member:
    replica: str
    instance: str
    address: str
    first_rank: int
    workers: int
    node: str = ""
    """Where it is; empty where the operator does not say (version 1 at first)."""
    zone: str = ""
    """Of its node; empty where that has no label."""


@dataclasses.dataclass(frozen=True)
class Rollback:
    """What was trained after `step` is not to be trusted."""

    step: int
    skipped: tuple[tuple[int, int], ...] = ()
    """Positions [begin, end) that are left out from now on: all that ever were."""
    damaged: Optional[Durable] = None
    """The checkpoint that can't be read whole, where that is why; `step` is of the one to read instead."""

    def undoes(self, uid: str) -> bool:
        """Return whether states of this job become void. A damaged checkpoint of another job voids none of them."""
        return self.damaged is None or self.damaged.uid == uid


@dataclasses.dataclass(frozen=True)
class Restore:
    """Where the round's state comes from.

    With Memory, `holders` says for every shard which members hold it (the nearest is tried first by the agent, a bad
    one is passed over); with Storage, `durable` names the checkpoint. (base_round, step) becomes the new round's base:
    snapshots of lower rounds with a later step are void and dropped."""

    source: RestoreSource
    step: int = 0
    id: Optional[SnapshotId] = None
    holders: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """Shard number, as a string, to replica names."""
    durable: Optional[Durable] = None
    skipped: tuple[tuple[int, int], ...] = ()
    """Positions that are left out, beside those that the state itself says."""
    undone: Optional[Undone] = None
    """By the last rollback of this job. With Storage: where `durable` was undone, the newest one that was not."""
    undone_before: tuple[Undone, ...] = ()
    """By earlier rollbacks, and not by the last one as well. (Version 1 did not say it at first.)"""
    damaged: tuple[str, ...] = ()
    """URIs of checkpoints that can't be read whole, of this job or of another one: none of them is read again."""

    @property
    def all_undone(self) -> tuple[Undone, ...]:
        return self.undone_before + ((self.undone,) if self.undone else ())

    def voids(self, durable: Durable) -> bool:
        """Whether a checkpoint of this job was undone."""
        return any(some.covers(durable.round, durable.step) for some in self.all_undone)

    def bars(self, durable: Durable, uid: str) -> bool:
        """Return whether the job with this uid must not go on from a checkpoint: it was undone, or is damaged."""
        return durable.uri in self.damaged or (durable.uid == uid and self.voids(durable))
