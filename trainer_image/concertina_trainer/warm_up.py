"""First step of a tiny model, in a process that waits to become a worker (see `concertina_agent.workers.spare`).

The first step of a process takes longer than the next ones, because torch fills its caches and starts threads, and the
process gets memory of its own in place of its parent's. All other ranks wait meanwhile. So a spare makes such a step
before it is needed. The step leaves caches, threads and memory, but no group, no file, no variable, no setting and no
random number that a new worker would not have (tests/train/trainer/test_spare.py).
"""

from __future__ import annotations

import gc
import json
import os

import torch
import torch.distributed as dist

from concertina_state.saving import StepFlags
from concertina_trainer.config.model_config import ModelConfig
from concertina_trainer.config.parallelism import ParallelismConfig
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.data.read.batch import batch_plan
from concertina_trainer.data.read.batches import Microbatch
from concertina_trainer.model.optimizer import ShardedAdamW, local
from concertina_trainer.parallel import group, summing
from concertina_trainer.parallel.group import DistContext
from concertina_trainer.parallel.parallelize import parallelized
from concertina_trainer.state.train_state import TrainState
from concertina_trainer.training.agreement import agree
from concertina_trainer.training.engine import engine_of

MODEL = ModelConfig(layers=1, dim=32, heads=2, sequence_length=32)
TAKEN_OVER = ("precision", "determinism")
"""Fields of the job's trainer that decide which kernels a step uses."""


def warm_up() -> None:
    """Train one step on a process group of one rank.

    Nothing is done on a machine with a GPU, whose memory a process that waits would take from the workers. The
    variables that are set here last until the spare gets those of a worker.
    """
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asking for GPUs must not open one
    if torch.cuda.is_available():
        return
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if interface := group.interface_of(os.environ.get("CONCERTINA_POD_IP", "")):
        os.environ.update(group.socket_variables(interface))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        _step(_config(os.environ.get("CONCERTINA_TRAINER", "{}")))
    finally:
        group.leave()
        gc.collect()


def _config(trainer: str) -> TrainerConfig:
    """Return the configuration of the tiny model. It has no data, since the step does not read any."""
    taken_over = {name: value for name, value in json.loads(trainer).items() if name in TAKEN_OVER}
    return TrainerConfig.model_validate(
        {"data": {"uri": "/none"}, "model": MODEL, "globalBatchSize": 1, "microBatchSize": 1, **taken_over}
    )


def _step(config: TrainerConfig) -> None:
    """Build a model like a worker does, and train one step on zeros."""
    world = DistContext.of(0, 1, torch.device("cpu"), ParallelismConfig())
    model = parallelized(config, world)
    optimizer = ShardedAdamW(model, config.optimizer, 0, exact=config.bitwise)
    TrainState(model, config, optimizer, world)
    for _, parameter in model.named_parameters():
        local(parameter.detach()).zero_()
    plan, length = batch_plan(config, world.degrees), config.model.sequence_length
    sums = summing.sums(config, model, plan, world)
    tokens, weights = torch.zeros(1, length + 1, dtype=torch.int64), torch.full((1, length), 1 / length)
    engine = engine_of(model, optimizer, sums, config, plan, world)
    losses = engine.forward_backward([Microbatch(tokens, weights, None)])
    agree(world, sums, losses, optimizer.counted_gradients(), StepFlags())
    optimizer.update(0.0, 0.5)
