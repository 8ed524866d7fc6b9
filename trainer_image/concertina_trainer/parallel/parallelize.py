"""The model in the layout of the round: tensor parallelism first, which FSDP cuts what is left of."""

from __future__ import annotations

import torch

from concertina_trainer.config import ModelConfig, Precision
from concertina_trainer.model.decoder import Decoder
from concertina_trainer.parallel import expert, tensor
from concertina_trainer.parallel.context import ContextParallel
from concertina_trainer.parallel.group import DistContext
from concertina_trainer.parallel.shard import shard


def parallelized(config: ModelConfig, precision: Precision, world: DistContext) -> Decoder:
    """What this rank has of it, its memory allocated and not yet filled. Raises BadInput."""
    meshes = world.meshes
    expert.check(config, world.degrees, meshes.expert.size() if meshes.expert else 1)
    with torch.device("meta"):
        model = Decoder(config, ContextParallel(meshes.context) if meshes.context else None)
    if meshes.tensor:
        tensor.cut(model, meshes.tensor)
    if meshes.expert:
        expert.cut(model, meshes.expert, world.times)
    shard(model, precision, config.weights, world)
    model.to_empty(device=world.device)
    return model
