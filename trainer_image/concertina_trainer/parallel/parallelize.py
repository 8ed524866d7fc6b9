"""Construction of this rank's part of the model: tensor parallelism splits the weights, then FSDP shards the parts."""

from __future__ import annotations

import torch

from concertina_trainer.config.trainer import Precision, TrainerConfig
from concertina_trainer.layouts import frees_weights
from concertina_trainer.model.decoder import Decoder
from concertina_trainer.model.float8 import check_device, use_float8
from concertina_trainer.model.lora import quantize, set_frozen_dtype
from concertina_trainer.model.own import OwnModel, OwnSpec
from concertina_trainer.model.stages import Stages, divided
from concertina_trainer.parallel import detached, expert, tensor
from concertina_trainer.parallel.context_parallel import ContextParallel
from concertina_trainer.parallel.group import DistContext
from concertina_trainer.parallel.hf_tensor import DividedModel
from concertina_trainer.parallel.shard import compute_dtype, shard


def parallelized(config: TrainerConfig, world: DistContext, own: OwnSpec | None = None) -> Stages:
    """Return this rank's part of the model, with allocated but uninitialized memory.

    `own` is a custom model, or None for the bundled decoder.
    """
    detached.skip_propagation()
    if own is not None:
        return Stages((), _own(own, world))
    meshes, degrees = world.meshes, world.degrees
    context = ContextParallel(meshes.context, world.times) if meshes.context else None
    stages = divided(config.model, degrees.pipeline * world.parallelism.stages_per_rank)
    free = frees_weights(config, world.parallelism)
    parts = []
    for part in stages[degrees.place(world.rank).pipeline :: degrees.pipeline]:
        with torch.device("meta"):
            model = Decoder(config.model, context, part, config.memory.resolved_activations)
        if config.precision is Precision.float8:
            check_device(world.device)
            use_float8(model)
        if meshes.tensor:
            tensor.cut(model, meshes.tensor, world.parallelism.async_tensor)
        if meshes.expert:
            expert.cut(model, meshes.expert, world.times)
        if meshes.sequence:
            expert.share_sequences(model, meshes.sequence)
        if config.model.lora:
            set_frozen_dtype(model, config.model.lora.frozen_dtype)
            quantize(model, config.model.lora.frozen_dtype)
        shard(model, config, free, world)
        parts.append(model)
    return Stages(parts)


def _own(own: OwnSpec, world: DistContext) -> OwnModel:
    config = own.config
    model = OwnModel(own, compute_dtype(config.precision, world.device))
    if world.meshes.tensor:
        model.proofs.append(DividedModel(model.model, world.meshes.tensor).check_gradients)
    shard(model, config, frees_weights(config, world.parallelism, model.weights), world)
    model.fill_buffers()
    return model
