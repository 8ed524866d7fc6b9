"""Context parallelism: the ranks of a group hold some tokens of each sequence, and gather keys and values of all of it
(as Llama 3 was trained, arXiv 2407.21783 section 3.3: any mask of documents works, and what is gathered is small beside
what is computed).

A causal token attends to those before it, so the last ones cost the most. Each rank has one chunk from the front and
its mirror image from the back, which makes all equal."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh


class ContextParallel:
    def __init__(self, mesh: DeviceMesh) -> None:
        self._group = mesh.get_group()
        self.size, self._rank = mesh.size(), mesh.get_local_rank()
        self._rows = functools.lru_cache(maxsize=8)(self._rows_of)

    def queries(self, length: int, device: torch.device) -> Tensor:
        """int64 [length / size]: which tokens of a sequence this rank computes."""
        return self._rows(length, device)[self._rank]

    def keys(self, length: int, device: torch.device) -> Tensor:
        """int64 [length]: which token each gathered key is of."""
        return self._rows(length, device).flatten()

    def _rows_of(self, length: int, device: torch.device) -> Tensor:
        chunks = torch.arange(length, device=device).view(2 * self.size, -1)
        return torch.cat([chunks[: self.size], chunks[self.size :].flip(0)], dim=1)

    def take(self, tokens: Tensor) -> Tensor:
        """Of [batch, length] this rank's [batch, length / size]."""
        return tokens.index_select(1, self.queries(tokens.size(1), tokens.device))

    def gather(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Those of all ranks, [batch, heads, length, head_dim]; gradients go back to whoever has the token."""
        # torch.distributed.nn's all_gather has wrong gradients on gloo for the strides that attention gives.
        both = all_gather_tensor_autograd(torch.stack([key, value]), 3, self._group)
        gathered_key, gathered_value = both.unbind(0)
        return gathered_key, gathered_value
