"""Export of a checkpoint's weights as a Hugging Face model: sharded safetensors, config.json and the tokenizer.

The export requires neither torch nor numpy, with two exceptions: numpy is needed to merge low-rank adapters into
weights, and transformers to name the tensors of a `trainer.model.hf` model.

The format of the index: https://huggingface.co/docs/transformers/big_models (model.safetensors.index.json).
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from concertina_state.buffers import stretches
from concertina_state.checkpoints.reader import StoredCheckpoint
from concertina_state.errors import InvalidInput
from concertina_state.filling import ShardReader
from concertina_state.format.read_plan import Box, ReadPlan, reads
from concertina_state.format.shardfile import ITEM_SIZES, Chunk
from concertina_state.objects.prefix import ObjectPrefix
from concertina_trainer.config.model_config import FrozenDtype, ModelConfig
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.export.quantized import as_quantized
from concertina_trainer.export.tokenizer_files import exported
from concertina_trainer.format import adapters, hf_config, hf_names
from concertina_trainer.format.hf_families import EXPERT, FAMILIES
from concertina_trainer.state.weights import frozen_files

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from concertina_trainer.model.hf_files import HfFiles

FILE_BYTES = 5 * 10**9
"""Maximum size in bytes of one file of weights. A larger tensor still becomes a single file."""
AVERAGES = "optimizer.ema."
"""Prefix of the names of averages of weights (`optimizer.emaDecay`)."""
TORCH_NAMES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
Advance = Callable[[int], None]


@dataclasses.dataclass(frozen=True)
class Adapter:
    """Low-rank adapter of a weight: two matrices whose product, times `scale`, is added to the weight."""

    a: Chunk
    b: Chunk
    scale: float
    frozen_dtype: FrozenDtype = FrozenDtype.bfloat16
    """Dtype in which the run stored the frozen weight.

    The exported sum contains the values that a quantized weight had in the run.
    """


@dataclasses.dataclass(frozen=True)
class Part:
    """Weight of this project that is exported as a whole tensor, or as part of a tensor with other weights."""

    chunk: Chunk
    adapter: Adapter | None = None

    @property
    def dtype(self) -> str:
        """Dtype of this part in the export.

        A merged weight is float32, because the sum of a weight and its adapter needs more digits than the frozen
        weight.
        """
        return "F32" if self.adapter else self.chunk.dtype

    @property
    def size(self) -> int:
        """Size of this part in the export, in bytes."""
        return math.prod(self.chunk.shape) * ITEM_SIZES[self.dtype]

    @property
    def read(self) -> list[Chunk]:
        """Chunks of the checkpoint that are read to compute this part of an exported tensor."""
        return [self.chunk, *((self.adapter.a, self.adapter.b) if self.adapter else ())]


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of the export."""

    name: str
    parts: tuple[Part, ...]
    """Weights whose rows follow each other in the tensor. Most tensors have one weight."""
    shape: tuple[int, ...]
    """Shape of the exported tensor. The tensor of a single expert has no dimension of experts."""

    @property
    def dtype(self) -> str:
        return self.parts[0].dtype

    @property
    def size(self) -> int:
        """Size of the tensor in the export, in bytes."""
        return sum(part.size for part in self.parts)


@dataclasses.dataclass(frozen=True)
class Export:
    """Contents of an export: tensors of a checkpoint, and files that describe them."""

    uri: str
    """URI of the checkpoint."""
    shards: Sequence[ShardReader]
    """Shards from which the tensors are read."""
    tensors: Sequence[Tensor]
    files: Mapping[str, object]
    """Contents of the other files as JSON values, keyed by file name."""
    message: str = ""
    """Sentence for the user about the export."""
    stem: str = "model"
    """Beginning of the names of the files with tensors."""

    @property
    def size(self) -> int:
        """Total size of all tensors in bytes."""
        return sum(tensor.size for tensor in self.tensors)

    def write(
        self, target: ObjectPrefix, advance: Advance = lambda size: None, file_bytes: int = FILE_BYTES
    ) -> list[str]:
        """Write all files of the export, and return their names. Several files of tensors get an index.

        Args:
            target: Folder to write to.
            advance: Function that is called with the number of bytes just processed.
            file_bytes: Maximum size in bytes of one file of tensors.

        Raises:
            InvalidInput: When the folder already contains weights, or the checkpoint lacks a part of a tensor.
            StorageError: When storage can't be read or written.
        """
        if any(name.endswith(".safetensors") for name in target.entries()):
            raise InvalidInput(
                f"{target.uri} already contains weights, which would be mixed with the exported ones: export "
                "into another folder, or delete them first."
            )
        headers = {number: shard.header for number, shard in enumerate(self.shards)}
        plan = reads(headers, [chunk for tensor in self.tensors for part in tensor.parts for chunk in part.read])
        plan.require(self.uri)
        files = _files(self.tensors, file_bytes, self.stem)
        for file, members in files.items():
            content = _content(members, self.shards, plan, advance)
            target.put_pieces(file, content, sum(tensor.size for tensor in members))
        described = dict(self.files)
        if len(files) > 1:
            weight_map = {tensor.name: file for file, members in files.items() for tensor in members}
            index = {"metadata": {"total_size": self.size}, "weight_map": weight_map}
            described[f"{self.stem}.safetensors.index.json"] = index
        for name, value in described.items():
            target.put(name, json.dumps(value, indent=2).encode())
        return [*files, *described]


