"""Seconds from a fault to the first step of the next round, on the local cluster, compared with other tools.

    python benchmarks/recovery.py [--runs 10] [--peer-runs 3] [--scenarios ...] [--json FILE] [--only ...]

Each row is named after its fault:
- `worker`: one training process is killed.
- `member`: process 1 of a replica that is not the coordinator is killed.
- `coordinator`: process 1 of the coordinator is killed. The coordinator hosts the store.
- `node`: all processes of a node are killed.
- `stopped agent` and `stopped worker`: the process is stopped by SIGSTOP, and its connections stay open.
- `notice`: the pod is deleted with its grace period.
- `member and operator`: process 1 of a replica and the operator are killed at the same moment.
- `join`: the time is measured from the moment at which a successor is warm to the first step with it.

The rows are measured for these kinds of training:
- concertina: the bundled trainer (FSDP2, snapshots in node memory), with the time of each part.
- concertina, script: benchmarks/scripts/elastic_ddp.py as a custom command with a warm start and its own checkpoints.
- concertina, script with state: elastic_state.py trains the same model with DDP and FSDP2 and `trainingjob.State`. Its
  steps are short in some rows. In others they are so long that a snapshot takes one percent of a step.
- concertina, script with run and state: the same script calls `trainingjob.run`, so that survivors keep their process.
- torchrun: the same script under three torchrun agents, with default settings and tuned.
- torchft 0.2.0: the same model under three replica groups. torchft is installed into a separate folder on first use.
- nvidia-resiliency-ext 0.4.1: the same model under its in-process wrapper, with default settings and tuned. Its world
  is fixed: a lost rank is not replaced. It is installed into a separate folder on first use.

In the row `behind a shell line`, a shell line with a condition starts the script. Other rows show seconds within a
recovery: from the evidence of a failure to the last Assign, and for `join` from the start of the container.

For scripts, one worker is also killed right after the first steps, before any modules are imported in advance. That is
a separate row.
"""

from __future__ import annotations

import argparse
import collections
import functools
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import recovery_nvidia
import recovery_torchft
import recovery_torchrun
import report
from recovery_concertina import (
    PARTS,
    Bench,
    Recovery,
    Traced,
    bundled,
    commit_share,
    own_command,
    shell_line,
    with_state,
)
from recovery_faults import BLOWS
from rich.console import Console

from concertina.demo import stage as stages
from concertina.demo.stage import Stage

SCENARIOS = (*BLOWS, "join")
SCRIPT_SCENARIOS = ("worker", "member", "coordinator", "node", "join")
SCRIPTS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "script": own_command,
    "script behind a shell line": shell_line,
    "script with state, DDP": functools.partial(with_state, "ddp", 0.05, False),
    "script with state, FSDP2": functools.partial(with_state, "fsdp2", 0.05, False),
    "script with run and state, DDP": functools.partial(with_state, "ddp", 0.05, True),
    "script with run and state, FSDP2": functools.partial(with_state, "fsdp2", 0.05, True),
    "script with state, DDP, steps of 0.2 s": functools.partial(with_state, "ddp", 0.2, False),
    "script with state, FSDP2, steps of 0.2 s": functools.partial(with_state, "fsdp2", 0.2, False),
    "script with run and state, DDP, steps of 0.2 s": functools.partial(with_state, "ddp", 0.2, True),
    "script with run and state, FSDP2, steps of 0.2 s": functools.partial(with_state, "fsdp2", 0.2, True),
}
LIMIT = 100.0
CONSOLE = Console(stderr=True)
T = TypeVar("T")


