"""Format of a shard file: the part of a state that one rank saves, as a safetensors file.

The file has the same bytes in node memory, in the memory of another replica's node, and in durable storage, so an
upload is a plain copy (decision "A snapshot slot is a safetensors file"). This module does not import torch.

A file consists of three parts: 8 bytes with the length of the header, the JSON header padded with blanks to a multiple
of 64 bytes, and the tensor bytes. The header's `__metadata__` has these keys:
- `DCP_SHARDING_INFO`: a key of torch's. HuggingFaceStorageReader of torch.distributed.checkpoint combines shards by
  this key.
- `concertina`: see ShardMetadata.
- `trainer`: the configuration as JSON, in states of the bundled trainer only.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from concertina_protocol import SnapshotId
from concertina_protocol.codec.typed_json import MOST, from_json
from concertina_protocol.messages.ranges import MOST_RANGES, Ranges
from concertina_protocol.sidecar import Damaged
from concertina_state.lineage import ROOMIEST, Origin

ITEM_SIZES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
ALIGNMENT = 64


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Box (rectangular part) of a tensor: `shape` elements from `offsets` on, of a tensor of shape `global_shape`."""

    name: str
    dtype: str
    """Name of the dtype in safetensors, such as F32 or BF16."""
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Size of the chunk in bytes."""
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


@dataclasses.dataclass(frozen=True)
class Continued:
    """Checkpoint of another job from which this job continued.

    If `LATEST` in this job's folder names this checkpoint, this job may make `LATEST` name a checkpoint of its own.
    """

    uid: str
    round: int
    step: int


@dataclasses.dataclass(frozen=True)
class Trend:
    """Statistics of the losses so far, for the detection of unusual losses (see `anomalies`)."""

    mean: float = 0.0
    variance: float = 0.0
    losses: int = 0


@dataclasses.dataclass(frozen=True)
class LossScale:
    """Loss scale of a run in float16 (see `loss_scaling`)."""

    exponent: int = 16
    """The scale is 2 to this power."""
    steps: int = 0
    """Steps since the last change of the scale."""
    recomputed: int = 0
    """Number of times that a step was computed again with a lower scale."""


@dataclasses.dataclass(frozen=True)
class Evaluations:
    """Results of a run's evaluations up to a state. A loss is None if it is not finite."""

    of: str = ""
    """Digest of the evaluated documents, their sequences, and which weights were evaluated.

    Losses with different digests can't be compared.
    """
    step: int = 0
    """Last evaluated step, or 0 if there was no evaluation."""
    loss: Optional[float] = None
    """Loss of the last evaluation."""
    sets: Mapping[str, Optional[float]] = dataclasses.field(default_factory=dict)
    """Loss of each named set in the last evaluation."""
    best_step: int = 0
    """Step with the lowest loss so far, or 0 if no loss was finite."""
    best_loss: Optional[float] = None
    reference: Optional[float] = None
    """Loss of the last evaluation that counts as an improvement (see `evaluation_history`)."""
    without_improvement: int = 0
    """Number of evaluations since the last improvement."""
    token_accuracy: Optional[float] = None
    """Token accuracy of the last evaluation, or None if the evaluation has no token accuracy (see `Evaluated`)."""
    bits_per_byte: Optional[float] = None
    """Bits per byte of the last evaluation, or None if they are not known."""
    set_token_accuracies: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Token accuracy of each named set in the last evaluation."""
    set_bits_per_byte: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Bits per byte of each named set for which this number is known."""


MOST_SETS = 8
LONGEST_SET_NAME = 32


@dataclasses.dataclass(frozen=True)
class FrozenWeights:
    """Weights that training does not change and that are read from files in storage, not from the saved state."""

    uri: str
    """File or folder of safetensors files."""
    digest: str = ""
    """Digest of the values of all frozen weights, which is the same in every layout.

    The digest is empty until the weights have been read for the first time.
    """


MOST_URI = 1024
"""Maximum length of the URI of frozen weights. It is counted after the URI has been encoded as JSON twice."""


