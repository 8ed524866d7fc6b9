"""What every benchmark prints and writes: a table of medians and worsts, and the same as JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

Samples = Mapping[str, Sequence[float]]
"""Seconds (or the unit that the row's name gives) by row, a number a run; inf where a run never got there."""


@contextmanager
def step(text: str) -> Iterator[Callable[[str], None]]:
    """Round each part of setting up, which may have more to say while it lasts."""
    print(f"{text} ...", flush=True)
    yield lambda more: None


def summary(values: Sequence[float], more_is_better: bool = False) -> dict[str, float | int | None]:
    """runs, median, p99, worst and best; None where a figure is infinite (a run that never got there)."""

    def finite(value: float) -> float | None:
        return None if value == float("inf") else round(value, 4)

    ordered = sorted(values, reverse=more_is_better)
    return {
        "runs": len(ordered),
        "median": finite(statistics.median(ordered)),
        "p99": finite(ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]),
        "worst": finite(ordered[-1]),
        "best": finite(ordered[0]),
    }


def show(title: str, samples: Samples, unit: str = "s", more_is_better: bool = False) -> None:
    """Print one row a name, as Markdown; `never` stands where the limit of a run was reached."""
    rows = [["", "runs", f"median {unit}", "best", "p99", "worst"]]
    for name, values in samples.items():
        if not values:
            continue
        row = summary(values, more_is_better)
        cells = ["never" if row[key] is None else f"{row[key]:.3g}" for key in ("median", "best", "p99", "worst")]
        rows.append([name, str(row["runs"]), *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    print(f"\n{title}\n")
    for cells in rows:
        print("|", " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)), "|")


def write(path: Path | None, name: str, samples: Samples, rates: Samples | None = None, **facts: object) -> None:
    """The same as JSON, with the machine it was measured on. `rates`: those of which more is better."""
    if path is None:
        return
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "kernel": platform.release()}
    rows = {
        row: {**summary(values, more_is_better), "all": [round(v, 4) for v in values if v != float("inf")]}
        for these, more_is_better in ((rates or {}, True), (samples, False))
        for row, values in these.items()
        if values
    }
    path.write_text(json.dumps({"benchmark": name, "machine": machine, "rows": rows, **facts}, indent=2) + "\n")
