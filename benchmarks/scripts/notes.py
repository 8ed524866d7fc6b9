"""Recorder for the times of a rank's steps. `scaling.py` reads its files."""

from __future__ import annotations

import itertools
import json
import os
import time
from pathlib import Path

KEYS = ("seconds", "processor", "computing", "waiting")


class Notes:
    """Recorder of step times. The environment variable TURNS configures it.

    TURNS is JSON. `warm` is the number of steps to skip at the start, `steps` the number of steps to record, and
    `folder` the folder in which each rank writes a file.
    """

    def __init__(self) -> None:
        settings = json.loads(os.environ["TURNS"])
        self._warm, self._steps, self._folder = settings["warm"], settings["steps"], Path(settings["folder"])
        self._added: list[tuple[float, ...]] = []
        self.facts: dict[str, float] = {}
        """Further values of the rank."""

    def add(self, waiting: float = 0.0) -> bool:
        """Record a step, and return whether all steps that TURNS requests are done.

        `waiting` is the number of seconds spent in collectives so far.
        """
        self._added.append((time.perf_counter(), time.process_time(), time.thread_time(), waiting))
        if len(self._added) <= self._warm + self._steps:
            return False
        took = [[b - a for a, b in zip(*both, strict=True)] for both in itertools.pairwise(self._added[self._warm :])]
        record = self.facts | {key: [step[i] for step in took] for i, key in enumerate(KEYS)}
        path = self._folder / f"rank-{os.environ['RANK']}.json"
        path.with_suffix(".new").write_text(json.dumps(record))
        path.with_suffix(".new").rename(path)
        return True
