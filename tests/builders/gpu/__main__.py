"""Run the GPU checks, or put results of several machines into one table: see docs/gpu-checks.md.

Exit status: 0 if a check passed and none failed, 1 if a check failed, 2 if the command was wrong, 3 if no check ran.
"""

from __future__ import annotations

import argparse
import datetime
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from builders.gpu.checks import CHECKS, Check
from builders.gpu.machine import ROOT, Machine, dotted, environment, probe
from builders.gpu.results import (
    Outcome,
    Result,
    Revision,
    UnreadableResults,
    card_name,
    default_path,
    document,
    read,
    table,
    write,
)
from builders.gpu.running import run_all, unreached

SECONDS = 560
"""Default deadline in seconds: a script of ten minutes can start, run the checks and copy the results."""
OLDEST_PYTHON = (3, 11)


def main(arguments: Sequence[str] | None = None, checks: Sequence[Check] = CHECKS) -> int:
    parser = argparse.ArgumentParser(prog="python -m builders.gpu", description=__doc__.partition("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="run the checks, in the order of their worth")
    running.add_argument("--only", default="", metavar="NAME,NAME", help="run these checks alone")
    running.add_argument("--deadline-seconds", type=float, default=SECONDS, help="time for all checks (%(default)s)")
    running.add_argument("--commit", help="commit of a copy without .git, as `git describe --always --dirty` prints it")
    running.add_argument("--json", type=Path, help="file of the results (out/gpu-<card>-<commit>.json)")
    commands.add_parser("list", help="print the names of the checks, in the order of their worth")
    merging = commands.add_parser("merge", help="print one table of several results")
    merging.add_argument("files", nargs="+", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    if sys.version_info < OLDEST_PYTHON:
        parser.error(f"concertina needs Python {'.'.join(map(str, OLDEST_PYTHON))} or newer: name one with PYTHON")
    if options.command == "list":
        show(checks)
        return 0
    if options.command == "merge":
        try:
            print(table([read(path) for path in options.files]))
        except UnreadableResults as error:
            parser.error(str(error))
        return 0
    try:
        picked = pick(checks, options.only)
    except UnknownCheck as error:
        parser.error(str(error))
    described = options.commit if options.commit is not None else describe()
    return run_picked(picked, Revision.of(described), options.deadline_seconds, options.json)


def show(checks: Sequence[Check]) -> None:
    width = max(len(check.name) for check in checks)
    for check in checks:
        needs = [f"{check.gpus} GPUs"] * (check.gpus > 1) + [f"{check.memory_gib:g} GiB"] * (check.memory_gib > 0)
        needs += [f"compute capability {dotted(check.capability)}"] * (check.capability > (0, 0))
        print(f"{check.name:<{width}}  {check.shows}" + (f" (needs {', '.join(needs)})" if needs else ""))


class UnknownCheck(Exception):
    """No check has this name."""


def pick(checks: Sequence[Check], only: str) -> list[Check]:
    """Return the named checks, or all of them if none is named, in the order of their worth.

    Raises:
        UnknownCheck: If no check has one of the names.
    """
    names = {name.strip() for name in only.split(",")} - {""}
    if unknown := sorted(names - {check.name for check in checks}):
        raise UnknownCheck(f"no check is named {', '.join(unknown)}: `make test-gpu LIST=1` prints the names")
    return [check for check in checks if not names or check.name in names]


def describe() -> str:
    """Return the checkout's commit, or nothing where there is no repository."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return asked.stdout.strip() if asked.returncode == 0 else ""


def run_picked(checks: Sequence[Check], revision: Revision, seconds: float, path: Path | None) -> int:
    """Run checks and return the exit status.

    The results are written after each check, because this process may be killed at any time.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    begun = time.monotonic()
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    variables = environment()
    machine = probe(checks, variables)
    print(describe_machine(machine), flush=True)
    target = (path or default_path(machine, revision)).resolve()
    results: list[Result] = []

    def save() -> None:
        rest = [unreached(check) for check in checks[len(results) :]]
        write(target, document(machine, revision, date, time.monotonic() - begun, [*results, *rest]))

    save()
    for result in run_all(checks, machine, variables, begun + seconds):
        results.append(result)
        print(result.line, flush=True)
        for line in result.error:
            print(f"    {line}", flush=True)
        save()
    print(f"{summary(results)}\n{target}", flush=True)
    return status(results)


def _interrupt(number: int, frame: object) -> NoReturn:
    """End by an exception, so that the running check's processes are killed.

    Raises:
        SystemExit: Always.
    """
    raise SystemExit(128 + number)


def describe_machine(machine: Machine) -> str:
    words = [card_name(machine), f"torch {machine.torch}", f"Python {machine.python}"]
    if len(machine.cards) > 1:
        words[0] = f"{len(machine.cards)} x {words[0]}"
    if machine.driver:
        words.append(f"driver {machine.driver}")
    return ", ".join(words)


def summary(results: Sequence[Result]) -> str:
    counts = {outcome: sum(result.outcome is outcome for result in results) for outcome in Outcome}
    words = ", ".join(f"{count} {outcome.value}" for outcome, count in counts.items() if count)
    return words if status(results) != NOTHING_RAN else f"NO CHECK RAN: {words}"


NOTHING_RAN = 3


def status(results: Sequence[Result]) -> int:
    outcomes = {result.outcome for result in results}
    if Outcome.FAILED in outcomes:
        return 1
    return 0 if Outcome.PASSED in outcomes else NOTHING_RAN


if __name__ == "__main__":
    sys.exit(main())
