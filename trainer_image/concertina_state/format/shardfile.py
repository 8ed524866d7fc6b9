"""One rank's state as a safetensors file: the same bytes in node memory, on a peer and in durable storage, so an upload
is a copy (decision "A snapshot slot is a safetensors file"). No torch.

8 bytes of header length, the JSON header padded with blanks to a multiple of 64, raw tensor bytes. In the header's
`__metadata__` stand `DCP_SHARDING_INFO` (torch's own key, by which torch.distributed.checkpoint's
HuggingFaceStorageReader puts shards together), `concertina` (ours, see ShardMetadata), and in states of the bundled
trainer `trainer`, its configuration as JSON.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import struct
import sys
from collections.abc import Sequence
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
    """A box of one tensor: `shape` elements from `offsets` on, of a whole of `global_shape`."""

    name: str
    dtype: str
    """As safetensors names it: F32, BF16, ..."""
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


@dataclasses.dataclass(frozen=True)
class Continued:
    """A checkpoint of another job that this run goes on from: its `LATEST` may be replaced by ours."""

    uid: str
    round: int
    step: int


@dataclasses.dataclass(frozen=True)
class Trend:
    """What is known of the losses so far (`anomalies`)."""

    mean: float = 0.0
    variance: float = 0.0
    losses: int = 0


@dataclasses.dataclass(frozen=True)
class ShardMetadata:
    """What a shard says of the state it belongs to."""

    id: SnapshotId
    shard: int
    position: int
    """Samples consumed."""
    config: str
    """Digest of the configuration."""
    data: str
    """Digest of the data's manifest; positions mean nothing with other data."""
    continued: Optional[Continued] = None  # noqa: UP045 (from_json knows typing's form)
    skipped: Ranges = ()
    """Positions that were left out."""
    trend: Trend = Trend()
    origin: Origin = Origin()  # noqa: RUF009 (frozen)
    waited_for: bool = False
    """By a script, whose last step this may be."""


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
    """Configuration of the bundled trainer, as JSON; empty in a script's state."""


class Layout:
    """The fixed places of one shard's chunks; only the metadata changes from snapshot to snapshot."""

    def __init__(self, chunks: Sequence[Chunk], trainer: str = "") -> None:
        """`trainer` is the configuration of the bundled trainer, as JSON."""
        self._trainer = f', "trainer": {json.dumps(trainer)}' if trainer else ""
        self.chunks = sorted(chunks, key=lambda chunk: (-ITEM_SIZES[chunk.dtype], chunk.name))
        entries, self._offsets, end = [], [], 0
        for chunk in self.chunks:
            self._offsets.append(end)
            place = {"dtype": chunk.dtype, "shape": chunk.shape, "data_offsets": [end, end + chunk.size]}
            entries.append(f"{json.dumps(chunk.name)}:{json.dumps(place, separators=(',', ':'))}")
            end += chunk.size
        self._entries = "".join("," + entry for entry in entries)
        sharding = json.dumps({chunk.name: {"saved_offsets": chunk.offsets} for chunk in self.chunks})
        shapes = json.dumps({chunk.name: chunk.global_shape for chunk in self.chunks})
        # Both are strings within the file's JSON, and made once: of a thousand chunks they take milliseconds.
        self._sharding, self._global_shapes = json.dumps(sharding), json.dumps(shapes)
        roomiest = SnapshotId(2**62, 2**62, "0" * 64, 2**62)
        other = Continued("0" * 64, 2**62, 2**62)
        skipped = ((2**62, 2**62),) * MOST_RANGES
        trend = Trend(-sys.float_info.max, -sys.float_info.max, 2**62)
        longest = self._json(ShardMetadata(roomiest, 2**62, 2**62, "0" * 64, "0" * 64, other, skipped, trend, ROOMIEST))
        self.data_begin = math.ceil((8 + len(longest)) / ALIGNMENT) * ALIGNMENT
        self.size = self.data_begin + end

    @property
    def begins(self) -> list[int]:
        """Offset in the file of each of `chunks`."""
        return [self.data_begin + offset for offset in self._offsets]

    def header(self, metadata: ShardMetadata) -> bytes:
        """The file's first `data_begin` bytes."""
        return struct.pack("<Q", self.data_begin - 8) + self._json(metadata).ljust(self.data_begin - 8)

    def _json(self, metadata: ShardMetadata) -> bytes:
        facts = dataclasses.asdict(dataclasses.replace(metadata, origin=_NOTHING))
        begun = json.dumps({**facts, "origin": _as_object(metadata.origin)}).removesuffix("}") + ', "global_shapes": '
        ours = json.dumps(begun)[:-1] + self._global_shapes[1:-1] + '}"'
        of_the_file = f'{{"format": "pt", "DCP_SHARDING_INFO": {self._sharding}, "concertina": {ours}{self._trainer}}}'
        return f'{{"__metadata__":{of_the_file}{self._entries}}}'.encode()