@dataclasses.dataclass(frozen=True)
class ShardMetadata:
    """Metadata of the state that a shard belongs to."""

    id: SnapshotId
    shard: int
    position: int
    """Number of samples consumed before this state."""
    config: str
    """Digest of the trainer's configuration."""
    data: str
    """Digest of the data set's manifest. With different data, a position would refer to different samples."""
    continued: Optional[Continued] = None
    skipped: Ranges = ()
    """Positions of the data that the run has skipped."""
    trend: Trend = Trend()
    origin: Origin = Origin()  # noqa: RUF009 (frozen)
    frozen: Optional[FrozenWeights] = None
    """Weights that a restore reads in addition to the state, or None if the state contains all weights."""
    evaluations: Evaluations = Evaluations()
    waited_for: bool = False
    """True if a script waits until this snapshot is saved, so that it may be the snapshot of the script's last step."""
    loss_scale: LossScale = LossScale()


@dataclasses.dataclass(frozen=True)
class StoredChunk:
    chunk: Chunk
    begin: int
    """Offset of the chunk's first byte in the file."""


@dataclasses.dataclass(frozen=True)
class Header:
    metadata: ShardMetadata
    chunks: dict[str, StoredChunk]
    trainer: str = ""
    """Configuration of the bundled trainer as JSON, or "" for a user's own script."""


class Layout:
    """Position of each chunk in the file of a shard.

    A snapshot is a copy of the training state in node memory. All snapshots of the same arrays have the same layout.
    From one snapshot to the next, only the metadata in the header change.
    """

    def __init__(self, chunks: Sequence[Chunk], trainer: str = "") -> None:
        """Assign a position in the file to each chunk. `trainer` is the bundled trainer's configuration as JSON."""
        self._trainer = f', "trainer": {json.dumps(trainer)}' if trainer else ""
        self.chunks = sorted(chunks, key=lambda chunk: (-ITEM_SIZES[chunk.dtype], chunk.name))
        entries, self._offsets, end = [], [], 0
        for chunk in self.chunks:
            self._offsets.append(end)
            description = {"dtype": chunk.dtype, "shape": chunk.shape, "data_offsets": [end, end + chunk.size]}
            entries.append(f"{json.dumps(chunk.name)}:{json.dumps(description, separators=(',', ':'))}")
            end += chunk.size
        self._entries = "".join("," + entry for entry in entries)
        sharding = json.dumps({chunk.name: {"saved_offsets": chunk.offsets} for chunk in self.chunks})
        shapes = json.dumps({chunk.name: chunk.global_shape for chunk in self.chunks})
        # Both are strings within the file's JSON. Encoding a thousand chunks takes milliseconds, so it is done only
        # once.
        self._sharding, self._global_shapes = json.dumps(sharding), json.dumps(shapes)
        roomiest = SnapshotId(2**62, 2**62, "0" * 64, 2**62)
        continued = Continued("0" * 64, 2**62, 2**62)
        skipped = ((2**62, 2**62),) * MOST_RANGES
        trend = Trend(_LONGEST, _LONGEST, 2**62)
        frozen = FrozenWeights("0" * MOST_URI, "0" * 64)
        longest = self._json(
            ShardMetadata(
                roomiest, 2**62, 2**62, "0" * 64, "0" * 64, continued, skipped, trend, ROOMIEST, frozen,
                _LONGEST_EVALUATIONS, loss_scale=LossScale(2**62, 2**62, 2**62),
            )
        )  # fmt: skip
        self.data_begin = math.ceil((8 + len(longest)) / ALIGNMENT) * ALIGNMENT
        self.size = self.data_begin + end

    @property
    def begins(self) -> list[int]:
        """Byte offset in the file of each chunk's first byte, in the order of `chunks`."""
        return [self.data_begin + offset for offset in self._offsets]

    def header(self, metadata: ShardMetadata) -> bytes:
        """Return the header of a file with this layout and `metadata`: the first `data_begin` bytes of the file."""
        return struct.pack("<Q", self.data_begin - 8) + self._json(metadata).ljust(self.data_begin - 8)

    def _json(self, metadata: ShardMetadata) -> bytes:
        facts = dataclasses.asdict(dataclasses.replace(metadata, origin=_NOTHING))
        beginning = (
            json.dumps({**facts, "origin": _as_object(metadata.origin)}).removesuffix("}") + ', "global_shapes": '
        )
        ours = json.dumps(beginning)[:-1] + self._global_shapes[1:-1] + '}"'
        file_metadata = (
            f'{{"format": "pt", "DCP_SHARDING_INFO": {self._sharding}, "concertina": {ours}{self._trainer}}}'
        )
        return f'{{"__metadata__":{file_metadata}{self._entries}}}'.encode()


