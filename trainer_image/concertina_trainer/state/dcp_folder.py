"""Folders of torch.distributed.checkpoint (DCP) as sources of weights (`initFrom`) and of whole states (`resumeFrom`).

Tensors must have the names that `concertina checkpoint export --to dcp` writes, or the names of torchtitan's Llama.
"""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from concertina_protocol import SnapshotId
from concertina_state.errors import InvalidInput
from concertina_state.format.shardfile import Chunk, Header, ShardMetadata, StoredChunk
from concertina_state.objects.prefix import Missing, ObjectPrefix
from concertina_state.tensors import NAMES, memory
from concertina_trainer.config.model_config import ModelConfig
from concertina_trainer.config.positions_config import RotaryPairs
from concertina_trainer.format import titan_names
from concertina_trainer.format.dcp_metadata import MOST_BYTES, NAME, DcpIndex, Location, Piece, parse
from concertina_trainer.format.hf_names import MODEL
from concertina_trainer.state.weights import ENDING, with_distinct_names

OPTIMIZER = r"optimizer\.state\.(.+)\.(\w+)"
STEP = "step"
STEPS = ("train_state.step",)
"""Keys under which a folder can contain the number of finished steps, in addition to the optimizer's own counts."""
HEAD, EMBEDDING = "head.weight", "embedding.weight"
STRIDE = 1 << 40
"""Distance between the offsets of two parts in a DcpFile. It is greater than the size of any piece."""
_NOBODY = ShardMetadata(SnapshotId(0, 0, "", 1), 0, 0, "", "")


