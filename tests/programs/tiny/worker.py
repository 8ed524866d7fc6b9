"""Worker whose state is the step, and whose snapshots are files of 100 kB."""

import json
import os
import time
import zlib
from pathlib import Path

from concertina_protocol import Progress, SnapshotId
from concertina_protocol import worker_channel as w
from concertina_protocol.sidecar import SNAPSHOT_SLOTS, Sidecar, remove_sidecar, write_sidecar

from .store import Group


def content(step: int, shard: int) -> bytes:
    header = json.dumps({"__metadata__": {"step": str(step), "shard": str(shard)}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes([(step + shard) % 251]) * 100_000


def restore(end: w.WorkerEnd, start: w.Start) -> int:
    if start.restore.source == "Fresh":
        return 0
    if start.restore.source == "Storage":
        return start.restore.durable.step
    id = start.restore.id
    for shard in range(id.shards):
        answer = end.request(w.FetchHeader(id, shard), w.FetchedHeader)
        if answer.error:
            end.send(w.Fault("RestoreFailed", answer.error))
            raise SystemExit(1)
        assert json.loads(answer.header)["__metadata__"] == {"step": str(id.step), "shard": str(shard)}, answer
        fetched = end.request(w.Fetch(id, shard), w.Fetched)
        if fetched.error:
            end.send(w.Fault("RestoreFailed", fetched.error))
            raise SystemExit(1)
        assert Path(fetched.path).read_bytes() == content(id.step, shard)
    return id.step


class Slots:
    def __init__(self, rank: int) -> None:
        self._folder = Path(os.environ["CONCERTINA_SNAPSHOTS"], f"shard-{rank}")
        self._folder.mkdir(parents=True, exist_ok=True)
        self._rank, self.steps = rank, []

    def take(self, id: SnapshotId) -> Path:
        path = self._folder / f"slot-{len(self.steps) % SNAPSHOT_SLOTS}"
        remove_sidecar(path)
        data = content(id.step, self._rank)
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        write_sidecar(path, Sidecar(id, self._rank, len(data), zlib.crc32(data)))
        self.steps.append(id.step)
        return path


def main(entered: float | None = None) -> int:
    rank, world, round = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "CONCERTINA_ROUND"))
    steps = int(os.environ.get("TINY_STEPS") or json.loads(os.environ["CONCERTINA_TRAINER"])["steps"])
    pause = float(os.environ.get("TINY_PAUSE", "0.01"))
    end = w.WorkerEnd(os.environ["CONCERTINA_SOCKET"])
    end.send(w.Hello(rank, os.getpid()))
    start = end.receive(w.Start)
    if os.environ.get("TINY_BAD_INPUT") and rank == 0:
        end.send(w.Fault("InvalidInput", "The file a.bin has another checksum; build it again."))
        return w.BAD_INPUT_EXIT
    step = restored = restore(end, start)
    print(f"rank {rank} of {world} in round {round} continues from {start.restore.source} {step}", flush=True)
    group = Group(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world)
    slots, copied, drain = Slots(rank), -1, 0
    while step < steps and not drain:
        for message in end.poll():
            if isinstance(message, w.CopiedUpTo):
                copied = message.step
            elif isinstance(message, w.DrainRequest):
                drain = 1 + message.durable
        drain = group.greatest(drain)
        step += 1
        behind = group.greatest(len(slots.steps) >= 2 and copied < slots.steps[-2])
        if not behind or drain or step == steps:
            id = SnapshotId(round, step, "tiny", world)
            path = slots.take(id)
            end.send(w.Committed(id, rank, str(path)))
        everywhere = -group.greatest(-copied)
        beat(end, rank, step, steps, everywhere, restored, start.restore.source)
        time.sleep(pause)
    if drain == 2 or (step == steps and os.environ["CONCERTINA_CHECKPOINT"] != "null"):
        shipping = path.with_name(f"shipping-{step}")
        os.link(path, shipping)
        end.send(w.WantDurable(id, rank, str(shipping), complete=step == steps))
    end.send(w.Done("complete" if step == steps else "drained", step))
    return 0


def beat(end, rank, step, steps, everywhere, restored, source) -> None:
    if rank:
        end.send(w.Beat(rank, step, "training"))
        return
    now = time.time()
    end.send(
        Progress(
            step, steps, 1 / step, 0.0, 0.01, step, "training", now, now, everywhere,
            restored_step=restored, restored_from=source,
        )
    )  # fmt: skip
