"""Run in forked workers: what rank 0 really has in memory, by torch's own tracker and by the tensors themselves."""

import os

import torch
from torch.distributed._tools.mem_tracker import MemTracker

from concertina_trainer.data.read.batch import batch_plan
from concertina_trainer.data.read.batches import Microbatch
from concertina_trainer.model.optimizer import ShardedAdamW, local
from concertina_trainer.parallel import group, summing, tensor
from concertina_trainer.parallel.parallelize import parallelized
from concertina_trainer.training.engine import engine_of
from concertina_trainer.worker import configuration


class Totals(MemTracker):
    """Of several microbatches too, which torch's tracker can't tell apart by module; all together it can."""

    def _nothing(self, *_):
        pass

    _pre_fw_hook = _post_fw_hook = _pre_bw_hook = _post_bw_hook = _nothing

    def _update_peak_stats(self, _):
        for device, kinds in self._curr_mem_snap.items():
            self._peak_mem[device] = max(self._peak_mem.get(device, 0), kinds["Total"])


def bytes_of(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def main() -> int:
    config, _, parallelism = configuration()
    world = group.join(os.environ, parallelism, config.model.experts is not None)
    model = parallelized(config, world)
    with torch.no_grad():
        for _, parameter in model.named_parameters():
            local(parameter).normal_(0, 0.02)
    optimizer = ShardedAdamW(model, config.optimizer, 0)
    plan = batch_plan(config, world.degrees)
    length = config.model.sequence_length
    batch = [
        Microbatch(torch.randint(config.model.vocab_size, (plan.rows, length + 1)), torch.ones(plan.rows, length), None)
        for _ in range(plan.microbatches)
    ]
    sums = summing.sums(config, model, plan, world)
    tracker = Totals()
    tracker.track_external(*model.parts, optimizer._adam, *(t for m in batch for t in (m.tokens, m.weights)))
    with tensor.loss_context(world), tracker:
        engine_of(model, optimizer, sums, config, plan, world).forward_backward(batch)
    found = {
        "weights": bytes_of(local(p.detach()) for _, p in model.named_parameters()),
        "moments": bytes_of(each for kind in optimizer.moments().values() for each in kind.values()),
        "gradients": bytes_of(optimizer.gradients()),
        "peak": tracker._peak_mem[world.device],
    }
    if world.rank == 0:
        torch.save(found, os.environ["RESULT"])
    torch.distributed.barrier()
    return 0
