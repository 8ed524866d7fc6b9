"""Scaling of training: `python benchmarks/scaling.py [--runs N] [--only PART ...] [--json FILE]`.

The part `measured` is weak scaling up to 8 ranks, with the same number of sequences for each rank. Real workers of the
bundled trainer under a real agent alternate with a plain FSDP2 script of the same model under torchrun. All ranks share
this machine's cores, so the time of a step does not show the speed on several machines. The meaningful values are the
processor time of a rank in a step, and the part of it outside of the computing thread. gloo's threads use that part for
messages between ranks. The waiting time is printed too, but most of it is waiting for a core.

The part `memory` compares the memory of the ranks that need the most with the plan's estimate, for each layout. The
part `model` shows the plan's time model for up to 4096 H100.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measuring
import report
from measuring import SCRIPTS, Agent, Kind

from concertina.api.parse import parse_spec
from concertina.api.spec import JobSpec
from concertina.demo import text
from concertina.local.host.linux_namespaces import die_with_parent
from concertina.planning.hardware import GPUS, FabricName, GpuName
from concertina.planning.layout import of
from concertina.planning.outlook import Estimate, bottleneck, outlook
from concertina.planning.search import least_memory
from concertina_trainer.config.parallelism import ParallelismConfig
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.data.build.build import build
from concertina_trainer.planning.memory import fullest, memory

Rank = Mapping[str, Any]
"""Content of a file that `scripts/notes.py` has written for one rank."""
SMALL = {
    "layers": 4, "dim": 256, "heads": 8, "kvHeads": 4, "vocabSize": 256, "sequenceLength": 256, "tieEmbeddings": False,
}  # fmt: skip
ROWS, WARM, STEPS = 2, 2, 6
RANKS = (1, 2, 4, 8)
MOST = RANKS[-1]
MIB = 1 << 20
LAYOUTS: dict[str, Mapping[str, Any]] = {
    "replicate 2 x shard 4": {"shard": 4},
    "shard 4 x tensor 2": {"tensor": 2},
    "shard 4 x context 2": {"context": 2},
    "shard 4 x pipeline 2": {"pipeline": 2},
}
"""Layouts of 8 ranks, in addition to FSDP."""
PARTS = ("measured", "memory", "model")


# --- measured ---------------------------------------------------------------------------------------------------------


@contextmanager
def scratch() -> Iterator[Path]:
    root = "/dev/shm" if Path("/dev/shm").is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="concertina-bench-", dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def ours(ranks: int, parallelism: Mapping[str, Any], data: Path, warm: int = WARM, steps: int = STEPS) -> list[Rank]:
    kind = Kind("", 0, SMALL, ROWS * ranks, ranks=ranks, parallelism=parallelism, package="scaled_trainer")

    async def run(folder: Path) -> list[Rank]:
        agent = Agent(folder, kind, data, {"warm": warm, "steps": steps})
        try:
            await agent.begin()
            watching = asyncio.ensure_future(agent.watch())
            try:
                return await asyncio.to_thread(written, folder, ranks, agent.process, agent.log)
            finally:
                watching.cancel()
        finally:
            agent.stop()

    with scratch() as folder:
        return asyncio.run(run(folder))


def torchrun(ranks: int) -> list[Rank]:
    with scratch() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        probe.close()
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "MODEL": json.dumps(SMALL),
            "ROWS": str(ROWS), "TURNS": json.dumps({"warm": WARM, "steps": STEPS, "folder": str(folder)}),
        }  # fmt: skip
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d",
            "--rdzv-endpoint", address, "--local-addr", "127.0.0.1", str(SCRIPTS / "fsdp2.py"),
        ]  # fmt: skip
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, preexec_fn=die_with_parent, start_new_session=True
            )
        ranks_written = written(folder, ranks, process, lambda: (folder / "log").read_text()[-3000:])
        process.wait(measuring.LIMIT)
        return ranks_written


def written(folder: Path, ranks: int, process: subprocess.Popen[bytes], log: Callable[[], str]) -> list[Rank]:
    paths = [folder / f"rank-{rank}.json" for rank in range(ranks)]
    until = time.monotonic() + measuring.LIMIT
    while not all(path.exists() for path in paths):
        if time.monotonic() > until or process.poll() not in (None, 0):
            raise TimeoutError(f"the run did not end:\n{log()}")
        time.sleep(0.2)
    return [json.loads(path.read_text()) for path in paths]


def mean(rank: Rank, key: str) -> float:
    """Return the mean of the time `key` of a rank over all steps, in milliseconds."""
    return 1000 * statistics.fmean(rank[key])


def note(rows: dict[str, list[float]], name: str, ranks: Sequence[Rank]) -> None:
    """Append one value of each rank to each row of `rows`."""
    for rank in ranks:
        processor, computing = mean(rank, "processor"), mean(rank, "computing")
        rows.setdefault(f"{name}: processor time", []).append(processor)
        rows.setdefault(f"{name}: of it beside computing", []).append(processor - computing)
        rows.setdefault(f"{name}: the step", []).append(mean(rank, "seconds"))
        if any(rank["waiting"]):
            rows.setdefault(f"{name}: of it in collectives", []).append(mean(rank, "waiting"))


def measure(data: Path, runs: int) -> dict[str, list[float]]:
    rows: dict[str, list[float]] = {}
    for run in range(runs):
        for ranks in RANKS:
            with report.step(f"run {run + 1}: {ranks} ranks"):
                note(rows, f"ours, {ranks} ranks", ours(ranks, {}, data))
                note(rows, f"torchrun and FSDP2, {ranks} ranks", torchrun(ranks))
        for name, parallelism in LAYOUTS.items():
            with report.step(f"run {run + 1}: {name}"):
                note(rows, f"ours, {name}", ours(MOST, parallelism, data))
    return rows


def show_efficiency(rows: Mapping[str, Sequence[float]]) -> None:
    """Print the efficiency of weak scaling, by processor time."""
    print("\n| | " + " | ".join(f"{ranks} ranks" for ranks in RANKS) + " |\n|---|" + "---|" * len(RANKS))
    for who in ("ours", "torchrun and FSDP2"):
        spent = [statistics.median(rows[f"{who}, {ranks} ranks: processor time"]) for ranks in RANKS]
        print(f"| {who} | " + " | ".join(f"{spent[0] / processor_time:.0%}" for processor_time in spent) + " |")


# --- memory -----------------------------------------------------------------------------------------------------------


def show_memory(data: Path) -> dict[str, list[float]]:
    """Print the planned and the measured memory of tensors, and the memory of the process including torch, in MiB."""
    rows: dict[str, list[float]] = {}
    table = ["| | rank | planned | tensors | error | process |", "|---|---|---|---|---|---|"]
    for name, given in {f"shard {MOST}": {}, **LAYOUTS}.items():
        with report.step(f"memory: {name}"):
            took = ours(MOST, given, data, warm=0, steps=1)
        parallelism = ParallelismConfig.model_validate(given)
        trainer = TrainerConfig.model_validate(
            {"data": {"uri": str(data)}, "model": SMALL, "globalBatchSize": ROWS * MOST, "microBatchSize": ROWS,
             "precision": "Float32"}
        )  # fmt: skip
        for rank in fullest(trainer, parallelism, MOST):
            planned = sum(memory(trainer, parallelism, MOST, rank).peak.values())
            tensors, process = took[rank]["tensors"], took[rank]["process"]
            figures = f"{planned / MIB:.1f} | {tensors / MIB:.1f} | {planned / tensors - 1:+.1%} | {process / MIB:.0f}"
            table.append(f"| {name} | {rank} | {figures} |")
            rows[f"{name}, rank {rank}: planned, MiB"] = [planned / MIB]
            rows[f"{name}, rank {rank}: tensors, MiB"] = [tensors / MIB]
            rows[f"{name}, rank {rank}: process, MiB"] = [process / MIB]
    print("\nmemory of the fullest ranks, MiB\n", *table, sep="\n")
    return rows


# --- by the model -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planned:
    name: str
    model: Mapping[str, int]
    parallelism: Mapping[str, Any]
    rows: int = 1
    """Number of sequences per step and GPU."""
    batch: int | None = None
    """Number of sequences per step for any number of GPUs, or None if `rows` determines it."""
    micro: int = 1
    activations: str = "KeepProducts"
    reshard: str = "Always"


MODELS = {
    "8B": {"layers": 32, "dim": 4096, "heads": 32, "kvHeads": 8, "hiddenDim": 14336},
    "70B": {"layers": 80, "dim": 8192, "heads": 64, "kvHeads": 8, "hiddenDim": 28672},
}
WORLDS = (8, 64, 512, 4096)
GPU, NETWORK, PER_NODE = GPUS[GpuName.h100], FabricName.infiniband400, 8
PLANNED = (
    Planned("8B, FSDP", MODELS["8B"], {}, rows=2, micro=2),
    Planned("8B, HSDP, a copy a node", MODELS["8B"], {"shard": 8}, rows=2, micro=2),
    Planned("8B, HSDP, a copy on 8 nodes", MODELS["8B"], {"shard": 64}, rows=2, micro=2),
    Planned("70B, FSDP", MODELS["70B"], {}, activations="Recompute"),
    Planned("70B, HSDP, a copy on 8 nodes", MODELS["70B"], {"shard": 64}, activations="Recompute"),
    Planned("70B, tensor 8 x FSDP", MODELS["70B"], {"tensor": 8}, reshard="Never"),
    Planned("70B, tensor 8 x pipeline 4 x HSDP", MODELS["70B"],
            {"tensor": 8, "pipeline": 4, "schedule": "Interleaved1F1B", "shard": 2}, reshard="Never"),
    Planned("8B, FSDP, 512 sequences", MODELS["8B"], {}, batch=512),
    Planned("70B, tensor 8 x FSDP, 512 sequences", MODELS["70B"], {"tensor": 8}, batch=512, reshard="Never"),
)  # fmt: skip


def spec(planned: Planned, ranks: int) -> JobSpec:
    model = {**planned.model, "vocabSize": 128256, "sequenceLength": 8192, "tieEmbeddings": False}
    trainer = {
        "steps": 1, "data": {"uri": "/none"}, "model": model, "globalBatchSize": planned.batch or planned.rows * ranks,
        "microBatchSize": planned.micro,
        "memory": {"activations": planned.activations, "reshardAfterForward": planned.reshard},
    }  # fmt: skip
    template = {"spec": {"containers": [{"name": "trainer", "image": "concertina/trainer"}]}}
    return parse_spec(
        {
            "spec": {
                "replicas": ranks // PER_NODE, "workersPerReplica": PER_NODE, "template": template, "trainer": trainer,
                "parallelism": planned.parallelism,
            }
        }
    )  # fmt: skip


def seen(planned: Planned, ranks: int) -> Estimate | None:
    """Return the estimate for a number of ranks.

    The result is None if the number is not a multiple of the block size. It is also None if the weights, moments and
    gradients alone do not fit into memory.
    """
    job = spec(planned, ranks)
    if ranks % job.parallelism.block:
        return None
    layout = of(job, ranks // PER_NODE)
    return outlook(job, layout, GPU, NETWORK) if least_memory(layout) < GPU.usable else None


def show_model() -> dict[str, list[float]]:
    rows: dict[str, list[float]] = {}
    print(f"\nby the model, {GPU.name}, {NETWORK}: MFU, and of that of the smallest world\n")
    print("| | " + " | ".join(map(str, WORLDS)) + " | what holds 512 back |\n|---|" + "---|" * (len(WORLDS) + 1))
    for planned in PLANNED:
        found = {ranks: seen(planned, ranks) for ranks in WORLDS}
        least = next(each for each in found.values() if each is not None)
        cells = ["" if each is None else f"{each.mfu:.1%} ({each.mfu / least.mfu:.0%})" for each in found.values()]
        at = found[512]
        assert at is not None
        print("|", " | ".join([planned.name, *cells, bottleneck(at).rpartition(":")[0]]), "|")
        rows |= {f"{planned.name}, {ranks} GPUs, MFU": [each.mfu] for ranks, each in found.items() if each}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    steps: dict[str, list[float]] = {}
    taken: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        data, texts = Path(folder, "data"), Path(folder, "text")
        texts.mkdir()
        list(build(text.write(texts, 35, 27_000), str(data), shard_bytes=300_000))
        if "measured" in options.only:
            steps = measure(data, options.runs)
            report.show("a step of a rank", steps, unit="ms")
            show_efficiency(steps)
        if "memory" in options.only:
            taken = show_memory(data)
    mfu = show_model() if "model" in options.only else {}
    report.write(options.json, "scaling", steps | taken, mfu)


if __name__ == "__main__":
    main()
