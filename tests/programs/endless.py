"""Process that takes snapshots of a small state without a pause."""

import os
from pathlib import Path

import torch

from concertina_protocol import SnapshotId
from concertina_state.format.shardfile import Chunk, Layout, ShardMetadata
from concertina_state.snapshots import Snapshots
from concertina_state.tensors import Tensors


class State(Tensors):
    """State of two tensors that hold the number of the step in each element."""

    def __init__(self, elements=1000):
        chunks = [Chunk(name, "F32", (0,), (elements,), (elements,)) for name in ("a", "b")]
        super().__init__(Layout(chunks), [torch.zeros(elements), torch.zeros(elements)])

    def at(self, step):
        for tensor in self.tensors:
            tensor.fill_(step)
        return ShardMetadata(SnapshotId(1, step, "layout", 1), 0, step, "", "")


def main() -> None:
    state = State(300_000)
    snapshots = Snapshots(Path(os.environ["CONCERTINA_SNAPSHOTS"]), state)
    for step in range(1_000_000):
        snapshots.complete = step - 2
        snapshots.begin(state.at(step))
