"""Time to save and to restore the training state of one rank, compared with torch's own functions.

python benchmarks/checkpoint.py [--mebibytes 10 100 1024] [--runs N] [--json FILE]

The benchmark measures how long a save delays the step, when the checkpoint is durable, and how fast the state is
restored from each place. torch's dcp.save, dcp.async_save and its stager are measured in the same run.

The state is that of a real model of the given size in one process: float32 weights and two moments. Node memory is
/dev/shm, like a replica's volume. Files are on the disk of --folder, and the S3 server is a SeaweedFS on this machine.

The row `memcpy` copies the tensors into other tensors, which is a lower bound for all rows. The row `memory` is the
time for which a worker waits for its snapshot if its agent has already verified the snapshot while the worker started.
The row `with its check` includes the verification. The row `a peer` is the time from the request for another agent's
shard until the tensors are filled.
"""

import argparse
import contextlib
import functools
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import checkpoint_paced
import checkpoint_peer
import report
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from concertina.local import s3
from concertina_agent.files import shards
from concertina_protocol import Durable, SnapshotId
from concertina_protocol.sidecar import SNAPSHOT_SLOTS
from concertina_state import uploader
from concertina_state.checkpoints.reader import StoredCheckpoint
from concertina_state.filling import ShardReader
from concertina_state.format.shardfile import ShardMetadata
from concertina_state.objects.prefix import ObjectPrefix
from concertina_state.saved import LocalShard
from concertina_state.snapshots import Snapshots, TakenSnapshot
from concertina_trainer.config.parallelism import ParallelismConfig
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.data.read.batch import plan_batch
from concertina_trainer.data.read.batches import Microbatch
from concertina_trainer.model.optimizer import LocalOptimizer
from concertina_trainer.parallel import summing
from concertina_trainer.parallel.group import DistContext
from concertina_trainer.parallel.parallelize import parallelized
from concertina_trainer.state.train_state import TrainState
from concertina_trainer.training.engine import WholeModel

UID = "bench"
CONFIG = uploader.Destination(uri="bench", keep=2)
BETWEEN = 3.0
"""Seconds from one snapshot to the next.

The interval is long, because in training, snapshots take at most one percent of the time.
"""
DEMO = {"layers": 4, "dim": 128}
"""Configuration of the demo's model, which is the default model. It has 0.8 million weights."""


@contextlib.contextmanager
def alone() -> Iterator[DistContext]:
    """Yield the distributed context of a process group with one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    device = torch.device("cpu")
    yield DistContext.of(0, 1, device, ParallelismConfig())
    dist.destroy_process_group()


class Subject:
    """Model with a training state of about the given size in MiB, and the snapshots of that state."""

    def __init__(self, mebibytes: float, world: DistContext, memory: Path) -> None:
        self.world = world
        self.config = TrainerConfig.model_validate(
            {"data": {"uri": "/none"}, "precision": "Float32", "model": _model(mebibytes)}
        )
        self.model = parallelized(self.config, world)
        self.optimizer = LocalOptimizer(self.model, self.config.optimizer, 0)
        self.state = TrainState(self.model, self.config, self.optimizer, world)
        self.state.initialise(self.config)
        self.volume = memory / "volume"
        """Folder of the snapshots, with the paths that an agent expects."""
        self.snapshots = Snapshots(self.volume / "snapshots" / "round-1" / "shard-0", self.state.saved)
        self.step = 0

    @property
    def mebibytes(self) -> float:
        return self.state.saved.layout.size / 2**20

    def begin(self) -> TakenSnapshot:
        """Begin a snapshot as the training loop does.

        This call waits until the tensors are copied. A thread then commits the snapshot.
        """
        return self.snapshots.begin(self._next())

    def take(self) -> TakenSnapshot:
        """Take a snapshot and wait until it is committed."""
        return self.snapshots.take(self._next())

    def _next(self) -> ShardMetadata:
        self.step += 1
        self.snapshots.complete = self.snapshots.count - 2
        return ShardMetadata(SnapshotId(1, self.step, self.state.digest, 1), 0, self.step, "", "")

    def load(self, shard: ShardReader) -> None:
        self.state.load(self.state.plan({0: shard.header}), {0: shard}, shard.header.metadata.id.step)

    def train_step(self) -> None:
        """Train one step of a complete global batch, without data loading and without other ranks."""
        length, size = self.config.model.sequence_length, self.config.global_batch_size
        plan = plan_batch(size, self.config.resolved_micro_batch_size, 1)
        tokens = torch.randint(0, 256, (plan.microbatches, plan.rows, length + 1))
        weights = torch.full((plan.rows, length), 1 / size / length)
        batches = [Microbatch(part, weights, None) for part in tokens]
        WholeModel(
            self.model, self.optimizer, summing.PlainSums(tokens.device, each=False), self.world
        ).forward_backward(batches)
        self.optimizer.update(1e-6, 1.0)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the state by name, in the form that torch's checkpoint functions accept."""
        saved = self.state.saved
        return {chunk.name: tensor for chunk, tensor in zip(saved.layout.chunks, saved.tensors, strict=True)}


