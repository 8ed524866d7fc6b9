"""Activations that a backward pass recomputes, and those that it does not."""

import collections

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from concertina_trainer.config.memory_config import Activations
from concertina_trainer.config.model_config import ModelConfig
from concertina_trainer.model.decoder import Decoder

LAYERS = 3


class Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = collections.Counter()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.calls[function] += 1
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize(
    ("activations", "products_again", "rest_again"),
    [(Activations.keep, 0, 0), (Activations.products, 0, 1), (Activations.recompute, 1, 1)],
)
def test_only_what_was_not_kept_is_computed_again(activations, products_again, rest_again):
    torch.manual_seed(0)
    config = ModelConfig(layers=LAYERS, dim=32, heads=2, sequence_length=8)
    model = Decoder(config, activations=activations)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.1)
    tokens = torch.randint(0, 256, (2, 8))
    with Counted() as forward:
        loss = model(tokens).float().logsumexp(-1).sum()
    with Counted() as backward:
        loss.backward()
    silu = torch.ops.aten.silu.default
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert forward.calls[silu] == forward.calls[attention] == LAYERS
    assert backward.calls[silu] == LAYERS * rest_again
    assert backward.calls[attention] == LAYERS * products_again