def main() -> None:
    """Run all rows, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10, help="of each scenario under concertina")
    parser.add_argument("--peer-runs", type=int, default=10, help="of each scenario under another tool")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds after which torchrun counts as never")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=SCENARIOS, help="what dies")
    parser.add_argument("--only", choices=["concertina", "script", "torchrun", "torchft", "nvidia"])
    parser.add_argument("--scripts", nargs="+", choices=list(SCRIPTS), default=list(SCRIPTS), help="of one's own")
    parser.add_argument("--one-gpu", action="store_true", help="shared by the bundled trainer's replicas")
    options = parser.parse_args()
    totals: dict[str, list[float]] = collections.defaultdict(list)
    recoveries: dict[str, list[Recovery]] = collections.defaultdict(list)
    scripts: dict[str, list[int]] = collections.defaultdict(list)
    commits: dict[str, list[float]] = {}
    if options.only in (None, "concertina", "script"):
        measure_concertina(options, totals, recoveries, scripts, commits)
    if options.only in (None, "torchrun"):
        measure_torchrun(options, totals)
    if options.only in (None, "torchft"):
        measure_torchft(options, totals)
    if options.only in (None, "nvidia"):
        measure_nvidia(options, totals)
    report.show("SIGKILL to the first step of the new world", totals)
    parts = {row: split(found) for row, found in recoveries.items()}
    for row, found in parts.items():
        report.show(f"{row}: where the time goes", found)
    replayed: dict[str, list[float]] = {row: [r.replayed for r in found] for row, found in recoveries.items()}
    replayed |= {row: [float(steps) for steps in found] for row, found in scripts.items()}
    report.show("steps replayed", replayed, unit="steps")
    if commits:
        report.show("time that saving takes, by process", commits, unit="%")
    medians = {row: {part: round(statistics.median(v), 4) for part, v in found.items()} for row, found in parts.items()}
    report.write(options.json, "recovery", totals, parts=medians, replayed=replayed, commits=commits)


def split(found: list[Recovery]) -> dict[str, list[float]]:
    """Return the seconds of each part of a recovery, such as the detection, as a list over all runs of a row."""
    return {part: [recovery.parts[part] for recovery in found] for part in PARTS}


def measure_concertina(
    options: argparse.Namespace,
    totals: dict[str, list[float]],
    recoveries: dict[str, list[Recovery]],
    scripts: dict[str, list[int]],
    commits: dict[str, list[float]],
) -> None:
    """Measure concertina, with one job of each kind in one cluster.

    `scripts` receives the numbers of repeated steps. `commits` receives, for each process, the percentage of time that
    saving took.
    """
    traces = Path(tempfile.mkdtemp(prefix="recovery-trace-"))
    try:
        with stages.standing(f"recovery-{os.getpid()}", 3, lambda _: nullcontext(CONSOLE.log)) as stage:
            for _ in stages.build_data(stage.storage):
                pass
            if options.only != "script":
                with Bench(stage, "bundled", bundled(options.one_gpu)) as bench:
                    for row, recovery in each("concertina", options.scenarios, options.runs, measured(bench)):
                        totals[row].append(recovery.total)
                        recoveries[row].append(recovery)
                        for what, seconds in recovery.within.items():
                            totals[f"{row}, {what}"].append(seconds)
            if options.only != "concertina":
                measure_scripts(stage, traces, options, totals, scripts, commits)
    finally:
        shutil.rmtree(traces, ignore_errors=True)


def measure_scripts(
    stage: Stage,
    traces: Path,
    options: argparse.Namespace,
    totals: dict[str, list[float]],
    replayed: dict[str, list[int]],
    commits: dict[str, list[float]],
) -> None:
    """Measure custom commands: a script with its own checkpoints, and scripts with `trainingjob.State`."""
    scenarios = [name for name in options.scenarios if name in SCRIPT_SCENARIOS]
    for kind in options.scripts:
        trace = traces / kind.replace(" ", "-")
        trace.mkdir()
        made = SCRIPTS[kind](trace)
        title = f"concertina, {kind}"
        with Bench(stage, made["metadata"]["name"], made) as bench:
            if "worker" in scenarios:
                cold = bench.recover_traced("worker", trace, cold=True)
                CONSOLE.log(f"{title}, worker, right after the job's first steps: {cold}")
                totals[f"{title}: worker, right after the first steps"].append(cold.total)
                replayed[f"{title}: worker, right after the first steps"].append(cold.replayed)
            for row, recovery in each(title, scenarios, options.runs, functools.partial(traced, bench, trace)):
                totals[row].append(recovery.total)
                replayed[row].append(recovery.replayed)
        if "state" in kind:
            commits[title] = commit_share(trace)


def traced(bench: Bench, trace: Path, scenario: str) -> Traced:
    return bench.recover_traced(scenario, trace)


def measured(bench: Bench) -> Callable[[str], Recovery]:
    return lambda scenario: bench.join() if scenario == "join" else bench.recover(scenario)


def each(title: str, scenarios: Sequence[str], runs: int, measure: Callable[[str], T]) -> Iterator[tuple[str, T]]:
    """Yield the row and the result of every run of every scenario, and log each result."""
    for scenario in scenarios:
        for run in range(runs):
            begun = time.monotonic()
            try:
                result = measure(scenario)
            except TimeoutError as error:  # The rows that were measured are worth more than the end of this one.
                CONSOLE.log(f"{title}, {scenario}, run {run + 1} of {runs}: {error}")
                break
            CONSOLE.log(f"{title}, {scenario}, run {run + 1} of {runs}: {result} ({time.monotonic() - begun:.0f} s)")
            yield f"{title}: {scenario}", result


def measure_torchrun(options: argparse.Namespace, totals: dict[str, list[float]]) -> None:
    """Measure torchrun. A scenario from which it does not recover is run only once."""
    for tuned in (True, False):
        title = f"torchrun, {'tuned' if tuned else 'as it comes'}"
        for scenario in (s for s in recovery_torchrun.SCENARIOS if s in options.scenarios):
            for run in range(options.peer_runs):
                seconds = recovery_torchrun.measure(scenario, tuned, options.limit)
                CONSOLE.log(f"{title}, {scenario}, run {run + 1} of {options.peer_runs}: {seconds:.2f} s")
                totals[f"{title}: {scenario}"].append(seconds)
                if seconds == float("inf"):
                    break


def measure_torchft(options: argparse.Namespace, totals: dict[str, list[float]]) -> None:
    """Measure torchft if its package can be installed and works."""
    for scenario in (s for s in recovery_torchft.SCENARIOS if s in options.scenarios):
        for run in range(options.peer_runs):
            try:
                seconds = recovery_torchft.measure(scenario, options.limit)
            except (subprocess.CalledProcessError, TimeoutError) as error:
                CONSOLE.log(f"torchft {recovery_torchft.VERSION} does not run here: {error}")
                return
            CONSOLE.log(f"torchft, {scenario}, run {run + 1} of {options.peer_runs}: {seconds:.2f} s")
            totals[f"torchft {recovery_torchft.VERSION}: {scenario}"].append(seconds)


def measure_nvidia(options: argparse.Namespace, totals: dict[str, list[float]]) -> None:
    """Measure the in-process wrapper of nvidia-resiliency-ext if its package can be installed and works."""
    for tuned in (True, False):
        title = f"nvidia-resiliency-ext {recovery_nvidia.VERSION}, {'tuned' if tuned else 'as it comes'}, fixed world"
        for scenario in (s for s in recovery_nvidia.SCENARIOS if s in options.scenarios):
            for run in range(options.peer_runs):
                try:
                    seconds = recovery_nvidia.measure(scenario, tuned, options.limit)
                except (subprocess.CalledProcessError, TimeoutError) as error:
                    CONSOLE.log(f"{title} does not run here: {error}")
                    return
                CONSOLE.log(f"{title}, {scenario}, run {run + 1} of {options.peer_runs}: {seconds:.2f} s")
                totals[f"{title}: {scenario}"].append(seconds)
                if seconds == float("inf"):
                    break


if __name__ == "__main__":
    main()
