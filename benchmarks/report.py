"""Output of every benchmark: a table of medians and worst values, and the same as JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

Samples = Mapping[str, Sequence[float]]
"""Measured values by row, one value per run. The unit is seconds unless the row's name contains another unit.

A value is infinite if the run did not finish.
"""


@contextmanager
def step(text: str) -> Iterator[Callable[[str], None]]:
    """Print a message about a part of the setup.

    Yield a function that callers may call with further messages, but that prints nothing.
    """
    print(f"{text} ...", flush=True)
    yield lambda more: None


def summary(values: Sequence[float], more_is_better: bool = False) -> dict[str, float | int | None]:
    """Return the number of runs and the median, p99, worst and best values. Infinite values become None."""

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
    """Print a Markdown table with one row per name. `never` means that a run reached its time limit."""
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
    """Write the values as JSON, with a description of the machine.

    Larger values are better in the rows of `rates`.
    """
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
