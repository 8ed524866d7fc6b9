"""Overhead of all measurements: `python benchmarks/measuring.py [--blocks N] [--only KIND ...] [--json FILE]`.

A real agent runs two ranks over gloo. The ranks run the bundled trainer with a small or a larger model, or a script
that only calls `trainingjob.report`. The agent's metrics are scraped every 15 s, and this process reads the agent's
reports like an operator. With the bundled trainer, the agent also stores tracking data, which a separate process ships
to TensorBoard. Steps run in blocks in random order. In a block, the ranks either measure and report everything, or
nothing: no clock, no heartbeat, no log line, no message to the agent.

Two more scripts, and one process on a GPU if there is one, either commit their state after each step or do not
(`trainingjob.State`: snapshots take at most one percent of the time). Their steps are not tracked.

The benchmark prints by how much a step with all measurements is slower than a step without them. It compares
neighbouring blocks, in time (medians and means of blocks) and in processor time of rank 0, with a 95 % interval by
bootstrap. The same values for two equal kinds of blocks show the noise. The first three kinds take no snapshots.

A separate run measures each measurement: its time and its calls per step of rank 0, and the processor time of the agent
and of the shipping process.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import report
import torch

import concertina_protocol as p
from concertina.agents.authority import Authority
from concertina.agents.calls import CallError, ConnectionIdentity, call, connection, receive
from concertina.demo import text
from concertina.local.host.linux_namespaces import die_with_parent
from concertina.local.host.processes import free_ports
from concertina_trainer.data.build.build import build

SCRIPTS = Path(__file__).parent / "scripts"
UID = "7d1f3f0e-measured"
RANKS = 2
SCRAPE_SECONDS = 15.0
LIMIT = 500.0
"""Time limit of a run in seconds."""
WITH, WITHOUT, AGAIN = "with", "without", "without, again"
RESAMPLES = 2000
TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Kind:
    """One kind of training, with its model and its number of ranks."""

    name: str
    block: int
    """Number of steps in a block."""
    model: Mapping[str, Any] | None = None
    """Model of the bundled trainer, or None for a script."""
    batch: int = 8
    script: str = "measured_script.py"
    dim: int = 0
    cut: str = ""
    """How the script's state is distributed ("ddp", "fsdp2" or "gpu"). `dim` is the width of the script's model."""
    ranks: int = RANKS
    parallelism: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of `spec.trainer` of the bundled trainer."""
    package: str = "measured_trainer"
    """Name of the package with the bundled trainer whose measurements can be switched off."""

    def environment(self, data: Path) -> dict[str, str]:
        if self.model is None:
            return {"DIM": str(self.dim), "CUT": self.cut}
        trainer = {
            "steps": 10**6, "data": {"uri": str(data)}, "model": self.model, "snapshot": {"everySteps": 10**6},
            "globalBatchSize": self.batch, "microBatchSize": self.batch // self.ranks, **self.trainer,
        }  # fmt: skip
        return {"CONCERTINA_TRAINER": json.dumps(trainer), "CONCERTINA_PARALLELISM": json.dumps(self.parallelism)}

    @property
    def command(self) -> list[str]:
        if self.model is None:
            return ["--", sys.executable, str(SCRIPTS / self.script)]
        return ["--bundled", "--package", self.package]


KINDS = (
    Kind("bundled, small", 10, {"layers": 4, "dim": 128, "heads": 4, "kvHeads": 2, "sequenceLength": 128}),
    Kind("bundled, larger", 4, {"layers": 6, "dim": 192, "heads": 6, "kvHeads": 3, "sequenceLength": 192}),
    Kind("script, small", 10, dim=384),
    Kind("commits, DDP", 20, script="committed_script.py", dim=256, cut="ddp"),
    Kind("commits, FSDP2", 20, script="committed_script.py", dim=256, cut="fsdp2"),
    Kind("commits, GPU", 20, script="committed_script.py", dim=4096, cut="gpu", ranks=1),
)


# --- a run ------------------------------------------------------------------------------------------------------------


