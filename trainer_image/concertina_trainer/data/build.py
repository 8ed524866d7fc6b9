"""Byte-level token shards from text files, in parallel and always the same for the same files in the same order."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from concertina_trainer.data.manifest import FORMAT, NAME, Manifest, Shard
from concertina_trainer.storage import Folder

SHARD_BYTES = 64 * 2**20
SEPARATOR = b"\x00"
"""Ends each document: the byte that no text file has."""


@dataclasses.dataclass(frozen=True)
class _Plan:
    index: int
    files: tuple[Path, ...]


def build(
    files: Sequence[Path], out: str, shard_bytes: int = SHARD_BYTES
) -> Iterator[tuple[int, int, Manifest | None]]:
    """Write shards and manifest below the URI or path `out`. Yields (files done, files in all, None) as it goes and
    the manifest with the last. A document never crosses from one shard into the next."""
    plans = list(_cut(files, shard_bytes))
    uri = out if "://" in out else str(Path(out).resolve())
    shards, done = [], 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for plan, shard in zip(plans, pool.map(lambda plan: _write(plan, uri), plans), strict=True):
            shards.append(shard)
            done += len(plan.files)
            yield done, len(files), None
    manifest = Manifest(FORMAT, 1, 256, tuple(shards))
    Folder(uri, create=True).put(NAME, manifest.to_json())
    yield done, len(files), manifest


def _cut(files: Sequence[Path], shard_bytes: int) -> Iterator[_Plan]:
    """Consecutive files to shards, by size alone."""
    group: list[Path] = []
    size = index = 0
    for file in files:
        length = file.stat().st_size + len(SEPARATOR)
        if group and size + length > shard_bytes:
            yield _Plan(index, tuple(group))
            group, size, index = [], 0, index + 1
        group.append(file)
        size += length
    if group:
        yield _Plan(index, tuple(group))


def _write(plan: _Plan, uri: str) -> Shard:
    texts = [file.read_bytes().replace(SEPARATOR, b" ") + SEPARATOR for file in plan.files]
    begins = np.cumsum([0, *(len(text) for text in texts[:-1])], dtype="<u8").tobytes()
    content = b"".join(texts)
    name = f"shard-{plan.index:06}"
    folder = Folder(uri, create=True)
    folder.put(f"{name}.bin", content)
    folder.put(f"{name}.documents", begins)
    return Shard(
        file=f"{name}.bin",
        tokens=len(content),
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        documents_file=f"{name}.documents",
        documents=len(texts),
        documents_sha256=hashlib.sha256(begins).hexdigest(),
    )
