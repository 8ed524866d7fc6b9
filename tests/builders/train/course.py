"""Training in legs, each in a layout of its own, compared with the same training in plain PyTorch."""

import json

import pytest
import torch

from builders.train import plain
from builders.train.gradients import computed

HALF = 5
"""Number of steps of a leg."""
AT_ONCE = 4
"""Number of legs in one process group, so that a busy machine completes them in time."""


class Course:
    """Training of one model in some of the layouts, with the results of plain training."""

    def __init__(self, parent, trainer, layouts, folder):
        self.parent, self.trainer, self.layouts, self.folder = parent, trainer, layouts, folder
        self.reference, self.bound = plain.trained(trainer, torch.float64), plain.bound(trainer, torch.float64)
        assert self.bound.losses < 1e-6 * plain.wrong_sample(trainer, torch.float64)

    def leg(self, layout, before=None):
        """Run a leg from the start to half, or from the state that another layout has left there to the end."""
        name = f"{before} > {layout}" if before else layout
        return {
            "name": name,
            "parallelism": self.layouts[layout][1],
            "from": before and str(self.folder / before),
            "to": str(self.folder / name),
            "last": 2 * HALF if before else HALF,
        }

    def run(self, world, *legs):
        """Run all legs, and compare each with the reference."""
        for begin in range(0, len(legs), AT_ONCE):
            some = legs[begin : begin + AT_ONCE]
            results = computed(
                self.parent, "workers.legs:main", self.trainer, world, self.folder, LEGS=json.dumps(some)
            )  # fmt: skip
            for leg in some:
                self._check(results[leg["name"]], leg["from"] is not None)

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
        """Run the second legs, from each state that the first legs have left."""
        self.run(self.layouts[layout][0], *(self.leg(layout, before) for before in self.layouts))