_NOTHING = Origin()
_as_object = functools.lru_cache(maxsize=2)(dataclasses.asdict)  # an origin is the same in each snapshot of a round


def header_length(start: bytes) -> int:
    """Bytes of the file before its tensor data, from the file's first 8."""
    length = int.from_bytes(start[:8], "little")
    if len(start) < 8 or not 2 <= length <= 1 << 30:
        raise Damaged("it does not begin with a safetensors header")
    return 8 + length


def parse_header(text: bytes) -> Header:
    """The JSON header, padded as it is in the file: what `header_length` counts, without the first 8 bytes."""
    try:
        entries = json.loads(text)
        of_the_file = entries.pop("__metadata__")
        ours = json.loads(of_the_file["concertina"])
        offsets = json.loads(of_the_file["DCP_SHARDING_INFO"])
        chunks = {
            name: StoredChunk(
                _chunk(name, entry, offsets[name]["saved_offsets"], ours["global_shapes"][name]),
                8 + len(text) + data_begin(entry),
            )
            for name, entry in entries.items()
        }
        trainer = of_the_file.get("trainer", "")
        if not isinstance(trainer, str):
            raise ValueError("its configuration is no text")
        return Header(from_json(ShardMetadata, ours), chunks, trainer)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise Damaged(f"its header can't be read ({str(error)[:MOST]})") from error


def _chunk(name: str, entry: dict[str, Any], begin: Any, whole: Any) -> Chunk:
    chunk = Chunk(name, entry["dtype"], counts(begin), counts(entry["shape"]), counts(whole))
    for first, length, end in zip(chunk.offsets, chunk.shape, chunk.global_shape, strict=True):
        if first + length > end:
            raise ValueError(f"{name:.100} is beyond the tensor that it is of")
    return chunk


def counts(value: Any) -> tuple[int, ...]:
    """Of a header: elements, or bytes. Raises ValueError."""
    if not isinstance(value, list) or not all(type(each) is int and 0 <= each < 2**63 for each in value):
        raise ValueError(f"{value!r} is no list of counts")
    return tuple(value)


def data_begin(entry: dict[str, Any]) -> int:
    """Where a tensor's bytes begin, of those behind the header; they are as many as its shape says. Raises ValueError
    or KeyError."""
    begin, end = counts(entry["data_offsets"])
    size = math.prod(counts(entry["shape"])) * ITEM_SIZES[entry["dtype"]]
    if end - begin != size:
        raise ValueError(f"a tensor of {size} bytes in {end - begin}")
    return begin


def layout_digest(wholes: Sequence[tuple[str, str, tuple[int, ...]]], cut: str) -> str:
    """Digest of names, dtypes and whole shapes (of the entire state) and of how they are cut."""
    return hashlib.sha256(json.dumps([sorted(wholes), cut]).encode()).hexdigest()[:16]