def export(checkpoint: StoredCheckpoint, data: str = "", ema: bool = False) -> Export:
    """Return the export of a checkpoint as a Hugging Face model.

    Args:
        checkpoint: Checkpoint to export.
        data: Folder of the run's data, which contains the tokenizer. Needed only if the data have been moved.
        ema: Whether to export the average of each weight. A frozen weight has no average, and is exported unchanged.

    Raises:
        InvalidInput: When the checkpoint or the data can't be exported.
        StorageError: When storage can't be read.
    """
    trainer = _exported_trainer(checkpoint)
    if trainer.model.hf:
        return _of_transformers(checkpoint, trainer, data, ema)
    if ema:
        require_average(checkpoint, trainer)
    shards = shards_of(checkpoint, trainer.model)
    tensors = _tensors(shards, trainer.model, ema)
    tokenizer = exported(trainer, checkpoint.manifest.data, data)
    config = {
        **hf_config.config_json(trainer.model),
        # Loaders convert all tensors to this dtype, so it is one that represents all values.
        "torch_dtype": TORCH_NAMES[max((tensor.dtype for tensor in tensors), key=ITEM_SIZES.__getitem__)],
        **tokenizer.config,
    }
    files = {"config.json": config, **tokenizer.files}
    return Export(checkpoint.uri, shards, tensors, files, " ".join(filter(None, (tokenizer.message, _remark(trainer)))))


def _remark(trainer: TrainerConfig) -> str:
    """Return a sentence about frozen weights that the run has quantized, or an empty string."""
    lora = trainer.model.lora
    if lora is None or not lora.frozen_dtype.quantized:
        return ""
    return (
        f"The adapters were trained beside weights in {lora.frozen_dtype.value}, so they are added to the values that "
        "these weights had in the run, and not to those of the files in checkpoint.initFrom."
    )


def _of_transformers(checkpoint: StoredCheckpoint, trainer: TrainerConfig, data: str, ema: bool) -> Export:
    """Return the export of a model of `trainer.model.hf`, under the names that transformers writes.

    Raises:
        InvalidInput: When transformers is missing, or can't read a tensor again.
    """
    if ema:
        require_average(checkpoint, trainer)
    shards = shards_of(checkpoint, trainer.model)
    wholes = whole_chunks(shards, trainer.model)
    if ema:
        wholes |= whole_chunks(shards, trainer.model, AVERAGES)
    files = _files_of_transformers(trainer.model)
    tensors = [
        Tensor(
            name, (Part(_placed(chunk, place.box)),), chunk.global_shape if place.box is None else place.box.shape[1:]
        )
        for own, chunk in wholes.items()
        for name, place in files.names(own.removeprefix(hf_names.MODEL))
    ]
    tensors.sort(key=lambda tensor: tensor.name)
    tokenizer = exported(trainer, checkpoint.manifest.data, data)
    dtype = TORCH_NAMES[max((tensor.dtype for tensor in tensors), key=ITEM_SIZES.__getitem__)]
    config = {**(trainer.model.options or {}), "torch_dtype": dtype, **tokenizer.config}
    return Export(checkpoint.uri, shards, tensors, {"config.json": config, **tokenizer.files}, tokenizer.message)


def _files_of_transformers(model: ModelConfig) -> HfFiles:
    """Return the names in Hugging Face files of the tensors of a `trainer.model.hf` model.

    Raises:
        InvalidInput: When torch or transformers is missing.
    """
    try:
        from concertina_trainer.model.hf import build
        from concertina_trainer.model.hf_files import HfFiles
        from concertina_trainer.model.spec import DataShape
    except ImportError as error:
        raise InvalidInput(
            f"transformers knows the names of the tensors of this model, and can't be used here ({error}): install "
            "concertina-trainer[hf], or use --to safetensors to keep the names of the trainer."
        ) from error
    return HfFiles(build(model.options or {}, DataShape(1, 0)))


