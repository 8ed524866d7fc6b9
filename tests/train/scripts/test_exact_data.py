"""Test scripts on `trainingjob.data` under real agents.

The scripts are killed and resized at random. In each step they must consume the samples of an uninterrupted run in the
same order, with the same losses, and report how many.
"""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

import pytest

import concertina_protocol as p
from builders.programs import SEARCH_PATH
from builders.train.replicas import UID, Job, Replica, newest_complete, running
from concertina_trainer.config.data_config import DataConfig
from concertina_trainer.data.build.build import build
from concertina_trainer.data.read.sequence_reader import Reader

SCRIPT = Path(__file__).parents[3] / "examples" / "scripts" / "exact_data.py"
STEPS, BATCH, LENGTH = 240, 16, 64
NEAR = 1e-4
"""Between losses of other worlds: their sums are of other order."""
REPLICAS, LEAST = 3, 2
PLAIN = json.dumps({"enabled": False})
LAW = "tests/train/scripts/test_data.py::test_any_world_reads_the_batches_of_the_bundled_trainer"
pytestmark = [pytest.mark.timeout(400.0), pytest.mark.usefixtures("data_cache"), pytest.mark.long(law=LAW)]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Path:
    """More than a window of shards, and less than the runs consume."""
    folder = tmp_path_factory.mktemp("tokens")
    size = LENGTH * BATCH * STEPS * 3 // 4
    content = bytes(random.Random(1).choices(range(1, 128), k=size))
    for at in range(0, len(content), 1000):
        (folder / f"{at:09}.txt").write_bytes(content[at : at + 1000])
    list(build(sorted(folder.iterdir()), str(folder / "data"), shard_bytes=8000))
    return folder / "data"


@dataclass(frozen=True)
class Step:
    world: int
    loss: float
    rows: tuple[int, ...]
    """Checksums, in the order of the ranks."""


def recorded(folder: Path) -> dict[int, Step]:
    """Return the timeline that was kept: for each step, the record of the last round that trained it."""
    lines: dict[tuple[int, int], dict[int, dict]] = {}
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            found = json.loads(line)
            ranks = lines.setdefault((found["step"], found["round"]), {})
            assert found["rank"] not in ranks, f"a rank consumed a step twice in a round: {found}"
            ranks[found["rank"]] = found
    kept: dict[int, Step] = {}
    for (step, _), ranks in sorted(lines.items()):
        world = next(iter(ranks.values()))["size"]
        rows = [row for rank in sorted(ranks) for row in ranks[rank]["rows"]]
        if len(ranks) == world:
            kept[step] = Step(world, ranks[0]["loss"], tuple(rows))
        else:
            kept.pop(step, None)  # its world ended within it, so a later one must have trained it
    return kept


def command(kind: str, data: Path, record: Path) -> list[str]:
    return [str(SCRIPT), kind, "--data", str(data), "--steps", str(STEPS), "--batch", str(BATCH), "--length",
            str(LENGTH), "--record", str(record)]  # fmt: skip


@pytest.fixture(scope="module")
def uninterrupted(tokens, tmp_path_factory) -> dict[int, Step]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    ran = subprocess.run(
        [sys.executable, *torchrun, *command("ddp", tokens, folder / "record")], cwd=folder, capture_output=True,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": SEARCH_PATH, "HOME": str(folder), "OMP_NUM_THREADS": "1"},
        text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return recorded(folder / "record")


def test_an_uninterrupted_run_consumes_the_order_of_the_bundled_trainer(tokens, uninterrupted):
    reader = Reader(DataConfig(uri=str(tokens)), LENGTH, seed=1)
    assert reader.epoch_size < STEPS * BATCH, "into a second epoch"
    sums = [zlib.crc32(str(row.tolist()).encode()) for row in reader.read(0, STEPS * BATCH)]
    assert len(set(sums)) == reader.epoch_size
    assert [row for step in range(STEPS) for row in uninterrupted[step].rows] == sums


CASES = [("fsdp2", 2, 2), ("ddp", 1, 2), ("ddp", 3, 3), ("ddp", 4, 3), ("fsdp2", 3, 3), ("fsdp2", 4, 3)]


@pytest.mark.parametrize(("kind", "seed", "troubles"), CASES)
def test_killed_and_resized_it_is_the_uninterrupted_run(folder, tokens, uninterrupted, kind, seed, troubles):
    chance = random.Random(seed)

    async def body() -> None:
        arguments = ["--", sys.executable, *command(kind, tokens, folder / "record")]
        async with running(folder, REPLICAS, arguments, CONCERTINA_WARM_START=PLAIN) as job:
            members = chance.sample(list(job.replicas.values()), REPLICAS)
            await job.begin(1, *members)
            restored = 0
            for round, trouble in enumerate(chance.sample(TROUBLES, troubles), 1):
                at = restored + chance.randint(5, 30)
                await job.until(members[0], come_to(round, at, restored), f"round {round} did not come to step {at}")
                members = await trouble(job, members, round, chance)
                prepared = await job.prepare(round + 1, *members)
                restore = newest_complete(prepared)
                restored = restore.step
                await job.assign(job.assignment(prepared, restore))
            report = await job.until(members[0], lambda report: report.state == "succeeded", "never done")
            assert report.progress.step == STEPS
            assert report.progress.position == STEPS * BATCH, "samples consumed, in the status"

    asyncio.run(body())
    steps = recorded(folder / "record")
    assert sorted(steps) == list(range(STEPS)), "a step was left out"
    for step, found in steps.items():
        assert found.rows == uninterrupted[step].rows, step
        assert found.loss == pytest.approx(uninterrupted[step].loss, rel=NEAR), step
    assert len({step.world for step in steps.values()}) > 1


def come_to(round: int, step: int, restored: int):
    """And its members could go on without one of them, from a step of this round."""

    def holds(report: p.Report) -> bool:
        done = report.progress
        return report.round == round and done is not None and done.step >= step and (done.snapshot_step or 0) > restored

    return holds


# --- what ends a world; returns who is in the next one --------------------------------------------------------------


async def lose_a_worker(job: Job, members: list[Replica], round: int, chance: random.Random) -> list[Replica]:
    rank = chance.randrange(len(members))
    os.kill(members[rank].worker_pids()[rank], signal.SIGKILL)
    await heard(job, members[0], round)
    return members


async def lose_a_replica(job: Job, members: list[Replica], round: int, chance: random.Random) -> list[Replica]:
    """With what it has in memory."""
    lost = chance.choice(members)
    lost.kill()
    left = [replica for replica in members if replica is not lost]
    await heard(job, left[0], round)
    if len(left) < LEAST:
        left += [replica for replica in job.replicas.values() if replica not in members]
    lost.start()
    return left


async def heard(job: Job, replica: Replica, round: int) -> None:
    await job.until(replica, lambda report: report.round == round and report.failures, "no failure was heard of")


async def resize(job: Job, members: list[Replica], round: int, chance: random.Random) -> list[Replica]:
    drain = p.Drain(UID, round, f"claim-{round}", "the job is resized", durable=False, grace_seconds=60.0)
    assert isinstance(await job.call(members[0], drain), p.Accepted)
    await job.until(members[0], lambda report: report.state == "drained", "never drained")
    others = [replica for replica in job.replicas.values() if replica not in members]
    chance.shuffle(members)
    return [*members, *others] if others else members[:-1]


TROUBLES = (lose_a_worker, lose_a_replica, resize)