class Agent:
    """Real agent. This process acts as its operator."""

    def __init__(self, folder: Path, kind: Kind, data: Path, turns: Mapping[str, Any]) -> None:
        self._folder = folder
        authority = Authority(b"k" * 32, UID, time.time())
        self._identity = ConnectionIdentity(UID, authority.client_context())
        (folder / "identity").mkdir()
        for name, content in authority.secret_data().items():
            (folder / "identity" / name).write_bytes(base64.b64decode(content))
        port, self.metrics = free_ports("127.0.0.1", 2)
        self._address = f"127.0.0.1:{port}"
        # A run that measures commits must not pay for the tracking of each step.
        tracking = None if kind.cut else {"backend": "TensorBoard", "uri": f"file://{folder}/runs"}
        environment = {
            "PATH": os.environ["PATH"], "HOME": str(folder), "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(SCRIPTS), os.environ.get("PYTHONPATH")])),
            "CONCERTINA_JOB": "bench/measured", "CONCERTINA_UID": UID, "CONCERTINA_REPLICA": "measured-0-0",
            "CONCERTINA_POD_IP": "127.0.0.1", "CONCERTINA_NODE": "node", "CONCERTINA_PORT": str(port),
            "CONCERTINA_WORKERS": str(kind.ranks), "CONCERTINA_TRAINER": "{}", "CONCERTINA_CHECKPOINT": "null",
            "CONCERTINA_WARM_START": "null", "CONCERTINA_VOLUME": str(folder),
            "CONCERTINA_IDENTITY": str(folder / "identity"), "CONCERTINA_TRACKING": json.dumps(tracking),
            "CONCERTINA_METRICS": json.dumps({"port": self.metrics}), "CONCERTINA_CACHE": str(folder / "cache"),
            "TURNS": json.dumps({**turns, "folder": str(folder)}), **kind.environment(data),
        }  # fmt: skip
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "concertina_agent.main", "run", *kind.command],
                env=environment, stdout=log, stderr=log, start_new_session=True, preexec_fn=die_with_parent,
            )  # fmt: skip

    async def begin(self) -> None:
        """Start the first round."""
        me = p.Candidate("measured-0-0", self._address)
        prepared = await self._ask(p.Prepare(UID, 1, "claim", (me,)))
        assert isinstance(prepared, p.Prepared), prepared
        member = p.Member(me.replica, prepared.instance, self._address, 0, prepared.workers)
        # The agent must not take a block without reports for a hang.
        limits = p.Limits(hang_seconds=LIMIT)
        done = await self._ask(
            p.Assign(UID, 1, "claim", (member,), prepared.store, p.Restore(p.RestoreSource.FRESH), limits)
        )
        assert isinstance(done, p.Accepted), done

    async def _ask(self, message: p.Prepare | p.Assign) -> object:
        for _ in range(600):
            with contextlib.suppress(CallError):
                return await call(self._identity, self._address, message)
            await asyncio.sleep(0.1)
        raise TimeoutError(f"the agent does not answer:\n{self.log()}")

    async def watch(self) -> None:
        async with connection(self._identity, self._address, p.Watch(UID, changes=True, pace=1.5)) as reader:
            while True:
                await receive(reader, self._identity, self._address)

    async def scrape(self) -> None:
        while True:
            await asyncio.sleep(SCRAPE_SECONDS)
            await asyncio.to_thread(lambda: urllib.request.urlopen(f"http://127.0.0.1:{self.metrics}/metrics").read())

    def seconds_of_processor(self) -> dict[str, float]:
        """Return the processor seconds of the agent and of the process that ships tracking data, without the ranks."""
        seconds_by_process = {"agent": processor_seconds(self.process.pid)}
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        for child in children:
            with contextlib.suppress(OSError):
                if b"concertina_tracking" in Path(f"/proc/{child}/cmdline").read_bytes():
                    seconds_by_process["shipper"] = processor_seconds(int(child))
        return seconds_by_process

    def log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")[-3000:]

    def stop(self) -> None:
        """Kill the agent and the processes that it started. The ranks end on their own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


@dataclass(frozen=True)
class Run:
    blocks: Sequence[tuple[str, Sequence[float], Sequence[float]]]
    """Blocks of rank 0: the kind, the seconds of each step, and the processor seconds of each step."""
    hooks: Mapping[str, tuple[float, float, float]]
    """Cost of each measurement: seconds in the median step, seconds in the mean step, and calls per step.

    A part of a step is measured by one call at its start and one at its end.
    """
    processor: Mapping[str, float]
    """Processor seconds per step, by process."""


async def _run(kind: Kind, data: Path, folder: Path, blocks: int, hooks: bool) -> Run:
    warm = 3 * kind.block
    agent = Agent(folder, kind, data, {"block": kind.block, "blocks": blocks, "warm": warm, "hooks": hooks})
    beside: list[asyncio.Task[None]] = []
    used: dict[str, float] = {}
    try:
        await agent.begin()
        beside = [asyncio.ensure_future(act) for act in (agent.watch(), agent.scrape())]
        written, before, until = folder / "rank-0.json", agent.seconds_of_processor(), time.monotonic() + LIMIT
        while not all((folder / f"rank-{rank}.json").exists() for rank in range(kind.ranks)):
            if time.monotonic() > until or agent.process.poll() is not None:
                raise TimeoutError(f"the run did not end:\n{agent.log()}")
            with contextlib.suppress(OSError):
                used = agent.seconds_of_processor()
            await asyncio.sleep(0.2)
    finally:
        for task in beside:
            task.cancel()
        agent.stop()
    result = json.loads(written.read_text())
    steps = warm + kind.block * len(result["blocks"])
    processor = {name: (seconds - before.get(name, 0.0)) / steps for name, seconds in used.items()}
    return Run([(name, seconds, used) for name, seconds, used in result["blocks"]], result["hooks"], processor)


def run(kind: Kind, data: Path, blocks: int, hooks: bool = False) -> Run:
    root = "/dev/shm" if Path("/dev/shm").is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="concertina-bench-", dir=root))
    try:
        return asyncio.run(_run(kind, data, folder, blocks, hooks))
    finally:
        shutil.rmtree(folder)


# --- figures ----------------------------------------------------------------------------------------------------------

Average = Callable[[Sequence[float]], float]


def differences(blocks: Sequence[tuple[str, Sequence[float]]], one: str, other: str, average: Average) -> list[float]:
    """Return by how many percent the steps in each block of `one` are slower than those in the next block of `other`.

    `one` and `other` are kinds of blocks.
    """
    percents = []
    for at in range(0, len(blocks), 3):
        turn = {kind: average(seconds) for kind, seconds in blocks[at : at + 3]}
        percents.append(100 * (turn[one] / turn[other] - 1))
    return percents


def interval(values: Sequence[float], average: Average) -> tuple[float, float]:
    """Return the 95 % confidence interval of the average of `values`, by bootstrap."""
    draw = random.Random(0)
    averages = sorted(average(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return averages[int(0.025 * RESAMPLES)], averages[int(0.975 * RESAMPLES)]


PAIRS = {"with beside without": (WITH, WITHOUT), "without beside without": (AGAIN, WITHOUT)}


def judge(kind: Kind, seen: Run) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Return the milliseconds of steps by row, and the difference of each pair of kinds of blocks.

    Each difference has its confidence interval. Differences and intervals are in percent.
    """
    steps: dict[str, list[float]] = {}
    facts: dict[str, dict[str, float]] = {}
    seconds_of = [(name, seconds) for name, seconds, _ in seen.blocks]
    processor_time = [(name, used) for name, _, used in seen.blocks]
    averages: list[tuple[str, list[tuple[str, Sequence[float]]], Average]] = [
        ("time, medians", seconds_of, statistics.median),
        ("time, means", seconds_of, statistics.fmean),
        ("processor time of rank 0, means", processor_time, statistics.fmean),
    ]
    for of, blocks, average in averages:
        for name in (WITH, WITHOUT):
            found = [1000 * average(some) for each, some in blocks if each == name]
            steps[f"{kind.name}: {of} of blocks, {name}"] = found
        for title, (one, other) in PAIRS.items():
            values = differences(blocks, one, other, average)
            low, high = interval(values, statistics.median)
            figures = {"median": statistics.median(values), "low": low, "high": high}
            facts[f"{kind.name}: {of} of blocks, {title}"] = {name: round(each, 2) for name, each in figures.items()}
    print("\n| | median % | 95 % |\n|---|---|---|")
    for name, row in facts.items():
        print(f"| {name} | {row['median']} | {row['low']} to {row['high']} |", flush=True)
    return steps, facts


