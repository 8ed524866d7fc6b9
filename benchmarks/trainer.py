"""Cost of a training step: `python benchmarks/trainer.py [--model NAME] [--activations NAME] [--precision NAME] ...`.

The bundled trainer under a real agent, a bare FSDP2 loop, a loop like nanoGPT's, and torchtitan's trainer train models
of the same shape, one process each. The processes take turns: a block of steps each, in random order. All processes see
the same load of the machine, so their ratios count.

On a CPU, each process has one thread, and the benchmark measures its processor time, in which the time of waiting for a
core does not count. On a GPU, which a process has for itself in its turn, it measures the time of a step with compiled
blocks, and the model FLOPs utilization (MFU) by the conventions of concertina and of torchtitan. The hardware FLOPs
utilization (HFU) also counts the products that activation checkpointing repeats. It is left out for torchtitan if
torchtitan repeats others than the bundled trainer. Both are relative to the GPU's peak rate in bfloat16.

`--activations` has the values of `trainer.memory.activations`. torchtitan has no activation checkpointing for `Keep`,
its selective one for `KeepProducts`, which also repeats every second product, and its full one for `Recompute`.
`--precision Float8` is that of the bundled trainer alone. The other processes still compute in bfloat16.

The bytes per weight are the memory that a process needs beyond what it needed before it built its model: weights,
gradients, moments, activations and, on a CPU, data.

torchtitan is installed from the package index into `--titan` (a folder for this Python in out/torchtitan by default),
beside this environment's torch, if Python does not find it. No kernel of torchtitan's attention runs on a CPU, so a
function of torch takes its place there.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import math
import os
import random
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measuring
import peer_packages
import report
import torch
from measuring import SCRIPTS, Agent, Kind

from concertina.demo import text
from concertina.local.host.linux_namespaces import die_with_parent
from concertina_trainer.config.memory_config import Activations
from concertina_trainer.config.model_config import ModelConfig
from concertina_trainer.config.trainer import Precision
from concertina_trainer.data.build.build import build
from concertina_trainer.model.flops import peak_flops, recomputed_flops, token_flops


@dataclass(frozen=True)
class Size:
    model: Mapping[str, Any]
    rows: int
    """Number of sequences in a step."""
    block: int
    """Number of steps in a block."""


def _model(layers: int, dim: int, heads: int, hidden: int, vocabulary: int, length: int) -> Mapping[str, Any]:
    return {
        "layers": layers, "dim": dim, "heads": heads, "kvHeads": heads // 4 if heads > 8 else heads // 2,
        "hiddenDim": hidden, "vocabSize": vocabulary, "sequenceLength": length, "tieEmbeddings": False,
    }  # fmt: skip


SIZES = {
    "small": Size(_model(4, 256, 8, 704, 320, 256), 2, 2),
    "0.3B": Size(_model(16, 1024, 16, 4096, 32000, 2048), 8, 10),
    "1B": Size(_model(16, 2048, 32, 8192, 32000, 2048), 4, 10),
}
WARM = 5
OURS, FSDP2, NANOGPT, TITAN = "concertina", "bare FSDP2 loop", "loop like nanoGPT's", "torchtitan"
NAMES = (OURS, FSDP2, NANOGPT, TITAN)
TITAN_NEEDS = SCRIPTS / "torchtitan.txt"
"""torchtitan, and its requirements that this environment lacks. The others are torch and what it requires."""
TITAN_FOLDER = Path(__file__).resolve().parents[1] / "out" / "torchtitan" / ".".join(map(str, sys.version_info[:2]))
SAMPLE_SECONDS = 0.002
CUDA = torch.cuda.is_available()


@dataclass
class Contestant:
    """Process that trains in turns."""

    name: str
    connection: socket.socket
    log: Callable[[], str]
    pid: int = 0
    received: bytes = b""

    def go(self) -> None:
        self.connection.sendall(b"g")

    def hear(self, meanwhile: Callable[[], None] = lambda: None, every: float = 0.5) -> Mapping[str, Any]:
        """Return the next message, and call `meanwhile` repeatedly until it comes.

        Raises:
            TimeoutError: When the process ends, or takes too long.
        """
        until = time.monotonic() + measuring.LIMIT
        while b"\n" not in self.received:
            meanwhile()
            if select.select([self.connection], [], [], every)[0]:
                more = self.connection.recv(1 << 16)
                if not more:
                    raise TimeoutError(f"{self.name} has ended:\n{self.log()}")
                self.received += more
            elif time.monotonic() > until:
                raise TimeoutError(f"{self.name} takes too long:\n{self.log()}")
        line, _, self.received = self.received.partition(b"\n")
        message: Mapping[str, Any] = json.loads(line)
        return message

    @property
    def memory(self) -> int:
        """Bytes of the process's memory that is not of a file."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


