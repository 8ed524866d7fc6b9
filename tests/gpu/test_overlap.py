"""FSDP's communication overlaps the computation on CUDA and NCCL, according to the times of kernels."""

import pytest
import torch

from builders.train.gradients import computed

pytestmark = pytest.mark.gpu


def beside(sent, computed):
    """Return the part of the time of `sent` (intervals that may overlap) in which something of `computed` ran too."""
    whole, both = union(sent), 0.0
    for begin, end in union(computed):
        both += sum(max(0.0, min(end, until) - max(begin, since)) for since, until in whole)
    return both / sum(end - begin for begin, end in whole)


def union(intervals):
    merged = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def test_beside_is_a_part_of_time():
    assert beside([(0, 4), (2, 6), (10, 12)], [(5, 11)]) == pytest.approx(2 / 8)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has no two CUDA devices: nothing overlapped")
@pytest.mark.parametrize("how", ["Always", "Never"])
def test_most_of_what_fsdp_sends_is_hidden(parent, trainer, tmp_path, how):
    model = {"layers": 8, "dim": 2048, "heads": 16, "sequenceLength": 1024}
    changed = {**trainer, "model": model, "microBatchSize": 8, "memory": {"reshardAfterForward": how}}
    times = computed(parent, "workers.overlap:main", changed, 2, tmp_path)
    assert times["sent"]
    assert times["computed"]
    assert beside(times["sent"], times["computed"]) > 0.5
