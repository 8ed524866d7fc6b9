"""Cost of snapshots for a loop whose device copies without a delay, so that only the checksum of snapshots takes time.

This is a part of checkpoint.py. The state is a file of the given size, and a step is a sleep. The job has one replica,
so a snapshot counts as copied to its peers at once. In the row `in each step`, each snapshot waits for the checksum of
the previous one, as in a loop that does not limit the pace of snapshots.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from mmap import mmap
from pathlib import Path

from concertina_protocol import JobHistory, SnapshotId
from concertina_protocol.worker_channel import Committed, CopiedUpTo, Message
from concertina_state.format.shardfile import Chunk, Layout, ShardMetadata
from concertina_state.interval import Interval
from concertina_state.live import Arrival
from concertina_state.pace import Pace
from concertina_state.saving import SavePolicy, Saving
from concertina_state.snapshots import Snapshots

STEP_SECONDS = 0.0586
"""Duration of a step in seconds.

The ratio of this duration to 1 GiB of state is the same as for the model 0.3B of benchmarks/gpu.py on an H100.
"""
STEPS = 300


class CopiedForFree:
    """Training state whose copy takes no time, because no bytes are copied."""

    def __init__(self, mebibytes: float) -> None:
        elements = int(mebibytes * 2**18)
        self.layout = Layout([Chunk("x", "F32", (0,), (elements,), (elements,))])

    def views(self, file: mmap) -> None:
        return None

    def copy_to(self, views: None) -> Arrival:
        return lambda: 0.0

    def before_change(self) -> None:
        pass


@dataclasses.dataclass
class OneReplica:
    """Agent of a job with one replica. There is no other replica to which snapshots could be copied."""

    copied: list[CopiedUpTo] = dataclasses.field(default_factory=list)

    def send(self, message: Message) -> None:
        if isinstance(message, Committed):
            self.copied.append(CopiedUpTo(message.id.step))

    def poll(self) -> Sequence[object]:
        copied, self.copied = self.copied, []
        return copied


def steps(mebibytes: float, memory: Path) -> tuple[dict[str, list[float]], dict[str, object]]:
    """Return the seconds of each step by row.

    Also return facts such as the number of snapshots of the loop that limits their pace.
    """
    state = CopiedForFree(mebibytes)
    metadata = ShardMetadata(SnapshotId(1, 0, "l", 1), 0, 0, "", "")

    def in_each(step: int) -> None:
        each.complete = each.count - 1
        each.begin(dataclasses.replace(metadata, id=dataclasses.replace(metadata.id, step=step)))

    def paced(step: int) -> None:
        flags = saving.local_flags()
        saving.before_change()
        saving.save(saving.decide(step, flags), step)

    rows = {"a step without snapshots": _timed(lambda step: None, 20)}
    each = Snapshots(memory / "each", state)
    rows["a step with a snapshot in each step"] = _timed(in_each, 20)
    each.finish()
    policy, interval = SavePolicy(10**9, 1, False, None), Interval(None, JobHistory())
    snapshots = Snapshots(memory / "paced", state)
    saving = Saving(policy, snapshots, metadata, None, interval, OneReplica(), Pace())
    rows["a step with snapshots at their pace"] = _timed(paced, STEPS)
    saving.finish()
    alone = statistics.mean(rows["a step without snapshots"])
    facts: dict[str, object] = {
        "snapshots in each step, times a step without": round(
            statistics.mean(rows["a step with a snapshot in each step"]) / alone, 3
        ),
        "snapshots at their pace, times a step without": round(
            statistics.mean(rows["a step with snapshots at their pace"]) / alone, 3
        ),
        "paced snapshots": f"{snapshots.count} in {STEPS} steps",
    }
    return rows, facts


def _timed(end_of_step: Callable[[int], None], count: int) -> list[float]:
    """Return the seconds of each of `count` steps.

    Three further steps run first and are not timed. They allocate the memory of the snapshots' files.
    """
    seconds = []
    for step in range(1, count + 4):
        started = time.perf_counter()
        time.sleep(STEP_SECONDS)
        end_of_step(step)
        if step > 3:
            seconds.append(time.perf_counter() - started)
    return seconds
