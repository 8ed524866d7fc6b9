"""A mixture of experts (Shazeer et al. 2017): a router sends each token through some of the feed-forwards of a layer.

Each token takes all the experts that were chosen for it: none has a capacity, and none drops a token. Loads are kept
even by a loss (Fedus et al. 2021, for each sequence as in DeepSeek-V3, arXiv 2412.19437 section 2.1.2), by biases that
follow the loads (Wang et al. 2024, arXiv 2408.15664; `training/expert_loads.py` moves them), or by both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from concertina_trainer.config.model_config import ExpertsConfig, RouterScores
from concertina_trainer.model.precision import precise

GROUPED = (torch.float32, torch.bfloat16, torch.float16)
"""What torch has grouped products for."""


class Router(nn.Module):
    def __init__(self, dim: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.active, self.scores = config.active_per_token, config.scores
        self.weight = nn.Parameter(torch.empty(config.count, dim))
        bias = None if config.bias_rate is None else torch.empty(config.count, dtype=torch.float32)
        self.register_buffer("bias", bias)
        self.bias: Tensor | None

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Of tokens [n, dim] the scores [n, experts] of all experts, in float32 at least, and the numbers of those that
        are chosen, int64 [n, active]."""
        # Ranks of a tensor group have the same router, and tokens of their own: gradients are added up.
        weight = self.weight.to_local(grad_placements=[Partial()]) if isinstance(self.weight, DTensor) else self.weight
        logits = F.linear(precise(tokens), precise(weight))
        scores = logits.softmax(-1) if self.scores is RouterScores.softmax else logits.sigmoid()
        wanted = scores.detach() if self.bias is None else scores.detach() + self.bias
        return scores, wanted.topk(self.active, dim=-1, sorted=False).indices


class Experts(nn.Module):
    """The experts of a layer that are on this rank, in three tensors: gate and up [experts, hidden, dim], down
    [experts, dim, hidden]."""

    def __init__(self, dim: int, hidden_dim: int, count: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(count, hidden_dim, dim))
        self.up = nn.Parameter(torch.empty(count, hidden_dim, dim))
        self.down = nn.Parameter(torch.empty(count, dim, hidden_dim))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows [n, dim] in the order of experts, `counts` of each, int64 [experts]; of the same shape."""
        gate, up, down = (p.to_local() if isinstance(p, DTensor) else p for p in (self.gate, self.up, self.down))
        inner = F.silu(grouped_product(rows, gate, counts)) * grouped_product(rows, up, counts)
        return grouped_product(inner, down, counts)


def grouped_product(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """[n, out]: of rows [n, in] the first counts[0] times the first matrix of weights [groups, out, in], and so on.
    Weights of no rows have a gradient too, of zeros."""
    if rows.dtype in GROUPED:
        return F.grouped_mm(rows, weights.transpose(-2, -1), offs=counts.cumsum(0).to(torch.int32))
    parts = rows.split(counts.tolist())
    return torch.cat([F.linear(part, weight) for part, weight in zip(parts, weights.unbind(), strict=True)])


Dispatch: TypeAlias = Callable[[Tensor, Tensor, Experts], Tensor]
"""Takes rows [n, dim] in the order of all experts, and how many each has, int64 [all experts], to the experts, and
brings back what they make of them, in the same order."""


def here(rows: Tensor, counts: Tensor, experts: Experts) -> Tensor:
    """Where this rank has all of them."""
    result: Tensor = experts(rows, counts)
    return result


OverSequences: TypeAlias = Callable[[Tensor], Tensor]
"""Of counts [sequences, n] of this rank's tokens those of whole sequences."""


def whole(counts: Tensor) -> Tensor:
    """Where no other rank has tokens of the same sequences."""
    return counts


class MixtureOfExperts(nn.Module):
    def __init__(self, dim: int, hidden_dim: int, config: ExpertsConfig, shared: nn.Module | None) -> None:
        """`hidden_dim`: of one expert. `shared`: what computes every token besides."""
        super().__init__()
        self.number, self.balance_loss = config.count, config.balance_loss
        self.router = Router(dim, config)
        self.experts = Experts(dim, hidden_dim, config.count)
        self.shared = shared
        self.dispatch: Dispatch = here
        self.over_sequences: OverSequences = whole
        self.loads: Tensor | None = None
        """int64 [experts]: tokens that each was chosen for since somebody has taken this, those of no weight apart."""

    def count(self, loads: Tensor | None) -> None:
        """Of a microbatch."""
        if loads is not None:
            self.loads = loads if self.loads is None else self.loads + loads

    def forward(self, x: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """x [batch, length, dim]; of the same shape. `weights` [batch, length]: each token's in the loss, 0 for
        filling. With them, the loads, to be counted once, and the gradient has that of the loss that balances them."""
        tokens = x.flatten(0, 1)
        scores, chosen = self.router(tokens)
        shares = scores.gather(1, chosen)
        shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)  # sigmoids may all be 0
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
    """Of the router's chances [batch, length, experts], which add up to 1 for each token, of chosen [batch, length,
    active] and the tokens' weights [batch, length]: how many tokens each expert has, int64 [experts], and the loss.
    Where other ranks have tokens of the same sequences, it is this rank's part, of which the sum is the loss.

    A sequence of T tokens adds its tokens' weights times the sum over experts of f * P: P is the mean chance, and f the
    part of the choices that fell on the expert, times the number of experts. The gradient is that of P. A loss is 1
    for even loads."""
    experts = chances.size(-1)
    counted = weights > 0
    ones = counted.long().unsqueeze(-1).expand_as(chosen).flatten(1)
    found = ones.new_zeros(len(chosen), experts).scatter_add_(1, chosen.flatten(1), ones)
    mine = (found, counted.sum(1, keepdim=True), weights.sum(1, keepdim=True))
    everywhere = over_sequences(torch.cat([part.double() for part in mine], 1))
    choices, tokens, weight = everywhere.to(chances.dtype).split([experts, 1, 1], 1)
    tokens = tokens.clamp(min=1)
    fractions = choices * experts / (chosen.size(-1) * tokens)
    means = (chances * counted.unsqueeze(-1)).sum(1) / tokens
    loss = (weight * fractions * means).sum()
    return found.sum(0), loss


def _counted(chosen: Tensor, experts: int) -> Tensor:
    """Not by bincount, for which the host waits."""
    return chosen.new_zeros(experts).scatter_add_(0, chosen, torch.ones_like(chosen))


class _WithLoss(torch.autograd.Function):
    """A tensor on the way to the loss, to which another loss is added there: so no layer has to hand it on, and no
    stage of a pipeline. The loss is a sum over all microbatches and ranks, so its gradient is 1."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor) -> Tensor:
        ctx.of = loss.dtype, loss.device
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        dtype, device = ctx.of
        return gradients[0], torch.ones((), dtype=dtype, device=device)
