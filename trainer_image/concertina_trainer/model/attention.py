"""Attention within documents: a token attends to itself and to the earlier tokens of its own document.

Under context parallelism (`Context`), the ranks of a context group share each sequence. A rank then computes the
queries of its own tokens, `[batch, heads, length / size, head_dim]`, with the keys and values of all tokens of the
sequence, which are gathered from the group.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from concertina_trainer.model.precision import precise
from concertina_trainer.model.soft_cap import soft_capped

Mask: TypeAlias = Any
"""Attention mask: a bool tensor `[batch or 1, 1, queries, keys]`, or a BlockMask of FlexAttention."""
BLOCK = 128
"""Number of queries, and number of keys, in one block of a FlexAttention mask."""
PAIRS_AT_ONCE = 1 << 26
"""Maximum number of pairs of a query and a key to examine at once, when the blocks of a mask are computed.

The number bounds the temporary memory, because each pair takes some bytes.
"""


class Context(Protocol):
    """Division of each sequence among the ranks of a context group (context parallelism)."""

    @property
    def size(self) -> int:
        """Number of ranks in the context group."""
        ...

    def queries(self, length: int, device: torch.device) -> Tensor:
        """Return the positions that this rank computes in a sequence of `length` tokens, int64 `[length / size]`."""
        ...

    def keys(self, length: int, device: torch.device) -> Tensor:
        """Return the position in the sequence of each key in the result of `gather`, int64 `[length]`.

        The gathered keys are in the order of ranks, which is not the order of the sequence.
        """
        ...

    def gather(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all tokens, gathered from the ranks of the context group.

        `key` and `value` are those of this rank's tokens, `[batch, heads, length / size, head_dim]`. The results are
        `[batch, heads, length, head_dim]`, in the order of the positions that the method `keys` returns.
        """
        ...

    def take(self, tokens: Tensor) -> Tensor:
        """Return the columns of `tokens` `[batch, length]` that this rank computes, `[batch, length / size]`."""
        ...


def causal_mask(
    document_ids: Tensor | None,
    length: int,
    context: Context | None,
    device: torch.device,
    window: int | None = None,
    needed: bool = False,
) -> Mask | None:
    """Return the attention mask, or None if the plain causal attention of torch (`is_causal`) suffices.

    On CUDA the mask is a BlockMask of FlexAttention, whose memory grows with the number of blocks. On CPU, where
    FlexAttention has no backward pass, the mask is a bool tensor with an element for each pair of tokens.

    Args:
        document_ids: Number of the document of each token in whole sequences, `[batch, length]`. None: documents are
            not separated.
        length: Number of tokens of a whole sequence.
        context: Division of the sequence among the ranks of a context group. None: each rank has whole sequences.
        device: Device of the mask.
        window: Number of tokens that a token attends to, itself included. None: itself and all tokens before it.
        needed: Whether to return a mask even if plain causal attention suffices. For example, `attend` needs a mask to
            apply a soft cap.
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
    """Return the BlockMask that FlexAttention's create_block_mask would return, but use less memory.

    create_block_mask takes three bytes for each pair of a query and a key. This function examines about PAIRS_AT_ONCE
    pairs at a time.
    """

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
    """Return the number of True pairs in each block of BLOCK queries and BLOCK keys.

    `pairs` is bool `[batch, queries, keys]`. The result is int64 `[batch, query blocks, key blocks]`.
    """
    whole = F.pad(pairs, (0, -pairs.shape[2] % BLOCK, 0, -pairs.shape[1] % BLOCK))
    cut: Tensor = whole.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK))
    return cut.sum(dim=(2, 4))


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the key blocks to compute for each query block, in the form that BlockMask requires.

    `blocks` is bool `[batch, query blocks, key blocks]`. The first result, int32 `[batch, 1, query blocks]`, is the
    number of True blocks in each row. The second result, int32 `[batch, 1, query blocks, key blocks]`, contains the
    indices of each row's key blocks, the True blocks first. The dimension of size 1 stands for the heads, because all
    heads have the same mask.
    """
    chosen = blocks[:, None].to(torch.int32)
    first = torch.argsort(chosen, dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), first.to(torch.int32)


