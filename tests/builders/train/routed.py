"""Reference implementation of a mixture of experts, as papers define it.

Every expert computes every token, and balance is counted sequence by sequence. There is no sorting, no grouped product
and no rank.
"""

import functools

import torch
import torch.nn.functional as F

from concertina_trainer.config.model_config import Projection, RouterScores
from concertina_trainer.model import dropout
from concertina_trainer.model.experts import MixtureOfExperts
from concertina_trainer.model.lora import NUMBERS


class Written(torch.nn.Module):
    """Replacement of a MixtureOfExperts with its parameters.

    After a forward, `loss` is the auxiliary loss, and `loads` the loads.
    """

    def __init__(self, moe, config):
        super().__init__()
        self.moe, self.config = moe, config

    def forward(self, x, weights, keys=None):
        config, experts, router = self.config, self.moe.experts, self.moe.router
        logits = x @ router.weight.T
        scores = logits.softmax(-1) if config.scores is RouterScores.softmax else logits.sigmoid()
        wanted = scores if router.bias is None else scores + router.bias
        chosen = torch.zeros_like(scores, dtype=torch.bool)
        for _ in range(config.active_per_token):
            best = wanted.masked_fill(chosen, -1e9).argmax(-1, keepdim=True)
            chosen = chosen | torch.zeros_like(chosen).scatter(-1, best, True)
        picked = scores * chosen
        shares = picked / picked.sum(-1, keepdim=True) if config.normalize_shares else picked
        shares = config.share_scale * shares
        result = torch.zeros_like(x)
        for i in range(config.count):
            of_expert = None if keys is None else dropout.derived(keys, i)
            gate, up = (adapted(experts, i, name, x, of_expert) for name in ("gate", "up"))
            outputs = adapted(experts, i, "down", F.silu(gate) * up, of_expert)
            result = result + shares[..., i : i + 1] * outputs
        self.loads, self.loss = torch.zeros(config.count), 0.0
        for row, counted in enumerate(weights > 0):
            if counted.any():
                mine, tokens = chosen[row][counted], int(counted.sum())
                fractions = mine.to(x.dtype).mean(0) * config.count / config.active_per_token
                chances = scores[row][counted] / scores[row][counted].sum(-1, keepdim=True)
                per_token = (fractions * chances.mean(0)).sum() * weights[row][counted][0]
                self.loss = self.loss + config.balance_loss * tokens * per_token
                self.loads += mine.sum(0)
        if self.moe.shared is None:
            return result
        gate = 1.0 if self.moe.shared_gate is None else (x * self.moe.shared_gate).sum(-1, keepdim=True).sigmoid()
        return result + gate * self.moe.shared(x, keys)

    def even_out(self):
        """Update the biases after a step with these loads."""
        if self.moe.router.bias is not None:
            self.moe.router.bias += self.config.bias_rate * torch.sign(self.loads.mean() - self.loads)


def adapted(experts, number, name, x, keys):
    """Return the product of x and a matrix of an expert, and of its adapter with dropout if the matrix has one."""
    result, a = x @ getattr(experts, name)[number].T, getattr(experts, f"{name}_lora_a", None)
    if a is None:
        return result
    lora, factors = experts.lora, 1.0
    if keys is not None:
        of_matrix = dropout.derived(keys, NUMBERS[Projection(name.capitalize())])
        factors = dropout.keep_mask(of_matrix, range(x.size(-1)), lora.dropout).type_as(x) / (1 - lora.dropout)
    return result + lora.alpha / lora.rank * (
        (x * factors) @ a[number].T @ getattr(experts, f"{name}_lora_b")[number].T
    )


def write_out(model, config):
    """Replace the layers of a decoder by reference layers, and return these."""
    written = []
    for block in model.blocks.values():
        if isinstance(block.feed_forward, MixtureOfExperts):
            written.append(Written(block.feed_forward, config.experts))
            block.feed_forward = written[-1]
            block.forward = functools.partial(_forward, block)
    return written


def _forward(block, x, mask, table, weights, keys):
    x = x + block.attention(block.attention_norm(x), mask, table, keys)
    return x + block.feed_forward(block.feed_forward_norm(x), weights, keys)


def names(model):
    """Return parameters and buffers by the names that they have in the original decoder."""
    values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name.replace("feed_forward.moe.", "feed_forward."): value for name, value in values.items()}
