"""Packing of documents into sequences of one length: the number of sequences that each shard yields.

These numbers determine the order of a run's data, so a run needs them for all shards before it reads any shard
(decision "Packing is planned per shard and counted beforehand"). `concertina data pack` computes them and writes them
beside the manifest.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
from collections.abc import Iterator

import numpy as np

from concertina_data.data_manifest import DataManifest, TokenShard
from concertina_protocol.codec.typed_json import ProtocolError, parse_json
from concertina_state.errors import InvalidInput
from concertina_state.objects.prefix import ObjectPrefix
from concertina_trainer.data.sequence_plan import bucketed, packed

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Packing:
    """Numbers of packed sequences of a data set, for one length."""

    format: int
    data: str
    """Digest of the data set."""
    length: int
    packed: tuple[int, ...]
    bucketed: tuple[int, ...]
    """Number of sequences of each shard, in the order of the manifest, in the mode `Bucketed` of `data.documents`."""
    fill: float
    """Fraction of the tokens in packed sequences that are not padding."""


def name(length: int) -> str:
    return f"packing-{length}.json"


def pack(
    folder: ObjectPrefix, manifest: DataManifest, length: int, threads: int
) -> Iterator[tuple[int, Packing | None]]:
    """Pack every shard, and yield the number of finished shards after each one.

    At the end, write the result beside the manifest, and yield the result together with the number of all shards.

    Raises:
        InvalidInput: When a file of documents is missing or damaged.
    """

    def counted(shard: TokenShard) -> tuple[int, int, int]:
        begins = folder.get(shard.documents_file)
        if begins is None or hashlib.sha256(begins).hexdigest() != shard.documents_sha256:
            raise InvalidInput(
                f"{folder.uri}/{shard.documents_file} is missing or damaged: copy it again, or build the data again."
            )
        starts = np.frombuffer(begins, "<u8").astype(np.int64)
        plan = packed(starts, shard.tokens, length)
        return len(plan), len(bucketed(starts, shard.tokens, length)), int(plan.lengths.sum())

    counts: list[tuple[int, int, int]] = []
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for shard_counts in pool.map(counted, manifest.shards):
            counts.append(shard_counts)
            yield len(counts), None
    in_packed, in_bucketed, tokens = (tuple(column) for column in zip(*counts, strict=True))
    fill = sum(tokens) / max(1, sum(in_packed) * (length + 1))
    result = Packing(FORMAT, manifest.digest, length, in_packed, in_bucketed, round(fill, 6))
    folder.put(name(length), json.dumps(dataclasses.asdict(result)).encode())
    yield len(counts), result


def read(text: bytes | None, uri: str, manifest: DataManifest, length: int) -> Packing:
    """Parse `text`, the packing of the data set at `uri`, and check that it is for `manifest` and `length`.

    Raises:
        InvalidInput: When there is no packing, or it is for other data.
    """
    advice = f"run `concertina data pack {uri} --length {length}`."
    if text is None:
        raise InvalidInput(f"{uri} has no plan for packed sequences of {length} tokens: {advice}")
    try:
        packing = parse_json(Packing, text)
    except ProtocolError as error:
        raise InvalidInput(f"{uri}/{name(length)} can't be read ({error}): {advice}") from error
    if (packing.format, packing.data, packing.length) != (FORMAT, manifest.digest, length):
        raise InvalidInput(f"{uri}/{name(length)} was made for other data than those of the manifest: {advice}")
    return packing
