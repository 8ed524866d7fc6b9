"""Mixture of experts (Shazeer et al. 2017): a router sends each token through some of the feed-forwards of a layer.

Each token is computed by all experts that were chosen for it: no expert has a capacity, and none drops a token. Loads
are balanced by a loss (Fedus et al. 2021, for each sequence as in DeepSeek-V3, arXiv 2412.19437 section 2.1.2), by
biases that follow the loads (Wang et al. 2024, arXiv 2408.15664; `training/expert_loads.py` updates them), or by both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from concertina_trainer.config.model_config import Activation, ExpertsConfig, RouterScores
from concertina_trainer.model.activation import ACTIVATIONS
from concertina_trainer.model.precision import precise

GROUPED = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes for which torch has grouped products."""


class Router(nn.Module):
    def __init__(self, dim: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.active, self.scores = config.active_per_token, config.scores
        self.weight = nn.Parameter(torch.empty(config.count, dim))
        bias = None if config.bias_rate is None else torch.empty(config.count, dtype=torch.float32)
        self.register_buffer("bias", bias)
        self.bias: Tensor | None

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores and chosen experts for tokens `[n, dim]`.

        The scores of all experts are `[n, experts]`, at least in float32. The numbers of the chosen experts are int64
        `[n, active]`.
        """
        # Ranks of a tensor group have the same router and different tokens, so gradients are added up.
        weight = self.weight.to_local(grad_placements=[Partial()]) if isinstance(self.weight, DTensor) else self.weight
        logits = F.linear(precise(tokens), precise(weight))
        scores = logits.softmax(-1) if self.scores is RouterScores.softmax else logits.sigmoid()
        preferences = scores.detach() if self.bias is None else scores.detach() + self.bias
        return scores, preferences.topk(self.active, dim=-1, sorted=False).indices


class Experts(nn.Module):
    """Experts of a layer that are on this rank.

    They are three tensors: gate and up `[experts, hidden, dim]`, down `[experts, dim, hidden]`.
    """

    def __init__(self, dim: int, hidden_dim: int, activation: Activation, count: int) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.gate = nn.Parameter(torch.empty(count, hidden_dim, dim))
        self.up = nn.Parameter(torch.empty(count, hidden_dim, dim))
        self.down = nn.Parameter(torch.empty(count, dim, hidden_dim))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Compute rows `[n, dim]`, which are in the order of experts, and return a tensor of the same shape.

        `counts`, int64 `[experts]`, is the number of rows of each expert.
        """
        gate, up, down = (p.to_local() if isinstance(p, DTensor) else p for p in (self.gate, self.up, self.down))
        inner = self.activation(grouped_product(rows, gate, counts)) * grouped_product(rows, up, counts)
        return grouped_product(inner, down, counts)


def grouped_product(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Multiply groups of rows by a matrix each, and return `[n, out]`.

    The first counts[0] of the rows `[n, in]` are multiplied by the first matrix of weights `[groups, out, in]`, and so
    on. Weights without rows have a gradient of zeros.
    """
    if rows.dtype in GROUPED:
        return F.grouped_mm(rows, weights.transpose(-2, -1), offs=counts.cumsum(0).to(torch.int32))
    parts = rows.split(counts.tolist())
    return torch.cat([F.linear(part, weight) for part, weight in zip(parts, weights.unbind(), strict=True)])


Dispatch: TypeAlias = Callable[[Tensor, Tensor, Experts], Tensor]
"""Function that sends rows to the experts, and returns the results in the same order.

Its arguments are rows `[n, dim]` in the order of all experts, and the number of rows of each, int64 `[all experts]`.
"""


def here(rows: Tensor, counts: Tensor, experts: Experts) -> Tensor:
    """Compute the experts if this rank has all of them."""
    result: Tensor = experts(rows, counts)
    return result


OverSequences: TypeAlias = Callable[[Tensor], Tensor]
"""Function that returns counts `[sequences, n]` over whole sequences, from the counts over this rank's tokens."""


def whole(counts: Tensor) -> Tensor:
    """Return the counts unchanged, for ranks that share no sequences with others."""
    return counts


class MixtureOfExperts(nn.Module):
    def __init__(
        self, dim: int, hidden_dim: int, activation: Activation, config: ExpertsConfig, shared: nn.Module | None
    ) -> None:
        """Build the router and the experts.

        `hidden_dim` is the width of one expert. `shared` computes every token besides.
        """
        super().__init__()
        self.number, self.balance_loss = config.count, config.balance_loss
        self.normalize_shares = config.normalize_shares
        self.router = Router(dim, config)
        self.experts = Experts(dim, hidden_dim, activation, config.count)
        self.shared = shared
        self.dispatch: Dispatch = here
        self.over_sequences: OverSequences = whole
        self.loads: Tensor | None = None
        """int64 `[experts]`: number of tokens that each expert was chosen for since this was last read and reset.

        Tokens without weight are not counted.
        """

    def count(self, loads: Tensor | None) -> None:
        """Add the loads of a microbatch."""
        if loads is not None:
            self.loads = loads if self.loads is None else self.loads + loads

    def forward(self, x: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Compute x `[batch, length, dim]`, and return a tensor of the same shape, with the loads.

        `weights` `[batch, length]` is the weight of each token in the loss, 0 for padding. With it, the loads are
        returned, to be counted once, and gradients include that of the balancing loss.
        """
        tokens = x.flatten(0, 1)
        scores, chosen = self.router(tokens)
        shares = scores.gather(1, chosen)
        if self.normalize_shares:
            shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)  # all sigmoids may be 0
        loads = None
        if weights is not None:
            chances = scores / (scores.sum(-1, keepdim=True) + 1e-20)
            by_token = chances.unflatten(0, x.shape[:2]), chosen.unflatten(0, x.shape[:2])
            loads, loss = balance(*by_token, weights, self.over_sequences)
            shares = _WithLoss.apply(shares, self.balance_loss * loss)
        result = self._routed(tokens, chosen, shares).type_as(x).view_as(x)
        return result if self.shared is None else result + self.shared(x), loads

    def _routed(self, tokens: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        active = chosen.size(1)
        order = chosen.flatten().argsort(stable=True)
        counts = _counted(chosen.flatten(), self.number)
        rows = tokens.index_select(0, order // active)
        results = self.dispatch(rows, counts, self.experts).index_select(0, order.argsort())
        combined: Tensor = (results.unflatten(0, (-1, active)) * shares.unsqueeze(-1)).sum(1)
        return combined


def balance(
    chances: Tensor, chosen: Tensor, weights: Tensor, over_sequences: OverSequences = whole
) -> tuple[Tensor, Tensor]:
    """Return how many tokens each expert has, int64 `[experts]`, and the balancing loss.

    If other ranks have tokens of the same sequences, the loss is this rank's part, and the sum of the parts is the
    loss.

    A sequence of T tokens adds its tokens' weights times the sum over experts of f * P. P is the mean chance, and f the
    share of the choices that fell on the expert, times the number of experts. The gradient is that of P. The loss is 1
    for even loads.

    Args:
        chances: `[batch, length, experts]` of the router, which add up to 1 for each token.
        chosen: `[batch, length, active]`, the chosen experts.
        weights: `[batch, length]`, the tokens' weights.
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
    """Count the tokens of each expert. The host would have to wait for bincount."""
    return chosen.new_zeros(experts).scatter_add_(0, chosen, torch.ones_like(chosen))


class _WithLoss(torch.autograd.Function):
    """Tensor on the way to the loss, with another loss added to it.

    Therefore no layer, and no stage of a pipeline, has to pass the other loss on. The other loss is a sum over all
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
