"""Steps by turns, in blocks of three kinds in an order drawn anew each time: measured, not measured, and not measured
once more, which shows what a difference between two that are alike comes to here."""

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
    """Own time of what measures, and how often it was called, by step."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = collections.defaultdict(list)
        """Of the calls of this step."""
        self.steps: dict[str, list[tuple[float, int]]] = collections.defaultdict(list)
        """Seconds and calls of each step that had any."""

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
    """TURNS is JSON: `block`, steps of one; `blocks`, of each kind; `warm`, steps before the first; `hooks`, whether
    each step is measured, and the measuring too; `folder`, where each rank writes what it saw."""

    def __init__(self) -> None:
        told = json.loads(os.environ["TURNS"])
        self._block, self._warm, self._folder = told["block"], told["warm"], Path(told["folder"])
        self._kinds = [kind for turn in range(told["blocks"]) for kind in random.Random(turn).sample(KINDS, len(KINDS))]
        self.times_hooks: bool = told["hooks"]
        self.hooks = Hooks()
        self.on = True
        self._began: list[tuple[float, float]] = []
        """Time, and processor time of this rank."""

    def begins(self, step: int) -> bool:
        """With each step, counted from 0; True when all are done."""
        self._began.append((time.perf_counter(), time.process_time()))
        self.hooks.step()
        block = (step - self._warm) // self._block
        self.on = self.times_hooks or step < self._warm or (block < len(self._kinds) and self._kinds[block] == KINDS[0])
        return step == self._warm + self._block * len(self._kinds)

    def write(self) -> None:
        """Block by block its kind, seconds of each step and processor seconds; and what measuring took in a step."""
        began = self._began[self._warm :]
        steps = [tuple(b - a for a, b in zip(*both, strict=True)) for both in itertools.pairwise(began)]
        blocks = [list(zip(*steps[at : at + self._block], strict=True)) for at in range(0, len(steps), self._block)]
        found = {
            "blocks": [[kind, *block] for kind, block in zip(self._kinds, blocks, strict=True)],
            "hooks": {name: _typical(steps[self._warm :]) for name, steps in self.hooks.steps.items()},
        }
        (self._folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))


def _typical(steps: list[tuple[float, int]]) -> tuple[float, float, float]:
    """Seconds of the median step, of the mean one, and calls."""
    seconds = [each for each, _ in steps]
    return statistics.median(seconds), statistics.fmean(seconds), statistics.fmean(calls for _, calls in steps)
