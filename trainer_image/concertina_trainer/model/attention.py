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
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        q, k = queries[query], keys[key]
        return (q >= k) if document_ids is None else (q >= k) & (document_ids[batch, q] == document_ids[batch, k])

    batch = None if document_ids is None else len(document_ids)
    return create_block_mask(visible, batch, None, len(queries), len(keys), device=queries.device)


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
