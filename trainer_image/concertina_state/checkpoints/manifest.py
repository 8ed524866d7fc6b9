"""Formats of a checkpoint's manifest and of the sidecar file of each shard (see docs/checkpoints.md).

This module does not import torch. The formats are dataclasses, which are parsed by their type hints. Unknown fields are
ignored.
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

from concertina_protocol import BestCheckpoint, Durable, SnapshotId, Undone
from concertina_protocol.codec import typed_json
from concertina_protocol.codec.typed_json import parse_json
from concertina_protocol.messages.ranges import Ranges
from concertina_state.errors import DamagedInput, InvalidInput
from concertina_state.format.shardfile import Continued, Evaluations, FrozenWeights, ShardMetadata
from concertina_state.lineage import Lineage

VERSION = 1
BLOCK = 4 << 20
"""Size in bytes of a block. Each block of a file has a checksum, so that byte ranges can be verified."""
NAME = "manifest.json"
LIBRARIES = ("concertina-sdk", "torch", "numpy", "obstore")
_PLACE = re.compile(r"^([^/]+)/round-(\d+)/step-(\d+)/(.+)$")


@dataclasses.dataclass(frozen=True)
class CheckpointKey:
    """Location of a checkpoint, relative to its run's URI."""

    uid: str
    round: int
    step: int

    @property
    def folder(self) -> str:
        return f"{self.uid}/round-{self.round}/step-{self.step}"

    @staticmethod
    def of(key: str) -> tuple[CheckpointKey, str] | None:
        """Return the key of an object's checkpoint, and the object's key within that checkpoint's folder.

        The result is None if the object belongs to no checkpoint.
        """
        match = _PLACE.match(key)
        return (CheckpointKey(match[1], int(match[2]), int(match[3])), match[4]) if match else None

    @staticmethod
    def named_by(record: Durable | BestCheckpoint | Continued) -> CheckpointKey:
        """Return the key of the checkpoint that a record names."""
        return CheckpointKey(record.uid, record.round, record.step)


def part_name(id: SnapshotId, shard: int) -> str:
    """Return the file name of a shard without its suffix."""
    return f"shard-{shard}-of-{id.shards}"


@dataclasses.dataclass(frozen=True)
class ShardFile:
    """File of one shard in a checkpoint."""

    key: str
    """Key of the file, relative to the checkpoint's folder."""
    size: int
    crc32: int
    header_size: int
    """Number of bytes in the file before the tensor data."""
    header_crc32: int


@dataclasses.dataclass(frozen=True)
class StoredSidecar:
    """Sidecar of a shard's file. A shard without a sidecar counts as missing."""

    part: ShardFile
    facts: ShardMetadata
    blocks: tuple[int, ...]
    """Running checksum at the end of each block of BLOCK bytes.

    Each checksum is the crc32 of the file from its beginning to the end of the block, so the last checksum is that of
    the whole file.
    """


@dataclasses.dataclass(frozen=True)
class Code:
    """Commit, image and library versions of the process that wrote a checkpoint, as far as they are known."""

    commit: str = ""
    image: str = ""
    """Image as the pod's template names it, including the digest if the template contains one."""
    python: str = ""
    libraries: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class EvaluationResult:
    """Evaluation after a checkpoint's own step, on documents that are not used for training."""

    loss: Optional[float]
    """Mean loss of the first set, or None if it is not finite."""
    sets: Mapping[str, Optional[float]] = dataclasses.field(default_factory=dict)
    """Mean loss of each named set."""
    of: str = ""
    """Digest of the documents and settings of the evaluation. Losses with different digests can't be compared."""

    @staticmethod
    def after(step: int, evaluations: Evaluations) -> EvaluationResult | None:
        """Return the evaluation result of a checkpoint's step, or None if a different step was evaluated last."""
        if not step or evaluations.step != step:
            return None
        return EvaluationResult(evaluations.loss, evaluations.sets, evaluations.of)


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Manifest of one checkpoint."""

    version: int
    uid: str
    job: str
    """Job as namespace/name."""
    id: SnapshotId
    position: int
    """Number of samples consumed before this state."""
    config: str
    """Digest of the settings that affect the run's numerical results."""
    data: str
    """Digest of the manifest of the data set."""
    complete: bool
    at: float
    """Time in Unix seconds."""
    parts: tuple[ShardFile, ...]
    parallelism: Mapping[str, int]
    """Degree of each kind of parallelism. Their product is the world size."""
    trainer: Mapping[str, Any]
    """spec.trainer with its defaults, or {} for a user's own script."""
    code: Code
    continued: Optional[Continued] = None
    skipped: Ranges = ()
    """Positions of the data that the run has skipped."""
    undone: tuple[Undone, ...] = ()
    """Ranges of states that rollbacks had undone before this checkpoint was written.

    Each range consists of a round and a step. It covers the states of this round and of earlier rounds that are later
    than the step.
    """
    frozen: Optional[FrozenWeights] = None
    """Weights of the state that are stored elsewhere, or None if the shards contain all weights."""
    lineage: Lineage = Lineage()  # noqa: RUF009 (frozen)
    """Rounds, data and settings that led to the checkpoint."""
    evaluation: Optional[EvaluationResult] = None
    """Evaluation after this step, or None if the step was not evaluated before the checkpoint was made."""

    @property
    def place(self) -> CheckpointKey:
        return CheckpointKey(self.uid, self.id.round, self.id.step)

    @property
    def size(self) -> int:
        """Total size of all shards in bytes."""
        return sum(part.size for part in self.parts)


def code(environment: Mapping[str, str], libraries: Sequence[str] = LIBRARIES) -> Code:
    """Return the commit, the image, and the versions of Python and of the given libraries of this process."""
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
    """Yield the blocks of a file, and append the crc32 of the file up to the end of each block to `ends`.

    A single read of the file computes the checksums of the file and of its blocks (decision "Running checksums of
    blocks"). A restore with a different number of ranks reads only parts of a file, and verifies these parts by the
    checksums of their blocks.
    """
    value = 0
    for block in blocks:
        value = zlib.crc32(block, value)
        ends.append(value)
        yield block


def parse(text: bytes, uri: str) -> Manifest:
    """Parse a manifest.

    Raises:
        DamagedInput: When the manifest is damaged.
        InvalidInput: When a newer version of concertina wrote the manifest.
    """
    try:
        manifest = parse_json(Manifest, text)
    except ValueError as error:
        raise DamagedInput(f"{uri}/{NAME} is damaged ({error}): use an older checkpoint.", uri) from error
    if manifest.version > VERSION:
        raise InvalidInput(
            f"{uri} was written by a newer concertina (manifest version {manifest.version!s:.20}, this one "
            f"reads {VERSION}): use the version of concertina that wrote it, or a newer one."
        )
    return manifest


def to_json(value: Any) -> bytes:
    return json.dumps(typed_json.to_json(value)).encode()


def here(uid: str, id: SnapshotId) -> str:
    """Return the folder of the checkpoint that is made from the snapshot `id`, relative to the run's URI."""
    return CheckpointKey(uid, id.round, id.step).folder


def about_this_process() -> tuple[str, Code]:
    """Return the job's name and the versions of the code of this process, for manifests."""
    return os.environ.get("CONCERTINA_JOB", ""), code(os.environ)


def spec_of_this_job() -> dict[str, Any]:
    """Return the job's spec, assembled from the environment variables that the operator sets.

    The result is empty if these variables are not set.
    """
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
