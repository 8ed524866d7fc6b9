"""A rank's part of the training state: weights and optimizer moments as named boxes, and how they are filled."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list

from concertina_trainer.config import TrainerConfig
from concertina_trainer.errors import BadInput
from concertina_trainer.format.hf_names import MODEL
from concertina_trainer.format.shardfile import Chunk, Header, Layout, Placed, layout_digest
from concertina_trainer.model.decoder import Decoder, initial_weight
from concertina_trainer.model.optimizer import ShardedAdamW, local
from concertina_trainer.parallel.parallel import World

DTYPES = {"F64": torch.float64, "F32": torch.float32, "I64": torch.int64, "BF16": torch.bfloat16, "F16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class Piece:
    chunk: Chunk
    tensor: Tensor
    """The live local tensor."""


class ShardBytes(Protocol):
    """Something that holds one shard's file."""

    @property
    def header(self) -> Header: ...

    def read(self, ranges: list[tuple[int, int]]) -> list[memoryview]:
        """The bytes [begin, end) of the file, for each range."""
        ...


@runtime_checkable
class LocalBytes(ShardBytes, Protocol):
    """One whose file is on this machine: it can be read into a tensor's own memory."""

    def read_into(self, parts: list[tuple[memoryview, int]]) -> None:
        """Fill each with the file's bytes from that offset on."""
        ...


class TrainState:
    """Everything that a snapshot holds, as this rank has it."""

    def __init__(self, model: Decoder, optimizer: ShardedAdamW, world: World) -> None:
        self._model, self._optimizer = model, optimizer
        parts = {f"model.{name}": (name, p) for name, p in model.named_parameters()}
        boxes = {name: _box(p) for name, p in model.named_parameters()}
        wholes = [(name, NAMES[p.dtype], tuple(p.shape)) for name, p in model.named_parameters()]
        self.digest = layout_digest(wholes, f"adamw, dimension 0 over {world.size}")
        live = {key: (name, local(p.detach())) for key, (name, p) in parts.items()}
        for kind, moments in optimizer.moments().items():
            live |= {f"optimizer.{kind}.{name}": (name, moment) for name, moment in moments.items()}
        self.pieces = [
            Piece(Chunk(key, NAMES[tensor.dtype], *boxes[name]), tensor)
            for key, (name, tensor) in live.items()
            if tensor.numel()
        ]
        self._names = frozenset(live)
        self.layout = Layout([piece.chunk for piece in self.pieces])
        by_name = {piece.chunk.name: piece.tensor for piece in self.pieces}
        self.tensors = [by_name[chunk.name] for chunk in self.layout.chunks]
        """In the layout's order."""

    @torch.no_grad()
    def initialise(self, config: TrainerConfig) -> None:
        """Step 0: weights from the seed alone, moments 0."""
        for name, parameter in self._model.named_parameters():
            target = local(parameter.detach())
            if target.numel():
                offsets, shape, whole = _box(parameter)
                value = initial_weight(name, torch.Size(whole), config.model, config.seed)
                target.copy_(value[tuple(slice(o, o + s) for o, s in zip(offsets, shape, strict=True))])
        for moments in self._optimizer.moments().values():
            for moment in moments.values():
                moment.zero_()
        self._optimizer.set_step(0)

    @torch.no_grad()
    def load(self, shards: Mapping[int, ShardBytes], step: int) -> None:
        """Fill every piece from the boxes of these shards, whatever world they were written by."""
        self._check(self.pieces, shards.values())
        _fill(self.pieces, shards.values(), "the saved state")
        self._optimizer.set_step(step)

    @torch.no_grad()
    def load_weights(self, shards: Collection[ShardBytes], whence: str) -> None:
        """Fill the weights alone, of whatever dtype they are; the rest stays as it is."""
        known = {name for name, _ in self._model.named_parameters()}
        for shard in shards:
            for name, placed in shard.header.chunks.items():
                if name.startswith(MODEL) and name.removeprefix(MODEL) not in known:
                    raise BadInput(
                        f"{whence} has {name.removeprefix(MODEL)} {list(placed.chunk.global_shape)}, which this model "
                        "has not: correct spec.trainer.model, or begin with other weights."
                    )
        weights = [piece for piece in self.pieces if piece.chunk.name.startswith(MODEL)]
        for shard in shards:
            for piece in weights:
                saved = shard.header.chunks.get(piece.chunk.name)
                if saved and saved.chunk.global_shape != piece.chunk.global_shape:
                    raise BadInput(
                        f"{piece.chunk.name.removeprefix(MODEL)} is {list(saved.chunk.global_shape)} in {whence} and "
                        f"{list(piece.chunk.global_shape)} in this model: correct spec.trainer.model, or begin with "
                        "other weights."
                    )
        _fill(weights, shards, whence)

    def _check(self, pieces: Collection[Piece], shards: Collection[ShardBytes]) -> None:
        for shard in shards:
            foreign = next((name for name in shard.header.chunks if name not in self._names), None)
            if foreign is not None:
                raise BadInput(
                    f"the saved state holds {foreign}, which the model has no place for: restore the model's "
                    "configuration, or start a new run under another checkpoint.uri."
                )
            for piece in pieces:
                placed = shard.header.chunks.get(piece.chunk.name)
                if placed and (placed.chunk.global_shape, placed.chunk.dtype) != (
                    piece.chunk.global_shape,
                    piece.chunk.dtype,
                ):
                    raise BadInput(
                        f"{piece.chunk.name} was saved as {placed.chunk.dtype} {list(placed.chunk.global_shape)} and "
                        f"the model has {piece.chunk.dtype} {list(piece.chunk.global_shape)}: restore the model's "
                        "configuration, or start a new run under another checkpoint.uri."
                    )


