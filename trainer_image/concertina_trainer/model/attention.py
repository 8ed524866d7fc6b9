"""Attention within documents: a token sees those before it that are of its own document.

Where several ranks share each sequence (`Context`), queries are those of this rank's tokens, and keys of all."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

Mask: TypeAlias = Any
"""A bool Tensor [batch or 1, 1, queries, keys], or FlexAttention's BlockMask."""
BLOCK = 128
"""Queries, and keys, of one of FlexAttention's blocks."""
PAIRS_AT_ONCE = 1 << 26
"""Of a query and a key, when blocks are found: some bytes each."""


class Context(Protocol):
    """How the ranks that share each sequence divide it."""

    @property
    def size(self) -> int:
        """Ranks."""
        ...

    def queries(self, length: int, device: torch.device) -> Tensor:
        """int64: which of a sequence's `length` tokens this rank computes."""
        ...

    def keys(self, length: int, device: torch.device) -> Tensor:
        """int64 [length]: which token each key is of that `gather` brings."""
        ...

    def gather(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Those of all tokens."""
        ...

    def take(self, tokens: Tensor) -> Tensor:
        """Of [batch, length] what this rank computes."""
        ...


def causal_mask(document_ids: Tensor | None, length: int, context: Context | None, device: torch.device) -> Mask | None:
    """For document_ids [batch, length], the document that each token of a whole sequence is of; None: they are not
    told apart. None where plain causal attention does. On CUDA in blocks, which takes memory for blocks and not for
    pairs; FlexAttention has no backward on CPU."""
    if document_ids is None and context is None:
        return None
    everything = torch.arange(length, device=device)
    queries = everything if context is None else context.queries(length, device)
    keys = everything if context is None else context.keys(length, device)
    return (_blocks if device.type == "cuda" else _pairs)(document_ids, queries, keys)


def _pairs(document_ids: Tensor | None, queries: Tensor, keys: Tensor) -> Tensor:
    visible = queries[:, None] >= keys[None, :]
    if document_ids is None:
        return visible[None, None]
    same = document_ids[:, queries][:, None, :, None] == document_ids[:, keys][:, None, None, :]
    return same & visible


def _blocks(document_ids: Tensor | None, queries: Tensor, keys: Tensor) -> Mask:
    """As FlexAttention's create_block_mask, which takes three bytes for each pair of all; here by some queries at a
    time."""
    from torch.nn.attention.flex_attention import BlockMask

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        q, k = queries[query], keys[key]
        return (q >= k) if document_ids is None else (q >= k) & (document_ids[batch, q] == document_ids[batch, k])

    device, rows = queries.device, 1 if document_ids is None else len(document_ids)
    batch = torch.arange(rows, device=device)[:, None, None]
    key = torch.arange(len(keys), device=device)
    at_once = max(1, PAIRS_AT_ONCE // (rows * len(keys) * BLOCK)) * BLOCK
    seen = torch.cat([
        _in_blocks(visible(batch, batch, query[:, None], key).expand(rows, -1, -1))
        for query in torch.arange(len(queries), device=device).split(at_once)
    ], dim=1)  # fmt: skip
    full = seen == BLOCK * BLOCK
    partial = (seen > 0) & ~full
    lengths = len(queries), len(keys)
    return BlockMask.from_kv_blocks(
        *_ordered(partial), *_ordered(full), BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=lengths
    )


def _in_blocks(pairs: Tensor) -> Tensor:
    """int64 [batch, blocks, blocks]: how many pairs of each are True in pairs [batch, queries, keys]."""
    whole = F.pad(pairs, (0, -pairs.shape[2] % BLOCK, 0, -pairs.shape[1] % BLOCK))
    cut: Tensor = whole.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK))
    return cut.sum(dim=(2, 4))


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """int32: in each row of blocks [batch, blocks, blocks] how many are True, and which ones, before all others."""
    chosen = blocks[:, None].to(torch.int32)
    first = torch.argsort(chosen, dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), first.to(torch.int32)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, gqa: bool) -> Tensor:
    """[batch, heads, length, head_dim]; causal, and as `mask` says where there is one."""
    if mask is None:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=gqa)
    if isinstance(mask, Tensor):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=gqa)
    result: Tensor = _compiled()(query, key, value, block_mask=mask, enable_gqa=gqa)
    return result


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    # Few kernels, and each of a node's workers would start a pool of processes for them: 8 on 16 cores took more than
    # 100 s, and 27 without.
    compiled: Callable[..., Tensor] = torch.compile(flex_attention, options={"compile_threads": 1})
    return compiled
