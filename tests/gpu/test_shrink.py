"""Compare torch's `shrink_group` with new groups after the loss of a rank."""

import os
import subprocess
import sys
import time

import pytest
from torch.distributed import TCPStore

from builders.programs import PROGRAMS
from builders.train import gpus

RANKS = 3
LIMIT_SECONDS = 60


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["new group", "shrink_group"])
def test_survivors_of_a_lost_rank_reduce_again(way, record_property):
    gpus.need(RANKS)
    for rank, seconds in seconds_until_reduced(way, "nccl").items():
        record_property(f"{way}: rank {rank} reduces again, s", round(seconds, 3))


def seconds_until_reduced(way, backend):
    """Return the seconds that each survivor takes, by rank."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        subprocess.Popen(
            [sys.executable, PROGRAMS / "shrunk.py", way, str(rank), str(RANKS), str(store.port), backend],
            env={**os.environ, **gpus.variables(rank, RANKS)}, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    try:
        deadline = time.monotonic() + LIMIT_SECONDS
        while store.add("reduced", 0) < RANKS:
            assert time.monotonic() < deadline, "the whole group never reduced"
            assert all(process.poll() is None for process in ranks), "a rank has ended early"
            time.sleep(0.01)
        ranks[-1].kill()
        ranks[-1].wait()
        store.set("killed", "")
        outputs = [process.communicate(timeout=LIMIT_SECONDS)[0] for process in ranks[:-1]]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert [process.returncode for process in ranks[:-1]] == [0] * (RANKS - 1)
    return {rank: float(output) for rank, output in enumerate(outputs)}
