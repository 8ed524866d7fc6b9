"""A checkpoint's weights as a Hugging Face model: sharded safetensors, config.json, the tokenizer. No torch.

The format of the index: https://huggingface.co/docs/transformers/big_models (model.safetensors.index.json).
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from concertina_trainer.checkpoints.retention import lease
from concertina_trainer.checkpoints.stored import StoredCheckpoint, StoredPart
from concertina_trainer.config import TrainerConfig, of_any_version
from concertina_trainer.errors import BadInput
from concertina_trainer.export.tokenizer_files import exported
from concertina_trainer.format import hf_names
from concertina_trainer.format.shardfile import ITEM_SIZES, Chunk, Placed
from concertina_trainer.objects.folder import Folder

FILE_BYTES = 5 * 10**9
"""Of one file of weights, at most (but for a tensor that is larger)."""
Advance = Callable[[int], None]


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of the export: rows of one of ours."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    ours: str
    first_row: int

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


@dataclasses.dataclass(frozen=True)
class Exported:
    files: list[str]
    """Names."""
    tokenizer: str
    """What became of the tokenizer: a sentence."""


def export(
    checkpoint: StoredCheckpoint, target: Folder, advance: Advance, file_bytes: int = FILE_BYTES, data: str = ""
) -> Exported:
    """`data`: where the run's data lie, if not where they were (for the tokenizer). Raises BadInput or StorageError."""
    trainer = _trainer(checkpoint)
    if any(name.endswith(".safetensors") for name in target.entries()):
        raise BadInput(
            f"{target.uri} holds weights already, which would be loaded beside or instead of these: export into "
            "another folder, or delete them first."
        )
    with lease(checkpoint.folder):
        boxes = _boxes(checkpoint)
        tensors = [tensor for name, placed in boxes.items() for tensor in _tensors(name, placed[0][1].chunk)]
        files = _files(tensors, file_bytes)
        for file, members in files.items():
            target.put_pieces(file, _content(members, boxes, advance), sum(tensor.size for tensor in members))
    tokenizer = exported(trainer, checkpoint.manifest.data, data)
    config = {**hf_names.config_json(trainer.model), "torch_dtype": _torch_name(tensors[0].dtype), **tokenizer.config}
    extra: dict[str, object] = {"config.json": config, **tokenizer.files}
    if len(files) > 1:
        weight_map = {tensor.name: file for file, members in files.items() for tensor in members}
        total = sum(tensor.size for tensor in tensors)
        extra["model.safetensors.index.json"] = {"metadata": {"total_size": total}, "weight_map": weight_map}
    for name, value in extra.items():
        target.put(name, json.dumps(value, indent=2).encode())
    return Exported([*files, *extra], tokenizer.said)


def size(checkpoint: StoredCheckpoint) -> int:
    """Bytes that an export writes, about."""
    return sum(t.size for name, p in _boxes(checkpoint).items() for t in _tensors(name, p[0][1].chunk))


def _trainer(checkpoint: StoredCheckpoint) -> TrainerConfig:
    if not checkpoint.manifest.trainer:
        raise BadInput(f"{checkpoint.uri} does not say what model it is of: its manifest has no trainer section.")
    try:
        return of_any_version(checkpoint.manifest.trainer)
    except ValueError as error:
        problem = " ".join(str(error).split())[:300]
        raise BadInput(f"{checkpoint.uri} is of a trainer that this version does not know ({problem}).") from error


def _boxes(checkpoint: StoredCheckpoint) -> dict[str, list[tuple[StoredPart, Placed]]]:
    """Where each weight's boxes are, by our name, in order of names."""
    found: dict[str, list[tuple[StoredPart, Placed]]] = {}
    for part in checkpoint.parts:
        for name, placed in part.header.chunks.items():
            if name.startswith(hf_names.MODEL):
                found.setdefault(name, []).append((part, placed))
    return dict(sorted(found.items()))


def _tensors(name: str, chunk: Chunk) -> Iterator[Tensor]:
    theirs = hf_names.theirs(name.removeprefix(hf_names.MODEL))
    if not theirs:
        raise BadInput(f"{name} has no place in a Hugging Face Llama: this model can't be exported.")
    rows = chunk.global_shape[0] // len(theirs)
    for index, their_name in enumerate(theirs):
        yield Tensor(their_name, chunk.dtype, (rows, *chunk.global_shape[1:]), name, rows * index)


def _files(tensors: list[Tensor], most: int) -> dict[str, list[Tensor]]:
    groups: list[list[Tensor]] = [[]]
    for tensor in tensors:
        if groups[-1] and sum(member.size for member in groups[-1]) + tensor.size > most:
            groups.append([])
        groups[-1].append(tensor)
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def _content(
    tensors: list[Tensor], boxes: Mapping[str, list[tuple[StoredPart, Placed]]], advance: Advance
) -> Iterator[memoryview]:
    """A safetensors file, a tensor at a time."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        offsets = [end, end + tensor.size]
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
        end += tensor.size
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    yield memoryview(struct.pack("<Q", len(header)) + header)
    for tensor in tensors:
        yield _assembled(tensor, boxes[tensor.ours])
        advance(tensor.size)


def _assembled(tensor: Tensor, boxes: list[tuple[StoredPart, Placed]]) -> memoryview:
    """Its bytes, put together from the boxes that hold something of it."""
    item = ITEM_SIZES[tensor.dtype]
    out = np.empty((*tensor.shape, item), dtype=np.uint8)
    filled = 0
    for part, placed in boxes:
        box = placed.chunk
        first, last = (
            max(box.offsets[0], tensor.first_row),
            min(box.offsets[0] + box.shape[0], tensor.first_row + tensor.shape[0]),
        )
        if last <= first:
            continue
        row = box.size // box.shape[0]
        begin = placed.begin + (first - box.offsets[0]) * row
        [data] = part.read([(begin, begin + (last - first) * row)])
        values = np.frombuffer(data, dtype=np.uint8).reshape(last - first, *box.shape[1:], item)
        inner = tuple(slice(o, o + s) for o, s in zip(box.offsets[1:], box.shape[1:], strict=True))
        out[(slice(first - tensor.first_row, last - tensor.first_row), *inner)] = values
        filled += values.size
    if filled != out.size:
        raise BadInput(f"{tensor.ours} is not wholly in the checkpoint: {filled} of {out.size} bytes were found.")
    return out.reshape(-1).data


def _torch_name(dtype: str) -> str:
    return {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}[dtype]
