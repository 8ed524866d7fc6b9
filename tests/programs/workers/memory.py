"""Program of forked workers that measure the memory of each rank in a step.

The plan's own ledger measures real tensors. torch's allocator, which is independent of the ledger, measures the total.
"""

import json
import os

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from concertina_trainer.data.read.batch import batch_plan
from concertina_trainer.data.read.batches import Microbatch
from concertina_trainer.model.optimizer import LocalOptimizer, local
from concertina_trainer.model.own import OwnSpec
from concertina_trainer.model.spec import DataShape
from concertina_trainer.parallel import group, summing, tensor
from concertina_trainer.parallel.parallelize import parallelized
from concertina_trainer.planning.ledger import Ledger, MemoryKind
from concertina_trainer.training.engine import engine_of
from concertina_trainer.worker import configuration


class Step:
    def __init__(self) -> None:
        self.config, _, parallelism = configuration()
        self.world = group.join(os.environ, parallelism, self.config.model.experts is not None)
        self.data = json.loads(os.environ["DATA"])
        length = self.config.model.sequence_length
        shape = DataShape(
            length, self.data["vocabulary"], {"features": self.data["width"]} if self.data["width"] else {}
        )
        own = OwnSpec(self.config, shape) if self.config.model.custom else None
        self.model = parallelized(self.config, self.world, own)
        if own:
            self.model.whole.proofs.clear()  # all ranks draw the same weights, so a tensor group has equal heads
        with torch.no_grad():
            for _, parameter in self.model.named_parameters():
                local(parameter).normal_(0, 0.02)
        for _, moe in self.model.mixtures():
            moe.router.register_forward_hook(chosen_in_turn)
        self.optimizer = LocalOptimizer(self.model, self.config.optimizer, 0, exact=self.config.bitwise)
        self.plan = batch_plan(self.config, self.world.degrees)
        self.sums = summing.sums(self.config, self.model, self.plan, self.world)

    @property
    def state(self):
        moments = [each for kind in self.optimizer.moments().values() for each in kind.values()]
        return [p.detach() for _, p in self.model.named_parameters()], moments

    def forward_backward(self):
        rows, length, world = self.plan.rows, self.config.model.sequence_length, self.world
        vocabulary, width = self.data["vocabulary"], self.data["width"]
        engine = engine_of(self.model, self.optimizer, self.sums, self.config, self.plan, world)
        batch = [
            Microbatch(
                torch.randint(vocabulary, (rows, length + 1)), torch.full((rows, length), 1e-3), None,
                fields={"features": torch.randn(rows, length + 1, width).half()} if width else {},
            )
            for _ in range(self.plan.microbatches)
        ]  # fmt: skip
        engine.forward_backward(batch)


def chosen_in_turn(router, arguments, output):
    """Choose experts in turn.

    BUSY of four choices fall on the first half of them: with 2, loads are even as in the plan.
    """
    scores, chosen = output
    half, numbers = scores.size(1) // 2, torch.arange(chosen.numel())
    experts = numbers // 4 % half + half * (numbers % 4 >= int(os.environ["BUSY"]))
    return scores, experts.view_as(chosen)


def counted(step):
    ledger = Ledger(None)
    with ledger.resizing(), ledger.routing(), ledger:
        weights, moments = step.state
        ledger.mark(MemoryKind.weights, weights)
        ledger.mark(MemoryKind.moments, moments)
        ledger.fresh()
        step.forward_backward()
        ledger.mark(MemoryKind.gradients, step.optimizer.gradients())
        step.sums.squares(step.optimizer.counted_gradients())
        ledger.updating = True
        step.optimizer.update(1e-3, 0.5)
    return {str(phase): {str(kind): size for kind, size in kinds.items()} for phase, kinds in ledger.peaks.items()}


def allocated(step):
    """Return the bytes allocated at the peak of forward and backward, with the optimizer's state."""
    now = peak = sum(local(each).nbytes for kind in step.state for each in kind)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step.forward_backward()
    changes = [each for each in profiled.profiler.kineto_results.events() if each.name() == "[memory]"]
    for change in sorted(changes, key=lambda each: each.start_ns()):
        now += change.nbytes()
        peak = max(peak, now)
    return peak


def main() -> int:
    step = Step()
    with tensor.measured_waits(step.world):
        result = {"rank": step.world.rank, "peaks": counted(step), "allocated": allocated(step)}
    ranks = [None] * step.world.size
    dist.all_gather_object(ranks, result)
    if step.world.rank == 0:
        torch.save(ranks, os.environ["RESULT"])
    dist.barrier()
    return 0
