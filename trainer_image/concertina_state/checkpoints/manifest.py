"""What a checkpoint says of itself: its manifest, and each shard's sidecar. docs/checkpoints.md describes both.

No torch. The forms are dataclasses, read by their type hints: fields that this version does not know are passed over.
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
"""Bytes of a file that have a checksum of their own, so that byte ranges can be checked."""
NAME = "manifest.json"
LIBRARIES = ("concertina", "torch", "numpy", "obstore")
_PLACE = re.compile(r"^([^/]+)/round-(\d+)/step-(\d+)/(.+)$")


@dataclasses.dataclass(frozen=True)
class CheckpointKey:
    """Where a checkpoint lies below its run's URI."""

    uid: str
    round: int
    step: int

    @property
    def folder(self) -> str:
        return f"{self.uid}/round-{self.round}/step-{self.step}"

    @staticmethod
    def of(key: str) -> tuple[CheckpointKey, str] | None:
        """The place that a key is in, and the rest of the key; None for a key of something else."""
        found = _PLACE.match(key)
        return (CheckpointKey(found[1], int(found[2]), int(found[3])), found[4]) if found else None


def part_name(id: SnapshotId, shard: int) -> str:
    """Without its ending."""
    return f"shard-{shard}-of-{id.shards}"


@dataclasses.dataclass(frozen=True)
class ShardFile:
    """One shard's file."""

    key: str
    """Within the checkpoint's folder."""
    size: int
    crc32: int
    header_size: int
    """Bytes before the tensors' own."""
    header_crc32: int


@dataclasses.dataclass(frozen=True)
class StoredSidecar:
    """Beside a shard's file, which is not there without it."""

    part: ShardFile
    facts: ShardMetadata
    blocks: tuple[int, ...]
    """crc32 of the file up to the end of each block of BLOCK bytes; the last one is that of the whole."""


@dataclasses.dataclass(frozen=True)
class Code:
    """What wrote it, as far as it is known."""

    commit: str = ""
    image: str = ""
    """As the pod's template names it, with its digest where the template gives one."""
    python: str = ""
    libraries: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Manifest:
    version: int
    uid: str
    job: str
    """namespace/name"""
    id: SnapshotId
    position: int
    """Samples consumed."""
    config: str
    """Digest of what decides the run's numbers."""
    data: str
    """Digest of the data's manifest."""
    complete: bool
    at: float
    """Unix seconds."""
    parts: tuple[ShardFile, ...]
    parallelism: Mapping[str, int]
    """Ranks by kind; their product is the world's size."""
    trainer: Mapping[str, Any]
    """spec.trainer, with its defaults; empty where it is not known."""
    code: Code
    continued: Optional[Continued] = None  # noqa: UP045 (typed_json knows typing's form)
    skipped: Ranges = ()
    """Positions that were left out."""
    undone: tuple[Undone, ...] = ()
    """What the run went back from before this: checkpoints of those rounds beyond those steps are void."""
    lineage: Lineage = Lineage()  # noqa: RUF009 (frozen)
    """What went into the checkpoint."""

    @property
    def place(self) -> CheckpointKey:
        return CheckpointKey(self.uid, self.id.round, self.id.step)

    @property
    def size(self) -> int:
        """Of all shards."""
        return sum(part.size for part in self.parts)


def code(environment: Mapping[str, str], libraries: Sequence[str] = LIBRARIES) -> Code:
    """Of this process."""
    found = {name: _version(name) for name in libraries}
    return Code(
        environment.get("CONCERTINA_COMMIT", ""),
        environment.get("CONCERTINA_IMAGE", ""),
        platform.python_version(),
        {name: version for name, version in found.items() if version},
    )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def running_crc32(blocks: Iterable[memoryview], ends: MutableSequence[int]) -> Iterator[memoryview]:
    """These, of BLOCK bytes each; as they are taken, the crc32 up to the end of each is added to `ends`, since a
    resized world reads byte ranges: one pass for the whole's checksum and the blocks' (decision "Checksums of blocks,
    as running values")."""
    value = 0
    for block in blocks:
        value = zlib.crc32(block, value)
        ends.append(value)
        yield block


def parse(text: bytes, uri: str) -> Manifest:
    """Raises InvalidInput with a sentence."""
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
    """The folder of a snapshot's checkpoint."""
    return CheckpointKey(uid, id.round, id.step).folder


def about_this_process() -> tuple[str, Code]:
    """The job's name and the code, for manifests."""
    return os.environ.get("CONCERTINA_JOB", ""), code(os.environ)


def spec_of_this_job() -> dict[str, Any]:
    """As the operator has handed it on, put together again; empty where it has not."""
    spec = _object(os.environ.get("CONCERTINA_SPEC"))
    if not spec:
        return {}
    for section, variable in (("trainer", "CONCERTINA_TRAINER"), ("checkpoint", "CONCERTINA_CHECKPOINT")):
        if found := _object(os.environ.get(variable)):
            spec[section] = {name: value for name, value in found.items() if value is not None}
    return spec


def _object(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "null")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
