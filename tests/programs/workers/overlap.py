"""Program of forked workers on GPUs that record when the kernels of a step ran, for communication and computation."""

import os

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from concertina_trainer.data.read.batch import batch_plan
from concertina_trainer.data.read.batches import microbatches
from concertina_trainer.data.read.sequence_reader import Reader
from concertina_trainer.model.optimizer import LocalOptimizer
from concertina_trainer.parallel import group, summing, tensor
from concertina_trainer.parallel.parallelize import parallelized
from concertina_trainer.state.train_state import TrainState
from concertina_trainer.training.engine import engine_of
from concertina_trainer.worker import configuration


def main() -> int:
    config, _, parallelism = configuration()
    world = group.join(os.environ, parallelism, config.model.experts is not None)
    reader = Reader(config.data, config.model.sequence_length, config.seed)
    model = parallelized(config, world)
    optimizer = LocalOptimizer(model, config.optimizer, 0)
    TrainState(model, config, optimizer, world).initialise(config)
    plan = batch_plan(config, world.degrees)
    engine = engine_of(model, optimizer, summing.sums(config, model, plan, world), config, plan, world)
    batch = [each.to(world.device) for each in microbatches(reader, plan, world.data_rank, position=0)]
    with tensor.measured_waits(world):
        for _ in range(3):  # The first steps create process groups and the allocator's blocks.
            engine.forward_backward(batch)
            optimizer.update(0.0, 1.0)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as traced:
            engine.forward_backward(batch)
            torch.cuda.synchronize()
    kernels = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in traced.events()
        if event.device_type == DeviceType.CUDA
    ]
    if world.rank == 0:
        torch.save(
            {
                "sent": [(begin, end) for name, begin, end in kernels if name.startswith("nccl")],
                "computed": [(begin, end) for name, begin, end in kernels if not name.startswith(("nccl", "Mem"))],
            },
            os.environ["RESULT"],
        )
    return 0
