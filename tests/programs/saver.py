"""Process that saves without a pause: snapshots of two ranks in memory, shipped and published as an uploader does.

With KILLED_AT, it is killed before that request of its second save that changes storage. If there are fewer requests,
it ends after the save.
"""

import itertools
import os
import signal
import time
from pathlib import Path

import obstore
import torch

from concertina_protocol import SnapshotId
from concertina_protocol.worker_channel import Publish, Ship
from concertina_state.format.shardfile import Chunk, Layout, ShardMetadata
from concertina_state.objects.file_writer import FileWriter
from concertina_state.snapshots import Snapshots
from concertina_state.tensors import Tensors
from concertina_state.uploader import Destination, answer

RANKS, ELEMENTS, UID = 2, 50_000, "crashing"


class State(Tensors):
    """State of a rank: half of one tensor, which holds the number of the step in each element."""

    def __init__(self, rank):
        layout = Layout([Chunk("x", "F32", (rank * ELEMENTS,), (ELEMENTS,), (RANKS * ELEMENTS,))])
        super().__init__(layout, [torch.zeros(ELEMENTS)])


def main():
    config = Destination.of(os.environ["CONCERTINA_CHECKPOINT"])
    round, first = int(os.environ["CONCERTINA_ROUND"]), int(os.environ["FIRST_STEP"])
    states = [State(rank) for rank in range(RANKS)]
    memory = [Snapshots(Path(os.environ["CONCERTINA_SNAPSHOTS"], f"shard-{r}"), states[r]) for r in range(RANKS)]
    log = os.open(os.environ["SAID"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for step in itertools.count(first):
        if step == first + 1 and "KILLED_AT" in os.environ:
            killed_at(int(os.environ["KILLED_AT"]))
        id = SnapshotId(round, step, "layout", RANKS)
        for rank, (state, snapshots) in enumerate(zip(states, memory, strict=True)):
            state.tensors[0].fill_(step)
            snapshots.complete = snapshots.count - 2
            taken = snapshots.take(ShardMetadata(id, rank, step, "", ""))
            until_done(Ship(id, rank, str(snapshots.link_for_shipping(taken))), config)
        until_done(Publish(id), config)
        os.write(log, f"{step}\n".encode())
        if step == first + 1 and "KILLED_AT" in os.environ:
            os._exit(0)


def killed_at(number):
    requests = itertools.count(1)

    def counted(request, *arguments, **options):
        if next(requests) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return request(*arguments, **options)

    def changed(owner, name):
        request = getattr(owner, name)
        setattr(owner, name, lambda *arguments, **options: counted(request, *arguments, **options))

    for owner, name in ((obstore, "put"), (obstore, "delete"), (FileWriter, "write"), (FileWriter, "close")):
        changed(owner, name)


def until_done(request, config):
    while (answered := answer(request, config, UID)).error:
        if getattr(answered, "refused", False):
            raise SystemExit(answered.error)
        time.sleep(0.02)
