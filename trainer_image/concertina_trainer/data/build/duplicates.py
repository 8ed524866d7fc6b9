"""Documents that occur more than once in a data set: they are counted, and removed on request.

Each input of a build records a digest of each of its documents. The process that finishes the build compares the
digests of all inputs. It keeps the first occurrence of each document, in the order of the shards, so the result does
not depend on the number of processes and machines. A shard without duplicates is not written again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from concertina_data.data_manifest import TokenShard
from concertina_state.objects.prefix import ObjectPrefix
from concertina_trainer.data.build.draft import Draft

DIGEST_BYTES = 16
"""Bytes of a digest. Among 10^12 different documents, the chance of two equal digests is below 10^-14."""


def digest(document: bytes) -> bytes:
    """Return a digest of a document's content: its elements in the format of a shard."""
    return hashlib.sha256(document).digest()[:DIGEST_BYTES]


def first_occurrences(digests: bytes) -> NDArray[np.bool_]:
    """Return for each document whether it is the first one with its digest."""
    values = np.frombuffer(digests, np.dtype((np.void, DIGEST_BYTES)))
    first = np.zeros(len(values), bool)
    first[np.unique(values, return_index=True)[1]] = True
    return first


def removed(
    folder: ObjectPrefix, shards: Sequence[TokenShard], keep: NDArray[np.bool_], element_bytes: int
) -> list[TokenShard] | None:
    """Write the shards again that have documents to remove, under other names, and return all shards that remain.

    The old shards stay, because another process may be finishing the same build. If one is missing, another process has
    finished the build, and the result is None.
    """
    remaining: list[TokenShard] = []
    edges = np.cumsum([0, *(shard.documents for shard in shards)])
    for shard, begin, end in zip(shards, edges[:-1], edges[1:], strict=True):
        of_shard = keep[begin:end]
        unique = (shard,) if of_shard.all() else _without(folder, shard, of_shard, element_bytes)
        if unique is None:
            return None
        remaining += unique
    return remaining


def _without(
    folder: ObjectPrefix, shard: TokenShard, keep: NDArray[np.bool_], element_bytes: int
) -> Sequence[TokenShard] | None:
    content, begins = folder.get(shard.file), folder.get(shard.documents_file)
    if content is None or begins is None:
        return None
    edges = [int(begin) * element_bytes for begin in np.frombuffer(begins, "<u8")] + [len(content)]
    draft = Draft()
    draft.documents = [content[edges[i] : edges[i + 1]] for i in np.flatnonzero(keep).tolist()]
    return draft.put(folder, f"{shard.file.removesuffix('.bin')}-unique", element_bytes)
