"""Float8 and float16 on CUDA: the products of the CPU, and the losses of bfloat16."""

import pytest
import torch

from builders.train import node
from concertina_trainer.model.float8 import LEAST_CAPABILITY, product

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device: float8 was not tried"),
]
has_float8 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < LEAST_CAPABILITY,
    reason="this GPU does not multiply in float8",
)


@has_float8
def test_cuda_multiplies_the_numbers_that_the_cpu_multiplies():
    """Both add up exact products in float32 at least, and round the sum to bfloat16."""
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(rows, 1024, generator=generator).to(torch.bfloat16) for rows in (100, 512))
    found, expected = product(a.cuda(), b.cuda()).cpu().float(), product(a, b).float()
    summed = a.float().abs() @ b.float().abs().T
    assert ((found - expected).abs() <= 2**-8 * expected.abs() + 1024 * 2**-24 * summed).all()


@pytest.mark.parametrize(("precision", "bound"), [pytest.param("Float8", 2**-4, marks=has_float8), ("Float16", 2**-7)])
def test_a_run_has_the_losses_of_bfloat16(folder, parent, trainer, precision, bound):
    """Within the error of one element in the coarser precision. Blocks are compiled, as by default on a GPU."""
    model = {**trainer["model"], "dim": 128, "heads": 4, "kvHeads": 2, "hiddenDim": 256}
    configured = {**trainer, "steps": 20, "model": model, "compile": "Blocks"}
    plain = node.Job(folder / "plain", parent, {**configured, "precision": "BFloat16"}).run(1)
    found = node.Job(folder / "other", parent, {**configured, "precision": precision}).run(1)
    assert found.codes == {0: 0}, found.output
    assert found.losses == pytest.approx(plain.losses, rel=bound)
    assert found.losses != plain.losses, "it has computed in bfloat16"
