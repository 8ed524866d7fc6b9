"""The loss in chunks against torch's cross entropy of all logits; gradients, precision and memory."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from concertina_trainer.model import loss
from concertina_trainer.model.precision import precise
from concertina_trainer.planning.fake import fake_tensors
from concertina_trainer.planning.ledger import Ledger

ROWS, LENGTH, DIM, VOCABULARY = 2, 50, 32, 101


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, LENGTH, DIM, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(VOCABULARY, DIM, generator=generator, dtype=torch.float64).to(dtype) / 4
    targets = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    return x.requires_grad_(), weight.requires_grad_(), targets, torch.rand(ROWS, LENGTH, generator=generator)


def whole(x: Tensor, weight: Tensor, targets: Tensor, token_weights: Tensor) -> Tensor:
    logits = F.linear(x, weight).flatten(0, 1)
    losses = F.cross_entropy(precise(logits), targets.flatten(), reduction="none")
    return (losses.view_as(targets) * token_weights).sum()


CASES = list(itertools.product((torch.float64, torch.float32, torch.bfloat16), (loss.CHUNK_LOGITS, 1000)))


@pytest.mark.parametrize(("dtype", "logits"), CASES)
def test_loss_and_gradients_are_those_of_all_logits(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, logits: int
) -> None:
    """A gradient is a sum of n rows, n = 100: its error is at most n roundings of the sum of their absolute values."""
    monkeypatch.setattr(loss, "CHUNK_LOGITS", logits)
    x, weight, targets, token_weights = inputs(dtype)
    expected = torch.autograd.grad(3 * whole(x, weight, targets, token_weights), (x, weight))
    summed = loss.summed_cross_entropy(x, weight, targets, token_weights)
    gradients = torch.autograd.grad(3 * summed, (x, weight))
    rounding = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    torch.testing.assert_close(summed, whole(x, weight, targets, token_weights), rtol=100 * rounding, atol=0)
    bound = 3 * (2 * torch.finfo(dtype).eps + 100 * rounding)
    for gradient, reference, terms in zip(gradients, expected, (weight, x), strict=True):
        assert gradient.dtype == dtype
        largest = 2 * terms.abs().sum(tuple(range(terms.dim() - 1))).max().item()
        torch.testing.assert_close(gradient, reference, rtol=0, atol=bound * largest)


@pytest.mark.parametrize("logits", [loss.CHUNK_LOGITS, 1000])
def test_the_gradient_of_a_token_s_weight_is_its_loss(monkeypatch: pytest.MonkeyPatch, logits: int) -> None:
    """By it, the trainer checks that the loss of a custom model is linear in the weights."""
    monkeypatch.setattr(loss, "CHUNK_LOGITS", logits)
    x, weight, targets, token_weights = inputs(torch.float64)
    token_weights.requires_grad_()
    [expected] = torch.autograd.grad(3 * whole(x, weight, targets, token_weights), token_weights)
    [found] = torch.autograd.grad(3 * loss.summed_cross_entropy(x, weight, targets, token_weights), token_weights)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("logits", [loss.CHUNK_LOGITS, 1000])
def test_correct_tokens_are_those_with_the_first_of_the_largest_logits(
    monkeypatch: pytest.MonkeyPatch, logits: int
) -> None:
    monkeypatch.setattr(loss, "CHUNK_LOGITS", logits)
    x, weight, targets, token_weights, expected = with_equal_logits()
    with torch.no_grad(), loss.correct_weights() as correct:
        for _ in range(2):
            loss.summed_cross_entropy(x, weight, targets, token_weights)
    assert [each.item() for each in correct] == pytest.approx([expected, expected], rel=1e-12)


def with_equal_logits() -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    """Return inputs, and the sum of the weights of the correctly predicted tokens."""
    x, weight, _, token_weights = inputs(torch.float32)
    with torch.no_grad():
        weight[50] = weight[60] = 8 * x[0, 0]  # equal logits, which are the largest of several tokens
        first = F.linear(x, weight).argmax(2)
    assert 0 < int((first == 50).sum()) < first.numel()
    targets = first.where(torch.arange(LENGTH) % 3 > 0, (first + 1) % VOCABULARY)
    targets[0, 0] = 60
    return x, weight, targets, token_weights, token_weights.double()[targets == first].sum().item()


def of_a_part(rank: int, store: str) -> None:
    """Compute as one of two ranks of a tensor group, whose parts of the vocabulary are 51 and 50 tokens."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    x, weight, targets, token_weights, expected = with_equal_logits()
    mesh = DeviceMesh("cpu", [0, 1])
    whole = distribute_tensor(x.detach(), mesh, [Replicate()])
    part = distribute_tensor(weight.detach(), mesh, [Shard(0)])
    with torch.no_grad(), loss.correct_weights() as correct:
        loss.summed_cross_entropy(whole, part, targets, token_weights)
    assert [each.item() for each in correct] == pytest.approx([expected], rel=1e-12)
    torch.distributed.destroy_process_group()


