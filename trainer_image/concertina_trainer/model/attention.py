"""Attention within documents: a token sees those before it that are of its own document."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

Mask: TypeAlias = Any
"""A bool Tensor [batch, 1, length, length], or FlexAttention's BlockMask."""


def document_mask(document_ids: Tensor) -> Mask:
    """For document_ids [batch, length], the document that each token is of. On CUDA in blocks, which takes memory for
    blocks and not for pairs; FlexAttention has no backward on CPU."""
    if document_ids.device.type == "cuda":
        return _blocks(document_ids)
    return _pairs(document_ids)


def _pairs(document_ids: Tensor) -> Tensor:
    same = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    return same.tril_()


def _blocks(document_ids: Tensor) -> Mask:
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (document_ids[batch, query] == document_ids[batch, key])

    batch, length = document_ids.shape
    return create_block_mask(visible, batch, None, length, length, device=document_ids.device)


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

    compiled: Callable[..., Tensor] = torch.compile(flex_attention)
    return compiled