@dataclasses.dataclass(frozen=True)
class Part:
    """Rows of a stored piece that form a box (rectangular part) of one tensor of this project.

    Usually these are all rows of the piece.
    """

    chunk: Chunk
    piece: Piece
    row: int = 0
    """Index of the first of these rows in the piece."""

    @property
    def begin(self) -> int:
        """Offset of the first row in the piece, in bytes."""
        rows = self.piece.chunk.shape[0] if self.row else 1
        return self.row * (self.piece.chunk.size // rows)


class DcpFile:
    """Parts of tensors in one file of a folder, at most one of each tensor.

    A part can't be read from the file directly, because torch.save may have written its piece in any order of
    dimensions. This class therefore loads the whole piece, and presents its bytes in row-major order. In the presented
    file, the bytes of each part have offsets that no other part uses.
    """

    batch_bytes = STRIDE
    """Maximum number of bytes to read in one batch. It equals the distance of parts, so a part is read in one batch."""

    def __init__(self, folder: ObjectPrefix, parts: Sequence[Part]) -> None:
        self._folder, self._parts = folder, parts
        chunks = {
            part.chunk.name: StoredChunk(part.chunk, number * STRIDE + part.begin) for number, part in enumerate(parts)
        }
        self.header = Header(_NOBODY, chunks)

    def read_into(self, parts: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each memoryview with bytes, beginning at the memoryview's offset.

        Raises:
            InvalidInput: When a piece does not match the folder's index.
            StorageError: When the file can't be read.
        """
        contents: dict[int, Tensor] = {}
        for begin, target in parts:
            number, offset = divmod(begin, STRIDE)
            if number not in contents:
                contents = {number: self._tensor(self._parts[number].piece)}
            target[:] = memory(contents[number])[offset : offset + len(target)]

    def _tensor(self, piece: Piece) -> Tensor:
        tensor, chunk = _loaded(self._folder, piece.location), piece.chunk
        if type(tensor) is not Tensor or (NAMES.get(tensor.dtype), tuple(tensor.shape)) != (chunk.dtype, chunk.shape):
            raise InvalidInput(
                f"{self._folder.uri}/{piece.location.file} has a part of {chunk.name} that is not what {NAME} says: "
                "use another checkpoint."
            )
        return tensor.contiguous()


@dataclasses.dataclass(frozen=True)
class DcpFolder:
    """Folder that torch.distributed.checkpoint has written."""

    folder: ObjectPrefix
    index: DcpIndex

    @staticmethod
    def open(uri: str) -> DcpFolder:
        """Read the index of a folder.

        Raises:
            InvalidInput: When the index can't be used, or names files that are missing or too short.
            StorageError: When storage can't be read.
        """
        folder = ObjectPrefix(uri)
        sizes = folder.list("")
        if sizes.get(NAME, 0) > MOST_BYTES:
            raise InvalidInput(f"{uri}/{NAME} has {sizes[NAME]} bytes, over the limit of {MOST_BYTES}.")
        index = parse(folder.get(NAME) or b"", f"{uri}/{NAME}")
        for place in (*(piece.location for piece in index.pieces), *index.values.values()):
            if place.begin + place.size > sizes.get(place.file, 0):
                raise InvalidInput(f"{uri}/{place.file} is missing or too short: use another checkpoint.")
        return DcpFolder(folder, index)

    def weights(self, names: Collection[str], model: ModelConfig) -> list[DcpFile]:
        """Return the folder's weights under this project's names. `names` are the names of all arrays of the state.

        Raises:
            InvalidInput: When a tensor of the folder has no counterpart in the state.
        """
        return self._files(part for part in self._own(names, model) if part.chunk.name.startswith(MODEL))

    def state(self, names: Collection[str], model: ModelConfig) -> list[DcpFile]:
        """Return the folder's weights and optimizer moments under this project's names.

        Raises:
            InvalidInput: When a tensor of the folder has no counterpart in the state.
        """
        return self._files(self._own(names, model))

    def step(self) -> int:
        """Return the number of finished steps.

        Raises:
            InvalidInput: When the folder has no number of steps, or several different ones.
        """
        places = [self.index.values[key] for key in STEPS if key in self.index.values]
        for piece in self.index.pieces:
            match = re.fullmatch(OPTIMIZER, piece.chunk.name)
            if piece.chunk.name in STEPS or (match and match[2] == STEP):
                places.append(piece.location)
        found = {_number(_loaded(self.folder, place)) for place in places}
        if len(found) != 1 or None in found:
            numbers = ", ".join(sorted(map(str, found))) or "none"
            raise InvalidInput(
                f"{self.folder.uri} must have one number of finished steps ({STEPS[0]}, or the optimizer's step), and "
                f"has: {numbers}. To use only its weights, set checkpoint.initFrom."
            )
        [step] = found
        assert step is not None
        return step

    def check_tied(self, model: ModelConfig) -> None:
        """Check that the folder's output layer equals its embedding, if the model uses the same weights for both.

        The check reads both tensors, so only one rank should call this method.

        Raises:
            InvalidInput: When the weights of the output layer differ from the embedding.
        """
        if not model.tie_embeddings:
            return
        pieces: dict[str, dict[tuple[int, ...], Piece]] = {EMBEDDING: {}, HEAD: {}}
        for piece in self.index.pieces:
            bare = piece.chunk.name.removeprefix(MODEL)
            own = titan_names.ours(bare) or bare
            if own in pieces:
                pieces[own][piece.chunk.offsets] = piece
        for offsets, head in pieces[HEAD].items():
            embedding = pieces[EMBEDDING].get(offsets)
            if embedding is None or not torch.equal(
                *(_loaded(self.folder, each.location) for each in (head, embedding))
            ):
                raise InvalidInput(
                    f"{self.folder.uri} has {head.chunk.name}, which is not the embedding: set "
                    "trainer.model.tieEmbeddings to false."
                )

    def _own(self, names: Collection[str], model: ModelConfig) -> list[Part]:
        own: list[Part] = []
        for piece in self.index.pieces:
            moment = re.fullmatch(OPTIMIZER, piece.chunk.name)
            if moment and (layer := titan_names.fused_layer(moment[1].removeprefix(MODEL))) and moment[2] != STEP:
                self._check_pairs(piece.chunk.name, model)
                own += _separated(piece, f"optimizer.{moment[2]}.blocks.{layer}.attention", model)
            elif name := self._own_name(piece.chunk.name, names, model):
                own.append(Part(dataclasses.replace(piece.chunk, name=name), piece))
        return own

    def _own_name(self, key: str, names: Collection[str], model: ModelConfig) -> str:
        """Return this project's name of a tensor, or "" if the tensor is not a part of the state.

        Raises:
            InvalidInput: When the tensor has no counterpart in the state.
        """
        moment = re.fullmatch(OPTIMIZER, key)
        if key in STEPS or (moment and moment[2] == STEP):
            return ""
        bare = (moment[1] if moment else key).removeprefix(MODEL)
        if f"{MODEL}{bare}" not in names:
            bare = self._from_titan(bare, model)
        if bare == HEAD and model.tie_embeddings and not moment:
            return ""  # see `check_tied`
        name = f"optimizer.{moment[2]}.{bare}" if moment else f"{MODEL}{bare}"
        if name not in names:
            raise InvalidInput(
                f"{self.folder.uri} has a tensor {key:.100}, which this model has no place for: correct "
                "spec.trainer.model, or use another checkpoint."
            )
        return name

    def _from_titan(self, bare: str, model: ModelConfig) -> str:
        own = titan_names.ours(bare)
        if own is None or own == bare:
            return bare
        self._check_pairs(bare, model)
        return own

    def _check_pairs(self, name: str, model: ModelConfig) -> None:
        """Check that the model rotates queries and keys as torchtitan's Llama does.

        Raises:
            InvalidInput: When the model rotates different pairs of elements.
        """
        if model.rotary_pairs is not RotaryPairs.adjacent:
            raise InvalidInput(
                f"{self.folder.uri} has torchtitan's name {name:.100}, and torchtitan's Llama rotates adjacent "
                "elements: set trainer.model.rotaryPairs to Adjacent."
            )

    def _files(self, parts: Iterable[Part]) -> list[DcpFile]:
        files: dict[str, list[tuple[str, Part]]] = {}
        for part in parts:
            files.setdefault(part.piece.location.file, []).append((part.chunk.name, part))
        return [
            DcpFile(self.folder, list(group.values()))
            for named_parts in files.values()
            for group in with_distinct_names(named_parts)
        ]


def _separated(piece: Piece, attention: str, model: ModelConfig) -> Iterator[Part]:
    """Yield the rows of queries, of keys and of values in a piece of a tensor that contains all three.

    The tensor is one of those that `titan_names.FUSED` names.

    `attention` is the name of the attention layer. The names of the parts begin with this name.

    Raises:
        InvalidInput: When the number of rows differs from that of the model.
    """
    head, keys = model.resolved_head_dim, model.resolved_kv_heads
    widths = {"query": model.query_dim // keys, "key": head, "value": head}
    rows, columns = sum(widths.values()), piece.chunk.global_shape[1]
    if piece.chunk.global_shape[0] != keys * rows:
        raise InvalidInput(
            f"{piece.chunk.name} has {piece.chunk.global_shape[0]} rows, and this model has {keys * rows}: correct "
            "spec.trainer.model."
        )
    (begin, column), (count, width) = piece.chunk.offsets, piece.chunk.shape
    for key in range(keys):
        first = key * rows
        for kind, length in widths.items():
            low, high = max(begin, first), min(begin + count, first + length)
            if low < high:
                chunk = Chunk(
                    f"{attention}.{kind}.weight",
                    piece.chunk.dtype,
                    (key * length + low - first, column),
                    (high - low, width),
                    (keys * length, columns),
                )
                yield Part(chunk, piece, low - begin)
            first += length


def is_dcp(uri: str) -> bool:
    """Return whether `uri` is a folder of torch.distributed.checkpoint."""
    if uri.endswith(ENDING):
        return False
    try:
        ObjectPrefix(uri).get_ranges(NAME, [(0, 1)])
    except Missing:
        return False
    return True


def _loaded(folder: ObjectPrefix, place: Location) -> Any:
    """Return an object that torch.save has written. Only tensors and plain values are loaded.

    Raises:
        InvalidInput: When the object can't be loaded.
    """
    [data] = folder.get_ranges(place.file, [(place.begin, place.begin + place.size)])
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes can raise anything
        problem = " ".join(str(error).split())[:200]
        raise InvalidInput(f"{folder.uri}/{place.file} can't be read: {problem}.") from error


def _number(value: Any) -> int | None:
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    return int(number) if isinstance(number, int | float) and number == int(number) and number >= 0 else None
