"""Grouped products on CUDA, compared with a loop: groups of any size, including empty ones."""

import pytest
import torch

from concertina_trainer.model.experts import grouped_product

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device: no product was tried"),
]


@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 0, 0], [0, 9, 0, 0]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_are_those_of_a_loop(counts, dtype):
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(sum(counts), 16, generator=generator, dtype=torch.float64)
    weights = torch.randn(4, 24, 16, generator=generator, dtype=torch.float64)
    results = []
    for kind in (dtype, torch.float64):
        a, b = (each.to(dtype).to("cuda", kind).requires_grad_() for each in (rows, weights))
        product = grouped_product(a, b, torch.tensor(counts, device="cuda"))
        (product * torch.linspace(-1, 1, 24, dtype=kind, device="cuda")).sum().backward()
        results.append((product.detach(), a.grad, b.grad))
    bound = 1e-4 if dtype is torch.float32 else 2e-2
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=bound, atol=bound)
