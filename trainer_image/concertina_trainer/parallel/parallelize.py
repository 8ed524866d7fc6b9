"""The model in the layout of the round: tensor parallelism first, which FSDP cuts what is left of."""

from __future__ import annotations

import torch

from concertina_trainer.config import MemoryConfig, ModelConfig, Precision
from concertina_trainer.model.decoder import Decoder
from concertina_trainer.model.stages import Stages, divided
from concertina_trainer.parallel import expert, tensor
from concertina_trainer.parallel.context import ContextParallel
from concertina_trainer.parallel.group import DistContext
from concertina_trainer.parallel.shard import reshards, shard


def parallelized(config: ModelConfig, precision: Precision, memory: MemoryConfig, world: DistContext) -> Stages:
    """What this rank has of it, its memory allocated and not yet filled."""
    meshes, degrees = world.meshes, world.degrees
    context = ContextParallel(meshes.context) if meshes.context else None
    stages = divided(config, degrees.pipeline * world.schedule.stages if degrees.pipeline > 1 else 1)
    reshard = reshards(memory, config.weights, world)
    parts = []
    for part in stages[degrees.place(world.rank).pipeline :: degrees.pipeline]:
        with torch.device("meta"):
            model = Decoder(config, context, part, memory.activations)
        if meshes.tensor:
            tensor.cut(model, meshes.tensor)
        if meshes.expert:
            expert.cut(model, meshes.expert, world.times)
        shard(model, precision, reshard, world)
        model.to_empty(device=world.device)
        parts.append(model)
    return Stages(parts)
