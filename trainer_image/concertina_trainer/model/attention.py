"""Attention within documents: a token attends to the earlier tokens of its own document.

If several ranks share each sequence (`Context`), queries are those of this rank's tokens, and keys those of all.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from concertina_trainer.model.precision import precise
from concertina_trainer.model.soft_cap import soft_capped

Mask: TypeAlias = Any
"""Bool tensor `[batch or 1, 1, queries, keys]`, or a BlockMask of FlexAttention."""
BLOCK = 128
"""Number of queries, and of keys, of one block of FlexAttention."""
PAIRS_AT_ONCE = 1 << 26
"""Number of pairs of a query and a key to examine at once when blocks are computed. Each takes some bytes."""


class Context(Protocol):
    """Division of each sequence among the ranks that share it."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def queries(self, length: int, device: torch.device) -> Tensor:
        """Return which of a sequence's `length` tokens this rank computes, as int64 `[length / size]`."""
        ...

    def keys(self, length: int, device: torch.device) -> Tensor:
        """Return the token of each key that `gather` returns, as int64 `[length]`."""
        ...

    def gather(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all tokens."""
        ...

    def take(self, tokens: Tensor) -> Tensor:
        """Return this rank's part of `tokens` `[batch, length]`."""
        ...


def causal_mask(
    document_ids: Tensor | None,
    length: int,
    context: Context | None,
    device: torch.device,
    window: int | None = None,
    needed: bool = False,
) -> Mask | None:
    """Return the attention mask, or None if plain causal attention suffices.

    On CUDA the mask consists of blocks, so its memory grows with blocks and not with pairs of tokens. FlexAttention has
    no backward pass on CPU.

    Args:
        document_ids: `[batch, length]`, the document of each token of a whole sequence. None: documents are not
            separated.
        length: Tokens of a whole sequence.
        context: Division of the sequence among ranks.
        device: Device of the mask.
        window: Number of tokens that a token attends to, itself included. None: all before it.
        needed: Whether to return a mask in any case.
    """
    size = length if window is None else min(window, length)
    if document_ids is None and context is None and size == length and not needed:
        return None
    everything = torch.arange(length, device=device)
    queries = everything if context is None else context.queries(length, device)
    keys = everything if context is None else context.keys(length, device)
    return (_blocks if device.type == "cuda" else _pairs)(document_ids, queries, keys, size)


def _pairs(document_ids: Tensor | None, queries: Tensor, keys: Tensor, window: int) -> Tensor:
    distance = queries[:, None] - keys[None, :]
    visible = (distance >= 0) & (distance < window)
    if document_ids is None:
        return visible[None, None]
    same_document = document_ids[:, queries][:, None, :, None] == document_ids[:, keys][:, None, None, :]
    return same_document & visible


def _blocks(document_ids: Tensor | None, queries: Tensor, keys: Tensor, window: int) -> Mask:
    """Return the mask that FlexAttention's create_block_mask returns.

    That function takes three bytes for each pair of tokens. This one examines some queries at a time.
    """
    from torch.nn.attention.flex_attention import BlockMask

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        q, k = queries[query], keys[key]
        near = (q >= k) & (q - k < window)
        return near if document_ids is None else near & (document_ids[batch, q] == document_ids[batch, k])

    device, rows = queries.device, 1 if document_ids is None else len(document_ids)
    batch = torch.arange(rows, device=device)[:, None, None]
    key = torch.arange(len(keys), device=device)
    at_once = max(1, PAIRS_AT_ONCE // (rows * len(keys) * BLOCK)) * BLOCK
    pair_counts = torch.cat([
        _in_blocks(visible(batch, batch, query[:, None], key).expand(rows, -1, -1))
        for query in torch.arange(len(queries), device=device).split(at_once)
    ], dim=1)  # fmt: skip
    full = pair_counts == BLOCK * BLOCK
    partial = (pair_counts > 0) & ~full
    lengths = len(queries), len(keys)
    return BlockMask.from_kv_blocks(
        *_ordered(partial), *_ordered(full), BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=lengths
    )


def _in_blocks(pairs: Tensor) -> Tensor:
    """Return how many pairs of each block are True.

    `pairs` is `[batch, queries, keys]`, and the result int64 `[batch, blocks, blocks]`.
    """
    whole = F.pad(pairs, (0, -pairs.shape[2] % BLOCK, 0, -pairs.shape[1] % BLOCK))
    cut: Tensor = whole.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK))
    return cut.sum(dim=(2, 4))


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks are True in each row, and the indices of the row with these first.

    `blocks` is `[batch, blocks, blocks]`. Both results are int32, with a dimension for heads inserted after the batch.
    """
    chosen = blocks[:, None].to(torch.int32)
    first = torch.argsort(chosen, dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), first.to(torch.int32)


@dataclasses.dataclass(frozen=True)
class Scores:
    """Scores of queries and keys."""

    gqa: bool
    """Whether several queries share a key."""
    scale: float
    """Factor of the product of a query and a key."""
    soft_cap: float | None = None
    """Soft bound of the scaled products."""


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, scores: Scores) -> Tensor:
    """Return causal attention under `mask`, as `[batch, heads, length, head_dim]`.

    Without a mask, scores have no soft bound: causal_mask returns one where `needed`.
    """
    gqa, scale = scores.gqa, scores.scale
    if mask is None:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=gqa)
    if isinstance(mask, Tensor) and scores.soft_cap is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=gqa)
    if isinstance(mask, Tensor):
        return _capped(query, key, value, mask, scores)
    cap = _cap_of(scores.soft_cap)
    result: Tensor = _compiled()(query, key, value, score_mod=cap, block_mask=mask, scale=scale, enable_gqa=gqa)
    return result


def _capped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scores: Scores) -> Tensor:
    """Compute attention by all pairs, as no kernel of torch on CPU has a soft bound."""
    shared = query.size(1) // key.size(1)
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    capped = soft_capped(query @ key.transpose(-2, -1) * scores.scale, scores.soft_cap)
    return precise(capped.masked_fill(~mask, -torch.inf)).softmax(-1).type_as(value) @ value


@functools.cache
def _cap_of(cap: float | None) -> Callable[..., Tensor] | None:
    """Return the function of a score for FlexAttention, always the same one, so that it is compiled once."""
    if cap is None:
        return None

    def bounded(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return soft_capped(score, cap)

    return bounded


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    # There are few kernels, and otherwise each worker of a node starts a pool of processes to compile them. With 8
    # workers on 16 cores that took more than 100 s, and 27 s without pools.
    compiled: Callable[..., Tensor] = torch.compile(flex_attention, options={"compile_threads": 1})
    return compiled