def _fill(pieces: Collection[Piece], shards: Collection[ShardBytes], whence: str) -> None:
    filled = dict.fromkeys((piece.chunk.name for piece in pieces), 0)
    for shard in shards:
        wanted = [(piece, placed) for piece in pieces if (placed := overlapping(piece.chunk, shard.header))]
        for piece, placed in wanted:
            filled[piece.chunk.name] += math.prod(end - begin for begin, end in _common(piece.chunk, placed.chunk))
        if isinstance(shard, LocalBytes):
            straight = [each for each in wanted if _is_stretch(*each)]
            shard.read_into([(_memory(*each), _rows(*each)[0]) for each in straight])
            wanted = [each for each in wanted if not _is_stretch(*each)]
        ranges = [_rows(piece, placed) for piece, placed in wanted]
        for (piece, placed), data, span in zip(wanted, shard.read(ranges), ranges, strict=True):
            _copy_overlap(piece, placed, data, span[0])
    for piece in pieces:
        if filled[piece.chunk.name] != piece.tensor.numel():
            raise BadInput(
                f"{piece.chunk.name} is not wholly in {whence}: {filled[piece.chunk.name]} of "
                f"{piece.tensor.numel()} elements were found. It was written by another model."
            )


def overlapping(chunk: Chunk, header: Header) -> Placed | None:
    """Where this shard has something of the chunk."""
    placed = header.chunks.get(chunk.name)
    return placed if placed and all(b > a for a, b in _common(chunk, placed.chunk)) else None


def _common(a: Chunk, b: Chunk) -> Iterator[tuple[int, int]]:
    """Begin and end of the common box, in the whole tensor's coordinates; end <= begin where there is none."""
    for a_begin, a_length, b_begin, b_length in zip(a.offsets, a.shape, b.offsets, b.shape, strict=True):
        yield max(a_begin, b_begin), min(a_begin + a_length, b_begin + b_length)


def _rows(piece: Piece, placed: Placed) -> tuple[int, int]:
    """The bytes of the file that hold the common rows (first dimension), whole rows of the saved box."""
    begin, end = next(_common(piece.chunk, placed.chunk))
    row = placed.chunk.size // placed.chunk.shape[0]
    first = placed.chunk.offsets[0]
    return placed.begin + (begin - first) * row, placed.begin + (end - first) * row


def _target(piece: Piece, placed: Placed) -> Tensor:
    """Of the piece's tensor the box that it has in common with what was saved."""
    return piece.tensor[_within(piece.chunk, piece.chunk, placed.chunk)]


def _is_stretch(piece: Piece, placed: Placed) -> bool:
    """Whether the common box lies in one stretch of bytes, the same in the file and in memory."""
    target, saved = _target(piece, placed), placed.chunk
    same = DTYPES[saved.dtype] == target.dtype and saved.shape[1:] == target.shape[1:]
    return same and target.is_cpu and target.is_contiguous()


def _memory(piece: Piece, placed: Placed) -> memoryview:
    return memoryview(_target(piece, placed).view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # 3.12 on


def _copy_overlap(piece: Piece, placed: Placed, data: memoryview, at: int) -> None:
    """Copy the common box out of `data` (the file's bytes from `at` on)."""
    saved = placed.chunk
    row = saved.size // saved.shape[0]
    first_row = saved.offsets[0] + (at - placed.begin) // row
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # nor is it written to
        source = torch.frombuffer(data, dtype=DTYPES[saved.dtype]).view(-1, *saved.shape[1:])
    read = dataclasses.replace(saved, offsets=(first_row, *saved.offsets[1:]))
    _target(piece, placed).copy_(source[_within(read, piece.chunk, saved)])


def _within(whose: Chunk, a: Chunk, b: Chunk) -> tuple[slice, ...]:
    """Where the common box of a and b lies, counted from the first element of `whose`."""
    return tuple(slice(begin - o, end - o) for (begin, end), o in zip(_common(a, b), whose.offsets, strict=True))


def _box(parameter: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Offsets, shape and whole shape of this rank's part of a parameter."""
    boxes = _create_chunk_list(parameter)
    if not boxes:
        return (0,) * parameter.dim(), (0,) * parameter.dim(), tuple(parameter.shape)
    return tuple(boxes[0].offsets), tuple(boxes[0].sizes), tuple(parameter.shape)
