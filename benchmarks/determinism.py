"""Cost of `determinism: Bitwise`: seconds of a step, compared with `Order` for the same ranks, model and batch.

python benchmarks/determinism.py [--world N] [--steps N] [--json FILE]

The ranks are real processes on gloo with the demo's model. Steps of both kinds alternate, so that other load on the
machine affects both equally. Reading data and saving are not measured, because they are the same for both kinds.
"""

import argparse
import tempfile
import time
from pathlib import Path

import report
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from concertina_state.saving import StepFlags
from concertina_trainer.config.parallelism import ParallelismConfig
from concertina_trainer.config.trainer import Determinism, TrainerConfig
from concertina_trainer.data.read.batch import plan_batch
from concertina_trainer.data.read.batches import Microbatch
from concertina_trainer.model.optimizer import LocalOptimizer
from concertina_trainer.parallel import summing
from concertina_trainer.parallel.group import DistContext
from concertina_trainer.parallel.parallelize import parallelized
from concertina_trainer.state.train_state import TrainState
from concertina_trainer.training.agreement import agree
from concertina_trainer.training.engine import WholeModel

CONFIG = TrainerConfig.model_validate({"data": {"uri": "/none"}, "precision": "Float32"})


class Kind:
    """One of the two determinism modes, with a separate model."""

    def __init__(self, bitwise: bool, world: DistContext) -> None:
        self.world = world
        config = CONFIG.model_copy(update={"determinism": Determinism.bitwise if bitwise else Determinism.order})
        self.model = parallelized(CONFIG, world)
        self.optimizer = LocalOptimizer(self.model, CONFIG.optimizer, 0, exact=bitwise)
        TrainState(self.model, CONFIG, self.optimizer, world).initialise(CONFIG)
        self.plan = plan_batch(CONFIG.global_batch_size, CONFIG.resolved_micro_batch_size, world.size, fixed=bitwise)
        self.sums = summing.sums(config, self.model, self.plan, world)
        self.engine = WholeModel(self.model, self.optimizer, self.sums, world)

    def step(self) -> float:
        """Train one step, and return its duration in seconds."""
        length = CONFIG.model.sequence_length
        batches = []
        for part in self.plan.slices(self.world.rank):
            weights = torch.zeros(self.plan.rows, length)
            weights[: len(part)] = 1 / CONFIG.global_batch_size / length
            batches.append(Microbatch(torch.randint(0, 256, (self.plan.rows, length + 1)), weights, None))
        dist.barrier()
        started = time.perf_counter()
        losses = self.engine.forward_backward(batches)
        nothing = torch.empty(0, dtype=torch.float64)
        agree(self.world, self.sums, losses, self.optimizer.counted_gradients(), StepFlags(), nothing)
        self.optimizer.update(1e-6, 1.0)
        return time.perf_counter() - started


def rank(number: int, size: int, steps: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=number, world_size=size)
    device = torch.device("cpu")
    world = DistContext.of(number, size, device, ParallelismConfig())
    kinds = {name: Kind(name == "bitwise", world) for name in ("order", "bitwise")}
    seconds = {name: [kind.step() for _ in range(2)] for name, kind in kinds.items()}  # warm
    for name in seconds:
        seconds[name].clear()
    for _ in range(steps):
        for name, kind in kinds.items():
            seconds[name].append(kind.step())
    if number == 0:
        torch.save(seconds, f"{folder}/seconds")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--world", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: dict[str, list[float]] = {}
    for size in options.world:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(rank, (size, options.steps, folder), nprocs=size)
            rows |= {f"{name}, {size} workers": seconds for name, seconds in torch.load(f"{folder}/seconds").items()}
    report.show("a step", rows)
    report.write(options.json, "determinism", rows)


if __name__ == "__main__":
    main()