def require_average(checkpoint: StoredCheckpoint, trainer: TrainerConfig) -> None:
    """Check that the checkpoint has an average of the weights.

    Raises:
        InvalidInput: When it has no average.
    """
    if trainer.optimizer.ema_decay is None:
        raise InvalidInput(
            f"{checkpoint.uri} has no average of the weights: export the weights, or train with "
            "trainer.optimizer.emaDecay."
        )


def shards_of(checkpoint: StoredCheckpoint, model: ModelConfig) -> list[ShardReader]:
    """Return readers for the checkpoint's shards and for the files of frozen weights that are stored elsewhere."""
    frozen = checkpoint.manifest.frozen
    return [*checkpoint.shards, *(frozen_files(frozen, model) if frozen else ())]


def _exported_trainer(checkpoint: StoredCheckpoint) -> TrainerConfig:
    trainer = trainer_of(checkpoint)
    if trainer.model.entrypoint:
        raise InvalidInput(
            f"{checkpoint.uri} is a checkpoint of {trainer.model.entrypoint}: only the bundled decoder can "
            "be exported as a Hugging Face model, because the Hugging Face names of a custom model's weights are not "
            "known. Use --to safetensors to keep their names."
        )
    return trainer


def trainer_of(checkpoint: StoredCheckpoint) -> TrainerConfig:
    """Return the configuration of the run that saved a checkpoint.

    Raises:
        InvalidInput: When the checkpoint has no configuration, or this version can't read it.
    """
    if not checkpoint.manifest.trainer:
        raise InvalidInput(f"{checkpoint.uri} does not describe its model: its manifest has no trainer section.")
    try:
        return TrainerConfig.model_validate(checkpoint.manifest.trainer)
    except ValueError as error:
        problem = " ".join(str(error).split())[:300]
        raise InvalidInput(
            f"{checkpoint.uri} was written with a trainer configuration that this version does not support ({problem})."
        ) from error


def _tensors(shards: Sequence[ShardReader], model: ModelConfig, ema: bool = False) -> list[Tensor]:
    """Return the tensors of the export, sorted by their exported names, in the dtypes of the trained model.

    With `ema`, weights that have an average are replaced by the average.

    Raises:
        InvalidInput: When no Hugging Face model has the same arithmetic as this model, or that model has no tensor for
            a weight.
    """
    family = FAMILIES[hf_config.config_json(model)["model_type"]]
    wholes = whole_chunks(shards, model)
    if ema:
        wholes |= whole_chunks(shards, model, AVERAGES)
    tensors: dict[str, Tensor] = {}
    for name, chunk in sorted(wholes.items(), key=lambda item: hf_names.rank_in_tensor(item[0], family)):
        if adapters.is_adapter(name):
            continue
        bare, shape = name.removeprefix(hf_names.MODEL), chunk.global_shape
        exported_name = hf_names.theirs(bare, family)
        if exported_name is None:
            raise InvalidInput(
                f"{name} has no counterpart in the architecture {family.architecture}: this model can't be exported."
            )
        if EXPERT not in exported_name:
            before = tensors.get(exported_name, Tensor(exported_name, (), (0, *shape[1:])))
            part = Part(chunk, _adapter(name, wholes, model))
            rows = (before.shape[0] + shape[0], *shape[1:])
            tensors[exported_name] = Tensor(exported_name, (*before.parts, part), rows)
            continue
        of_all = _adapter(name, wholes, model)
        for number in range(shape[0]):
            adapter = of_all and Adapter(_of_expert(of_all.a, number), _of_expert(of_all.b, number), of_all.scale)
            expert_name = exported_name.replace(EXPERT, str(number))
            tensors[expert_name] = Tensor(expert_name, (Part(_of_expert(chunk, number), adapter),), shape[1:])
    return [tensors[name] for name in sorted(tensors)]


def _placed(chunk: Chunk, box: Box | None) -> Chunk:
    """Return the part of a chunk that `box` selects, or the whole chunk if `box` is None."""
    return chunk if box is None else dataclasses.replace(chunk, offsets=box.offsets, shape=box.shape)


def _of_expert(chunk: Chunk, number: int) -> Chunk:
    """Return one expert's part of a tensor of all experts of a layer."""
    shape = chunk.global_shape
    return Chunk(chunk.name, chunk.dtype, (number, *(0 for _ in shape[1:])), (1, *shape[1:]), shape)


