"""Performance of one GPU: `python benchmarks/gpu.py [--model NAME ...] [--precision NAME ...] [--json FILE]`.

The bundled trainer's model, optimizer and snapshots run with one rank and with random tokens. The benchmark measures
the training speed of eager and of compiled blocks, and the memory, and compares both with the estimate of `concertina
plan` for the same GPU. It fails if the memory of eager blocks differs from the plan by more than 5 %.

The model `largest` has the width of Llama 3 8B and as many layers as fit into the GPU's memory by the plan, with the
settings that a job's trainer would choose. The utilization of float8 is relative to the GPU's peak rate in bfloat16.

The benchmark also measures the cost of a snapshot, except with `--speed-only` and for the model `largest`: the time of
two steps with a snapshot between them. For comparison, two steps run without a snapshot, with a copy to memory that is
not pinned, and with torch's own stager. The variants alternate, and each starts after the previous snapshot has been
committed, except one, which starts while the previous snapshot is copied and committed. At the end, a snapshot is
restored, and the training speed is measured with compiled blocks.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from concertina.api.parse import parse_spec
from concertina.planning.hardware import GPUS, FabricName, Gpu
from concertina.planning.layout import of
from concertina.planning.outlook import outlook
from concertina_protocol import SnapshotId
from concertina_state.format.shardfile import ShardMetadata
from concertina_state.saved import LocalShard
from concertina_state.snapshots import Snapshots
from concertina_trainer.config.parallelism import ParallelismConfig
from concertina_trainer.config.trainer import Precision, TrainerConfig
from concertina_trainer.data.read.batches import Microbatch
from concertina_trainer.ladder import usable_memory
from concertina_trainer.model.flops import recomputed_flops, token_flops
from concertina_trainer.model.optimizer import LocalOptimizer
from concertina_trainer.parallel import compiled, summing
from concertina_trainer.parallel.group import DistContext
from concertina_trainer.parallel.parallelize import parallelized
from concertina_trainer.planning.choice import Job, chosen
from concertina_trainer.planning.ledger import MemoryPhase
from concertina_trainer.planning.memory import DEPTHS, memory
from concertina_trainer.state.train_state import TrainState
from concertina_trainer.training.engine import WholeModel

GIB = 1 << 30
LARGEST = "largest"


@dataclass(frozen=True)
class Model:
    shape: Mapping[str, int]
    rows: int
    """Number of sequences in a step. All of them are in one microbatch."""


def _model(layers: int, dim: int, heads: int, hidden: int, length: int, rows: int) -> Model:
    shape = {"layers": layers, "dim": dim, "heads": heads, "kvHeads": 8, "hiddenDim": hidden, "sequenceLength": length}
    return Model(shape, rows)


MODELS = {
    "0.3B": _model(16, 1024, 16, 4096, 2048, 16),
    "0.7B": _model(10, 2048, 32, 8192, 4096, 4),
    "1B": _model(16, 2048, 32, 8192, 2048, 8),
    LARGEST: _model(1, 4096, 32, 14336, 4096, 2),  # `largest` sets the number of layers
}
PRECISIONS = (Precision.bfloat16, Precision.float8)
MOST_PERCENT = 5
"""Largest difference of the measured memory from the planned memory, in percent of the planned memory."""
MEASURED_MEMORY, PLANNED_MEMORY = "memory at the peak, GiB", "memory at the peak, planned, GiB"
COMPARED = "memory at the peak, measured beside planned, %"
NOTHING, SNAPSHOT, IN_FLIGHT = "nothing", "a snapshot", "a snapshot while the previous one is committed"


def trainer(name: str, precision: Precision, layers: int | None = None) -> dict[str, Any]:
    """Return `spec.trainer` of a job that trains the model `name`."""
    model = {**MODELS[name].shape, "vocabSize": 32000, "tieEmbeddings": False}
    rows = MODELS[name].rows
    return {
        "data": {"uri": "/none"}, "model": model if layers is None else {**model, "layers": layers},
        "precision": precision.value, "globalBatchSize": rows, "microBatchSize": rows,
    }  # fmt: skip


def largest(precision: Precision, device_bytes: int) -> dict[str, Any]:
    """Return `spec.trainer` of the deepest model that fits into a device's memory, with the settings chosen for it.

    Each phase's peak grows by the same number of bytes with each layer, so two depths are planned.
    """

    def job(layers: int) -> Job:
        return Job(TrainerConfig.model_validate(trainer(LARGEST, precision, layers)), ParallelismConfig(), 1)

    def peaks(planned: Job) -> Mapping[MemoryPhase, float]:
        """Return the bytes at the peak of each phase with the settings that need the least memory."""
        config = planned.ladder()[-1].filled(planned.config)
        of_phases = memory(config, planned.parallelism, planned.ranks, 0).peaks
        return {phase: sum(kinds.values()) for phase, kinds in of_phases.items()}

    low, high = (peaks(job(depth)) for depth in DEPTHS)
    limit, span = usable_memory(device_bytes), DEPTHS[1] - DEPTHS[0]
    layers = min(math.floor(DEPTHS[0] + span * (limit - low[phase]) / (high[phase] - low[phase])) for phase in low)
    if layers < 1:
        sys.exit(f"not even one layer of the model {LARGEST} fits into {device_bytes / GIB:.0f} GiB")
    choice = chosen(job(layers), device_bytes).choice
    settings = {"activations": choice.activations.value, "reshardAfterForward": choice.reshard_after_forward.value}
    return {**trainer(LARGEST, precision, layers), "memory": settings}


class Subject:
    """Model that is trained, with its optimizer."""

    def __init__(self, spec: Mapping[str, Any], world: DistContext) -> None:
        self.config = TrainerConfig.model_validate(spec)
        self.world = world
        torch.cuda.reset_peak_memory_stats()
        self.model = parallelized(self.config, world)
        self.optimizer = LocalOptimizer(self.model, self.config.optimizer, 0)
        self.state = TrainState(self.model, self.config, self.optimizer, world)
        self.state.initialise(self.config)
        rows = self.config.global_batch_size
        length, vocabulary = self.config.model.sequence_length, self.config.model.vocab_size
        tokens = torch.randint(0, vocabulary, (rows, length + 1), device=world.device)
        weights = torch.full((rows, length), 1 / rows / length, device=world.device)
        self.batches = [Microbatch(tokens, weights, None)]
        self.sums = summing.PlainSums(world.device, each=False)
        self.engine = WholeModel(self.model, self.optimizer, self.sums, world)

    @property
    def tokens(self) -> int:
        """Number of tokens per step."""
        return self.batches[0].weights.numel()

    def step(self) -> None:
        losses = self.engine.forward_backward(self.batches)
        self.sums.losses(losses).item()  # as the loop does, once a step
        self.state.saved.before_change()
        self.optimizer.update(1e-5, 1.0)

    def tensors(self) -> dict[str, torch.Tensor]:
        saved = self.state.saved
        return {chunk.name: tensor.detach() for chunk, tensor in zip(saved.layout.chunks, saved.tensors, strict=True)}


class Saving:
    """Snapshots of a subject's state in a folder."""

    def __init__(self, subject: Subject, folder: Path) -> None:
        self.state = subject.state
        self.snapshots = Snapshots(folder / "shard-0", self.state.saved)
        self.number = 0

    def snapshot(self) -> None:
        self.number += 1
        self.snapshots.complete = self.snapshots.count - 2
        id = SnapshotId(1, self.number, self.state.digest, 1)
        self.taken = self.snapshots.begin(ShardMetadata(id, 0, self.number, "", ""))

    def restore(self) -> None:
        shard = LocalShard(self.taken.path, self.taken.id)
        self.state.load(self.state.plan({0: shard.header}), {0: shard}, self.number)
        torch.cuda.synchronize()


