"""Schedule that switches measurements on and off in blocks of steps, in random order.

There are three kinds of blocks: measured, not measured, and again not measured. The last two are equal, so the
difference between them is the noise.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import os
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

KINDS = ("with", "without", "without, again")


class Hooks:
    """Cost of the measurements: the time that they take and the number of their calls, per step."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = collections.defaultdict(list)
        """Seconds of each call in the current step, by measurement."""
        self.steps: dict[str, list[tuple[float, int]]] = collections.defaultdict(list)
        """Total seconds and number of calls for each step with calls, by measurement."""

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds[name].append(time.perf_counter() - began)

    def step(self) -> None:
        for name, seconds in self._seconds.items():
            self.steps[name].append((sum(seconds), len(seconds)))
        self._seconds.clear()


class Turns:
    """Schedule of the blocks. The environment variable TURNS configures it.

    TURNS is JSON. `block` is the number of steps in a block, `blocks` the number of blocks of each kind, and `warm` the
    number of steps before the first block. If `hooks` is true, every step is measured, and the measurements themselves
    are timed. Each rank writes its results into `folder`.
    """

    def __init__(self) -> None:
        settings = json.loads(os.environ["TURNS"])
        self._block, self._warm, self._folder = settings["block"], settings["warm"], Path(settings["folder"])
        self._kinds = [
            kind for turn in range(settings["blocks"]) for kind in random.Random(turn).sample(KINDS, len(KINDS))
        ]
        self.times_hooks: bool = settings["hooks"]
        self.hooks = Hooks()
        self.on = True
        self._began: list[tuple[float, float]] = []
        """Clock time, and processor time of this rank, at the start of each step."""

    def begins(self, step: int) -> bool:
        """Begin a step, and return whether all steps are done. Steps count from 0."""
        self._began.append((time.perf_counter(), time.process_time()))
        self.hooks.step()
        block = (step - self._warm) // self._block
        self.on = self.times_hooks or step < self._warm or (block < len(self._kinds) and self._kinds[block] == KINDS[0])
        return step == self._warm + self._block * len(self._kinds)

    def write(self) -> None:
        """Write the kind of each block, the times of its steps, and the cost of the measurements.

        The times are clock times and processor times.
        """
        began = self._began[self._warm :]
        steps = [tuple(b - a for a, b in zip(*both, strict=True)) for both in itertools.pairwise(began)]
        blocks = [list(zip(*steps[at : at + self._block], strict=True)) for at in range(0, len(steps), self._block)]
        record = {
            "blocks": [[kind, *block] for kind, block in zip(self._kinds, blocks, strict=True)],
            "hooks": {name: _typical(steps[self._warm :]) for name, steps in self.hooks.steps.items()},
        }
        (self._folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(record))


def _typical(steps: list[tuple[float, int]]) -> tuple[float, float, float]:
    """Return the cost of the measurements per step: median and mean of the seconds, and mean number of calls."""
    seconds = [duration for duration, _ in steps]
    return statistics.median(seconds), statistics.fmean(seconds), statistics.fmean(calls for _, calls in steps)