@dataclass
class Run:
    """Files and the socket of a run."""

    folder: Path
    data: Path
    tokens: Path
    door: socket.socket
    size: Size
    activations: Activations
    precision: Precision

    def settings(self, name: str) -> dict[str, Any]:
        return {"socket": str(self.folder / "door"), "name": name, "warm": WARM, "block": self.size.block}

    def admit(self, name: str, alive: Callable[[], bool], log: Callable[[], str]) -> Contestant:
        """Return the process that connects next.

        Raises:
            TimeoutError: When the process ends, or takes too long.
        """
        until = time.monotonic() + measuring.LIMIT
        while not select.select([self.door], [], [], 0.5)[0]:
            if not alive() or time.monotonic() > until:
                raise TimeoutError(f"{name} does not start:\n{log()}")
        contestant = Contestant(name, self.door.accept()[0], log)
        contestant.pid = contestant.hear()["pid"]
        return contestant


@contextmanager
def ours(run: Run) -> Iterator[Contestant]:
    """Run the bundled trainer under a real agent, to which this process is the operator."""
    settings = {"memory": {"activations": run.activations.value}, "precision": run.precision.value}
    kind = Kind("", 0, run.size.model, run.size.rows, ranks=1, package="turned_trainer", trainer=settings)
    folder = run.folder / "agent"
    folder.mkdir()
    agent = Agent(folder, kind, run.data, run.settings(OURS))
    ended = threading.Event()

    async def serve() -> None:
        await agent.begin()
        watching = asyncio.ensure_future(agent.watch())
        await asyncio.to_thread(ended.wait)
        watching.cancel()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    try:
        yield run.admit(OURS, lambda: agent.process.poll() is None, agent.log)
    finally:
        ended.set()
        agent.stop()
        thread.join()


@contextmanager
def script(name: str, arguments: Sequence[str], run: Run, search_path: str = "") -> Iterator[Contestant]:
    path = os.pathsep.join(filter(None, [search_path, os.environ.get("PYTHONPATH")]))
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "MODEL": json.dumps(run.size.model), "ROWS": str(run.size.rows),
        "TOKENS": str(run.tokens), "TURNS": json.dumps(run.settings(name)), "PYTHONPATH": path,
        "ACTIVATIONS": run.activations.value,
    }  # fmt: skip
    file = run.folder / f"{arguments[-1]}.log"
    with file.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, str(SCRIPTS / arguments[0]), *arguments[1:]], env=environment, stdout=log, stderr=log,
            preexec_fn=die_with_parent, cwd=run.folder,
        )  # fmt: skip
    try:
        yield run.admit(name, lambda: process.poll() is None, lambda: file.read_text(errors="replace")[-3000:])
    finally:
        process.kill()
        process.wait()


def torchtitan(folder: Path) -> Path:
    """Return the folder for torchtitan, and install it there if it is neither there nor in this environment."""
    if importlib.util.find_spec("torchtitan") is not None:
        return folder
    return peer_packages.install(folder, ["--no-deps", "--requirement", str(TITAN_NEEDS)])


def contestants(names: Sequence[str], run: Run, titan: Path) -> dict[str, Callable[[], Any]]:
    ways: dict[str, Callable[[], Any]] = {
        OURS: lambda: ours(run),
        FSDP2: lambda: script(FSDP2, ["bare_loops.py", "fsdp2"], run),
        NANOGPT: lambda: script(NANOGPT, ["bare_loops.py", "nanogpt"], run),
        TITAN: lambda: script(TITAN, ["titan_trainer.py"], run, str(torchtitan(titan.resolve()))),
    }
    return {name: ways[name] for name in names}