_LONGEST = -sys.float_info.max
_LONGEST_SETS = {f"{i:0>{LONGEST_SET_NAME}}": _LONGEST for i in range(MOST_SETS)}
_LONGEST_EVALUATIONS = Evaluations(
    "0" * 64, 2**62, _LONGEST, _LONGEST_SETS, 2**62, _LONGEST, _LONGEST, 2**62, _LONGEST, _LONGEST, _LONGEST_SETS,
    _LONGEST_SETS,
)  # fmt: skip
_NOTHING = Origin()
_as_object = functools.lru_cache(maxsize=2)(dataclasses.asdict)  # all snapshots of a round have the same origin


def header_length(start: bytes) -> int:
    """Return the number of bytes before the tensor data, given the first 8 bytes of the file.

    Raises:
        Damaged: When the file does not begin with a safetensors header.
    """
    length = int.from_bytes(start[:8], "little")
    if len(start) < 8 or not 2 <= length <= 1 << 30:
        raise Damaged("it does not begin with a safetensors header")
    return 8 + length


def parse_header(text: bytes) -> Header:
    """Parse the JSON header of a file. `text` may include the padding, but not the 8 bytes before the header.

    Raises:
        Damaged: When the header can't be read.
    """
    try:
        entries = json.loads(text)
        file_metadata = entries.pop("__metadata__")
        ours = json.loads(file_metadata["concertina"])
        offsets = json.loads(file_metadata["DCP_SHARDING_INFO"])
        chunks = {
            name: StoredChunk(
                _chunk(name, entry, offsets[name]["saved_offsets"], ours["global_shapes"][name]),
                8 + len(text) + data_begin(entry),
            )
            for name, entry in entries.items()
        }
        return Header(from_json(ShardMetadata, ours), chunks, _trainer_config(file_metadata))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise Damaged(f"its header can't be read ({str(error)[:MOST]})") from error


def _trainer_config(file_metadata: dict[str, Any]) -> str:
    """Return the configuration of the bundled trainer from a file's `__metadata__`, or "" for a script's state.

    Raises:
        ValueError: When the value is not a string.
    """
    trainer = file_metadata.get("trainer", "")
    if not isinstance(trainer, str):
        raise ValueError("its configuration is not text")
    return trainer


def _chunk(name: str, entry: dict[str, Any], begin: Any, whole: Any) -> Chunk:
    chunk = Chunk(name, entry["dtype"], counts(begin), counts(entry["shape"]), counts(whole))
    if not len(chunk.offsets) == len(chunk.shape) == len(chunk.global_shape):
        raise ValueError(f"{name:.100} and its position have different numbers of dimensions")
    for first, length, end in zip(chunk.offsets, chunk.shape, chunk.global_shape):
        if first + length > end:
            raise ValueError(f"{name:.100} lies outside the tensor to which it belongs")
    return chunk


def counts(value: Any) -> tuple[int, ...]:
    """Check a list of numbers of elements or bytes from a file's header, and return it as a tuple.

    Raises:
        ValueError: When `value` is not a list of non-negative numbers.
    """
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item < 2**63 for item in value):
        raise ValueError(f"{value!r} is not a list of counts")
    return tuple(value)


def data_begin(entry: dict[str, Any]) -> int:
    """Return the offset of the first byte of a tensor's data, counted from the end of the file's header.

    The size of the tensor in the file is checked against its shape.

    Raises:
        ValueError: When the size does not match the shape, or the entry is malformed.
        KeyError: When the entry lacks a field, or its dtype is unknown.
    """
    begin, end = counts(entry["data_offsets"])
    size = math.prod(counts(entry["shape"])) * ITEM_SIZES[entry["dtype"]]
    if end - begin != size:
        raise ValueError(f"a tensor of {size} bytes in {end - begin}")
    return begin


def layout_digest(wholes: Sequence[tuple[str, str, tuple[int, ...]]], cut: str) -> str:
    """Return a digest of the arrays of a state and of their division among ranks.

    The digest covers the names, dtypes and global shapes of all tensors of the state, and the description `cut` of the
    division.
    """
    return hashlib.sha256(json.dumps([sorted(wholes), cut]).encode()).hexdigest()[:16]