def whole_chunks(shards: Sequence[ShardReader], model: ModelConfig, prefix: str = hf_names.MODEL) -> dict[str, Chunk]:
    """Return a chunk for each whole weight in the shards, in the trained model's dtype, keyed by the weight's name.

    Args:
        shards: Shards of the checkpoint.
        model: Model that was trained.
        prefix: Prefix of the names to look for in the shards, such as AVERAGES. In the result, MODEL replaces this
            prefix.
    """
    chunks = [stored.chunk for shard in shards for stored in shard.header.chunks.values()]
    return {
        f"{hf_names.MODEL}{chunk.name.removeprefix(prefix)}": dataclasses.replace(
            chunk,
            dtype=_dtype_of(chunk.name, chunk.dtype, model),
            offsets=(0,) * len(chunk.global_shape),
            shape=chunk.global_shape,
        )
        for chunk in chunks
        if chunk.name.startswith(prefix)
    }


def _dtype_of(name: str, stored: str, model: ModelConfig) -> str:
    """Return the dtype of a weight in the trained model. Frozen weights may be stored in another dtype."""
    if model.lora is None or adapters.is_adapter(name):
        return stored
    return "F32" if model.lora.frozen_dtype is FrozenDtype.float32 else "BF16"


def _adapter(name: str, wholes: Mapping[str, Chunk], model: ModelConfig) -> Adapter | None:
    a, b = adapters.matrices(name)
    if model.lora is None or a not in wholes:
        return None
    return Adapter(wholes[a], wholes[b], model.lora.scale, model.lora.frozen_dtype)


def _files(tensors: Sequence[Tensor], most: int, stem: str) -> dict[str, list[Tensor]]:
    groups: list[list[Tensor]] = [[]]
    for tensor in tensors:
        if groups[-1] and sum(member.size for member in groups[-1]) + tensor.size > most:
            groups.append([])
        groups[-1].append(tensor)
    if len(groups) == 1:
        return {f"{stem}.safetensors": groups[0]}
    return {f"{stem}-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def _content(
    tensors: Sequence[Tensor], shards: Sequence[ShardReader], plan: ReadPlan, advance: Advance
) -> Iterator[memoryview]:
    """Yield the bytes of a safetensors file: the header, and then one tensor at a time."""
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
        for part in tensor.parts:
            contents = [content_of(chunk, shards, plan) for chunk in part.read]
            yield memoryview(_merged(contents, part) if part.adapter else contents[0])
            advance(part.size)


def _merged(contents: Sequence[bytearray], part: Part) -> bytes:
    """Return the bytes of a weight plus the product of its adapter's matrices, as float32.

    `contents` contains the bytes of each chunk in `part.read`.
    """
    assert part.adapter is not None
    weight, a, b = (
        _float32(content, chunk.dtype).reshape(chunk.shape) for content, chunk in zip(contents, part.read, strict=True)
    )
    if part.adapter.frozen_dtype.quantized:
        weight = as_quantized(weight, part.adapter.frozen_dtype)
    return (weight + weight.dtype.type(part.adapter.scale) * (b @ a)).tobytes()


def _float32(content: bytearray | memoryview, dtype: str) -> NDArray[np.float32]:
    """Return values of a floating-point dtype as float32, which represents BF16 and F16 exactly."""
    import numpy as np

    if dtype == "BF16":
        return (np.frombuffer(content, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(content, {"F16": "<f2", "F32": "<f4", "F64": "<f8"}[dtype]).astype("<f4")


def _converted(content: memoryview, dtype: str, wanted: str) -> memoryview:
    """Return `content` converted to the dtype `wanted`, rounded to the nearest value as torch rounds.

    Supported conversions are to F32, and to BF16 except for NaNs.
    """
    values = _float32(content, dtype)
    if wanted == "BF16":
        bits = values.view("<u4")
        return memoryview(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes())
    return memoryview(values.tobytes())


def content_of(chunk: Chunk, shards: Sequence[ShardReader], plan: ReadPlan) -> bytearray:
    """Return the bytes of a chunk, read from the shards, in row-major order and in the chunk's dtype."""
    itemsize = ITEM_SIZES[chunk.dtype]
    out = bytearray(chunk.size)
    for item in plan.of(chunk):
        data = memoryview(bytearray(item.size))
        shards[item.shard].read_into([(item.begin, data)])
        if item.dtype != chunk.dtype:
            data = _converted(data, item.dtype, chunk.dtype)
        for source, target, length in stretches(item.box, item.rows, Box.of(chunk), itemsize):
            out[target : target + length] = data[source : source + length]
    return out