def measure(
    names: Sequence[str], blocks: int, run: Run, titan: Path, until: float
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Return the seconds of a step in each block, and the facts, by the name of each process.

    No turns begin after `until` (time.monotonic), except the first ones.
    """
    seconds: dict[str, list[float]] = {name: [] for name in names}
    facts: dict[str, Any] = {}
    with ExitStack() as stack:
        running = {}
        for name, way in contestants(names, run, titan).items():
            with report.step(f"{name} starts and trains {WARM} steps"):
                running[name] = stack.enter_context(way())
                facts[name] = warmed_up(running[name])
        for turn in range(blocks):
            if turn and time.monotonic() > until:
                break
            for name in random.Random(turn).sample(list(names), len(names)):
                running[name].go()
                said = running[name].hear()
                seconds[name].append(said["seconds" if CUDA else "processor"] / run.size.block)
                facts[name]["last loss"] = round(said["loss"], 3)
    tokens = run.size.rows * run.size.model["sequenceLength"]
    for name in names:
        facts[name] |= speed(name, run, tokens / statistics.median(seconds[name]))
    return seconds, facts


def speed(name: str, run: Run, rate: float) -> dict[str, float]:
    """Return the facts about the process `name`, which trains on `rate` tokens per second."""
    if not CUDA:
        return {"tokens a second of a core": round(rate)}
    facts: dict[str, float] = {"tokens a second": round(rate)}
    model = ModelConfig.model_validate(run.size.model)
    if peak := peak_flops(torch.device("cuda")):
        flops = token_flops(model)
        facts["MFU"] = round(flops * rate / peak, 4)
        facts["MFU, all of attention counted"] = round(token_flops(model, full_attention=True) * rate / peak, 4)
        if name != TITAN or run.activations is Activations.keep:
            facts["HFU"] = round((flops + recomputed_flops(model, run.activations)) * rate / peak, 4)
    return facts


def warmed_up(contestant: Contestant) -> dict[str, Any]:
    """Let a process build its model and train its first steps, and return the facts about it."""
    before, samples = contestant.memory, [0]
    contestant.go()
    said = contestant.hear(lambda: samples.append(contestant.memory), SAMPLE_SECONDS)
    memory = (said["memory"] or max(samples) - before) / said["weights"]
    return {"weights": said["weights"], "bytes a weight": round(memory, 1), "first loss": round(said["loss"], 3)}


def ratios(seconds: Mapping[str, Sequence[float]], base: str) -> dict[str, dict[str, float]]:
    """Return by how many percent each process takes longer than `base`, with the 95 % interval, over turns."""
    rows = {}
    for name, values in seconds.items():
        if name != base and base in seconds:
            percents = [100 * (one / other - 1) for one, other in zip(values, seconds[base], strict=True)]
            low, high = measuring.interval(percents, statistics.median)
            rows[name] = {"median": statistics.median(percents), "low": low, "high": high}
    return {name: {key: round(value, 2) for key, value in row.items()} for name, row in rows.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--model", choices=SIZES, default="small")
    parser.add_argument("--blocks", type=int, default=30, help="of each process")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--activations", type=Activations, choices=list(Activations), default=Activations.keep)
    parser.add_argument("--precision", type=Precision, choices=list(Precision), default=Precision.auto)
    parser.add_argument("--titan", type=Path, default=TITAN_FOLDER)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no turns begin")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory(prefix="concertina-bench-") as name, socket.socket(socket.AF_UNIX) as door:
        folder = Path(name)
        texts = folder / "text"
        texts.mkdir()
        list(build(text.write(texts, 35, 27_000), str(folder / "data"), shard_bytes=300_000))
        tokens = folder / "tokens"
        tokens.write_bytes(b"".join(file.read_bytes() for file in sorted(texts.iterdir())))
        door.bind(str(folder / "door"))
        door.listen()
        seconds, facts = measure(
            options.only,
            options.blocks,
            Run(folder, folder / "data", tokens, door, SIZES[options.model], options.activations, options.precision),
            options.titan,
            until,
        )
    what = "time" if CUDA else "processor time"
    report.show(f"{what} of a step", {name: [1000 * v for v in values] for name, values in seconds.items()}, "ms")
    beside = {f"more {what} than the {FSDP2}, %": ratios(seconds, FSDP2)}
    for what, rows in {**facts, **beside}.items():
        print(f"{what}: {rows}")
    report.write(options.json, "trainer", seconds, None, **facts, **beside)


if __name__ == "__main__":
    main()
