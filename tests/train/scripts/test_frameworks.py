"""Test frameworks that have their own training loops, with the support of `trainingjob` for each.

They continue at the step, the batch and the random numbers of the saved state, in worlds of any size.
"""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

import concertina_protocol as p
from builders.programs import PROGRAMS, SEARCH_PATH
from builders.train import forked
from builders.train.replicas import UID, newest_complete, running, trained

SCRIPT = PROGRAMS / "with_framework.py"
LIMIT = 600.0
pytestmark = pytest.mark.timeout(LIMIT)
HERE = "tests/train/scripts/test_frameworks.py::"
ALONE = f"{HERE}test_a_world_that_goes_on_trains_as_one_that_was_never_stopped"
AGENTS = (
    "tests/train/scripts/test_loops.py::test_a_planned_end_waits_for_the_next_optimizer_step[frameworks:accelerated-7]"
)


class Step(NamedTuple):
    """Each as it was trained last."""

    losses: dict[int, float]
    items: dict[int, list[int]]
    """Of all ranks."""
    epochs: dict[int, int]


def read(*texts: str) -> Step:
    seen = Step({}, {}, {})
    for text in texts:
        seen.losses.update({int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss (\S+)", text)})
        given: dict[int, list[int]] = {}
        for step, epoch, items in re.findall(r"step (\d+) rank \d+ epoch (\d+) items (\S*)", text):
            given.setdefault(int(step), []).extend(map(int, items.split(",")))
            seen.epochs[int(step)] = int(epoch)
        seen.items.update({step: sorted(items) for step, items in given.items()})
    return seen


@pytest.fixture
def run(parents):
    """Run a script in a folder, with no job."""

    def ran(folder: Path, world: int, framework: str, *more: str) -> str:
        if world > 1:
            return under_torchrun(folder, world, framework, *more)
        done = forked.run(parents["loops.preload"], folder, world, SCRIPT, framework, *more)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return ran


def under_torchrun(folder: Path, world: int, framework: str, *more: str) -> str:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": SEARCH_PATH, "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    done = subprocess.run(
        [sys.executable, *torchrun, str(SCRIPT), framework, *more],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def begun(text: str) -> set[tuple[int, int]]:
    """(world, step)"""
    found = re.findall(r"rank \d+ of (\d+) starts at step (\d+)", text)
    return {(int(world), int(step)) for world, step in found}


WAYS: dict[str, tuple[str, Sequence[str], int, int]] = {
    "lightning": ("lightning", ["--dropout", "0.3", "--workers", "1"], 2, 7),
    "lightning, at an epoch's end": ("lightning", ["--dropout", "0.3", "--batch", "6", "--accumulate", "2"], 1, 10),
    "transformers": ("transformers", ["--dropout", "0.3"], 2, 7),
    "transformers, accumulating": ("transformers", ["--batch", "8", "--accumulate", "3"], 1, 7),
    "accelerate": ("accelerate", ["--dropout", "0.3"], 2, 7),
    "accelerate, at an epoch's end": ("accelerate", ["--dropout", "0.3", "--workers", "1"], 1, 10),
}  # fmt: skip


QUICK = ["lightning, at an epoch's end", "transformers, accumulating"]
LONG = [pytest.param(way, marks=pytest.mark.long(law=f"{ALONE}[{QUICK[0]}]")) for way in WAYS if way not in QUICK]


@pytest.mark.parametrize("way", [*QUICK, *LONG])
def test_a_world_that_goes_on_trains_as_one_that_was_never_stopped(run, tmp_path, way):
    """Bit for bit: data, dropout, schedulers, validations."""
    framework, options, world, stop = WAYS[way]
    arguments = [framework, "--steps", "14", *options]
    (tmp_path / "whole").mkdir()
    whole = read(run(tmp_path / "whole", world, *arguments))
    first = run(tmp_path, world, *arguments, "--stop", str(stop))
    second = run(tmp_path, world, *arguments)
    # It ends a moment after its last snapshot was begun: on a busy machine that one may not be whole.
    assert begun(second) in ({(world, stop)}, {(world, stop - 1)})
    assert read(first, second) == whole
    if world == 1:
        assert read(run(tmp_path, world, *arguments)) == Step({}, {}, {}), "there was no step left"


@pytest.mark.long(law=f"{ALONE}[{QUICK[0]}]")
@pytest.mark.parametrize("framework", ["lightning", "accelerate"])
def test_no_item_is_trained_twice_where_the_batch_grows_with_the_world(run, tmp_path, framework):
    first = run(tmp_path, 2, framework, "--each", "4", "--steps", "30", "--stop", "11")
    second = run(tmp_path, 3, framework, "--each", "4", "--steps", "30")
    assert begun(second) in ({(3, 11)}, {(3, 10)})  # as above
    seen = read(first, second)
    given = Counter(item for step, items in seen.items.items() if seen.epochs[step] == 1 for item in items)
    assert given == Counter(range(60))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Train the same without a job, in one process, and return the items in order."""
    known: dict[str, Step] = {}

    def of(framework: str) -> Step:
        if framework not in known:
            world = 2 if framework == "accelerate" else 1
            arguments = [framework, "--steps", "60", "--always-ddp"]
            known[framework] = read(under_torchrun(tmp_path_factory.mktemp(framework), world, *arguments))
        return known[framework]

    return of


def safe_at(step: int):
    return lambda report: report.progress is not None and (report.progress.snapshot_step or 0) >= step


@pytest.mark.long(law=AGENTS)
@pytest.mark.parametrize("framework", ["accelerate", "lightning", "transformers"])
def test_it_goes_on_from_memory_in_any_world(folder, framework, undisturbed):
    """Two; one of them is killed; one goes on; three end it."""
    arguments = [sys.executable, str(SCRIPT), framework, "--steps", "60", "--pause", "0.1", "--always-ddp"]

    async def body() -> str:
        async with running(folder, 3, ["--", *arguments], OMP_NUM_THREADS="1") as job:
            await job.begin(1, job[0], job[1])
            await job.until(job[0], safe_at(3), "no snapshot")
            os.kill(job[1].worker_pids()[1], signal.SIGKILL)
            report = await job.until(job[0], lambda r: r.failures, "the failure was not heard of")
            safe, last = report.progress.snapshot_step, report.progress.step

            prepared = await job.prepare(2, job[0])
            restore = newest_complete(prepared)
            assert safe <= restore.step <= last + 1
            await job.assign(job.assignment(prepared, restore))
            report = await job.until(job[0], lambda r: r.round == 2 and trained(restore.step + 5)(r), "no way on")
            assert report.progress.restored_step == restore.step
            drain = p.Drain(UID, 2, "claim-2", "two replicas join", durable=False, grace_seconds=60.0)
            assert isinstance(await job.call(job[0], drain), p.Accepted)
            report = await job.until(job[0], lambda r: r.state == "drained", "never drained")
            assert not report.failures
            stopped = report.progress.step

            (folder / "hurry").touch()
            prepared = await job.prepare(3, job[2], job[0], job[1])
            restore = newest_complete(prepared)
            assert restore.step == stopped, "a step was lost to a planned change"
            await job.assign(job.assignment(prepared, restore))
            report = await job.until(job[2], lambda r: r.state == "succeeded", "never done")
            assert (report.progress.step, report.progress.restored_step) == (60, stopped)
            assert (3, stopped) in begun(job[2].log())
            return "\n".join(job[i].log() for i in range(3))

    log = asyncio.run(body())
    whole = undisturbed(framework)
    assert read(log).losses == pytest.approx(whole.losses, rel=1e-4, abs=1e-4)