@dataclasses.dataclass(frozen=True)
class Scores:
    """Parameters of the computation of attention scores from queries and keys."""

    gqa: bool
    """True if several query heads share a key head (grouped-query attention)."""
    scale: float
    """Factor of the dot product of a query and a key."""
    soft_cap: float | None = None
    """Soft cap of the scaled dot products (see `soft_capped`), or None."""


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, scores: Scores, sinks: Tensor | None = None
) -> Tensor:
    """Return causal attention under `mask`, as `[batch, heads, queries, head_dim]`.

    The soft cap of `scores` and the sinks are applied only if `mask` is not None. A caller that uses one of these two
    therefore calls causal_mask with `needed`.

    Args:
        query: `[batch, heads, queries, head_dim]`.
        key: `[batch, key heads, keys, head_dim]`.
        value: `[batch, key heads, keys, head_dim]`.
        mask: Result of causal_mask.
        scores: How scores are computed from queries and keys.
        sinks: Attention sinks, `[heads]`, or None if the model has none. A sink is one more score in the softmax of its
            head, without a value vector (gpt-oss model card, arXiv 2508.10925, section 2.2).
    """
    gqa, scale = scores.gqa, scores.scale
    if mask is None:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=gqa)
    if isinstance(mask, Tensor) and scores.soft_cap is None and sinks is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=gqa)
    if isinstance(mask, Tensor):
        return _by_pairs(query, key, value, mask, scores, sinks)
    # Within a compiled block, torch compiles FlexAttention with the block.
    flex: Any = flex_attention if torch.compiler.is_compiling() else _compiled()
    cap = None if scores.soft_cap is None else _cap_of(scores.soft_cap)
    arguments = {"score_mod": cap, "block_mask": mask, "scale": scale, "enable_gqa": gqa}
    result: Tensor
    if sinks is None:
        result = flex(query, key, value, **arguments)
        return result
    result, sums = flex(query, key, value, return_aux=AuxRequest(lse=True), **arguments)
    # The sink adds exp(sink) to the denominator exp(lse) of the softmax.
    share: Tensor = (sums.lse - precise(sinks)[:, None]).sigmoid().unsqueeze(-1)
    return (result * share).type_as(value)


def _by_pairs(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scores: Scores, sinks: Tensor | None) -> Tensor:
    """Compute attention with a soft cap or sinks on CPU, from the scores of all pairs of a query and a key.

    On CPU, no attention kernel of torch supports a soft cap or sinks.
    """
    shared = query.size(1) // key.size(1)
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    capped = soft_capped(query @ key.transpose(-2, -1) * scores.scale, scores.soft_cap)
    visible = precise(capped.masked_fill(~mask, -torch.inf))
    if sinks is None:
        return visible.softmax(-1).type_as(value) @ value
    column = precise(sinks).view(1, -1, 1, 1).expand(*visible.shape[:3], 1)
    return torch.cat([visible, column], -1).softmax(-1)[..., :-1].type_as(value) @ value


@functools.cache
def _cap_of(cap: float) -> Callable[..., Tensor]:
    """Return the function by which FlexAttention applies the soft cap `cap` to each score.

    The cache returns the same function for the same cap, so that torch.compile compiles it only once.
    """

    def bounded(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return soft_capped(score, cap)

    return bounded


COMPILER_OPTIONS: dict[str, Any] = {"compile_threads": 1}
"""Options of torch's compiler.

With more threads, each worker of a node would start a pool of processes to compile kernels, although there are only a
few kernels. With 8 workers on 16 cores, compilation took more than 100 s with the pools and 27 s without them.
"""


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    compiled: Callable[..., Tensor] = torch.compile(flex_attention, options=COMPILER_OPTIONS)
    return compiled
