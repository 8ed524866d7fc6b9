"""Mixture of experts (Shazeer et al. 2017): a router sends each token through some of the feed-forwards of a layer.

Each token is computed by all experts that the router chose for it. Experts have no capacity limit, so no token is
dropped. The load of an expert is the number of its tokens. Loads are balanced by a loss (Fedus et al. 2021, for each
sequence as in DeepSeek-V3, arXiv 2412.19437 section 2.1.2), by router biases that follow the loads (Wang et al. 2024,
arXiv 2408.15664; `training/expert_loads.py` updates them), or by both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from concertina_trainer.config.model_config import (
    FEED_FORWARD,
    Activation,
    ClampedSwigluConfig,
    ExpertsConfig,
    LoraConfig,
    Projection,
    RouterScores,
)
from concertina_trainer.format.adapters import matrices
from concertina_trainer.model.activation import ACTIVATIONS
from concertina_trainer.model.dropout import derived, keep_mask
from concertina_trainer.model.lora import NUMBERS
from concertina_trainer.model.precision import precise

GROUPED = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes for which torch has grouped matrix products (`grouped_mm`)."""


class Router(nn.Module):
    def __init__(self, dim: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.active, self.scores = config.active_per_token, config.scores
        self.weight = nn.Parameter(torch.empty(config.count, dim))
        self.logit_bias = None if config.clamped_swiglu is None else nn.Parameter(torch.empty(config.count))
        bias = None if config.bias_rate is None else torch.empty(config.count, dtype=torch.float32)
        self.register_buffer("bias", bias)
        self.bias: Tensor | None

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores of all experts, and the experts chosen for each token, for tokens `[n, dim]`.

        The scores are `[n, experts]`, in float32 or a higher precision. The indices of the chosen experts are int64
        `[n, active]`.
        """
        logit_bias = None if self.logit_bias is None else precise(_of_all_tokens(self.logit_bias))
        logits = F.linear(precise(tokens), precise(_of_all_tokens(self.weight)), logit_bias)
        scores = logits.softmax(-1) if self.scores is RouterScores.softmax else logits.sigmoid()
        preferences = scores.detach() if self.bias is None else scores.detach() + self.bias
        return scores, preferences.topk(self.active, dim=-1, sorted=False).indices


def _of_all_tokens(parameter: Tensor) -> Tensor:
    """Return a parameter of the router, or the gate of the shared experts, as a plain tensor.

    The ranks of a tensor group have the same parameter and different tokens, so the parameter's gradient is the sum
    over the group.
    """
    return parameter.to_local(grad_placements=[Partial()]) if isinstance(parameter, DTensor) else parameter


class Experts(nn.Module):
    """Experts of a layer that are on this rank, as one module.

    Three parameters contain the weights of all these experts: gate and up `[experts, hidden, dim]`, down `[experts,
    dim, hidden]`. A weight `[experts, out, in]` with adapters (`model.lora`) has two more parameters, `[experts, rank,
    in]` and `[experts, out, rank]`.
    """

    def __init__(
        self, dim: int, hidden_dim: int, activation: Activation, count: int, lora: LoraConfig | None = None
    ) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.gate = nn.Parameter(torch.empty(count, hidden_dim, dim))
        self.up = nn.Parameter(torch.empty(count, hidden_dim, dim))
        self.down = nn.Parameter(torch.empty(count, dim, hidden_dim))
        self.lora = lora
        for projection in FEED_FORWARD if lora is not None else ():
            if lora is not None and projection in lora.targets:
                name = projection.value.lower()
                _, outputs, inputs = getattr(self, name).shape
                a, b = matrices(name)
                self.register_parameter(a, nn.Parameter(torch.empty(count, lora.rank, inputs)))
                self.register_parameter(b, nn.Parameter(torch.empty(count, outputs, lora.rank)))

    def forward(self, rows: Tensor, counts: Tensor, keys: Tensor | None = None) -> Tensor:
        """Compute the experts for rows `[n, dim]`, and return a tensor of the same shape.

        A row is the input of one expert for one token. Rows are sorted by expert. `counts`, int64 `[experts]`, is the
        number of rows of each expert. `keys` `[n]`, if given, are the keys of dropout, one for each row.
        """
        gate, up = (self._product(rows, projection, counts, keys) for projection in (Projection.gate, Projection.up))
        return self._product(self.activation(gate) * up, Projection.down, counts, keys)

    def _product(self, rows: Tensor, projection: Projection, counts: Tensor, keys: Tensor | None) -> Tensor:
        """Multiply rows by the matrices `projection` of the rows' experts, including adapters."""
        name = projection.value.lower()
        weight, *adapter = (
            p.to_local() if isinstance(p, DTensor) else p
            for p in (self._parameters.get(each) for each in (name, *matrices(name)))
            if p is not None
        )
        product = grouped_product(rows, weight, counts)
        if self.lora is None or not adapter:
            return product
        a, b = adapter
        scale = self.lora.scale
        if keys is not None:
            scale = self.lora.training_scale
            rows = rows * keep_mask(derived(keys, NUMBERS[projection]), range(rows.size(1)), self.lora.dropout)
        return product + scale * grouped_product(grouped_product(rows, a, counts), b, counts)


class ClampedExperts(nn.Module):
    """Experts of a layer of gpt-oss that are on this rank: a clamped SwiGLU with biases.

    The parameters have the layout of transformers: gate_up `[experts, dim, 2 hidden]` with gate and up in alternating
    columns, down `[experts, hidden, dim]`, and the biases gate_up_bias `[experts, 2 hidden]` and down_bias `[experts,
    dim]`.
    """

    def __init__(self, dim: int, hidden_dim: int, swiglu: ClampedSwigluConfig, count: int) -> None:
        super().__init__()
        self.limit, self.alpha = swiglu.limit, swiglu.alpha
        self.gate_up = nn.Parameter(torch.empty(count, dim, 2 * hidden_dim))
        self.gate_up_bias = nn.Parameter(torch.empty(count, 2 * hidden_dim))
        self.down = nn.Parameter(torch.empty(count, hidden_dim, dim))
        self.down_bias = nn.Parameter(torch.empty(count, dim))

    def forward(self, rows: Tensor, counts: Tensor, keys: Tensor | None = None) -> Tensor:
        """Compute the experts for rows `[n, dim]`, and return a tensor of the same shape (see `Experts.forward`).

        These experts have no adapters, and therefore no dropout.
        """
        gate_up, gate_up_bias, down, down_bias = (
            p.to_local() if isinstance(p, DTensor) else p
            for p in (self.gate_up, self.gate_up_bias, self.down, self.down_bias)
        )
        numbers = torch.arange(len(counts), device=rows.device).repeat_interleave(counts, output_size=len(rows))
        both = grouped_product(rows, gate_up.transpose(-2, -1), counts) + _of_rows(gate_up_bias, numbers, rows)
        gate, up = both[..., ::2].clamp(max=self.limit), both[..., 1::2].clamp(-self.limit, self.limit)
        inner = (up + 1) * gate * (gate * self.alpha).sigmoid()
        return grouped_product(inner, down.transpose(-2, -1), counts) + _of_rows(down_bias, numbers, rows)


def _of_rows(bias: Tensor, numbers: Tensor, rows: Tensor) -> Tensor:
    """Return the bias of the expert of each row.

    The backward pass adds up the gradients of an expert's rows one by one, for which half precision is too coarse.
    """
    return precise(bias)[numbers].type_as(rows)


def grouped_product(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Multiply each group of rows by the transposed matrix of the group, and return `[n, out]`.

    The first counts[0] of the rows `[n, in]` belong to the first matrix of `weights` `[groups, out, in]`, the next
    counts[1] rows to the second matrix, and so on. A matrix without rows gets a gradient of zeros.
    """
    if rows.dtype in GROUPED:
        return F.grouped_mm(rows, weights.transpose(-2, -1), offs=counts.cumsum(0).to(torch.int32))
    parts = rows.split(counts.tolist())
    return torch.cat([F.linear(part, weight) for part, weight in zip(parts, weights.unbind(), strict=True)])


Dispatch: TypeAlias = Callable[[Tensor, Tensor, nn.Module, Tensor | None], Tensor]
"""Function that sends rows to the ranks of their experts, and returns the results in the order of the rows.

Its arguments are the rows `[n, dim]`, sorted by expert; the number of rows of each expert of the layer, int64 `[all
experts]`; the experts of this rank; and the key of each row for dropout, int64 `[n]`, or None for no dropout.
"""


def here(rows: Tensor, counts: Tensor, experts: nn.Module, keys: Tensor | None) -> Tensor:
    """Compute the experts for `rows` without communication, if this rank has all experts (see Dispatch)."""
    result: Tensor = experts(rows, counts, keys)
    return result


OverSequences: TypeAlias = Callable[[Tensor], Tensor]
"""Function that sums counts `[sequences, n]` over the ranks that have tokens of the same sequences.

The argument contains the counts of this rank's tokens, and the result the counts of the whole sequences.
"""


OwnTokens: TypeAlias = Callable[[Tensor], Tensor]
"""Function that selects, from the values `[batch, length]` of tokens, those of the tokens that this rank routes."""


def whole(values: Tensor) -> Tensor:
    """Return `values` unchanged, for a rank that has all tokens of its sequences.

    OverSequences and OwnTokens describe the functions for a rank that has only a part of these tokens.
    """
    return values


class MixtureOfExperts(nn.Module):
    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        activation: Activation,
        config: ExpertsConfig,
        shared: nn.Module | None,
        lora: LoraConfig | None = None,
    ) -> None:
        """Build the router and the experts.

        `hidden_dim` is the width of one expert. `shared`, if given, is a feed-forward that computes every token in
        addition to the chosen experts.
        """
        super().__init__()
        self.number, self.balance_loss = config.count, config.balance_loss
        self.normalize_shares, self.share_scale = config.normalize_shares, config.share_scale
        self.router = Router(dim, config)
        self.experts: Experts | ClampedExperts
        if config.clamped_swiglu is None:
            self.experts = Experts(dim, hidden_dim, activation, config.count, lora)
        else:
            self.experts = ClampedExperts(dim, hidden_dim, config.clamped_swiglu, config.count)
        self.shared = shared
        self.shared_gate = nn.Parameter(torch.empty(1, dim)) if config.shared_gate else None
        self.dispatch: Dispatch = here
        self.over_sequences: OverSequences = whole
        self.own_tokens: OwnTokens = whole
        self.adapted = lora is not None and any(projection in lora.targets for projection in FEED_FORWARD)
        self.loads: Tensor | None = None
        """int64 `[experts]`: number of this rank's tokens that were sent to each expert, summed over microbatches.

        `training.expert_loads` reads the numbers once per step, and then resets them. Tokens of weight 0 are not
        counted.
        """

    def count(self, loads: Tensor | None) -> None:
        """Add the number of tokens of each expert in one microbatch, int64 `[experts]`, to `self.loads`.

        None stands for no tokens.
        """
        if loads is not None:
            self.loads = loads if self.loads is None else self.loads + loads

    def forward(self, x: Tensor, weights: Tensor | None, keys: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Compute x `[batch, length, dim]`, and return a tensor of the same shape, with the loads of the experts.

        The loads, int64 `[experts]`, are the number of tokens of this microbatch that each expert was chosen for. They
        are None without `weights`. The caller has to add the loads by `count`, once per microbatch. This method does
        not add them itself, because activation checkpointing calls this method a second time in the backward pass.

        `weights` `[batch, length]` is the weight of each token in the loss, 0 for padding. If `weights` is given,
        gradients include the gradient of the balancing loss. `keys` `[batch, length]` are the keys of the layer's
        dropout, or None without dropout. Under tensor parallelism, `weights` and `keys` contain the tokens of the whole
        group, and `x` contains the tokens of this rank.
        """
        tokens = x.flatten(0, 1)
        scores, chosen = self.router(tokens)
        shares = scores.gather(1, chosen)
        if self.normalize_shares:
            shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)  # all sigmoids may be 0
        shares = shares * self.share_scale
        loads = None
        if weights is not None:
            chances = scores / (scores.sum(-1, keepdim=True) + 1e-20)
            by_token = chances.unflatten(0, x.shape[:2]), chosen.unflatten(0, x.shape[:2])
            loads, loss = balance(*by_token, self.own_tokens(weights), self.over_sequences)
            shares = _WithLoss.apply(shares, self.balance_loss * loss)
        own_keys = None if keys is None or not self.adapted else self.own_tokens(keys).flatten()
        result = self._routed(tokens, chosen, shares, own_keys).type_as(x).view_as(x)
        return result if self.shared is None else result + self._shared(x, keys, self.shared), loads

    def _shared(self, x: Tensor, keys: Tensor | None, shared: nn.Module) -> Tensor:
        """Compute the shared experts for x `[batch, length, dim]`, and multiply the result by the tokens' factors."""
        result: Tensor = shared(x, keys)
        return result if self.shared_gate is None else F.linear(x, _of_all_tokens(self.shared_gate)).sigmoid() * result

    def _routed(self, tokens: Tensor, chosen: Tensor, shares: Tensor, keys: Tensor | None) -> Tensor:
        active = chosen.size(1)
        order = chosen.flatten().argsort(stable=True)
        counts = _counted(chosen.flatten(), self.number)
        rows = tokens.index_select(0, order // active)
        if keys is not None:
            keys = derived(keys.index_select(0, order // active), chosen.flatten().index_select(0, order))
        results = self.dispatch(rows, counts, self.experts, keys).index_select(0, order.argsort())
        combined: Tensor = (results.unflatten(0, (-1, active)) * shares.unsqueeze(-1)).sum(1)
        return combined


def balance(
    chances: Tensor, chosen: Tensor, weights: Tensor, over_sequences: OverSequences = whole
) -> tuple[Tensor, Tensor]:
    """Return the number of tokens that each expert was chosen for, int64 `[experts]`, and the balancing loss.

    Both results cover this rank's tokens. If other ranks have tokens of the same sequences, the balancing loss of these
    sequences is the sum of the losses of all these ranks.

    For each sequence, the loss is the sum of its tokens' weights, times the sum over experts of f * P. P is the
    expert's mean chance over the tokens of the sequence. f is the fraction of choices that fell on the expert, times
    the number of experts. Only P has a gradient. With even loads, the sum over experts is 1.

    Args:
        chances: `[batch, length, experts]`: scores of the router, normalized to a sum of 1 for each token.
        chosen: `[batch, length, active]`: indices of the chosen experts.
        weights: `[batch, length]`: weights of the tokens in the loss. Tokens of weight 0 are not counted.
        over_sequences: Function that sums counts over whole sequences.
    """
    experts = chances.size(-1)
    counted = weights > 0
    ones = counted.long().unsqueeze(-1).expand_as(chosen).flatten(1)
    choices_here = ones.new_zeros(len(chosen), experts).scatter_add_(1, chosen.flatten(1), ones)
    own_parts = (choices_here, counted.sum(1, keepdim=True), weights.sum(1, keepdim=True))
    everywhere = over_sequences(torch.cat([part.double() for part in own_parts], 1))
    choices, tokens, weight = everywhere.to(chances.dtype).split([experts, 1, 1], 1)
    tokens = tokens.clamp(min=1)
    fractions = choices * experts / (chosen.size(-1) * tokens)
    means = (chances * counted.unsqueeze(-1)).sum(1) / tokens
    loss = (weight * fractions * means).sum()
    return choices_here.sum(0), loss


def _counted(chosen: Tensor, experts: int) -> Tensor:
    """Return how often each expert occurs in `chosen`, as int64 `[experts]`.

    torch.bincount would make the host wait for the device.
    """
    return chosen.new_zeros(experts).scatter_add_(0, chosen, torch.ones_like(chosen))


class _WithLoss(torch.autograd.Function):
    """Identity function of a tensor that adds a second loss (the balancing loss) to the backward pass.

    The tensor is an intermediate result of the main loss. The backward pass therefore reaches the second loss, although
    no layer and no pipeline stage passes this loss on to the output. The second loss is a plain sum over all
    microbatches and ranks, so its gradient is 1.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor) -> Tensor:
        ctx.of = loss.dtype, loss.device
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        dtype, device = ctx.of
        return gradients[0], torch.ones((), dtype=dtype, device=device)