def timed(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def five_steps(subject: Subject) -> None:
    for _ in range(5):
        subject.step()


def two_steps(subject: Subject, between: Callable[[], object]) -> None:
    subject.step()
    between()
    subject.step()


def snapshots(subject: Subject, saving: Saving, runs: int) -> tuple[dict[str, list[float]], float]:
    """Return the seconds of two steps by row, and the seconds of a snapshot's copy on the device."""
    pageable = [torch.empty_like(tensor, device="cpu").fill_(0) for tensor in subject.tensors().values()]
    stager = DefaultStager(StagingOptions(True, True, False, False))

    def stages_twice() -> bool:
        """Return whether torch's stager can be used for more than one snapshot. The stager of torch 2.11 can not."""
        for _ in range(2):
            try:
                stager.stage({"a": torch.ones(1, device="cuda")})
            except KeyError:
                print("torch's stager is left out: in this torch it stages once")
                return False
        return True

    def in_the_loop() -> None:
        for copy, tensor in zip(pageable, subject.tensors().values(), strict=True):
            copy.copy_(tensor)

    works: dict[str, Callable[[], object]] = {
        NOTHING: lambda: None,
        SNAPSHOT: saving.snapshot,
        IN_FLIGHT: saving.snapshot,
        "a copy to memory that is not pinned": in_the_loop,
    }
    if stages_twice():
        works["torch's stager, pinned"] = lambda: stager.stage(subject.tensors())
    rows: dict[str, list[float]] = {name: [] for name in works}
    for run in range(runs + 3):  # The first three runs allocate the memory of the slots.
        for name, between in works.items():
            saving.snapshots.finish()
            if name == IN_FLIGHT:
                saving.snapshot()
            took = timed(functools.partial(two_steps, subject, between))
            if run >= 3:
                rows[name].append(took)
    saving.snapshots.finish()
    return rows, saving.snapshots.device_seconds


def planned(spec: Mapping[str, Any], gpu: Gpu | None) -> dict[str, float]:
    """Return the estimate of `concertina plan`. There must be no process group, because the estimate creates one.

    Without `gpu`, the estimate has no speed.
    """
    config = TrainerConfig.model_validate(spec)
    most_bytes = sum(memory(config, ParallelismConfig(), 1, 0).peak.values())
    facts = {PLANNED_MEMORY: round(most_bytes / GIB, 3)}
    if gpu:
        job = parse_spec(
            {
                "spec": {
                    "template": {"spec": {"containers": [{"name": "trainer", "image": "concertina/trainer"}]}},
                    "trainer": {"steps": 1, **spec},
                }
            }
        )
        expected = outlook(job, of(job, 1), gpu, FabricName.infiniband400)
        facts["MFU, planned"] = round(expected.mfu, 4)
    return facts


def speed(subject: Subject, runs: int) -> tuple[list[float], float]:
    """Return the seconds of a step in each of several runs, and the bytes at the peak since the last reset."""
    steps = [timed(functools.partial(five_steps, subject)) / 5 for _ in range(runs)]
    return steps, torch.cuda.max_memory_allocated()


def utilization(config: TrainerConfig, rate: float, peak: float, kind: str) -> Iterator[tuple[str, float]]:
    """Yield the share of a GPU's peak rate that the model uses, by each convention, at `rate` tokens per second."""
    flops = token_flops(config.model)
    again = recomputed_flops(config.model, config.memory.resolved_activations)
    yield f"MFU{kind}", round(flops * rate / peak, 4)
    yield f"HFU{kind}", round((flops + again) * rate / peak, 4)
    yield f"MFU{kind}, all of attention counted", round(token_flops(config.model, True) * rate / peak, 4)


def measure(
    name: str, spec: Mapping[str, Any], runs: int, gpu: Gpu | None, folder: Path | None
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Return the seconds of each row, and the facts. Snapshots are measured in `folder`, if there is one."""
    others = torch.cuda.memory_allocated()
    subject = Subject(spec, DistContext.of(0, 1, torch.device("cuda", 0), ParallelismConfig()))
    model = subject.config.model
    size = subject.state.saved.layout.size
    facts: dict[str, Any] = {"layers": model.layers, "weights": model.weights, "state, GiB": round(size / GIB, 3)}
    facts |= {f"memory.{key}": value for key, value in spec.get("memory", {}).items()}
    five_steps(subject)
    steps, peak = speed(subject, runs)
    rows = {f"{name}: a step": steps}
    facts[MEASURED_MEMORY] = round((peak - others) / GIB, 3)
    if folder:
        saving = Saving(subject, folder)
        of_snapshots, device = snapshots(subject, saving, runs)
        rows |= {f"{name}: two steps and between them {between}": times for between, times in of_snapshots.items()}
        medians = {between: statistics.median(times) for between, times in of_snapshots.items()}
        for between in (SNAPSHOT, IN_FLIGHT):
            facts[f"{between} adds, s"] = round(medians[between] - medians[NOTHING], 4)
        rows[f"{name}: restored from node memory"] = [timed(saving.restore) for _ in range(runs)]
        facts["a snapshot's copy, GB/s"] = round(size / device / 1e9, 1)
        saving.snapshots.close()
    for part in subject.model.parts:
        compiled.compile_blocks(part)
    facts["first five steps of compiled blocks, s"] = round(timed(functools.partial(five_steps, subject)), 1)
    torch.cuda.reset_peak_memory_stats()
    compiled_steps, compiled_peak = speed(subject, runs)
    rows[f"{name}: a step, compiled"] = compiled_steps
    facts["memory at the peak, compiled, GiB"] = round((compiled_peak - others) / GIB, 3)
    for kind, times in (("", steps), (", compiled", compiled_steps)):
        rate = subject.tokens / statistics.median(times)
        facts[f"tokens a second{kind}"] = round(rate)
        if gpu:
            facts |= utilization(subject.config, rate, gpu.flops, kind)
    return rows, facts


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--precision", nargs="+", choices=[str(one) for one in PRECISIONS], default=[PRECISIONS[0]])
    parser.add_argument("--speed-only", action="store_true", help="measure no snapshots")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("this machine has no CUDA device")
    device = torch.cuda.get_device_name()
    gpu = next((gpu for gpu in GPUS.values() if gpu.device == device), None)
    if gpu is None:
        print(f"planning/hardware.py does not list {device}: MFU and the planned speed are left out")
    torch.cuda.set_device(0)
    specs: dict[tuple[str, Precision], dict[str, Any]] = {}
    for model, precision in itertools.product(options.model, map(Precision, options.precision)):
        spec = largest(precision, device_bytes()) if model == LARGEST else trainer(model, precision)
        specs[model, precision] = spec
    expected = {case: planned(spec, gpu) for case, spec in specs.items()}
    rows: dict[str, list[float]] = {}
    facts: dict[str, Any] = {}
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    for (model, precision), spec in specs.items():
        name = f"{model}, {precision}"
        with report.step(name), tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            saved_in = None if options.speed_only or model == LARGEST else Path(folder)
            some, measured = measure(name, spec, options.runs, gpu, saved_in)
        gc.collect()  # the model's tensors refer to each other
        torch.cuda.empty_cache()
        facts[name] = measured | expected[model, precision]
        facts[name][COMPARED] = round(100 * (measured[MEASURED_MEMORY] / facts[name][PLANNED_MEMORY] - 1), 2)
        report.show(f"{name} on {device}", some)
        for what, value in facts[name].items():
            print(f"{what}: {value}")
        rows |= some
    dist.destroy_process_group()
    report.write(options.json, "gpu", rows, None, GPU=device, torch=torch.__version__, **facts)
    if wrong := [name for name, row in facts.items() if abs(row[COMPARED]) > MOST_PERCENT]:
        sys.exit(f"the memory of {'; '.join(wrong)} differs from the plan by more than {MOST_PERCENT} %")


def device_bytes() -> int:
    return int(torch.cuda.get_device_properties(0).total_memory)


if __name__ == "__main__":
    main()
