"""Attention within documents on one GPU: `python benchmarks/attention.py [--runs N] [--json FILE]`.

The benchmark measures the forward and backward pass of one layer's attention over packed documents. It compares
FlexAttention (as the bundled trainer uses it), torch's variable-length attention (torch.nn.attention.varlen), and a
mask that has an element for each pair of tokens. It also measures the first call, in which FlexAttention is compiled.
Results and gradients are compared with attention in float32. The benchmark fails if they differ by more than bfloat16
explains.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import report
import torch
from torch import Tensor

from concertina_trainer.model.attention import Scores, attend, causal_mask

ROWS, LENGTH, HEADS, KEY_HEADS, HEAD_DIM = 4, 8192, 32, 8, 128
MEAN_DOCUMENT = 1000
"""Mean number of tokens of a document."""
BOUND = 2e-2
"""Maximum difference, relative to the norm. bfloat16 has a relative precision of 2^-8, and sums add up its errors."""
SCORES = Scores(True, HEAD_DIM**-0.5)
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function of query, key and value, each `[rows, heads, length, head_dim]`."""


def documents(rows: int, length: int, device: torch.device) -> Tensor:
    """Return the number of each token's document within its row, int32 `[rows, length]`."""
    begins = torch.rand(rows, length, generator=torch.Generator().manual_seed(0)) < 1 / MEAN_DOCUMENT
    return begins.int().cumsum(1, dtype=torch.int32).to(device)


def edges(document_ids: Tensor) -> tuple[Tensor, int]:
    """Return the places in the flattened rows at which documents begin, and the length of the longest document.

    The places, int32 `[documents + 1]`, include the end of the last document. No document continues in the next row.
    """
    ids = document_ids.cpu()
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    ends = torch.cat([begins.flatten().nonzero()[:, 0], torch.tensor([ids.numel()])])
    return ends.to(document_ids.device, torch.int32), int(ends.diff().max())


def variable_length(document_ids: Tensor) -> Attention:
    varlen_attn: Any = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    starts, longest = edges(document_ids)

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = len(query)
        flat = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
        attended: Tensor = varlen_attn(
            *flat, starts, starts, longest, longest, scale=SCORES.scale, window_size=(-1, 0), enable_gqa=True
        )
        by_row: Tensor = attended.unflatten(0, (rows, -1))
        return by_row.transpose(1, 2)

    return attention


def masked(document_ids: Tensor) -> Attention:
    length = document_ids.size(1)
    place = torch.arange(length, device=document_ids.device)
    mask = (document_ids[:, None, :, None] == document_ids[:, None, None, :]) & (place[:, None] >= place)
    return lambda query, key, value: attend(query, key, value, mask, SCORES)


def flex(document_ids: Tensor) -> Attention:
    mask = causal_mask(document_ids, document_ids.size(1), None, document_ids.device)
    return lambda query, key, value: attend(query, key, value, mask, SCORES)


WAYS: Mapping[str, Callable[[Tensor], Attention]] = {
    "FlexAttention": flex,
    "variable-length attention": variable_length,
    "a mask of all pairs": masked,
}


def computed(attention: Attention, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the result, and the gradients of its sum of squares."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    result = attention(*leaves)
    result.square().sum().backward()
    return [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def inputs(rows: int, length: int, device: torch.device) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    shapes = [(rows, heads, length, HEAD_DIM) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    return tuple(torch.randn(*shape, device=device) for shape in shapes)


def difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference of a tensor, relative to its norm."""
    return max(float((one.float() - other).norm() / other.norm()) for one, other in zip(found, expected, strict=True))


def timed(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this machine has no CUDA device")
    device = torch.device("cuda")
    short = documents(ROWS, LENGTH // 4, device)
    exact = inputs(ROWS, LENGTH // 4, device)
    expected = computed(masked(short), exact)
    long, rounded = documents(ROWS, LENGTH, device), tuple(t.bfloat16() for t in inputs(ROWS, LENGTH, device))
    rows: dict[str, list[float]] = {}
    facts: dict[str, dict[str, float]] = {}
    for name, way in WAYS.items():
        found = difference(computed(way(short), tuple(tensor.bfloat16() for tensor in exact)), expected)
        attention = way(long)
        work = functools.partial(computed, attention, rounded)
        first = timed(work)
        rows[name] = [timed(work) for _ in range(options.runs)]
        facts[name] = {"first call, s": round(first, 3), "difference from float32": found}
        print(f"{name}: {facts[name]}", flush=True)
    report.show(f"attention of one layer, {ROWS} x {LENGTH} tokens, forward and backward", rows)
    report.write(options.json, "attention", rows, None, GPU=torch.cuda.get_device_name(), **facts)
    wrong = [name for name, row in facts.items() if not row["difference from float32"] <= BOUND]
    if wrong:
        sys.exit(f"results of {', '.join(wrong)} differ from float32 by more than {BOUND}")


if __name__ == "__main__":
    main()
