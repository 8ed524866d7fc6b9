"""Run in forked workers: the whole gradient of one global batch, however many ranks computed it."""

import json
import os
import sys

import torch

from concertina_trainer.config import TrainerConfig
from concertina_trainer.data.read.batch import plan_batch
from concertina_trainer.data.read.batches import microbatches
from concertina_trainer.data.read.reader import Reader
from concertina_trainer.model.optimizer import ShardedAdamW
from concertina_trainer.parallel import parallel
from concertina_trainer.parallel.summing import PlainSums
from concertina_trainer.state.train_state import TrainState
from concertina_trainer.training import loop


def main() -> int:
    before = set(sys.modules)
    config = TrainerConfig.model_validate(json.loads(os.environ["CONCERTINA_TRAINER"]))
    world = parallel.join(os.environ)
    model = parallel.sharded_model(config.model, config.precision, world)
    optimizer = ShardedAdamW(model, config.optimizer, 0)
    TrainState(model, optimizer, world).initialise(config)
    reader = Reader(config.data, config.model.sequence_length, config.seed)
    plan = plan_batch(config.global_batch_size, config.micro_batch_size, world.size)
    if shares := json.loads(os.environ["SHARES"]):
        plan = plan.shared_out(shares, config.micro_batch_size)
    batch = microbatches(reader, plan, world.rank, position=100)
    sums = PlainSums()
    loop.forward_backward(model, optimizer, sums, batch, world.times)
    squared = sums.squares(optimizer.gradients())[0]
    torch.distributed.all_reduce(squared)
    whole = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    optimizer.update(0.0, 1.0)
    late = set(sys.modules) - before
    if world.rank == 0:
        torch.save({"gradients": whole, "norm": squared.sqrt().item(), "late": late}, os.environ["RESULT"])
    return 0
