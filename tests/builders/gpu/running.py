"""Run GPU checks one after another, each in processes of its own, until a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from builders.gpu import cases
from builders.gpu.checks import Check, Kind
from builders.gpu.machine import ROOT, Machine, why_not_runnable
from builders.gpu.results import ERROR_LINES, Case, Outcome, Result

MARK = "CONCERTINA_GPU_CHECK"
"""A variable by which every process of a check is known, in whatever session or process group it is."""
LAST_WORDS_SECONDS = 5
"""Time for stuck processes to print their stacks."""
PYTEST = (
    *("-m", "pytest", "-p", "builders.gpu.cases", "-p", "no:cacheprovider", "--confcutdir", "tests/gpu"),
    *("-o", "addopts=", "-W", "ignore::pytest.PytestConfigWarning"),  # the option of pytest-timeout is unknown
    *("-q", "--import-mode=importlib", "--tb=short"),
)


def unreached(check: Check) -> Result:
    return Result(check.name, Outcome.NOT_REACHED, "the time was over before it began")


def run_all(
    checks: Sequence[Check], machine: Machine, environment: Mapping[str, str], deadline: float
) -> Iterator[Result]:
    """Yield each check's result as it ends. `deadline`: a time of `time.monotonic`."""
    for check in checks:
        if reason := why_not_runnable(check, machine):
            yield Result(check.name, Outcome.NOT_RUNNABLE, reason)
        elif (seconds_left := deadline - time.monotonic()) <= 0:
            yield unreached(check)
        else:
            yield run(check, environment, seconds_left)


def run(check: Check, environment: Mapping[str, str], seconds_left: float) -> Result:
    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        started = time.monotonic()
        code = _exit_code(check, environment, min(check.limit_seconds, seconds_left), folder)
        seconds = time.monotonic() - started
        cut_off = code is None and seconds_left < check.limit_seconds
        output = (folder / "output").read_text(encoding="utf-8", errors="replace")
        judge = _judge_tests if check.kind is Kind.TESTS else _judge_benchmark
        return judge(check, code, seconds, cut_off, output, folder)


def _exit_code(check: Check, environment: Mapping[str, str], limit_seconds: float, folder: Path) -> int | None:
    """Run the check; return its exit status, or None if it was killed at the limit."""
    mark = uuid.uuid4().hex
    variables = {**environment, MARK: mark, cases.VARIABLE: str(folder / "cases"), "TMPDIR": str(folder)}
    variables["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # a machine's own plugins change what a check does
    before = PYTEST if check.kind is Kind.TESTS else ()
    after = () if check.kind is Kind.TESTS else ("--json", str(folder / "figures.json"))
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *before, *check.arguments, *after],
            cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            return process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            _signal(mark, signal.SIGABRT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LAST_WORDS_SECONDS)
            return None
        finally:  # Also kill what the check has left running: it would hold the GPU's memory.
            _signal(mark, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver that hangs may hold a killed process
                process.wait(LAST_WORDS_SECONDS)


def _signal(mark: str, number: signal.Signals) -> None:
    """Signal every process of the check."""
    wanted = f"{MARK}={mark}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # gone, or another user's
            if wanted in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), number)


def _judge_tests(check: Check, code: int | None, seconds: float, cut_off: bool, output: str, folder: Path) -> Result:
    lines = _lines(folder / "cases")
    ended = [line for line in lines if line["outcome"] != "started"]
    names = {line["name"] for line in ended}
    running = [line["name"] for line in lines if line["name"] not in names]
    failed = [line for line in ended if line["outcome"] == "failed"]
    passed = [line for line in ended if line["outcome"] == "passed"]
    skipped = [line for line in ended if line["outcome"] == "skipped"]

    outcome, reason, error = Outcome.PASSED, "", _last(output)
    if failed:
        outcome, reason = Outcome.FAILED, ", ".join(line["name"].rpartition("/")[2] for line in failed)
        error = _last("\n".join(line["error"] for line in failed[:1]))
    elif cut_off:
        outcome, reason = Outcome.NOT_REACHED, f"the time was over; {len(passed)} of its tests had passed"
    elif code is None:
        outcome = Outcome.FAILED
        reason = f"did not end within {check.limit_seconds} s, in {', '.join(running) or 'no test'}"
    elif code:
        outcome, reason = Outcome.FAILED, f"pytest ended with exit status {code}"
    elif running:
        outcome, reason = Outcome.FAILED, f"pytest ended early, in {', '.join(running)}"
    elif not passed:
        outcome, reason = Outcome.SKIPPED, skipped[0]["reason"] if skipped else "pytest ran no test"
    elif skipped:
        reason = f"{len(skipped)} of its tests were skipped: {skipped[0]['reason']}"
    return Result(
        check.name,
        outcome,
        reason,
        seconds,
        {name: value for line in ended for name, value in line.get("figures", {}).items()},
        tuple(Case(line["name"], line["outcome"], line["seconds"]) for line in ended),
        (error or ("no output",)) if outcome is Outcome.FAILED else (),
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    """Read lines of JSON, of which the last one may be cut off."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            lines.append(json.loads(text))
    return lines


def _judge_benchmark(
    check: Check, code: int | None, seconds: float, cut_off: bool, output: str, folder: Path
) -> Result:
    path = folder / "figures.json"
    figures = _figures(json.loads(path.read_text(encoding="utf-8"))) if path.exists() and code is not None else {}
    outcome, reason = Outcome.PASSED, ""
    if cut_off:
        outcome, reason = Outcome.NOT_REACHED, "the time was over while it ran"
    elif code is None:
        outcome, reason = Outcome.FAILED, f"did not end within {check.limit_seconds} s"
    elif code:
        outcome, reason = Outcome.FAILED, f"ended with exit status {code}"  # also if a figure is beyond its bound
    elif not figures:
        outcome, reason = Outcome.FAILED, "measured nothing"
    error = (_last(output) or ("no output",)) if outcome is Outcome.FAILED else ()
    return Result(check.name, outcome, reason, seconds, figures, error=error)


def _figures(written: Mapping[str, Any]) -> dict[str, Any]:
    """Return the median of each row, and the numbers beside the rows, by their path."""
    figures = {name: row["median"] for name, row in written["rows"].items()}
    for name, value in written.items():
        if name not in ("benchmark", "machine", "rows"):
            figures |= _flat(name, value)
    return figures


def _flat(name: str, value: Any) -> dict[str, Any]:
    match value:
        case dict():
            return {
                path: number for key, item in value.items() for path, number in _flat(f"{name}: {key}", item).items()
            }
        case bool() | str() | None:
            return {}
        case int() | float():
            return {name: value}
    return {}


def _last(text: str) -> tuple[str, ...]:
    """Return the last lines, or the innermost calls of the first stack that a killed process has printed."""
    lines = text.rstrip().splitlines()
    stacks = [number for number, line in enumerate(lines) if line.endswith("(most recent call first):")]
    return tuple(lines[stacks[0] :][:ERROR_LINES] if stacks else lines[-ERROR_LINES:])