def show_hooks(kind: Kind, seen: Run) -> dict[str, Any]:
    step = statistics.median(second for _, seconds, _ in seen.blocks for second in seconds)
    rows = {
        name: {
            "us": round(1e6 * median, 1), "mean us": round(1e6 * mean, 1), "calls": round(calls, 1),
            "per cent": round(100 * median / step, 3),
        }
        for name, (median, mean, calls) in seen.hooks.items()
    }  # fmt: skip
    rows |= {
        f"processor time of the {name}": {"mean us": round(1e6 * seconds), "per cent": round(100 * seconds / step, 3)}
        for name, seconds in seen.processor.items()
    }
    print(f"\n{kind.name}, a step of {1000 * step:.1f} ms: what measures, by itself\n")
    print("| | median us | mean us | calls | % |\n|---|---|---|---|---|")
    for name, row in rows.items():
        print("|", " | ".join([name, *(str(row.get(key, "")) for key in ("us", "mean us", "calls", "per cent"))]), "|")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--blocks", type=int, default=60, help="of each kind")
    parser.add_argument("--only", nargs="+", choices=[kind.name for kind in KINDS])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    steps: dict[str, list[float]] = {}
    facts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        data, texts = Path(folder, "data"), Path(folder, "text")
        texts.mkdir()
        list(build(text.write(texts, 35, 27_000), str(data), shard_bytes=300_000))
        for kind in KINDS:
            if options.only and kind.name not in options.only:
                continue
            if kind.cut == "gpu" and not torch.cuda.is_available():
                print(f"{kind.name}: this machine has no CUDA device")
                continue
            with report.step(f"{kind.name}, {options.blocks} blocks of each"):
                ms, more = judge(kind, run(kind, data, options.blocks))
            steps, facts = {**steps, **ms}, {**facts, **more}
            facts[f"{kind.name}: own time"] = show_hooks(kind, run(kind, data, 5, hooks=True))
    report.show("a step", steps, unit="ms")
    report.write(options.json, "measuring", steps, facts=facts)


if __name__ == "__main__":
    main()
