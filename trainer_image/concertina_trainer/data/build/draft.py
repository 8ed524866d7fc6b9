"""Draft of a shard: its documents, its two files, and its entry in the manifest."""

from __future__ import annotations

import hashlib
import zlib

import numpy as np

from concertina_data.data_manifest import TokenShard
from concertina_state.objects.prefix import ObjectPrefix


class Draft:
    """Shard to which documents are still being added."""

    def __init__(self) -> None:
        self.documents: list[bytes] = []
        self.text_bytes = 0
        """Size in bytes of the text from which the documents were made, or 0 if it is unknown."""

    def put(self, folder: ObjectPrefix, name: str, token_bytes: int) -> tuple[TokenShard, ...]:
        if not self.documents:
            return ()
        content = b"".join(self.documents)
        lengths = [len(document) // token_bytes for document in self.documents]
        begins = np.cumsum([0, *lengths[:-1]], dtype="<u8").tobytes()
        folder.put(f"{name}.bin", content)
        folder.put(f"{name}.documents", begins)
        shard = TokenShard(
            file=f"{name}.bin",
            tokens=len(content) // token_bytes,
            size=len(content),
            sha256=hashlib.sha256(content).hexdigest(),
            crc32=zlib.crc32(content),
            documents_file=f"{name}.documents",
            documents=len(lengths),
            documents_sha256=hashlib.sha256(begins).hexdigest(),
            text_bytes=self.text_bytes or None,
        )
        return (shard,)