def _model(mebibytes: float) -> dict[str, int]:
    if mebibytes <= 16:
        return DEMO
    weights = mebibytes * 2**20 / 12
    dim = 1024 if mebibytes >= 512 else 512
    layers = max(1, round(weights / (12 * dim * dim)))
    return {"layers": layers, "dim": dim, "heads": 8}


def timed(runs: int, work: Callable[[], object], before: Callable[[], object] = lambda: None) -> list[float]:
    """Return the seconds of each run. An additional first run is a warm-up and is not included."""
    seconds = []
    for _ in range(runs + 1):
        before()
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return seconds[1:]


def in_turn(runs: int, works: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Return the seconds of each run for each row. The rows run alternately.

    Other load on the machine therefore affects all rows equally.
    """
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(runs + 1):
        for name, work in works.items():
            started = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - started)
    return {name: values[1:] for name, values in seconds.items()}


def firsts(subject: Subject, runs: int, memory: Path) -> list[float]:
    """Return the seconds for which the training loop waits at each of a round's first four snapshots.

    A snapshot is written into a slot, which is a file that later snapshots use again. The third snapshot is still being
    uploaded when its slot would be used again, so each of the first four snapshots needs a new file.
    """
    seconds = []
    for run in range(runs):
        folder = memory / f"first-{run}" / "snapshots" / "round-1" / "shard-0"
        snapshots = Snapshots(folder, subject.state.saved)
        for step in range(2 * SNAPSHOT_SLOTS):
            time.sleep(BETWEEN)
            metadata = ShardMetadata(SnapshotId(1, step, subject.state.digest, 1), 0, step, "", "")
            started = time.perf_counter()
            taken = snapshots.begin(metadata)
            seconds.append(time.perf_counter() - started)
            if step == SNAPSHOT_SLOTS - 1:
                snapshots.finish()
                snapshots.link_for_shipping(taken)
            snapshots.make_room()
            snapshots.complete = step
        snapshots.finish()
        shutil.rmtree(memory / f"first-{run}")
    return seconds


def saves(subject: Subject, runs: int, memory: Path, disk: Path) -> dict[str, list[float]]:
    """Return the seconds for which the training loop waits for a snapshot, by row."""
    tensors = subject.tensors()
    copies = [torch.empty_like(tensor) for tensor in tensors.values()]
    options = StagingOptions(False, False, False, False)
    stager = DefaultStager(options)

    def memcpy() -> None:
        for copy, tensor in zip(copies, tensors.values(), strict=True):
            copy.copy_(tensor)

    rows = {"memcpy": timed(runs, memcpy)}
    rows["concertina: snapshot, stall"] = timed(max(runs, 9), subject.begin, subject.snapshots.finish)
    rows["concertina: snapshot, first six of a round, stall"] = firsts(subject, runs, memory)
    rows["concertina: snapshot, committed"] = timed(max(runs, 9), subject.take)
    rows["torch: stager"] = timed(runs, lambda: stager.stage(tensors))
    return rows | dcp_saves(tensors, runs, disk / "dcp", stager)


def dcp_saves(
    tensors: dict[str, torch.Tensor], runs: int, target: Path, stager: DefaultStager
) -> dict[str, list[float]]:
    """Return the seconds of torch's own saves to a file, with default settings and with tuned settings, by row.

    The tuned settings follow torch's documentation: two writer threads, and one stager for all saves. A new stager
    would have to allocate all of its memory again.
    """

    def comes() -> dict[str, Any]:
        return {"checkpoint_id": target}

    def threads() -> dict[str, Any]:
        return {"storage_writer": FileSystemWriter(target, thread_count=2)}

    def wipe() -> None:
        shutil.rmtree(target, ignore_errors=True)

    rows = {
        "torch: dcp.save": timed(runs, lambda: dcp.save(tensors, **comes(), no_dist=True), wipe),
        "torch: dcp.save, 2 threads": timed(runs, lambda: dcp.save(tensors, **threads(), no_dist=True), wipe),
    }
    for name, where, reused_stager in (
        ("", comes, None), (", stager kept", comes, stager), (", stager kept, 2 threads", threads, stager),
    ):  # fmt: skip
        stalls, durable = [], []
        for _ in range(runs + 1):
            wipe()
            started = time.perf_counter()
            pending = dcp.async_save(tensors, **where(), async_stager=reused_stager, no_dist=True)
            stalls.append(time.perf_counter() - started)
            assert isinstance(pending, Future)
            pending.result()
            durable.append(time.perf_counter() - started)
        rows[f"torch: dcp.async_save{name}, stall"] = stalls[1:]
        rows[f"torch: dcp.async_save{name}, durable"] = durable[1:]
    return rows


def durables(subject: Subject, runs: int, disk: Path, bucket: str) -> tuple[dict[str, list[float]], dict[str, Durable]]:
    """Return the seconds from the start of a save until the checkpoint is durable, by row, and the checkpoints.

    A checkpoint is durable when the file LATEST refers to it. dcp.save, and obstore's own upload of the same file to
    the same server, run alternately with concertina's saves. In the row `kept`, dcp.save keeps as many checkpoints as
    concertina, and deletes the oldest one after each save. If a file is deleted just before a save, the save can reuse
    the file's memory. On a virtual machine, the save then takes half the time.
    """
    newest = dict[str, Durable]()
    target, tensors = disk / "dcp", subject.tensors()
    checkpoints = deque[Path]()

    def save(name: str, folder: ObjectPrefix) -> None:
        taken = subject.take()
        uploader.ship(folder, UID, taken.id, 0, taken.path)
        durable = uploader.publish(folder, CONFIG, UID, taken.id, False).durable
        assert durable is not None
        newest[name] = durable

    def dcp_save() -> None:
        shutil.rmtree(target, ignore_errors=True)
        dcp.save(tensors, checkpoint_id=target, no_dist=True)

    def dcp_save_kept() -> None:
        checkpoints.append(disk / f"dcp-{subject.step}")
        dcp.save(tensors, checkpoint_id=checkpoints[-1], no_dist=True)
        if len(checkpoints) > CONFIG.keep:
            shutil.rmtree(checkpoints.popleft())

    file, cloud = (ObjectPrefix(uri, create=True) for uri in (f"file://{disk}/durable", f"s3://{bucket}"))
    works = {
        "concertina: durable, file": lambda: save("file", file),
        "torch: dcp.save, in turn": dcp_save,
        "torch: dcp.save, in turn, kept": dcp_save_kept,
        "concertina: durable, S3": lambda: save("S3", cloud),
        "obstore: put to S3": lambda: cloud.put("plain", subject.take().path),
    }
    return in_turn(runs, works), newest


def pulls(subject: Subject, runs: int, memory: Path) -> dict[str, list[float]]:
    """Return the seconds from the request for another agent's shard until every tensor is filled, by row."""
    taken = subject.take()
    size = taken.path.stat().st_size
    target = memoryview(bytearray(size))
    with checkpoint_peer.holder(memory, subject.volume, taken.id) as holder:

        def from_a_peer() -> None:
            subject.load(LocalShard(holder.pull(), taken.id))

        rows = {"concertina: a peer, pull alone": timed(runs, holder.pull, holder.forget)}
        works = {
            "plain TCP copy": lambda: checkpoint_peer.plain_copy(taken.path, target),
            "concertina: a peer": from_a_peer,
            "(given back)": holder.forget,
        }
        rows |= in_turn(runs, works)
    del rows["(given back)"]
    return rows


def restores(subject: Subject, runs: int, disk: Path, newest: dict[str, Durable]) -> dict[str, list[float]]:
    """Return the seconds from the start of a restore until every tensor is filled and verified, by row."""
    taken = subject.take()
    shard = shards.committed_shard(taken.path)
    assert shard is not None

    def load_from_memory() -> None:
        subject.load(LocalShard(taken.path, taken.id))

    def from_memory() -> None:
        shard.verify()
        load_from_memory()

    def from_storage(durable: Durable) -> None:
        subject.load(StoredCheckpoint(durable.uri).shards[0])

    rows = {
        "concertina: memory": timed(runs, load_from_memory),
        "concertina: memory, with its check": timed(runs, from_memory),
    }
    into = {name: torch.empty_like(tensor) for name, tensor in subject.tensors().items()}
    works: dict[str, Callable[[], object]] = {
        f"concertina: {name}": functools.partial(from_storage, durable) for name, durable in newest.items()
    }
    works["torch: dcp.load"] = lambda: dcp.load(into, checkpoint_id=disk / "dcp", no_dist=True)
    return rows | in_turn(runs, works)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--mebibytes", type=float, nargs="+", default=[10, 100, 1024])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="a folder on the disk to write to (default: the temporary one)")
    parser.add_argument("--threads", type=int, default=1, help="of torch, as a worker has (default: 1)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    everything: dict[str, list[float]] = {}
    facts: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        world = stack.enter_context(alone())
        server = stack.enter_context(s3.serve("benchmark-checkpoint", ["bench"]))
        os.environ.update(server.environment())
        for size in options.mebibytes:
            memory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
            disk = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.folder)))
            subject = Subject(size, world, memory)
            rows = saves(subject, options.runs, memory, disk)
            more, newest = durables(subject, options.runs, disk, f"bench/{int(size)}")
            rows |= more
            report.show(f"save, {subject.mebibytes:.0f} MiB of state", rows)
            back = restores(subject, options.runs, disk, newest) | pulls(subject, options.runs, memory)
            report.show(f"restore, {subject.mebibytes:.0f} MiB of state", back)
            beside, took = checkpoint_paced.steps(size, memory)
            milliseconds = 1000 * checkpoint_paced.STEP_SECONDS
            report.show(f"steps of {milliseconds:.0f} ms, {size:.0f} MiB copied for free", beside)
            for what, value in took.items():
                print(f"{what}: {value}")
            back |= beside
            if subject.mebibytes < 100:
                rows["a training step"] = timed(10, subject.train_step)
                print(f"a snapshot at every step costs {share(rows):.2%} of the step time")
            facts[f"{subject.mebibytes:.0f} MiB"] = {
                "restore, share of memcpy's speed": speed(rows, back),
                "restore from a peer, share of a plain TCP copy's speed": peer_speed(back),
                **took,
            }
            print(f"restore from memory runs at {speed(rows, back):.0%} of memcpy's speed")
            print(f"restore from a peer runs at {peer_speed(back):.0%} of a plain TCP copy's speed")
            label = f"{subject.mebibytes:.0f} MiB, "
            everything |= {label + name: values for name, values in (rows | back).items()}
            for folder in (memory, disk):
                shutil.rmtree(folder, ignore_errors=True)
    report.write(options.json, "checkpoint", everything, **facts)


def share(rows: dict[str, list[float]]) -> float:
    return median(rows["concertina: snapshot, stall"]) / median(rows["a training step"])


def speed(rows: dict[str, list[float]], back: dict[str, list[float]]) -> float:
    return median(rows["memcpy"]) / median(back["concertina: memory"])


def peer_speed(back: dict[str, list[float]]) -> float:
    return median(back["plain TCP copy"]) / median(back["concertina: a peer"])


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


if __name__ == "__main__":
    main()
