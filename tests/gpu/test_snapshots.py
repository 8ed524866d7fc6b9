"""Snapshots of GPU memory: they are copied beside the GPU's work, and complete."""

import tempfile
from pathlib import Path

import pytest
import torch

from concertina_protocol import SnapshotId
from concertina_protocol.sidecar import SNAPSHOT_SLOTS
from concertina_state.format.shardfile import Chunk, Layout, ShardMetadata
from concertina_state.snapshots import Snapshots
from concertina_state.tensors import Tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device: nothing was copied"),
]
ELEMENTS = 1 << 26
LONG = 2_000_000_000
"""Number of cycles that take about a second."""


@pytest.fixture
def state():
    chunks = [Chunk(name, "F32", (0,), (ELEMENTS,), (ELEMENTS,)) for name in ("device", "host")]
    return Tensors(Layout(chunks), [numbers().to(device) for device in ("cuda", "cpu")])


def numbers():
    """Return numbers to which 1 can be added without rounding."""
    return torch.arange(ELEMENTS, dtype=torch.float32) % 1000


def metadata(step):
    return ShardMetadata(SnapshotId(1, step, "layout", 1), 0, step, "", "")


def held(layout, path):
    content = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    return [
        content[begin : begin + chunk.size].view(torch.float32)
        for chunk, begin in zip(layout.chunks, layout.begins, strict=True)
    ]


@pytest.fixture
def memory():
    """Yield a folder in memory, as a replica's volume: pages of a file on a disk can't be locked for a device."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def test_what_is_queued_next_is_not_in_it_and_the_host_goes_on(memory, state):
    """The first snapshots are an exception: they allocate and lock the memory of their slots."""
    snapshots = Snapshots(memory, state)
    for step in range(6):
        snapshots.complete = snapshots.count - 2
        torch.cuda._sleep(LONG)
        taken = snapshots.begin(metadata(step))
        (copied,) = state._copied.values()
        snapshots.before_change()
        for tensor in state.tensors:
            tensor.add_(1)
        if step >= SNAPSHOT_SLOTS:
            assert not copied.query(), "the host has waited for the device"
        snapshots.finish()
        assert snapshots.device_seconds > 0
        for found in held(state.layout, taken.path):
            assert torch.equal(found, numbers() + step)
