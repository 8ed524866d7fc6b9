"""Initial weights of a run (`checkpoint.initFrom`), from another run's checkpoint or from safetensors files."""

from __future__ import annotations

import collections
import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from concertina_protocol import SnapshotId
from concertina_protocol.codec.typed_json import MOST
from concertina_protocol.sidecar import Damaged
from concertina_state.checkpoints.best import run_of_best
from concertina_state.checkpoints.latest import LATEST
from concertina_state.checkpoints.manifest import NAME
from concertina_state.checkpoints.reader import StoredCheckpoint, StoredShard, resolve
from concertina_state.errors import InvalidInput
from concertina_state.format.shardfile import (
    ITEM_SIZES,
    MOST_URI,
    Chunk,
    FrozenWeights,
    Header,
    ShardMetadata,
    StoredChunk,
    counts,
    data_begin,
    header_length,
)
from concertina_state.objects.prefix import ObjectPrefix
from concertina_state.objects.retry import final
from concertina_trainer.config.model_config import ModelConfig
from concertina_trainer.format import hf_config, hf_names
from concertina_trainer.format.hf_families import ENDS, FAMILIES, Family

T = TypeVar("T")
ENDING = ".safetensors"
WHOLE, INDEX = f"model{ENDING}", f"model{ENDING}.index.json"
COMPARED_BYTES = 1 << 24
"""Number of bytes of two tensors to compare at a time."""
UNSEEN = ("heads", "normEpsilon", "ropeTheta", "ropeScaling")
"""Fields of the model that can't be inferred from the names and shapes of tensors."""
PASSED_OVER = ("rotary_emb.inv_freq",)
"""Suffixes of names of tensors in files that are ignored, because they are not weights."""
_NOBODY = ShardMetadata(SnapshotId(0, 0, "", 1), 0, 0, "", "")


class _Part(NamedTuple):
    """Tensor of a file, and the part of a weight that the tensor contains."""

    key: str
    """Name of the file."""
    name: str
    """Name of the tensor in the file."""
    stored: StoredChunk


