"""What an agent and its uploader, the process that writes to durable storage, say to each other.

UploaderHello  ->                           the first line
               <-  a request, and then the next one when it has been answered:
                   Probe -> StorageState, Ship -> Shipped, Publish -> Published, Undo -> StorageState
"""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Optional, Tuple, Type, Union

from concertina_protocol import Durable, SnapshotId, Storage, Undone


@dataclasses.dataclass(frozen=True)
class UploaderHello:
    pid: int


@dataclasses.dataclass(frozen=True)
class Probe:
    """Look at durable storage: can it be reached, what does LATEST name, and which job owns the folder? Answer:
    StorageState."""

    owned: bool = False
    """An earlier look has found that this job owns the folder: that is not asked again."""
    living: Optional[Tuple[str, ...]] = None
    """As in Assign: make this job the owner, where it may be. None: only look."""


@dataclasses.dataclass(frozen=True)
class StorageState:
    storage: Storage
    owned: bool = False
    """This job owns the folder."""


@dataclasses.dataclass(frozen=True)
class Ship:
    """Put one shard into storage (the same again does no harm). Answer: Shipped; `path` is gone when it went well."""

    id: SnapshotId
    shard: int
    path: str


@dataclasses.dataclass(frozen=True)
class Shipped:
    id: SnapshotId
    shard: int
    error: str = ""
    """A sentence; try again later."""


@dataclasses.dataclass(frozen=True)
class Publish:
    """To the coordinator's uploader, when every part of the snapshot has been shipped: write its manifest, move LATEST,
    delete what is beyond `keep`. Sizes and checksums of the parts are read from storage. Answer: Published."""

    id: SnapshotId
    complete: bool = False


@dataclasses.dataclass(frozen=True)
class Published:
    id: SnapshotId
    durable: Optional[Durable] = None
    """What LATEST names now."""
    error: str = ""
    """A sentence; with `durable`: why older checkpoints could not be deleted."""
    refused: bool = False
    """The fence: a higher round or another job has written here. Trying again can't help."""


@dataclasses.dataclass(frozen=True)
class Undo:
    """To the coordinator's uploader: `LATEST` is to name nothing of this job that was undone, and to take nothing of it
    any more (the same again does no harm). Answer: StorageState."""

    undone: Undone


Message = Union[UploaderHello, Probe, StorageState, Ship, Shipped, Publish, Published, Undo]
KINDS: Dict[str, Type[Any]] = {
    "UploaderHello": UploaderHello, "Probe": Probe, "StorageState": StorageState, "Ship": Ship, "Shipped": Shipped,
    "Publish": Publish, "Published": Published, "Undo": Undo,
}  # fmt: skip
"""By the names that lines have for them: these stay, whatever a class is called."""
