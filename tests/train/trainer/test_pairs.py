"""Five steps in one layout, then five in another: losses, samples and weights are those of plain training on one
process. In float64, so that a state that lost a bit on the way would be seen."""

import json

import pytest
import torch

from builders.train import plain
from builders.train.gradients import computed

HALF = 5
FOUR = {
    "fsdp": {},
    "hsdp": {"shard": 2},
    "fsdp x tensor": {"tensor": 2},
    "fsdp x context": {"context": 2},
    "context x tensor": {"context": 2, "tensor": 2},
    "fsdp x pipeline": {"pipeline": 2},
    "pipeline x tensor": {"pipeline": 2, "tensor": 2},
    "copies x interleaved": {"pipeline": 2, "schedule": "Interleaved1F1B", "shard": 1},
    "fsdp x zero bubble": {"pipeline": 2, "schedule": "InterleavedZeroBubble"},
}
EIGHT = {
    "fsdp x pipeline x tensor": {"pipeline": 2, "tensor": 2},
    "hsdp x context x tensor": {"context": 2, "tensor": 2, "shard": 1},
}
LAYOUTS = {name: (4, parallelism) for name, parallelism in FOUR.items()}
LAYOUTS |= {name: (8, parallelism) for name, parallelism in EIGHT.items()}
AT_ONCE = 4
"""Legs of one process group: a machine that is busy otherwise gets through them in time."""
LAW = "tests/train/trainer/test_pairs.py::test_one_layout_goes_on_from_another"


@pytest.fixture(scope="module")
def uneven(trainer):
    """Heads, layers and lengths that all layouts can cut, and otherwise sizes that no world of theirs divides."""
    model = {**trainer["model"], "layers": 4, "heads": 4, "kvHeads": 2, "hiddenDim": 44, "vocabSize": 259}
    changed = {"steps": 2 * HALF, "microBatchSize": 4, "model": model, "snapshot": {"everySteps": HALF}}
    return {**trainer, **changed}


@pytest.fixture(scope="module")
def reference(uneven):
    return plain.trained(uneven, torch.float64)


@pytest.fixture(scope="module")
def bound(uneven):
    bound = plain.bound(uneven, torch.float64)
    assert bound.losses < 1e-6 * plain.wrong_sample(uneven, torch.float64)
    return bound


def leg(folder, layout, before=None):
    """From the start to half, or from what another layout has left there to the end."""
    return {
        "name": f"{before} > {layout}" if before else layout,
        "parallelism": LAYOUTS[layout][1],
        "from": before and str(folder / before),
        "to": str(folder / (f"{before} > {layout}" if before else layout)),
        "last": 2 * HALF if before else HALF,
    }


def run(parent, trainer, folder, world, legs):
    found = {}
    for begin in range(0, len(legs), AT_ONCE):
        some = json.dumps(legs[begin : begin + AT_ONCE])
        found |= computed(parent, "workers.legs:main", trainer, world, folder, LEGS=some)
    return found


def check(found, steps, reference, bound):
    assert found["positions"] == {step: 7 * step for step in steps}
    assert found["losses"] == pytest.approx({step: reference.losses[step] for step in steps}, rel=bound.losses, abs=0)


def check_end(found, reference, bound):
    check(found, range(HALF + 1, 2 * HALF + 1), reference, bound)
    assert found["weights"].keys() == reference.weights.keys()
    for name, weight in reference.weights.items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=0, atol=bound.weights)


def test_one_layout_goes_on_from_another(parent, uneven, folder, reference, bound):
    legs = [leg(folder, "fsdp x tensor"), leg(folder, "fsdp x pipeline", "fsdp x tensor")]
    first, second = run(parent, uneven, folder, 4, legs).values()
    check(first, range(1, HALF + 1), reference, bound)
    check_end(second, reference, bound)


@pytest.fixture(scope="module")
def halves(parent, uneven, folder_of_module, reference, bound):
    """The folder where each layout has left what half of the steps came to."""
    for world in (4, 8):
        legs = [leg(folder_of_module, layout) for layout in LAYOUTS if LAYOUTS[layout][0] == world]
        for found in run(parent, uneven, folder_of_module, world, legs).values():
            check(found, range(1, HALF + 1), reference, bound)
    return folder_of_module


@pytest.mark.long(law=LAW)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_goes_on_from_every_other(parent, uneven, halves, reference, bound, layout):
    legs = [leg(halves, layout, before) for before in LAYOUTS]
    found = run(parent, uneven, halves, LAYOUTS[layout][0], legs)
    assert len(found) == len(LAYOUTS)
    for each in found.values():
        check_end(each, reference, bound)
