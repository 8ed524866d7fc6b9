"""Search for documents that occur more than once in a data set. They are counted, and removed on request.

For each document, the process that writes it records a row with the document's digest and counts. The process that
finishes the build compares the digests of all inputs. That process keeps the first occurrence of each document in the
order of the shards, so the result does not depend on the number of processes and machines. If a shard has no
duplicates, it is not written again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from concertina_data.data_manifest import TokenShard
from concertina_state.objects.prefix import ObjectPrefix
from concertina_trainer.data.build.chat_counts import ChatCounts
from concertina_trainer.data.build.draft import Draft

DIGEST_BYTES = 16
"""Bytes of a digest. Among 10^12 different documents, the chance of two equal digests is below 10^-14."""


ROW = np.dtype([
    ("digest", np.void, DIGEST_BYTES), ("trained", "<u4"), ("truncated", np.uint8), ("overlaps", np.bool_),
    ("text_bytes", "<u8"),
])  # fmt: skip
"""dtype of the row of a document.

`trained` and `truncated` are the document's ChatCounts. `overlaps` says whether the document has an n-gram of the
evaluation data. `text_bytes` is the size of the document's text, or 0 (see `Document.text_bytes`).
"""
_Rows = NDArray[np.void]


def digest(document: bytes) -> bytes:
    """Return a digest of a document's content: its elements in the format of a shard."""
    return hashlib.sha256(document).digest()[:DIGEST_BYTES]


def row(document: bytes, chats: ChatCounts, overlaps: bool, text_bytes: int) -> tuple[bytes, int, int, bool, int]:
    """Return the row of a document with the content `document`.

    `overlaps` says whether the document has an n-gram of the evaluation data.
    """
    return digest(document), chats.trained, chats.truncated, overlaps, text_bytes


def rows_of(recorded: bytes) -> _Rows:
    return np.frombuffer(recorded, ROW)


def first_occurrences(rows: _Rows) -> NDArray[np.bool_]:
    """Return for each document whether it is the first one with its digest."""
    first = np.zeros(len(rows), bool)
    first[np.unique(rows["digest"], return_index=True)[1]] = True
    return first


def chats_of(rows: _Rows) -> ChatCounts:
    return ChatCounts(int(rows["trained"].sum(dtype=np.int64)), int(rows["truncated"].sum(dtype=np.int64)))


def removed(
    folder: ObjectPrefix, shards: Sequence[TokenShard], rows: _Rows, keep: NDArray[np.bool_], element_bytes: int
) -> list[TokenShard] | None:
    """Write shards without the documents to remove, under new names, and return all shards that remain.

    `rows` contains the row of each document, and `keep` says whether the document stays.

    The old shards stay, because another process may be finishing the same build. If an old shard is missing, another
    process has finished the build, and the result is None.
    """
    remaining: list[TokenShard] = []
    edges = np.cumsum([0, *(shard.documents for shard in shards)])
    for shard, begin, end in zip(shards, edges[:-1], edges[1:], strict=True):
        of_shard = keep[begin:end]
        text_bytes = int(rows["text_bytes"][begin:end][of_shard].sum())
        unique = (shard,) if of_shard.all() else _without(folder, shard, of_shard, element_bytes, text_bytes)
        if unique is None:
            return None
        remaining += unique
    return remaining


def _without(
    folder: ObjectPrefix, shard: TokenShard, keep: NDArray[np.bool_], element_bytes: int, text_bytes: int
) -> Sequence[TokenShard] | None:
    content, begins = folder.get(shard.file), folder.get(shard.documents_file)
    if content is None or begins is None:
        return None
    edges = [int(begin) * element_bytes for begin in np.frombuffer(begins, "<u8")] + [len(content)]
    draft = Draft()
    draft.documents = [content[edges[i] : edges[i + 1]] for i in np.flatnonzero(keep).tolist()]
    draft.text_bytes = text_bytes
    return draft.put(folder, f"{shard.file.removesuffix('.bin')}-unique", element_bytes)
