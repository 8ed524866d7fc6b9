"""Initial weights of a run (`checkpoint.initFrom`), from another run's checkpoint or from safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from concertina_protocol import SnapshotId
from concertina_protocol.codec.typed_json import MOST
from concertina_protocol.sidecar import Damaged
from concertina_state.checkpoints.latest import LATEST
from concertina_state.checkpoints.manifest import NAME
from concertina_state.checkpoints.reader import StoredShard
from concertina_state.errors import InvalidInput
from concertina_state.format.shardfile import (
    ITEM_SIZES,
    Chunk,
    Header,
    ShardMetadata,
    StoredChunk,
    counts,
    data_begin,
    header_length,
)
from concertina_state.objects.prefix import ObjectPrefix
from concertina_trainer.config.model_config import ModelConfig
from concertina_trainer.format import hf_config, hf_names

ENDING = ".safetensors"
WHOLE, INDEX = f"model{ENDING}", f"model{ENDING}.index.json"
UNSEEN = {name: hf_config.OURS[name] for name in ("num_attention_heads", "rms_norm_eps", "rope_theta")}
"""Fields of config.json whose values can't be inferred from the names and shapes of tensors."""
PASSED_OVER = ("rotary_emb.inv_freq",)
"""Suffixes of names of tensors in files that are not weights, and so are ignored."""
_NOBODY = ShardMetadata(SnapshotId(0, 0, "", 1), 0, 0, "", "")


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
    """One safetensors file or a folder of them. Tensors have this project's names or those of Hugging Face's Llama."""

    def __init__(self, uri: str) -> None:
        """Find the files at `uri`.

        Raises:
            InvalidInput: When there are no such files.
            StorageError: When storage can't be read.
        """
        self.uri = uri
        if uri.endswith(ENDING):
            folder, _, file = uri.rpartition("/")
            self._folder, self._keys = ObjectPrefix(folder), [file]
        else:
            self._folder = ObjectPrefix(uri)
            self._keys = self._of_the_model()
        if not self._keys:
            raise InvalidInput(f"{uri} holds no {NAME}, no {LATEST} and no {ENDING} file: correct checkpoint.initFrom.")

    def _of_the_model(self) -> list[str]:
        """Return the names of the files that transformers would load.

        A folder can contain the same weights a second time, under other names.

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

    def check(self, model: ModelConfig) -> str:
        """Check that config.json describes `model`. Return a sentence about what could not be checked, or "".

        Without config.json, only the names and shapes of tensors can be checked.

        Raises:
            InvalidInput: When config.json describes another model.
        """
        where = f"{self._folder.uri}/{hf_config.NAME}"
        text = self._folder.get(hf_config.NAME)
        if text is not None:
            hf_config.check(text, where, model)
            return ""
        fields = ", ".join(f"{field} ({exported_name})" for exported_name, field in UNSEEN.items())
        return (
            f"there is no {where}: that the weights were trained with the same {fields}, activation and rope scaling "
            "as spec.trainer.model says could not be checked; only names and shapes were"
        )

    @cached_property
    def shards(self) -> list[FileWeights]:
        """Readers of the tensors of each file.

        Raises:
            InvalidInput: When a file can't be used, or has a tensor that the model has no place for.
        """
        return [
            FileWeights(self._folder, key, {stored.chunk.name: stored for stored in self._stored_chunks(key)})
            for key in self._keys
        ]

    def _stored_chunks(self, key: str) -> Iterator[StoredChunk]:
        where = f"{self._folder.uri}/{key}"
        try:
            header_size = header_length(bytes(self._folder.get_ranges(key, [(0, 8)])[0]))
            header = json.loads(bytes(self._folder.get_ranges(key, [(8, header_size)])[0]))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                if not name.endswith(PASSED_OVER):
                    yield _stored_chunk(name, entry, header_size, where)
        except (Damaged, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise InvalidInput(f"{where} is no safetensors file that can be read: {str(error)[:MOST]}.") from error


def _stored_chunk(name: str, entry: dict[str, Any], header_size: int, where: str) -> StoredChunk:
    dtype, shape = str(entry["dtype"])[:20], counts(entry["shape"])
    bare = name.removeprefix(hf_names.MODEL)
    own_name = hf_names.ours(name) or (bare if hf_names.theirs(bare) else None)
    if own_name is None:
        raise InvalidInput(
            f"{where} has a tensor {name:.100}, which the bundled model has no place for: it is of another kind of "
            "model, and can't be begun with."
        )
    if dtype not in ITEM_SIZES:
        raise InvalidInput(f"{name} in {where} has the dtype {dtype}: convert it to one of {', '.join(ITEM_SIZES)}.")
    if not shape:
        raise InvalidInput(f"{name} in {where} is a single number, and not a tensor of the bundled model.")
    chunk = Chunk(f"{hf_names.MODEL}{own_name}", dtype, (0,) * len(shape), shape, shape)
    return StoredChunk(chunk, header_size + data_begin(entry))


def is_checkpoint(uri: str) -> bool:
    """Return whether `uri` is a checkpoint of this project or a run's folder, and not files of weights."""
    if uri.endswith(ENDING):
        return False
    folder = ObjectPrefix(uri)
    return folder.get(NAME) is not None or folder.get(LATEST) is not None
