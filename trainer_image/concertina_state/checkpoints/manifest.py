"""Description of a checkpoint: its manifest, and the sidecar of each shard. docs/checkpoints.md describes both.

No torch. The formats are dataclasses, read by their type hints. Fields that this version does not know are ignored.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, MutableSequence, Sequence
from typing import Any, Optional

from concertina_protocol import SnapshotId, Undone
from concertina_protocol.codec import typed_json
from concertina_protocol.codec.typed_json import parse_json
from concertina_protocol.messages.ranges import Ranges
from concertina_state.errors import DamagedInput, InvalidInput
from concertina_state.format.shardfile import Continued, ShardMetadata
from concertina_state.lineage import Lineage

VERSION = 1
BLOCK = 4 << 20
"""Bytes of a file that have a checksum of their own, so that byte ranges can be verified."""
NAME = "manifest.json"
LIBRARIES = ("concertina-sdk", "torch", "numpy", "obstore")
_PLACE = re.compile(r"^([^/]+)/round-(\d+)/step-(\d+)/(.+)$")


@dataclasses.dataclass(frozen=True)
class CheckpointKey:
    """Location of a checkpoint below its run's URI."""

    uid: str
    round: int
    step: int

    @property
    def folder(self) -> str:
        return f"{self.uid}/round-{self.round}/step-{self.step}"

    @staticmethod
    def of(key: str) -> tuple[CheckpointKey, str] | None:
        """Return the checkpoint that an object belongs to, and the rest of the object's key; None for other objects."""
        match = _PLACE.match(key)
        return (CheckpointKey(match[1], int(match[2]), int(match[3])), match[4]) if match else None


def part_name(id: SnapshotId, shard: int) -> str:
    """Return the name of a shard's files, without the suffix."""
    return f"shard-{shard}-of-{id.shards}"


@dataclasses.dataclass(frozen=True)
class ShardFile:
    """File of one shard."""

    key: str
    """Key within the checkpoint's folder."""
    size: int
    crc32: int
    header_size: int
    """Bytes before the tensor data."""
    header_crc32: int


@dataclasses.dataclass(frozen=True)
class StoredSidecar:
    """Sidecar of a shard's file. A file without it counts as missing."""

    part: ShardFile
    facts: ShardMetadata
    blocks: tuple[int, ...]
    """crc32 of the file up to the end of each block of BLOCK bytes. The last one is that of the whole file."""


@dataclasses.dataclass(frozen=True)
class Code:
    """Code that wrote a checkpoint, as far as it is known."""

    commit: str = ""
    image: str = ""
    """Image as the pod's template names it, with its digest if the template gives one."""
    python: str = ""
    libraries: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Manifest of one checkpoint."""

    version: int
    uid: str
    job: str
    """Job as namespace/name."""
    id: SnapshotId
    position: int
    """Number of samples consumed."""
    config: str
    """Digest of the settings that determine the run's numbers."""
    data: str
    """Digest of the data's manifest."""
    complete: bool
    at: float
    """Time in Unix seconds."""
    parts: tuple[ShardFile, ...]
    parallelism: Mapping[str, int]
    """Ranks by kind of parallelism. Their product is the world's size."""
    trainer: Mapping[str, Any]
    """spec.trainer with its defaults; empty if it is not known."""
    code: Code
    continued: Optional[Continued] = None
    skipped: Ranges = ()
    """Positions that were skipped."""
    undone: tuple[Undone, ...] = ()
    """States that the run went back from before this checkpoint: those of these rounds beyond these steps are void."""
    lineage: Lineage = Lineage()  # noqa: RUF009 (frozen)
    """Lineage of the checkpoint."""

    @property
    def place(self) -> CheckpointKey:
        return CheckpointKey(self.uid, self.id.round, self.id.step)

    @property
    def size(self) -> int:
        """Bytes of all shards."""
        return sum(part.size for part in self.parts)


def code(environment: Mapping[str, str], libraries: Sequence[str] = LIBRARIES) -> Code:
    """Return the code that this process runs."""
    versions = {name: _version(name) for name in libraries}
    return Code(
        environment.get("CONCERTINA_COMMIT", ""),
        environment.get("CONCERTINA_IMAGE", ""),
        platform.python_version(),
        {name: version for name, version in versions.items() if version},
    )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def running_crc32(blocks: Iterable[memoryview], ends: MutableSequence[int]) -> Iterator[memoryview]:
    """Yield the blocks, of BLOCK bytes each, and add the crc32 up to the end of each block to `ends`.

    A resized world reads byte ranges. One pass computes the checksums of the whole and of the blocks (decision
    "Checksums of blocks, as running values").
    """
    value = 0
    for block in blocks:
        value = zlib.crc32(block, value)
        ends.append(value)
        yield block


def parse(text: bytes, uri: str) -> Manifest:
    """Parse a manifest.

    Raises:
        DamagedInput: When it is damaged.
        InvalidInput: When a newer version wrote it.
    """
    try:
        manifest = parse_json(Manifest, text)
    except ValueError as error:
        raise DamagedInput(f"{uri}/{NAME} is damaged ({error}): use an older checkpoint.", uri) from error
    if manifest.version > VERSION:
        raise InvalidInput(
            f"{uri} was written by a newer concertina (manifest version {manifest.version!s:.20}, this one reads "
            f"{VERSION}): use the version that wrote it, or a newer one."
        )
    return manifest


def to_json(value: Any) -> bytes:
    return json.dumps(typed_json.to_json(value)).encode()


def here(uid: str, id: SnapshotId) -> str:
    """Return the folder of a snapshot's checkpoint."""
    return CheckpointKey(uid, id.round, id.step).folder


def about_this_process() -> tuple[str, Code]:
    """Return the job's name and the code, for manifests."""
    return os.environ.get("CONCERTINA_JOB", ""), code(os.environ)


def spec_of_this_job() -> dict[str, Any]:
    """Return the job's spec, assembled from what the operator has passed on; empty if it has not."""
    spec = _object(os.environ.get("CONCERTINA_SPEC"))
    if not spec:
        return {}
    for section, variable in (("trainer", "CONCERTINA_TRAINER"), ("checkpoint", "CONCERTINA_CHECKPOINT")):
        if section_fields := _object(os.environ.get(variable)):
            spec[section] = {name: value for name, value in section_fields.items() if value is not None}
    return spec


def _object(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "null")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
