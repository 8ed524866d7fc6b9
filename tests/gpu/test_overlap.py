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
    found = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def test_beside_is_a_part_of_time():
    assert beside([(0, 4), (2, 6), (10, 12)], [(5, 11)]) == pytest.approx(2 / 8)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has no two CUDA devices: nothing overlapped")
@pytest.mark.parametrize("how", ["Always", "Never"])
def test_most_of_what_fsdp_sends_is_hidden(parent, trainer, tmp_path, how):
    model = {"layers": 8, "dim": 2048, "heads": 16, "sequenceLength": 1024}
    changed = {**trainer, "model": model, "microBatchSize": 8, "memory": {"reshardAfterForward": how}}
    found = computed(parent, "workers.overlap:main", changed, 2, tmp_path)
    assert found["sent"]
    assert found["computed"]
    assert beside(found["sent"], found["computed"]) > 0.5
