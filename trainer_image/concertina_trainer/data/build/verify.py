"""Verification of a whole data set against its manifest."""

from __future__ import annotations

import concurrent.futures
import hashlib
from collections.abc import Iterator

import numpy as np

from concertina_data.data_manifest import TOKEN, WEIGHT, DataManifest, TokenShard
from concertina_state.objects.prefix import ObjectPrefix, StorageError
from concertina_trainer.data import elements


def verify(folder: ObjectPrefix, manifest: DataManifest, threads: int) -> Iterator[tuple[TokenShard, str]]:
    """Yield each shard in order, with a sentence about its damage, or "" if the shard is correct."""
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        problems = pool.map(lambda shard: _problem(folder, shard, manifest), manifest.shards)
        yield from zip(manifest.shards, problems, strict=True)


def _problem(folder: ObjectPrefix, shard: TokenShard, manifest: DataManifest) -> str:
    location = f"{folder.uri}/{shard.file}"
    try:
        content, begins = folder.get(shard.file), folder.get(shard.documents_file)
    except StorageError as error:
        return str(error)
    if content is None or begins is None:
        return f"{location if content is None else f'{folder.uri}/{shard.documents_file}'} is missing."
    if hashlib.sha256(content).hexdigest() != shard.sha256:
        return f"{location} is damaged: the sha256 of its {len(content)} bytes differs from the manifest's."
    if hashlib.sha256(begins).hexdigest() != shard.documents_sha256:
        return f"{folder.uri}/{shard.documents_file} is damaged: its sha256 differs from the manifest's."
    starts = np.frombuffer(begins, "<u8")
    if len(starts) != shard.documents or starts[0] != 0 or (np.diff(starts.astype(np.int64)) <= 0).any():
        return (
            f"{folder.uri}/{shard.documents_file} does not contain the beginnings of {shard.documents} "
            "documents, which the manifest names."
        )
    if len(content) != shard.tokens * manifest.element_bytes:
        return (
            f"{location} has {len(content)} bytes, but the manifest has {shard.tokens} elements of "
            f"{manifest.element_bytes} bytes."
        )
    values = elements.parts(content, manifest.fields)
    for name, array in values.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            return f"{location} contains values of {name} that are not finite."
    if manifest.chats is not None and values[WEIGHT].max() > 1:
        return f"{location} holds weight {values[WEIGHT].max()}, and weights of chats are 0 or 1."
    if TOKEN in values and (highest := int(values[TOKEN].max())) >= manifest.vocab_size:
        return (
            f"{location} contains token {highest}, but the manifest's vocabulary has only {manifest.vocab_size} tokens."
        )
    return ""
