"""Program of forked workers that save the whole gradient of one global batch, for any number of ranks."""

import json
import os
import sys

import torch

from concertina_trainer.data.read.batch import batch_plan
from concertina_trainer.data.read.batches import microbatches
from concertina_trainer.data.read.sequence_reader import Reader
from concertina_trainer.model import loss
from concertina_trainer.model.optimizer import LocalOptimizer
from concertina_trainer.model.own import own_spec
from concertina_trainer.parallel import compiled, group, summing, tensor
from concertina_trainer.parallel.parallelize import parallelized
from concertina_trainer.state.train_state import TrainState
from concertina_trainer.training.engine import engine_of
from concertina_trainer.training.expert_loads import ExpertLoads
from concertina_trainer.worker import configuration


def main() -> int:
    before = set(sys.modules)
    prepare()
    found = of_round(before)
    if os.environ["RANK"] == "0":
        torch.save(found, os.environ["RESULT"])
    return 0


def prepare():
    torch.set_default_dtype(getattr(torch, os.environ["DTYPE"]))
    loss.CHUNK_LOGITS = int(os.environ.get("CHUNK_LOGITS", loss.CHUNK_LOGITS))


def of_round(before=frozenset()):
    """Join the round of the environment variables, and return what its ranks have computed together.

    `before` has the names of modules that were imported when the process began.
    """
    config, _, parallelism = configuration()
    world = group.join(os.environ, parallelism, config.model.experts is not None)
    reader = Reader(config.data, config.model.sequence_length, config.seed)
    backend = os.environ.get("COMPILED")
    if backend:
        compiled.share_between_rounds(world)
    model = parallelized(config, world, own_spec(config, reader))
    if backend:
        compiled.BACKEND = {"backend": backend}
        for part in model.parts:
            compiled.compile_blocks(part)
    optimizer = LocalOptimizer(model, config.optimizer, 0)
    TrainState(model, config, optimizer, world).initialise(config)
    plan = batch_plan(config, world.degrees)
    if shares := json.loads(os.environ["SHARES"]):
        plan = plan.shared_out(shares, config.resolved_micro_batch_size)
    batch = [each.to(world.device) for each in microbatches(reader, plan, world.data_rank, position=100)]
    sums = summing.sums(config, model, plan, world)
    with tensor.measured_waits(world), compiled.groups_released(world):
        losses = engine_of(model, optimizer, sums, config, plan, world).forward_backward(batch)
    reduced = torch.stack([*sums.squares(optimizer.counted_gradients()), *sums.losses(losses)])
    torch.distributed.all_reduce(reduced)
    squared, mean_loss = reduced.tolist()
    loads = ExpertLoads(model, config.model)
    counted = loads.payload(world.device)
    torch.distributed.all_reduce(counted)
    loads.update(counted.tolist())
    whole = {name: p.grad.full_tensor().cpu() for name, p in model.named_parameters() if p.requires_grad}
    biases = {name: bias.cpu() for name, bias in model.named_buffers()}
    optimizer.update(0.0, 1.0)
    late = set(sys.modules) - before
    for found in (whole, biases):
        stages = [None] * world.size
        torch.distributed.all_gather_object(stages, found)
        for stage in stages:
            for name, value in stage.items():
                torch.testing.assert_close(value, found.setdefault(name, value), rtol=0, atol=0)
    return {
        "gradients": whole,
        "norm": squared**0.5,
        "loss": mean_loss,
        "late": late,
        "seconds": {part.value: seconds for part, seconds in world.times.parts.items()},
        "waiting": world.times.waiting,
        "graphs": compiled.graphs(),
        "loads": counted.tolist(),
        "biases": biases,
    }
