"""`.metadata`: the index of a folder of torch.distributed.checkpoint (DCP).

The file is a pickle, and a pickle can call any function. This module accepts only the names in ALLOWED. Each of these
names is replaced by a class or value of this module, so no code of torch or of another package runs.

The format is that of torch.distributed.checkpoint.metadata and .filesystem in torch 2.15. Before torch 2.3, the class
for the properties of tensors was in the module TORCH_SHARDED.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Mapping
from typing import Any

from concertina_state.errors import InvalidInput
from concertina_state.format.shardfile import ITEM_SIZES, Chunk, counts

NAME = ".metadata"
MOST_BYTES = 512 << 20
"""Maximum size of a `.metadata` file in bytes."""
MOST_FRAME = 1 << 20
"""Maximum number of bytes that torch.save adds to the bytes of one tensor."""
DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
"""Name of each dtype in safetensors, keyed by the name in torch."""


class _Record:
    """Replacement for a class of torch.

    It stores the fields that the pickle contains, without running code of torch.
    """

    def __init__(self, *fields: Any) -> None:
        self.fields: Any = fields

    def __setstate__(self, fields: Any) -> None:
        self.fields = fields


class _Metadata(_Record): ...


class _Tensor(_Record): ...


class _Bytes(_Record): ...


class _Index(_Record): ...


def _only(value: Any) -> Any:
    return value


def _member(kind: Any, name: str) -> str:
    return name


def _path(*parts: str) -> tuple[str, ...]:
    return parts


METADATA, FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
TORCH_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
ALLOWED: Mapping[tuple[str, str], Any] = {
    (METADATA, "Metadata"): _Metadata,
    (METADATA, "MetadataIndex"): _Index,
    (METADATA, "TensorStorageMetadata"): _Tensor,
    (METADATA, "BytesStorageMetadata"): _Bytes,
    (METADATA, "ChunkStorageMetadata"): _Record,
    (METADATA, "TensorProperties"): _Record,
    (METADATA, "StorageMeta"): _Record,
    (METADATA, "_MEM_FORMAT_ENCODING"): _only,
    (TORCH_SHARDED, "TensorProperties"): _Record,
    (TORCH_SHARDED, "MEM_FORMAT_ENCODING"): _only,
    (FILES, "_StorageInfo"): _Record,
    ("builtins", "getattr"): _member,  # by which Python 3.11 before 3.11.4 pickles members of enums
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _only,
    ("pathlib", "PosixPath"): _path,
    ("pathlib._local", "PosixPath"): _path,
    **{("torch", name): dtype for name, dtype in DTYPES.items()},
}
"""Replacements for all names that a `.metadata` may contain, keyed by module and name."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return the class of this module that replaces a class or function of torch in the pickle.

        Raises:
            InvalidInput: When the name is not in ALLOWED.
        """
        if (module, name) not in ALLOWED:
            raise InvalidInput(
                f"it names {module:.100}.{name:.100}, which no index of torch.distributed.checkpoint does: "
                "do not use the folder"
            )
        return ALLOWED[module, name]


@dataclasses.dataclass(frozen=True)
class Location:
    """File and byte range of an object that torch.save has written into a DCP folder."""

    file: str
    begin: int
    size: int
    """Number of bytes."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """Box (rectangular part) of a tensor, as a DCP folder stores it."""

    chunk: Chunk
    location: Location


@dataclasses.dataclass(frozen=True)
class DcpIndex:
    """Contents of a folder of DCP."""

    pieces: tuple[Piece, ...]
    values: Mapping[str, Location]
    """Locations of objects other than tensors, keyed by flat key."""


def parse(text: bytes, where: str) -> DcpIndex:
    """Parse the contents of an index. `where` is the URI of the index file.

    Raises:
        InvalidInput: When the index can't be read, or names something that is not allowed.
    """
    try:
        root = _Unpickler(io.BytesIO(text)).load()
        return _index_of(root)
    except InvalidInput as error:
        raise InvalidInput(f"{where} can't be used: {error}.") from error
    except Exception as error:  # a damaged pickle can raise anything
        raise InvalidInput(f"{where} can't be read: {type(error).__name__}: {str(error)[:200]}.") from error


def _index_of(root: Any) -> DcpIndex:
    fields = _fields(root, _Metadata)
    places = {_key(index): _location(info) for index, info in fields["storage_data"].items()}
    pieces: list[Piece] = []
    values: dict[str, Location] = {}
    for name, stored in fields["state_dict_metadata"].items():
        if not isinstance(name, str):
            raise InvalidInput("a name is no text")
        if isinstance(stored, _Bytes):
            values[name] = places[name, None]
            continue
        tensor = _fields(stored, _Tensor)
        dtype, whole = _dtype(name, tensor["properties"]), counts(list(tensor["size"]))
        for piece in tensor["chunks"]:
            box = _fields(piece, _Record)
            offsets, shape = counts(list(box["offsets"])), counts(list(box["sizes"]))
            chunk = Chunk(name, dtype, offsets, shape, whole)
            pieces.append(_checked(Piece(chunk, places[name, offsets])))
    return DcpIndex(tuple(pieces), values)


def _fields(record: Any, kind: type[_Record]) -> dict[str, Any]:
    if not isinstance(record, kind) or not isinstance(record.fields, dict):
        raise InvalidInput(f"it has a {type(record).__name__} in the place of a {kind.__name__}")
    return record.fields


def _key(index: Any) -> tuple[str, tuple[int, ...] | None]:
    fields = _fields(index, _Index)
    offset = fields.get("offset")
    return fields["fqn"], None if offset is None else counts(list(offset))


def _location(info: Any) -> Location:
    """Return the Location that a storage info describes.

    Raises:
        InvalidInput: When the file is not in the folder itself, or is compressed.
    """
    fields = _fields(info, _Record)
    file = fields["relative_path"]
    if not isinstance(file, str) or "/" in file or file in ("", ".", ".."):
        raise InvalidInput(f"it names a file {file!r:.100}, which is not in the folder itself")
    if fields.get("transform_descriptors"):
        raise InvalidInput(f"{file:.100} is compressed or encrypted: save the checkpoint without extensions")
    begin, size = counts([fields["offset"], fields["length"]])
    return Location(file, begin, size)


def _dtype(name: str, properties: Any) -> str:
    """Return the dtype of a tensor.

    Raises:
        InvalidInput: When the dtype is not supported.
    """
    fields = properties.fields if isinstance(properties, _Record) else ()
    dtype = fields.get("dtype") if isinstance(fields, dict) else next(iter(fields), None)
    if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
        raise InvalidInput(f"{name:.100} has no dtype that can be read")
    return dtype


def _checked(piece: Piece) -> Piece:
    """Check that a part of a tensor is within the tensor, and that the part's stored bytes have the right size.

    Raises:
        InvalidInput: When the part is not within its tensor, or its bytes have another size.
    """
    chunk = piece.chunk
    same = len(chunk.offsets) == len(chunk.shape) == len(chunk.global_shape)
    if not same or any(o + n > end for o, n, end in zip(chunk.offsets, chunk.shape, chunk.global_shape, strict=True)):
        raise InvalidInput(f"a part of {chunk.name:.100} is beyond the tensor")
    if not chunk.size <= piece.location.size <= chunk.size + MOST_FRAME:
        raise InvalidInput(f"{chunk.name:.100} has {piece.location.size} bytes for a part of {chunk.size} bytes")
    return piece