def test_ranks_that_split_the_vocabulary_find_the_same_correct_tokens(tmp_path: Path) -> None:
    torch.multiprocessing.start_processes(of_a_part, (str(tmp_path / "store"),), nprocs=2, start_method="fork")


@pytest.mark.parametrize("trained", [0, 1])
def test_one_of_both_has_a_gradient(trained: int) -> None:
    x, weight, targets, token_weights = inputs(torch.float64)
    tensors = [x, weight]
    (reference,) = torch.autograd.grad(whole(x, weight, targets, token_weights), tensors[trained])
    tensors[1 - trained].requires_grad_(False)
    (gradient,) = torch.autograd.grad(loss.summed_cross_entropy(x, weight, targets, token_weights), tensors[trained])
    torch.testing.assert_close(gradient, reference)


def test_without_gradients_nothing_is_computed_for_them() -> None:
    x, weight, targets, token_weights = inputs(torch.float64)
    with torch.no_grad():
        summed = loss.summed_cross_entropy(x, weight, targets, token_weights)
    assert not summed.requires_grad
    assert summed.item() == pytest.approx(whole(x, weight, targets, token_weights).item(), rel=1e-13)


def test_a_logit_that_is_no_number_makes_the_loss_none() -> None:
    x, weight, targets, token_weights = inputs(torch.float32)
    with torch.no_grad():
        x[1, 7, 3] = torch.nan
    assert loss.summed_cross_entropy(x, weight, targets, token_weights).isnan()


def test_no_more_than_a_chunk_of_logits_is_in_memory() -> None:
    """8192 tokens of an 8B model in bf16, whose logits take 2 GiB, and 4 in float32."""
    peak_by_loss = {}
    for compute in (loss.summed_cross_entropy, whole):
        with fake_tensors(None) as mode, Ledger(mode) as ledger:
            x = torch.empty(1, 8192, 4096, dtype=torch.bfloat16, requires_grad=True)
            weight = torch.empty(128256, 4096, dtype=torch.bfloat16, requires_grad=True)
            compute(x, weight, torch.zeros(1, 8192, dtype=torch.int64), torch.ones(1, 8192)).backward()
        peak_by_loss[compute] = max(sum(kinds.values()) for kinds in ledger.peaks.values())
    weight_sizes = (1 + 2 + 1) * 2 * weight.numel()  # the weight, the sum in float32, and a chunk's product
    chunk_sizes = (4 + 2 + 2) * loss.CHUNK_LOGITS  # in float32, and in bf16 before and after
    assert peak_by_loss[loss.summed_cross_entropy] < weight_sizes + chunk_sizes + 4 * 2 * x.numel()
    assert peak_by_loss[loss.summed_cross_entropy] < peak_by_loss[whole] / 1.5
