"""Data parallelism by FSDP2: weights, gradients and optimizer state are sharded over ranks.

With hybrid sharding (HSDP), there are several copies of the weights. Each copy is sharded over the ranks of one group.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from concertina_trainer.config.memory_config import Offload
from concertina_trainer.config.optimizer_config import StatePrecision
from concertina_trainer.config.trainer import Precision, TrainerConfig
from concertina_trainer.model.decoder import Decoder
from concertina_trainer.model.optimizer import local
from concertina_trainer.model.own import OwnModel
from concertina_trainer.parallel.group import DistContext
from concertina_trainer.parallel.step_times import measure

HALF = {
    Precision.bfloat16: torch.bfloat16,
    Precision.float16: torch.float16,
    Precision.float8: torch.bfloat16,
}
"""Dtype of activations and gathered weights, keyed by precision. With Float8, matrix products round further."""


def shard(model: Decoder | OwnModel, config: TrainerConfig, reshard: bool, world: DistContext) -> None:
    """Shard the model over the FSDP mesh, with allocated but uninitialized memory.

    Gradients are reduced to sums over ranks, not to means: the loss is already divided by the global number of tokens,
    and gloo can't multiply while it sums. The function sets this for every module, because FSDP's setters are not
    recursive. `reshard` says whether blocks free their gathered weights between the forward and the backward pass.
    """
    rounded = config.gradient_precision is StatePrecision.bfloat16
    # Inputs are not cast to half precision, because the tokens' weights in the loss would lose bits.
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype(config.precision, world.device),
        reduce_dtype=torch.bfloat16 if rounded else torch.get_default_dtype(),
        cast_forward_inputs=False,
    )
    offloaded = config.memory.offload is Offload.state
    # Copies between host and GPU run concurrently with computation only if the host memory is pinned.
    offload = CPUOffloadPolicy(pin_memory=world.device.type == "cuda") if offloaded else OffloadPolicy()
    mesh = world.meshes.fsdp
    for moe in model.mixtures() if isinstance(model, Decoder) else ():
        # Experts are sharded as a module of their own: there may be more ranks than experts, and with expert
        # parallelism ranks have different experts.
        cut = world.meshes.expert_fsdp or mesh
        fully_shard(
            moe.experts, mesh=cut, mp_policy=policy, reshard_after_forward=reshard,
            shard_placement_fn=functools.partial(_expert_cut, ranks=cut.size(cut.ndim - 1)), offload_policy=offload,
        )  # fmt: skip
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard, offload_policy=offload)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False, offload_policy=offload)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            measure(module, world.times)
            if isinstance(model, OwnModel) and model.own.config.model.hf:
                module.set_reduce_scatter_unused_params(True)  # ranks may use other experts
    _allocate(model, torch.device("cpu") if offloaded else world.device, world.device)


def _allocate(model: nn.Module, weights: torch.device, buffers: torch.device) -> None:
    """Allocate memory for the weights on the device `weights`, and for the buffers on the device `buffers`.

    If the state is offloaded, FSDP pins the weights here. The weights stay at the same addresses afterwards, so other
    code may keep references to them. Modules that share a parameter also share the new parameter.
    """
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((module, name))
    model._apply(functools.partial(_empty_like, device=weights))
    for (first, name), *others in owners.values():
        for module, other_name in others:
            module._parameters[other_name] = first._parameters[name]
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(buffers))


def _empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    """Return an uninitialized tensor with the same shape, dtype and sharding on another device.

    `Module.to_empty` would do the same, but it makes DTensor derive the sharding again for each shape.
    """
    if not isinstance(tensor, DTensor):
        return torch.empty_like(tensor, device=device)
    return DTensor(torch.empty_like(tensor._local_tensor, device=device), tensor._spec, requires_grad=False)


def _expert_cut(weights: nn.Parameter, ranks: int) -> Shard:
    """Return how FSDP shards a weight of experts `[experts, ...]`: by experts, or by the second dimension.

    The second dimension is sharded if there are fewer experts than ranks, so that no rank is left without a shard.
    """
    experts, rows = len(local(weights)), weights.size(1)
    return Shard(1) if experts < ranks and rows % ranks == 0 else Shard(0)


def compute_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """Return the dtype of matrix products. Weights and optimizer state have torch's default dtype, float32."""
    if precision is Precision.auto and device.type == "cuda" and torch.cuda.is_bf16_supported():
        return torch.bfloat16
    return HALF.get(precision, torch.get_default_dtype())
