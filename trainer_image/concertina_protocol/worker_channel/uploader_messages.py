"""Messages between an agent and its uploader, the process that writes to durable storage.

UploaderHello  ->                           the first line
               <-  one request at a time, each with its answer:
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
    """Request to check durable storage.

    The uploader checks whether storage is reachable, which checkpoint the file LATEST names, and which job owns the
    folder. The answer is StorageState.
    """

    owned: bool = False
    """True if this job is known to own the folder. In that case, the uploader does not check the owner again."""
    living: Optional[Tuple[str, ...]] = None
    """Other existing jobs, as in `Assign.living`, or None to only check the folder's owner.

    With this list, the uploader makes this job the owner of the folder if `owner.decide` allows that.
    """


@dataclasses.dataclass(frozen=True)
class StorageState:
    """State of durable storage."""

    storage: Storage
    owned: bool = False
    """True if this job owns the folder."""


@dataclasses.dataclass(frozen=True)
class Ship:
    """Request to upload one shard. A repeated request uploads the shard again.

    The answer is Shipped. After a successful upload, the file at `path` is removed.
    """

    id: SnapshotId
    shard: int
    path: str


@dataclasses.dataclass(frozen=True)
class Shipped:
    """Answer to Ship: whether the shard is in storage, or an error."""

    id: SnapshotId
    shard: int
    error: str = ""
    """Sentence that says why the upload failed, or "" on success. The agent tries again later."""


@dataclasses.dataclass(frozen=True)
class Publish:
    """Request to the coordinator's uploader to publish a checkpoint, after all its shards have been uploaded.

    The uploader writes the manifest, makes the file LATEST name the checkpoint, and deletes the oldest checkpoints if
    there are more than `keep`. It reads the sizes and checksums of the shards from storage. The answer is Published.

    The coordinator is the agent of rank 0.
    """

    id: SnapshotId
    complete: bool = False


@dataclasses.dataclass(frozen=True)
class Published:
    """Answer to Publish: the checkpoint that the file LATEST in storage now names, or an error."""

    id: SnapshotId
    durable: Optional[Durable] = None
    """Checkpoint that LATEST names now, or None after an error."""
    error: str = ""
    """Sentence about an error, or "" on success.

    If `durable` is set, the checkpoint is published, and the sentence says why older checkpoints could not be deleted.
    """
    refused: bool = False
    """True if the checkpoint was refused, because a higher round or another job has written to the folder.

    The agent must not retry.
    """


@dataclasses.dataclass(frozen=True)
class Undo:
    """Request to the coordinator's uploader to apply a rollback to storage.

    If the file `LATEST` names a checkpoint of this job that the rollback has undone, the uploader changes `LATEST` to
    an earlier checkpoint. From then on, `LATEST` never names an undone checkpoint again. The request may be repeated.
    The answer is StorageState.

    The coordinator is the agent of rank 0.
    """

    undone: Undone


Message = Union[UploaderHello, Probe, StorageState, Ship, Shipped, Publish, Published, Undo]
KINDS: Dict[str, Type[Any]] = {
    "UploaderHello": UploaderHello, "Probe": Probe, "StorageState": StorageState, "Ship": Ship, "Shipped": Shipped,
    "Publish": Publish, "Published": Published, "Undo": Undo,
}  # fmt: skip
"""Class of each message, by the name in its lines. A name never changes, even if the class is renamed."""
