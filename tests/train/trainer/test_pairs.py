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
EXPERTS = {
    "fsdp": {},
    "experts": {"expert": 4},
    "experts x fsdp": {"expert": 2},
    "experts x copies": {"expert": 2, "shard": 2},
}
LAYOUTS = {name: (4, parallelism) for name, parallelism in FOUR.items()}
LAYOUTS |= {name: (8, parallelism) for name, parallelism in EIGHT.items()}
OF_EXPERTS = {name: (4, parallelism) for name, parallelism in EXPERTS.items()}
AT_ONCE = 4
"""Legs of one process group: a machine that is busy otherwise gets through them in time."""
LAW = "tests/train/trainer/test_pairs.py::test_one_layout_goes_on_from_another"


class Course:
    """Of one model, in any of some layouts, with what plain training gives."""

    def __init__(self, parent, trainer, layouts, folder):
        self.parent, self.trainer, self.layouts, self.folder = parent, trainer, layouts, folder
        self.reference, self.bound = plain.trained(trainer, torch.float64), plain.bound(trainer, torch.float64)
        assert self.bound.losses < 1e-6 * plain.wrong_sample(trainer, torch.float64)

    def leg(self, layout, before=None):
        """From the start to half, or from what another layout has left there to the end."""
        name = f"{before} > {layout}" if before else layout
        return {
            "name": name,
            "parallelism": self.layouts[layout][1],
            "from": before and str(self.folder / before),
            "to": str(self.folder / name),
            "last": 2 * HALF if before else HALF,
        }

    def run(self, world, *legs):
        """And compare each with the reference."""
        for begin in range(0, len(legs), AT_ONCE):
            some = legs[begin : begin + AT_ONCE]
            found = computed(
                self.parent, "workers.legs:main", self.trainer, world, self.folder, LEGS=json.dumps(some)
            )  # fmt: skip
            for leg in some:
                self._check(found[leg["name"]], leg["from"] is not None)

    def _check(self, found, second):
        steps = range(HALF + 1, 2 * HALF + 1) if second else range(1, HALF + 1)
        assert found["positions"] == {step: 7 * step for step in steps}
        expected = {step: self.reference.losses[step] for step in steps}
        assert found["losses"] == pytest.approx(expected, rel=self.bound.losses, abs=0)
        assert found["weights"].keys() == self.reference.weights.keys()
        if second:
            for name, weight in self.reference.weights.items():
                torch.testing.assert_close(found["weights"][name], weight, rtol=0, atol=self.bound.weights)

    def halves(self):
        for world in sorted({world for world, _ in self.layouts.values()}):
            self.run(world, *(self.leg(layout) for layout in self.layouts if self.layouts[layout][0] == world))

    def ends(self, layout):
        """From what each has left."""
        self.run(self.layouts[layout][0], *(self.leg(layout, before) for before in self.layouts))


@pytest.fixture(scope="module")
def course(parent, trainer, folder_of_module):
    """Heads, layers and lengths that all layouts can cut, and otherwise sizes that no world of theirs divides."""
    model = {**trainer["model"], "layers": 4, "heads": 4, "kvHeads": 2, "hiddenDim": 44, "vocabSize": 259}
    changed = {"steps": 2 * HALF, "microBatchSize": 4, "model": model, "snapshot": {"everySteps": HALF}}
    return Course(parent, {**trainer, **changed}, LAYOUTS, folder_of_module)


@pytest.fixture(scope="module")
def halves(course):
    course.halves()


@pytest.fixture(scope="module")
def of_experts(parent, course, folder_of_module):
    experts = {"count": 4, "hiddenDim": 24, "shared": 1, "firstDense": 1, "balanceLoss": 0.5, "biasRate": 0.01}
    changed = {**course.trainer, "model": {**course.trainer["model"], "experts": experts}}
    (folder_of_module / "experts").mkdir()
    found = Course(parent, changed, OF_EXPERTS, folder_of_module / "experts")
    found.halves()
    return found


def test_one_layout_goes_on_from_another(course):
    course.run(4, course.leg("fsdp x tensor"), course.leg("fsdp x pipeline", "fsdp x tensor"))


@pytest.mark.long(law=LAW)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_goes_on_from_every_other(course, halves, layout):
    course.ends(layout)


@pytest.mark.long(law=LAW)
@pytest.mark.parametrize("layout", OF_EXPERTS)
def test_so_do_layouts_of_experts(of_experts, layout):
    of_experts.ends(layout)
