"""With the state in host memory a run has the very bits that it has without, in each layout, whatever it goes on from.

On CPU device and host are one: what this can't show is in tests/gpu, and in tests/unit/trainer/test_host_state.py."""

import json

import pytest
import torch

from builders.train import node, states
from concertina_protocol import Restore

STEPS = 5
EXPERTS = {"count": 4, "hiddenDim": 24, "shared": 1, "firstDense": 1, "biasRate": 0.01}
FREED = {"microBatchSize": 1, "memory": {"reshardAfterForward": "Always"}}
"""Each microbatch's gradients are added up in host memory."""
CASES = {
    "fsdp": (3, {}, {}),
    "fsdp, freed": (2, {}, FREED),
    "hsdp, freed": (4, {"shard": 2}, FREED),
    "bitwise": (2, {}, {"determinism": "bitwise", "globalBatchSize": 8}),
    "copies x tensor": (4, {"shard": 1, "tensor": 2}, {}),
    "context": (2, {"context": 2}, {}),
    "pipeline": (2, {"pipeline": 2}, {}),
    "pipeline x fsdp, freed": (4, {"pipeline": 2}, FREED),
    "interleaved x copies": (4, {"pipeline": 2, "schedule": "Interleaved1F1B", "shard": 1}, {}),
    "zero bubble": (2, {"pipeline": 2, "schedule": "InterleavedZeroBubble"}, {}),
    "experts x copies": (4, {"expert": 2, "shard": 2}, {"experts": EXPERTS}),
    "experts x tensor": (4, {"expert": 2, "tensor": 2}, {"experts": EXPERTS}),
}
LAW = "tests/train/trainer/test_offload.py::test_the_bits_are_the_same[fsdp, freed]"
QUICK = ("fsdp, freed", "pipeline", "experts x copies")


def offloaded(trainer):
    return {**trainer, "memory": {**trainer.get("memory", {}), "offload": "State"}}


def begun(folder, parent, trainer, parallelism):
    job = node.Job(folder, parent, trainer)
    job.environment["CONCERTINA_PARALLELISM"] = json.dumps(parallelism)
    return job


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name].view(torch.int32), value.view(torch.int32)), name


@pytest.fixture(scope="module")
def wide(trainer):
    """With as many heads and layers as the layouts need."""

    def changed(experts=None, **fields):
        model = {**trainer["model"], "layers": 4, "heads": 4, "kvHeads": 2}
        model |= {"experts": experts} if experts else {}
        return {**trainer, "steps": STEPS, "model": model, **fields}

    return changed


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.long(law=LAW)) for case in CASES]
)
def test_the_bits_are_the_same(folder, parent, wide, case):
    """Of losses, weights, moments and biases."""
    world, parallelism, changed = CASES[case]
    trainer = wide(**changed)
    whole, job = (begun(folder / name, parent, config, parallelism)
                  for name, config in (("a", trainer), ("b", offloaded(trainer))))  # fmt: skip
    expected, found = whole.run(world), job.run(world)
    assert set(found.codes.values()) == {0}, found.output
    assert list(found.losses) == list(range(1, STEPS + 1))
    assert found.losses == expected.losses
    same(states.whole(job), states.whole(whole))
