"""Rules about the test suite: the cases of the gate, the gate's test that each long case extends, and durations."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TIMES = ROOT / "tests/times.json"
"""Seconds of each test that takes more than KNOWN_FROM, as last written (see `written`)."""
KNOWN_FROM = 1.0
SLOW, TIMES_AS_LONG = 5.0, 2.0
"""A test is reported as slow if it takes TIMES_AS_LONG times its known duration, or SLOW seconds if that is longer."""
UNKNOWN = 0.3
"""Assumed duration in seconds of a test whose duration is unknown."""
SAME_EACH_TIME = "CONCERTINA_SEEDS_FROM" in os.environ
"""Whether random examples are the same in each run. CI sets this for changes, so that none fails by chance."""


class Case(NamedTuple):
    id: str
    """Id of the case as pytest writes it: file::test[parameters]."""
    law: str | None = None
    """Test of the gate that checks the same rule, for a case of the long suite only; None for a case of the gate."""

    @property
    def file(self) -> str:
        return self.id.partition("::")[0]


def breaches(cases: Iterable[Case], root: Path = ROOT) -> list[str]:
    """Return a sentence for each case of the long suite that names no existing test of the gate.

    `cases` are all cases that pytest collected. If the file of a named test was not collected, only the file has to
    exist.
    """
    cases = list(cases)
    files = {case.file for case in cases}
    ids = {case.id for case in cases}
    gate = {case.id for case in cases if case.law is None}
    # A test may be named without its parameters. Then any case of it in the gate is enough.
    ids |= {id.partition("[")[0] for id in ids}
    gate |= {id.partition("[")[0] for id in gate}
    sentences = []
    for case in cases:
        if case.law is None:
            continue
        file = case.law.partition("::")[0]
        if not case.law:
            sentences.append(f"{case.id} names no test of the gate")
        elif not (root / file).is_file():
            sentences.append(f"{case.id} names a test of {file}, and there is no such file")
        elif file in files and case.law not in ids:
            sentences.append(f"{case.id} names {case.law}, and there is no such test")
        elif file in files and case.law not in gate:
            sentences.append(f"{case.id} names {case.law}, which is of the long suite itself")
    return sentences


def known() -> dict[str, float]:
    times: dict[str, float] = json.loads(TIMES.read_text())
    return times


def longest_first(ids: Iterable[str], times: dict[str, float]) -> list[str]:
    """Return the files of these tests, longest first.

    Otherwise one process could still run the longest file when the others are done.
    """
    seconds: dict[str, float] = defaultdict(float)
    for id in ids:
        seconds[id.partition("::")[0]] += times.get(id, UNKNOWN)
    return sorted(seconds, key=lambda file: -seconds[file])


def written(times: dict[str, float], took: dict[str, float]) -> dict[str, float]:
    """Return the known durations after a run with these durations of passed tests, without tests that are gone."""
    merged = {id: seconds for id, seconds in times.items() if id not in took and _exists(id)}
    merged |= {id: round(seconds, 1) for id, seconds in took.items() if seconds > KNOWN_FROM}
    return dict(sorted(merged.items()))


def _exists(id: str) -> bool:
    file, _, test = id.partition("::")
    return (ROOT / file).is_file() and f"def {test.partition('[')[0]}(" in (ROOT / file).read_text()


def slow(times: dict[str, float], took: dict[str, float]) -> list[str]:
    """Return a line for each test that takes much longer than its known duration, the slowest first."""
    slow_ids = [id for id, seconds in took.items() if seconds > TIMES_AS_LONG * max(SLOW, times.get(id, 0.0))]
    return [
        f"{took[id]:6.1f} s, {f'was {times[id]:.0f} s' if id in times else 'is new'}: {id}"
        for id in sorted(slow_ids, key=lambda id: -took[id])
    ]
