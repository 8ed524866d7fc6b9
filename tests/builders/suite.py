"""What the suite knows of itself: which cases are the gate's, which law the long ones show more of, and how long each
takes."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TIMES = ROOT / "tests/times.json"
"""Seconds of each test that takes more than KNOWN_FROM, as of when it was last written: see `written`."""
KNOWN_FROM = 1.0
SLOW, TIMES_AS_LONG = 5.0, 2.0
"""A test is named that takes so many times as long as it is known to, or as SLOW."""
UNKNOWN = 0.3
"""Seconds that a test takes of which nothing is known."""
SAME_EACH_TIME = "CONCERTINA_SEEDS_FROM" in os.environ
"""What is drawn: CI has the same for every change, so that none fails by luck."""


class Case(NamedTuple):
    id: str
    """As pytest has it: file::test[parameters]."""
    law: str | None = None
    """The gate's test that holds the same law, for a case of the long suite alone; None for one of the gate."""

    @property
    def file(self) -> str:
        return self.id.partition("::")[0]


def breaches(cases: Iterable[Case], root: Path = ROOT) -> list[str]:
    """A sentence for each long-only case that names no test of the gate, of all cases that pytest collected. Where the
    file of a named test was not asked for, it is enough that there is that file."""
    cases = list(cases)
    files = {case.file for case in cases}
    ids = {case.id for case in cases}
    gate = {case.id for case in cases if case.law is None}
    # A test may be named without its parameters: any case of it that the gate has will do.
    ids |= {id.partition("[")[0] for id in ids}
    gate |= {id.partition("[")[0] for id in gate}
    found = []
    for case in cases:
        if case.law is None:
            continue
        file = case.law.partition("::")[0]
        if not case.law:
            found.append(f"{case.id} names no test of the gate")
        elif not (root / file).is_file():
            found.append(f"{case.id} names a test of {file}, and there is no such file")
        elif file in files and case.law not in ids:
            found.append(f"{case.id} names {case.law}, and there is no such test")
        elif file in files and case.law not in gate:
            found.append(f"{case.id} names {case.law}, which is of the long suite itself")
    return found


def known() -> dict[str, float]:
    times: dict[str, float] = json.loads(TIMES.read_text())
    return times


def longest_first(ids: Iterable[str], times: dict[str, float]) -> list[str]:
    """The files of these tests: with the longest one last, one process would still run it when the others are done."""
    seconds: dict[str, float] = defaultdict(float)
    for id in ids:
        seconds[id.partition("::")[0]] += times.get(id, UNKNOWN)
    return sorted(seconds, key=lambda file: -seconds[file])


def written(times: dict[str, float], took: dict[str, float]) -> dict[str, float]:
    """What is known after a run in which these tests passed in so many seconds; tests that are gone are forgotten."""
    merged = {id: seconds for id, seconds in times.items() if id not in took and _exists(id)}
    merged |= {id: round(seconds, 1) for id, seconds in took.items() if seconds > KNOWN_FROM}
    return dict(sorted(merged.items()))


def _exists(id: str) -> bool:
    file, _, test = id.partition("::")
    return (ROOT / file).is_file() and f"def {test.partition('[')[0]}(" in (ROOT / file).read_text()


def slow(times: dict[str, float], took: dict[str, float]) -> list[str]:
    """A line for each test that takes much longer than it is known to, the slowest first."""
    found = [id for id, seconds in took.items() if seconds > TIMES_AS_LONG * max(SLOW, times.get(id, 0.0))]
    return [
        f"{took[id]:6.1f} s, {f'was {times[id]:.0f} s' if id in times else 'is new'}: {id}"
        for id in sorted(found, key=lambda id: -took[id])
    ]
