"""Program of forked workers: legs of one training, one after another, each with its own layout.

All legs use one process group. A leg continues where another has ended, by the trainer's own restore, loop and
snapshots.
"""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

from concertina_protocol import Progress, Restore
from concertina_protocol.heartbeat import HeartbeatWriter
from concertina_protocol.sidecar import read_sidecar
from concertina_protocol.worker_channel import Fetch, Fetched, FetchedHeader, Start
from concertina_state.format.shardfile import header_length
from concertina_trainer import worker
from concertina_trainer.config.parallelism import ParallelismConfig
from concertina_trainer.config.trainer import ReproductionConfig
from concertina_trainer.data.read.readers import Readers
from concertina_trainer.parallel import group, tensor
from concertina_trainer.parallel.group import DistContext
from concertina_trainer.state.restore import restore
from concertina_trainer.training.loop import train
from concertina_trainer.training.progress_report import Reporter

UID = "u1"


class Folder:
    """Stand-in for an agent: it has the snapshots of one leg, or none, and keeps the messages of the worker."""

    def __init__(self, path):
        self._path, self.said = path, []

    def newest(self):
        if self._path is None:
            return Restore("Fresh")
        found = (read_sidecar(mark.with_suffix("")) for mark in Path(self._path, "shard-0").glob("slot-*.json"))
        id = max((each.id for each in found), key=lambda id: id.step)
        return Restore("Memory", id.step, id)

    def send(self, message):
        self.said.append(message)

    def poll(self):
        return []

    def request(self, message, kind):
        marks = Path(self._path, f"shard-{message.shard}").glob("slot-*.json")
        [file] = [mark.with_suffix("") for mark in marks if read_sidecar(mark.with_suffix("")).id == message.id]
        if isinstance(message, Fetch):
            return Fetched(str(file))
        content = file.read_bytes()
        return FetchedHeader(content[8 : header_length(content[:8])].decode())


def main() -> int:
    torch.set_default_dtype(torch.float64)
    config, _, _ = worker.configuration()
    world = group.join(os.environ, ParallelismConfig(), routed=False)
    found = {}
    for number, leg in enumerate(json.loads(os.environ["LEGS"])):
        os.environ["CONCERTINA_ROUND"] = str(number + 1)
        os.environ["CONCERTINA_SNAPSHOTS"] = leg["to"]
        until = config.model_copy(update={"reproduction": ReproductionConfig(last_step=leg["last"])})
        layout = ParallelismConfig.model_validate(leg["parallelism"])
        here = DistContext.of(world.rank, world.size, world.device, layout, config.model.experts is not None)
        told = run(until, here, Folder(leg["from"]))
        if world.rank == 0:
            found[leg["name"]] = told
        dist.barrier()
    if world.rank == 0:
        torch.save(found, os.environ["RESULT"])
    return 0


def run(config, world, folder):
    """Run a leg, and return its losses and positions by step, and the weights after its last step."""
    given = folder.newest()
    start = Start(given, world.size, UID)
    reporter = Reporter(config, world.rank, folder, HeartbeatWriter(), None)
    built = worker.build(config, None, world, given.step, reporter, Readers())
    restored = restore(given, UID, built.state, config, None, built.reader.digest, world, folder)
    reporter.begin(worker.round_info(built, given, restored))
    with tensor.measured_waits(world):
        train(worker.assemble(built, start, restored, reporter, folder), restored.id.step, restored.position)
    mine = {name: p.detach().full_tensor() for name, p in built.model.named_parameters()}
    stages = [None] * world.size
    dist.all_gather_object(stages, mine)
    weights = {name: weight for stage in stages for name, weight in stage.items()}
    steps = [told for told in folder.said if isinstance(told, Progress) and told.phase == "training"]
    return {
        "losses": {told.step: told.loss for told in steps},
        "positions": {told.step: told.position for told in steps},
        "weights": weights,
    }
