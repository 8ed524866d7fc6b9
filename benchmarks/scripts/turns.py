"""Steps by turns, in blocks of three kinds in an order drawn anew each time: measured, not measured, and not measured
once more, which shows what a difference between two that are alike comes to here."""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

KINDS = ("with", "without", "without, again")


class Hooks:
    """Own time of what measures, and how often it was called."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self.calls: dict[str, int] = collections.defaultdict(int)

    @contextlib.contextmanager
    def timed(self, name: str, calls: int = 1) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - began
        self.calls[name] += calls


class Turns:
    """TURNS is JSON: `block`, steps of one; `blocks`, of each kind; `warm`, steps before the first; `hooks`, whether
    each step is measured, and the measuring too; `folder`, where each rank writes what it saw."""

    def __init__(self) -> None:
        told = json.loads(os.environ["TURNS"])
        self._block, self._warm, self._folder = told["block"], told["warm"], Path(told["folder"])
        self._kinds = [kind for turn in range(told["blocks"]) for kind in random.Random(turn).sample(KINDS, len(KINDS))]
        self.hooks: bool = told["hooks"]
        self.on = True
        self._began: list[float] = []

    def begins(self, step: int) -> bool:
        """With each step, counted from 0; True when all are done."""
        self._began.append(time.perf_counter())
        block = (step - self._warm) // self._block
        self.on = self.hooks or step < self._warm or (block < len(self._kinds) and self._kinds[block] == KINDS[0])
        return step == self._warm + self._block * len(self._kinds)

    def write(self, hooks: Hooks) -> None:
        """Seconds of each step, block by block, with its kind."""
        began = self._began[self._warm :]
        steps = [after - before for before, after in itertools.pairwise(began)]
        blocks = [steps[at : at + self._block] for at in range(0, len(steps), self._block)]
        counted = len(self._began) - 1
        found = {
            "blocks": [[kind, block] for kind, block in zip(self._kinds, blocks, strict=True)],
            "hooks": {
                name: [seconds / counted, hooks.calls[name] / counted] for name, seconds in hooks.seconds.items()
            },
        }
        (self._folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))
