"""Layer of experts against a reference implementation, in float64: results, gradients, loads, the balancing loss."""

import pytest
import torch

from builders.train.routed import Written
from concertina_trainer.config.model_config import Activation, ClampedSwigluConfig, ExpertsConfig, ModelConfig
from concertina_trainer.model.decoder import Decoder, FeedForward
from concertina_trainer.model.experts import ClampedExperts, MixtureOfExperts, grouped_product

DIM, HIDDEN = 16, 24


def layer(dtype=torch.float64, **fields):
    config = ExpertsConfig(**fields)
    silu = Activation.silu
    shared = FeedForward(DIM, config.shared * HIDDEN, silu) if config.shared else None
    moe = MixtureOfExperts(DIM, HIDDEN, silu, config, shared)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        if moe.router.bias is not None:
            moe.router.bias.copy_(torch.linspace(-0.2, 0.2, config.count))
    moe.to(dtype)
    return moe, config


def tokens(dtype=torch.float64):
    x = torch.randn(3, 10, DIM, generator=torch.Generator().manual_seed(4)).to(dtype)
    weights = torch.full((3, 10), 1 / 17, dtype=dtype)
    weights[1, 7:] = 0
    weights[2] = 0
    return x.requires_grad_(), weights


def outcome(forward, moe, x, weights, loss):
    result = forward(x, weights)
    if isinstance(result, tuple):
        result, moe.loads = result
    target = torch.linspace(-1, 1, DIM, dtype=x.dtype)
    ((result * target).sum(-1) * weights).sum().add(loss()).backward()
    gradients = {name: p.grad for name, p in moe.named_parameters()} | {"x": x.grad}
    for p in moe.parameters():
        p.grad = None
    return result.detach(), gradients


KINDS = [
    {"count": 5},
    {"count": 8, "active_per_token": 3, "scores": "Sigmoid", "bias_rate": 0.1, "share_scale": 2.5},
    {"count": 4, "active_per_token": 1, "shared": 2, "balance_loss": 1.0},
    {"count": 4, "shared": 1, "shared_gate": True},
    {"count": 3, "active_per_token": 3, "balance_loss": 0.0},
]


@pytest.mark.parametrize("fields", KINDS, ids=str)
def test_it_is_what_is_written_down(fields):
    moe, config = layer(**fields)
    written = Written(moe, config)
    x, weights = tokens()
    expected, wanted = outcome(written, moe, x, weights, lambda: written.loss)
    x.grad = None
    found, gradients = outcome(moe, moe, x, weights, lambda: 0.0)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for name, gradient in wanted.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-11, atol=1e-13, msg=name)
    assert moe.loads.tolist() == written.loads.tolist()
    assert moe.loads.sum() == 17 * config.active_per_token, "filling is not counted"


def test_the_bias_chooses_and_does_not_weigh():
    moe, config = layer(count=4, active_per_token=1, bias_rate=0.0)
    with torch.no_grad():
        moe.router.bias.copy_(torch.tensor([0.0, 0.0, 5.0, 0.0]))
    x, weights = tokens()
    expected, _ = outcome(Written(moe, config), moe, x, weights, lambda: 0.0)
    result, loads = moe(x, weights)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    assert loads.tolist() == [0, 0, 17, 0]


@pytest.mark.parametrize("counts", [[2, 0, 5, 1], [0, 0, 0, 0], [0, 8, 0, 0]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_are_those_of_a_loop(counts, dtype):
    """Forward and backward are compared.

    An expert without tokens has a gradient of zeros, and delays no other expert.
    """
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(sum(counts), DIM, generator=generator, dtype=torch.float64)
    weights = torch.randn(4, HIDDEN, DIM, generator=generator, dtype=torch.float64)
    found = []
    for kind in (dtype, torch.float64):
        a, b = (each.to(dtype).to(kind).requires_grad_() for each in (rows, weights))
        product = grouped_product(a, b, torch.tensor(counts))
        (product * torch.linspace(-1, 1, HIDDEN, dtype=kind)).sum().backward()
        found.append((product.detach(), a.grad, b.grad))
    bound = 1e-5 if dtype is torch.float32 else 2e-2
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=bound, atol=bound)


def test_nothing_is_counted_or_balanced_where_no_weights_are_given():
    moe, _ = layer(count=4)
    x, weights = tokens()
    (result, loads), (balanced, _) = moe(x, None), moe(x, weights)
    assert torch.equal(result, balanced)
    assert loads is None


def test_weights_are_counted_as_they_are():
    experts = ExpertsConfig(count=6, active_per_token=2, hidden_dim=24, shared=1, first_dense=2)
    config = ModelConfig(layers=5, dim=32, heads=2, experts=experts)
    model = Decoder(config)
    assert config.weights == sum(p.numel() for p in model.parameters())
    idle = sum(4 * p.numel() // 6 for moe in model.mixtures() for p in moe.experts.parameters())
    norms = sum(p.numel() for name, p in model.named_parameters() if "norm" in name)
    assert config.multiplied_weights == config.weights - idle - norms


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_expert_biases_are_added_up_in_float32(dtype):
    """Added up one by one in bfloat16, 4096 equal gradients give 256."""
    experts = ClampedExperts(8, 16, ClampedSwigluConfig(), 2).to(dtype)
    torch.manual_seed(1)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    rows = torch.randn(4196, 8).to(dtype)
    experts(rows, torch.tensor([4096, 100])).backward(torch.ones_like(rows))
    assert experts.down_bias.grad[:, 0].tolist() == [4096, 100]
