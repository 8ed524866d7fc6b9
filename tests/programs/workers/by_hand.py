"""Reference implementation of a block over a tensor group, with plain collectives and no DTensor, for forked workers.

It follows the papers (Shoeybi et al. 2019, Megatron-LM, section 3; Korthikanti et al. 2022, section 4.2.2). The workers
compare it with the trainer's own block, and with that of one process.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import _symmetric_memory
from torch.distributed.tensor import distribute_tensor

from concertina_trainer.model.decoder import Decoder, StageLayers
from concertina_trainer.model.positions import Positions, rotary_table, rotate
from concertina_trainer.parallel import async_tensor, group, tensor
from concertina_trainer.worker import configuration

BLOCK = StageLayers(range(1), first=False, last=False)
COLUMNS = ("query", "key", "value", "gate", "up")
"""Weights of which a rank has some rows, so that it computes some columns of the result."""
ROWS = ("output", "down")
ROWS_OF_BATCH = 3


def gathered(x, dim=1):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim)


def summed(x):
    x = x.clone()
    dist.all_reduce(x)
    return x


def own(x, dim=1):
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()]


class Gather(torch.autograd.Function):
    """All-gather of sequences. Each rank uses all of them, so their gradients are summed and cut."""

    @staticmethod
    def forward(ctx, x):
        return gathered(x)

    @staticmethod
    def backward(ctx, gradient):
        return own(summed(gradient))


class SumAndCut(torch.autograd.Function):
    """Reduce-scatter of sequences, the reverse of Gather."""

    @staticmethod
    def forward(ctx, x):
        return own(summed(x))

    @staticmethod
    def backward(ctx, gradient):
        return gathered(gradient)


def by_hand(x, weights, config):
    """Return the block's output for x `[batch, length of this rank, dim]`; `weights` are this rank's, by short name."""

    def norm(x, weight):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config.norm_epsilon) * weight

    inner = Gather.apply(norm(x, weights["attention_norm"]))
    query, key, value = (
        (inner @ weights[name].T).unflatten(-1, (-1, config.resolved_head_dim)).transpose(1, 2)
        for name in ("query", "key", "value")
    )
    positions = Positions.of(config, 0)
    table = rotary_table(query.size(-2), positions, query.device)
    query, key = rotate(query, positions, table), rotate(key, positions, table)
    shared = query.size(1) // key.size(1)
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    scores = query @ key.transpose(-2, -1) / query.size(-1) ** 0.5
    future = torch.ones_like(scores, dtype=torch.bool).triu(1)
    attended = scores.masked_fill(future, -torch.inf).softmax(-1) @ value
    x = x + SumAndCut.apply(attended.transpose(1, 2).flatten(2) @ weights["output"].T)
    inner = Gather.apply(norm(x, weights["feed_forward_norm"]))
    inner = F.silu(inner @ weights["gate"].T) * (inner @ weights["up"].T)
    return x + SumAndCut.apply(inner @ weights["down"].T)


def short(name):
    return name.removesuffix(".weight").rpartition(".")[2]


def of_hand(whole, x, upstream, config):
    dims = dict.fromkeys(COLUMNS, 0) | dict.fromkeys(ROWS, 1)
    weights = {name: own(w, dims[name]) if name in dims else w for name, w in whole.items()}
    weights = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    mine = own(x).clone().requires_grad_()
    result = by_hand(mine, weights, config)
    torch.autograd.backward(result, own(upstream))
    gradients = {
        name: gathered(weight.grad, dims[name]) if name in dims else summed(weight.grad)
        for name, weight in weights.items()
    }
    return {"result": gathered(result.detach()), "x": gathered(mine.grad), **gradients}


def of_ours(whole, x, upstream, config, mesh, overlapped=False):
    """Compute the trainer's own block: with a mesh that of the tensor group, otherwise that of one process."""
    model = Decoder(config, None, BLOCK)
    if mesh is not None:
        tensor.cut(model, mesh, overlapped)
    with torch.no_grad():
        for name, p in model.named_parameters():
            value = whole[short(name)]
            p.copy_(value if mesh is None else distribute_tensor(value, mesh, p.placements, src_data_rank=None))
    mine = (x if mesh is None else own(x)).clone().requires_grad_()
    result = model(mine)
    torch.autograd.backward(result, upstream if mesh is None else own(upstream))
    gradients = {short(name): p.grad for name, p in model.named_parameters()}
    if mesh is None:
        return {"result": result.detach(), "x": mine.grad, **gradients}
    gradients = {name: gradient.full_tensor() for name, gradient in gradients.items()}
    return {"result": gathered(result.detach()), "x": gathered(mine.grad), **gradients}


def in_turn(x, mesh):
    """Check that our operations that send while they multiply give the results of torch's fallbacks on CPU."""
    name = mesh.get_group().group_name
    weights = [x[0, : x.size(2)].T.contiguous(), x[1, : x.size(2)].T.contiguous()]
    for dim, whole in ((0, True), (1, True), (1, False)):
        ours = async_tensor.GATHER_MULTIPLY(x, weights, dim, name, return_A=whole)
        theirs = _symmetric_memory._fused_all_gather_matmul_fallback(x, weights, dim, name, return_A=whole)
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        ours = async_tensor.MULTIPLY_REDUCE(gathered(x, dim), weights[0], "sum", dim, name)
        theirs = _symmetric_memory._fused_matmul_reduce_scatter_fallback(
            gathered(x, dim), weights[0], "sum", dim, name
        )  # fmt: skip
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def main() -> int:
    torch.set_default_dtype(torch.float64)
    config, _, parallelism = configuration()
    model, world = config.model, group.join(os.environ, parallelism, routed=False)
    generator = torch.Generator().manual_seed(5)
    shapes = {short(name): p.shape for name, p in Decoder(model, None, BLOCK).named_parameters()}
    whole = {name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for name, shape in shapes.items()}
    size = (ROWS_OF_BATCH, model.sequence_length, model.dim)
    x, upstream = (torch.randn(size, generator=generator) for _ in range(2))
    results = {
        "one process": of_ours(whole, x, upstream, model, None),
        "by hand": of_hand(whole, x, upstream, model),
        "ours": of_ours(whole, x, upstream, model, world.meshes.tensor),
        "overlapped": of_ours(whole, x, upstream, model, world.meshes.tensor, overlapped=True),
    }
    in_turn(own(x), world.meshes.tensor)
    if world.rank == 0:
        torch.save(results, os.environ["RESULT"])
    dist.barrier()
    return 0