class FileWeights:
    """Tensors of one safetensors file."""

    batch_bytes = StoredShard.batch_bytes

    def __init__(self, folder: ObjectPrefix, key: str, chunks: dict[str, StoredChunk]) -> None:
        self._folder, self._key = folder, key
        self.header = Header(_NOBODY, chunks)

    def read_into(self, parts: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each memoryview with bytes of the file, beginning at the memoryview's offset.

        Raises:
            StorageError: When the file can't be read.
        """
        contents = self._folder.get_ranges(self._key, [(begin, begin + len(target)) for begin, target in parts])
        for (_, target), data in zip(parts, contents, strict=True):
            target[:] = data


class SafetensorsFiles:
    """One safetensors file or a folder of them. Tensors have this project's names or those of a Hugging Face model."""

    def __init__(self, uri: str) -> None:
        """Find the files at `uri`.

        Raises:
            InvalidInput: When there are no such files.
            StorageError: When storage can't be read.
        """
        self.uri = uri
        self._has_tied_head = False
        """True if a file contains an output layer although the model uses its embeddings as the output layer.

        Some programs store such weights twice, and declare them as tied in config.json.
        """
        self._parts: dict[tuple[str, tuple[int, ...]], _Part] = {}
        """First tensor of the files for each part of a weight, keyed by the weight's name and the part's offsets."""
        self._copies: list[tuple[_Part, _Part]] = []
        """Pairs of tensors of the files for the same part of a weight: the first tensor and a further one."""
        self._left_out = range(0)
        """Numbers of layers that files may contain although the model does not have these layers."""
        if uri.endswith(ENDING):
            folder, _, file = uri.rpartition("/")
            self._folder, self._keys = ObjectPrefix(folder), [file]
        else:
            self._folder = ObjectPrefix(uri)
            self._keys = self._of_the_model()
        if not self._keys:
            raise InvalidInput(
                f"{uri} has no {NAME}, no {LATEST}, no .metadata and no {ENDING} file: correct checkpoint.initFrom."
            )

    def _of_the_model(self) -> list[str]:
        """Return the names of the files that transformers would load.

        Other files are left out, because a folder can contain the same weights a second time under other names.

        Raises:
            InvalidInput: When the index can't be read.
        """
        keys = sorted(key for key in self._folder.entries() if key.endswith(ENDING) and "/" not in key)
        if WHOLE in keys:
            return [WHOLE]
        index = self._folder.get(INDEX)
        if index is None:
            return keys
        try:
            return sorted(set(json.loads(index)["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidInput(f"{self.uri}/{INDEX} can't be read: {error}.") from error

    def of(self, model: ModelConfig) -> tuple[list[FileWeights], str]:
        """Return the tensors of the files, under the names that this project has for the weights of the model.

        The second result is a sentence about omitted checks and omitted tensors, or "".

        Raises:
            InvalidInput: When config.json describes a different model, a file can't be used, or the model lacks a
                tensor.
        """
        where = f"{self._folder.uri}/{hf_config.NAME}"
        text = self._folder.get(hf_config.NAME)
        if text is not None:
            described, unchecked = hf_config.check(text, where, model), ""
            family, remark = described.family, described.left_out
            self._left_out = range(model.layers, model.layers + described.prediction_layers)
        else:
            found = hf_config.family_of(model)
            family, remark = found[1] if found else FAMILIES["llama"], ""
            unchecked = (
                f"{where} is missing, so only the names and shapes of the weights were checked. Make sure "
                f"that they were trained with the same {', '.join(UNSEEN)} and activation as in "
                "spec.trainer.model"
            )
        files = [weights for key in self._keys for weights in self._read(key, model, family)]
        if unchecked and self._has_tied_head:
            raise InvalidInput(
                f"{self.uri} has {ENDS['head.weight']}, and this model uses its embeddings as output layer: set "
                f"spec.trainer.model.tieEmbeddings to false, or put the config.json of the weights at {where}."
            )
        return files, unchecked or remark

    def of_module(
        self, options: Mapping[str, Any], place: Callable[[str], hf_names.Place | None]
    ) -> tuple[list[FileWeights], str]:
        """Return the tensors of the files under the names of a module of transformers, and a sentence for the log.

        Args:
            options: Fields of the config.json of the module.
            place: Function that returns the Place of a file's tensor in the module, or None if the tensor is not read.

        Raises:
            InvalidInput: When config.json describes another model, or a file can't be used.
        """
        text = self._folder.get(hf_config.NAME)
        if text is not None:
            hf_config.check_fields(text, f"{self._folder.uri}/{hf_config.NAME}", options)

        def chunks(key: str) -> Iterator[StoredChunk]:
            with _readable(f"{self._folder.uri}/{key}"):
                for name, entry, header_size, where in self._entries(key):
                    own = place(name)
                    if own is not None:
                        stored = StoredChunk(_placed(own, name, entry, where), header_size + data_begin(entry))
                        if self._is_first(key, name, stored):
                            yield stored

        weights = [
            FileWeights(self._folder, key, named)
            for key in self._keys
            for named in with_distinct_names((stored.chunk.name, stored) for stored in chunks(key))
        ]
        self._check_overlaps()
        remark = (
            f"{self._folder.uri}/{hf_config.NAME} is missing, so only the names and shapes of the weights were "
            "checked. Make sure that they belong to the model of trainer.model.hf."
        )
        return weights, remark if text is None else ""

    def check_copies(self, rank: int, size: int) -> None:
        """Check that tensors that a model uses as one weight are equal, such as an output layer and the embeddings.

        transformers does not tie weights that differ, even if config.json declares them as tied. Rank `rank` of `size`
        compares its share of the bytes.

        Raises:
            InvalidInput: When the tensors differ.
            StorageError: When a file can't be read.
        """
        for first, other in self._copies:
            length = first.stored.chunk.size
            equal = (first.stored.chunk.dtype, length) == (other.stored.chunk.dtype, other.stored.chunk.size)
            begin, end = length * rank // size, length * (rank + 1) // size
            for at in range(begin, end if equal else begin, COMPARED_BYTES):
                pieces = [
                    bytes(self._folder.get_ranges(key, [(start + at, start + min(end, at + COMPARED_BYTES))])[0])
                    for key, start in ((part.key, part.stored.begin) for part in (first, other))
                ]
                equal = equal and pieces[0] == pieces[1]
            if not equal:
                raise InvalidInput(
                    f"{self.uri} has different values in {first.name:.100} and {other.name:.100}, and the model has "
                    f"one weight for both: remove one of them, or set tie_word_embeddings in {hf_config.NAME} to false "
                    "if they are the embeddings and the output layer."
                )

    def _is_first(self, key: str, name: str, stored: StoredChunk) -> bool:
        """Record a tensor of a file, and return whether it is the first one for its part of a weight."""
        part = _Part(key, name, stored)
        first = self._parts.setdefault((stored.chunk.name, stored.chunk.offsets), part)
        if first is not part:
            self._copies.append((first, part))
        return first is part

    def _check_overlaps(self) -> None:
        """Check that no two parts of a weight have elements in common.

        Raises:
            InvalidInput: When two parts overlap, because their tensors could have different values for the same
                elements.
        """
        sizes: collections.Counter[str] = collections.Counter()
        for part in self._parts.values():
            chunk = part.stored.chunk
            sizes[chunk.name] += math.prod(chunk.shape)
            if sizes[chunk.name] > math.prod(chunk.global_shape):
                raise InvalidInput(
                    f"{self.uri} has a part of {chunk.name.removeprefix(hf_names.MODEL)} twice: {part.name:.100} is "
                    "also in another tensor. Remove one of them."
                )

    def _read(self, key: str, model: ModelConfig, family: Family) -> Iterator[FileWeights]:
        """Yield readers of the file `key`, each with at most one part of each tensor.

        A file can contain several parts of a tensor: a Hugging Face model has one tensor for each expert, and this
        project has one tensor for all experts of a layer.
        """
        stored_chunks = self._stored_chunks(key, model, family)
        for chunks in with_distinct_names((stored.chunk.name, stored) for stored in stored_chunks):
            yield FileWeights(self._folder, key, chunks)

    def _stored_chunks(self, key: str, model: ModelConfig, family: Family) -> Iterator[StoredChunk]:
        with _readable(f"{self._folder.uri}/{key}"):
            for name, entry, header_size, where in self._entries(key):
                is_tied_head = model.tie_embeddings and name == ENDS["head.weight"]
                self._has_tied_head |= is_tied_head
                if name.endswith(PASSED_OVER) or hf_names.layer_of(name) in self._left_out:
                    continue
                # The output layer of a tied model is a copy of its embeddings.
                published = ENDS["embedding.weight"] if is_tied_head else name
                for stored in _chunks_of(published, entry, header_size, where, model, family):
                    if self._is_first(key, name, stored):
                        yield stored

    def _entries(self, key: str) -> Iterator[tuple[str, dict[str, Any], int, str]]:
        """Yield the name and the entry of each tensor of a file, the size of the header, and the file's URI."""
        header_size = header_length(bytes(self._folder.get_ranges(key, [(0, 8)])[0]))
        header = json.loads(bytes(self._folder.get_ranges(key, [(8, header_size)])[0]))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            yield name, entry, header_size, f"{self._folder.uri}/{key}"


@contextlib.contextmanager
def _readable(where: str) -> Iterator[None]:
    """Convert errors about the contents of a safetensors file to InvalidInput.

    Raises:
        InvalidInput: When the file can't be read.
    """
    try:
        yield
    except (Damaged, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise InvalidInput(f"{where} can't be read as a safetensors file: {str(error)[:MOST]}.") from error


def with_distinct_names(items: Iterable[tuple[str, T]]) -> list[dict[str, T]]:
    """Divide named items into as few dicts as possible, so that a name occurs once in each dict.

    A header of a file has each name only once, but a file can contain several parts of the same tensor.
    """
    groups: list[dict[str, T]] = []
    for name, item in items:
        group = next((group for group in groups if name not in group), None)
        if group is None:
            groups.append(group := {})
        group[name] = item
    return groups


def _chunks_of(
    name: str, entry: dict[str, Any], header_size: int, where: str, model: ModelConfig, family: Family
) -> Iterator[StoredChunk]:
    """Yield the weights of this project that one tensor of a file contains.

    A tensor contains one weight, a part of a weight (one expert's), or the rows of several weights.

    Raises:
        InvalidInput: When the model has no counterpart of the tensor.
    """
    bare = name.removeprefix(hf_names.MODEL)
    own = hf_names.ours(name, family) or ([hf_names.OwnName(bare)] if hf_names.theirs(bare, family) else [])
    if not own:
        raise InvalidInput(
            f"{where} contains the tensor {name:.100}, which the bundled model does not have: use weights "
            "of a supported model."
        )
    dtype, shape = _form(name, entry, where)
    begin = header_size + data_begin(entry)
    if len(own) > 1:
        rows = [hf_names.rows(part.name, model) for part in own]
        if sum(rows) != shape[0]:
            raise InvalidInput(f"{name} in {where} has {shape[0]} rows, but spec.trainer.model needs {sum(rows)}.")
        row_bytes = ITEM_SIZES[dtype] * math.prod(shape[1:])
        for part, count in zip(own, rows, strict=True):
            yield StoredChunk(_chunk(part.name, dtype, (count, *shape[1:])), begin)
            begin += count * row_bytes
        return
    [weight] = own
    if weight.expert is None:
        yield StoredChunk(_chunk(weight.name, dtype, shape), begin)
        return
    experts = model.experts.count if model.experts else 0
    if weight.expert >= experts:
        raise InvalidInput(
            f"{where} contains the tensor {name:.100}, but spec.trainer.model has {experts} experts in a layer."
        )
    offsets = (weight.expert, *(0 for _ in shape))
    chunk = Chunk(f"{hf_names.MODEL}{weight.name}", dtype, offsets, (1, *shape), (experts, *shape))
    yield StoredChunk(chunk, begin)


def _placed(place: hf_names.Place, name: str, entry: dict[str, Any], where: str) -> Chunk:
    """Return the part of a transformers module's tensor that one tensor of a file contains.

    Raises:
        InvalidInput: When the tensor's shape differs from the shape of that part.
    """
    dtype, shape = _form(name, entry, where)
    if place.box is None:
        return _chunk(place.name, dtype, shape)
    if shape != place.box.shape[1:]:
        raise InvalidInput(
            f"{name} in {where} has the shape {list(shape)}, but the model of trainer.model.hf needs "
            f"{list(place.box.shape[1:])}."
        )
    return Chunk(f"{hf_names.MODEL}{place.name}", dtype, place.box.offsets, place.box.shape, place.whole)


def _form(name: str, entry: Mapping[str, Any], where: str) -> tuple[str, tuple[int, ...]]:
    """Return the dtype and the shape of a tensor in a file.

    Raises:
        InvalidInput: When the tensor can't be a weight.
    """
    dtype, shape = str(entry["dtype"])[:20], counts(entry["shape"])
    if dtype not in ITEM_SIZES:
        raise InvalidInput(f"{name} in {where} has the dtype {dtype}: convert it to one of {', '.join(ITEM_SIZES)}.")
    if not shape:
        raise InvalidInput(f"{name} in {where} is a single number, not a tensor of the model.")
    return dtype, shape


def _chunk(name: str, dtype: str, shape: tuple[int, ...]) -> Chunk:
    return Chunk(f"{hf_names.MODEL}{name}", dtype, (0,) * len(shape), shape, shape)


def is_checkpoint(uri: str) -> bool:
    """Return whether `uri` is a checkpoint of this project or a run's folder, as opposed to files of weights."""
    if uri.endswith(ENDING):
        return False
    if run_of_best(uri) is not None:
        return True
    folder = ObjectPrefix(uri)
    return folder.get(NAME) is not None or folder.get(LATEST) is not None


def frozen_weights_of(uri: str) -> FrozenWeights | None:
    """Return the frozen weights that a run with adapters must read again at each restore, if the run begins with `uri`.

    The result is None if `uri` is a checkpoint of this project that has all weights. In that case, the frozen weights
    are saved with the state, because the run that made the checkpoint may delete it.

    Raises:
        InvalidInput: When the URI is too long for a state's header.
        StorageError: When storage can't be read.
    """
    if is_checkpoint(uri):
        return StoredCheckpoint(resolve(uri)).manifest.frozen
    if len(json.dumps(json.dumps(uri))) > MOST_URI:
        raise InvalidInput(f"checkpoint.initFrom has more than {MOST_URI} characters: give the weights a shorter URI.")
    return FrozenWeights(uri)


def frozen_files(frozen: FrozenWeights, model: ModelConfig) -> list[FileWeights]:
    """Return readers of the files of frozen weights.

    Raises:
        InvalidInput: When the files do not fit the model.
        StorageError: When storage can't be read.
    """
    return final(lambda: SafetensorsFiles(frozen.uri).of(model)[0])
