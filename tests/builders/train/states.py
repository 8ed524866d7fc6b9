"""Content of a job's newest snapshot, or of a checkpoint, assembled from its shards."""

import json

import torch

from concertina_state.checkpoints.reader import StoredCheckpoint
from concertina_state.format.shardfile import header_length, parse_header
from concertina_state.tensors import DTYPES


def shards(job):
    """Yield header and content of each shard, of the newest snapshot of which every shard is held."""
    id = job.newest().id
    for shard in range(id.shards):
        content = bytearray(job.find(id, shard).read_bytes())
        begin = header_length(content[:8])
        yield bytes(content[8:begin]), content


def whole(job):
    """Return the whole tensors by name."""
    return _together(shards(job))


def of_checkpoint(uri):
    """Return the whole tensors of a checkpoint in storage by name."""
    return _together(_shards_of(StoredCheckpoint(uri)))


def _shards_of(checkpoint):
    for shard in checkpoint.shards:
        content = bytearray(b"".join(shard.blocks()))
        begin = header_length(content[:8])
        yield bytes(content[8:begin]), content


def _together(shards):
    tensors = {}
    for header, content in shards:
        for name, stored in parse_header(header).chunks.items():
            chunk = stored.chunk
            dtype = DTYPES[chunk.dtype]
            value = torch.frombuffer(content, dtype=dtype, offset=stored.begin, count=chunk.size // dtype.itemsize)
            target = tensors.setdefault(name, torch.full(chunk.global_shape, torch.nan, dtype=dtype))
            target[tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.shape, strict=True))] = value.view(
                chunk.shape
            )
    return tensors


def replicated(job):
    """Return the text that each rank has written of the replicated state, without the shard's own number.

    All ranks must have written the same text.
    """
    texts = set()
    for header, _ in shards(job):
        metadata = json.loads(header)["__metadata__"]
        facts = json.loads(metadata["concertina"])
        del facts["shard"], facts["global_shapes"]
        texts.add(json.dumps(facts, sort_keys=True))
    return texts
