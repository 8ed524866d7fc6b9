"""Performance of one GPU: `python benchmarks/gpu.py [--model NAME ...] [--runs N] [--json FILE]`.

The bundled trainer's model, optimizer and snapshots run with one rank and with random tokens. The benchmark measures
the training speed and the memory, and compares both with the estimate of `concertina plan` for the same GPU. It also
measures the cost of a snapshot: the time of two steps with a snapshot between them. For comparison, two steps run
without a snapshot, with a copy to memory that is not pinned, and with torch's own stager. The variants alternate, and
each starts after the previous snapshot has been committed. At the end, a snapshot is restored, and the training speed
is measured with compiled blocks.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

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
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.data.read.batches import Microbatch
from concertina_trainer.model.flops import token_flops
from concertina_trainer.model.optimizer import LocalOptimizer
from concertina_trainer.parallel import compiled, summing
from concertina_trainer.parallel.group import DistContext
from concertina_trainer.parallel.parallelize import parallelized
from concertina_trainer.planning.memory import memory
from concertina_trainer.state.train_state import TrainState
from concertina_trainer.training.engine import WholeModel

GIB = 1 << 30
MODELS = {
    "0.3B": {"layers": 16, "dim": 1024, "heads": 16, "kvHeads": 8, "hiddenDim": 4096, "sequenceLength": 2048},
    "0.7B": {"layers": 10, "dim": 2048, "heads": 32, "kvHeads": 8, "hiddenDim": 8192, "sequenceLength": 4096},
}
ROWS = {"0.3B": 16, "0.7B": 4}
"""Number of sequences in a step. All of them are in one microbatch."""


def trainer(name: str) -> dict[str, object]:
    model = {**MODELS[name], "vocabSize": 32000, "tieEmbeddings": False}
    return {"data": {"uri": "/none"}, "model": model, "globalBatchSize": ROWS[name], "microBatchSize": ROWS[name]}


class Subject:
    def __init__(self, name: str, world: DistContext, folder: Path) -> None:
        self.config = TrainerConfig.model_validate(trainer(name))
        self.world = world
        torch.cuda.reset_peak_memory_stats()
        self.model = parallelized(self.config, world)
        self.optimizer = LocalOptimizer(self.model, self.config.optimizer, 0)
        self.state = TrainState(self.model, self.config, self.optimizer, world)
        self.state.initialise(self.config)
        rows = ROWS[name]
        length, vocabulary = self.config.model.sequence_length, self.config.model.vocab_size
        tokens = torch.randint(0, vocabulary, (rows, length + 1), device=world.device)
        weights = torch.full((rows, length), 1 / rows / length, device=world.device)
        self.batches = [Microbatch(tokens, weights, None)]
        self.sums = summing.PlainSums(world.device, each=False)
        self.engine = WholeModel(self.model, self.optimizer, self.sums, world)
        self.snapshots = Snapshots(folder / "shard-0", self.state.saved)
        self.number = 0

    @property
    def tokens(self) -> int:
        """Number of tokens per step."""
        return self.batches[0].weights.numel()

    def step(self) -> None:
        losses = self.engine.forward_backward(self.batches)
        self.sums.losses(losses).item()  # as the loop does, once a step
        self.snapshots.before_change()
        self.optimizer.update(1e-5, 1.0)

    def snapshot(self) -> None:
        self.number += 1
        self.snapshots.complete = self.snapshots.count - 2
        id = SnapshotId(1, self.number, self.state.digest, 1)
        self.taken = self.snapshots.begin(ShardMetadata(id, 0, self.number, "", ""))

    def restore(self) -> None:
        shard = LocalShard(self.taken.path, self.taken.id)
        self.state.load(self.state.plan({0: shard.header}), {0: shard}, self.number)
        torch.cuda.synchronize()

    def tensors(self) -> dict[str, torch.Tensor]:
        saved = self.state.saved
        return {chunk.name: tensor.detach() for chunk, tensor in zip(saved.layout.chunks, saved.tensors, strict=True)}


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


def snapshots(subject: Subject, runs: int) -> tuple[dict[str, list[float]], float]:
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
        "nothing": lambda: None,
        "a snapshot": subject.snapshot,
        "a copy to memory that is not pinned": in_the_loop,
    }
    if stages_twice():
        works["torch's stager, pinned"] = lambda: stager.stage(subject.tensors())
    rows: dict[str, list[float]] = {name: [] for name in works}
    for run in range(runs + 3):  # The first three runs allocate the memory of the slots.
        for name, between in works.items():
            subject.snapshots.finish()
            took = timed(functools.partial(two_steps, subject, between))
            if run >= 3:
                rows[name].append(took)
    subject.snapshots.finish()
    return rows, subject.snapshots.device_seconds


def planned(name: str, gpu: Gpu) -> dict[str, float]:
    """Return the estimate of `concertina plan`. There must be no process group, because the estimate creates one."""
    job = parse_spec(
        {
            "spec": {
                "template": {"spec": {"containers": [{"name": "trainer", "image": "concertina/trainer"}]}},
                "trainer": {"steps": 1, **trainer(name)},
            }
        }
    )
    expected = outlook(job, of(job, 1), gpu, FabricName.infiniband400)
    config = TrainerConfig.model_validate(trainer(name))
    most_bytes = sum(memory(config, ParallelismConfig(), 1, 0).peak.values())
    return {"MFU, planned": round(expected.mfu, 4), "memory at the peak, planned, GiB": round(most_bytes / GIB, 3)}


def measure(name: str, runs: int, gpu: Gpu | None, folder: Path) -> tuple[dict[str, list[float]], dict[str, float]]:
    subject = Subject(name, DistContext.of(0, 1, torch.device("cuda", 0), ParallelismConfig()), folder)
    five_steps(subject)
    steps = [timed(functools.partial(five_steps, subject)) / 5 for _ in range(runs)]
    peak = torch.cuda.max_memory_allocated()
    rows, device = snapshots(subject, runs)
    rows = {f"{name}: two steps and between them {between}": seconds for between, seconds in rows.items()}
    rows[f"{name}: a step"] = steps
    rows[f"{name}: restored from node memory"] = [timed(subject.restore) for _ in range(runs)]
    rate = subject.tokens / statistics.median(steps)
    size = subject.state.saved.layout.size
    facts = {
        "tokens a second": round(rate),
        "memory at the peak, GiB": round(peak / GIB, 3),
        "state, GiB": round(size / GIB, 3),
        "a snapshot's copy, GB/s": round(size / device / 1e9, 1),
    }
    for part in subject.model.parts:
        compiled.compile_blocks(part)
    facts["first five steps of compiled blocks, s"] = round(timed(functools.partial(five_steps, subject)), 1)
    torch.cuda.reset_peak_memory_stats()
    compiled_steps = [timed(functools.partial(five_steps, subject)) / 5 for _ in range(runs)]
    rows[f"{name}: a step, compiled"] = compiled_steps
    compiled_rate = subject.tokens / statistics.median(compiled_steps)
    facts["tokens a second, compiled"] = round(compiled_rate)
    facts["memory at the peak, compiled, GiB"] = round(torch.cuda.max_memory_allocated() / GIB, 3)
    if gpu:
        model = subject.config.model
        facts["MFU"] = round(token_flops(model) * rate / gpu.flops, 4)
        facts["MFU, compiled"] = round(token_flops(model) * compiled_rate / gpu.flops, 4)
        facts["MFU, all of attention counted"] = round(token_flops(model, full_attention=True) * rate / gpu.flops, 4)
    return rows, facts


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("this machine has no CUDA device")
    name = torch.cuda.get_device_name()
    gpu = next((gpu for gpu in GPUS.values() if gpu.device == name), None)
    if gpu is None:
        print(f"planning/hardware.py does not list {name}: MFU and what is planned are left out")
    torch.cuda.set_device(0)
    rows: dict[str, list[float]] = {}
    facts: dict[str, object] = {"GPU": name, "torch": torch.__version__}
    expected = {model: planned(model, gpu) if gpu else {} for model in options.model}
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    for model in options.model:
        with report.step(model), tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            some, measured_facts = measure(model, options.runs, gpu, Path(folder))
        report.show(f"{model} on {name}", some)
        for what, value in (measured_facts | expected[model]).items():
            print(f"{what}: {value}")
        rows |= some
        facts[model] = measured_facts | expected[model]
    dist.destroy_process_group()
    report.write(options.json, "gpu", rows, None, **facts)


if __name__ == "__main__":
    main()
