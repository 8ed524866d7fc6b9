"""Messages between an agent and its uploader, the process that writes to durable storage.

UploaderHello  ->                           the first line
               <-  a request, and the next one after its answer:
                   Probe -> StorageState, Ship -> Shipped, Publish -> Published, Undo -> StorageState
"""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Optional, Tuple, Type, Union

from concertina_protocol import Durable, SnapshotId, Storage, Undone


@dataclasses.dataclass(frozen=True)
class UploaderHello:
    """First message of the uploader."""

    pid: int


@dataclasses.dataclass(frozen=True)
class Probe:
    """Request to check durable storage: whether it is reachable, what LATEST names, and which job owns the folder.

    The answer is StorageState.
    """

    owned: bool = False
    """Whether an earlier check has found that this job owns the folder. The owner is then not checked again."""
    living: Optional[Tuple[str, ...]] = None
    """Live jobs as in Assign: make this job the owner if allowed. If None, only check."""


@dataclasses.dataclass(frozen=True)
class StorageState:
    """State of durable storage."""

    storage: Storage
    owned: bool = False
    """Whether this job owns the folder."""


@dataclasses.dataclass(frozen=True)
class Ship:
    """Request to put one shard into storage; it may be repeated without harm.

    The answer is Shipped. The file at `path` is removed on success.
    """

    id: SnapshotId
    shard: int
    path: str


@dataclasses.dataclass(frozen=True)
class Shipped:
    """Answer to Ship."""

    id: SnapshotId
    shard: int
    error: str = ""
    """Sentence, or empty on success. The agent tries again later."""


@dataclasses.dataclass(frozen=True)
class Publish:
    """Request to the coordinator's uploader to publish a snapshot, once every part of it has been shipped.

    The uploader writes the manifest, moves LATEST, and deletes checkpoints beyond `keep`. It reads sizes and checksums
    of the parts from storage. The answer is Published.
    """

    id: SnapshotId
    complete: bool = False


@dataclasses.dataclass(frozen=True)
class Published:
    """Answer to Publish."""

    id: SnapshotId
    durable: Optional[Durable] = None
    """Checkpoint that LATEST names now."""
    error: str = ""
    """Sentence, or empty on success. With `durable`, the reason why older checkpoints could not be deleted."""
    refused: bool = False
    """Whether the fence refused the snapshot: a higher round or another job has written here. A retry cannot help."""


@dataclasses.dataclass(frozen=True)
class Undo:
    """Request to the coordinator's uploader to make `LATEST` name nothing of this job that was undone.

    From then on, `LATEST` accepts no such checkpoint. The request may be repeated without harm. The answer is
    StorageState.
    """

    undone: Undone


Message = Union[UploaderHello, Probe, StorageState, Ship, Shipped, Publish, Published, Undo]
KINDS: Dict[str, Type[Any]] = {
    "UploaderHello": UploaderHello, "Probe": Probe, "StorageState": StorageState, "Ship": Ship, "Shipped": Shipped,
    "Publish": Publish, "Published": Published, "Undo": Undo,
}  # fmt: skip
"""Message classes by their names on the wire. These names are stable, even if a class is renamed."""
