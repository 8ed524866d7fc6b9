"""Products in float8: near the exact ones, the same for a token in any microbatch, and never finite by mistake."""

from unittest import mock

import pytest
import torch

from concertina_state.errors import InvalidInput
from concertina_trainer.config.model_config import ModelConfig
from concertina_trainer.model.decoder import Decoder
from concertina_trainer.model.float8 import Float8Linear, check_device, product, rounded, use_float8


def random(*shape, seed=1):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values * torch.logspace(-3, 3, len(values))[:, None]


def error(rows):
    """Return the largest error of each element: 3 bits after the point, and 2^-10 near 0, of a row up to 224 or more.

    The last is at most 2^-17 of the row's largest element.
    """
    return 2**-4 * rows.abs() + 2**-17 * rows.abs().amax(1, keepdim=True)


@pytest.mark.parametrize("largest", [1.0, 1.75, 1.7500001, 1.9999999, 448.0, 3e38, 1e-30])
def test_a_row_fills_the_range(largest):
    row = torch.tensor([[largest, -largest / 3, 0.0]])
    values, factor = rounded(row)
    assert 224 <= values[0, 0].float() <= 448
    assert ((values.float() * factor - row).abs() <= error(row)).all()


def test_a_product_is_as_near_as_the_digits_of_its_factors():
    x, weight = random(9, 48), random(32, 48, seed=2)
    exact = x.double() @ weight.double().T
    bound = error(x) @ (weight.abs() + error(weight)).T + x.abs() @ error(weight).T
    assert ((product(x, weight) - exact).abs() <= bound * (1 + 2**-12)).all()


def test_gradients_are_those_of_the_rounded_factors():
    layer = Float8Linear(48, 32)
    x, gradient = random(9, 48).requires_grad_(), random(9, 32, seed=3)
    layer(x).backward(gradient)
    torch.testing.assert_close(x.grad, product(gradient, layer.weight.detach().T.contiguous()))
    torch.testing.assert_close(layer.weight.grad, gradient.T @ x.detach())
    torch.testing.assert_close(layer.bias.grad, gradient.sum(0))


def test_a_token_has_the_same_result_beside_any_others():
    x, weight = random(8, 48), random(32, 48, seed=2)
    whole = product(x, weight)
    assert torch.equal(torch.cat([product(x[:3], weight), product(x[3:], weight)]), whole)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_so(value):
    x = random(4, 48)
    x[2, 5] = value
    found = product(x, random(32, 48, seed=2))
    assert not found[2].isfinite().any()
    assert found[[0, 1, 3]].isfinite().all()


def test_the_layers_of_blocks_are_in_one_graph():
    model = Decoder(ModelConfig(layers=1, dim=32, heads=2, vocab_size=64, sequence_length=16))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    use_float8(model)
    layers = [name for name, layer in model.named_modules() if isinstance(layer, Float8Linear)]
    assert len(layers) == 7
    [block] = model.blocks.values()
    gate = torch.compile(block.feed_forward, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 8, 32)
    torch.testing.assert_close(gate(x), block.feed_forward(x))


def test_a_gpu_without_float8_is_refused_by_its_name():
    with (
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(8, 0)),
        mock.patch.object(torch.cuda, "get_device_name", return_value="NVIDIA A100"),
        pytest.raises(InvalidInput, match="and NVIDIA A100 has a lower one"),
    ):
        check_device(torch.device("cuda"))
    check_device(torch.device("cpu"))
