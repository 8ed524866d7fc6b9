"""Test unmodified scripts of other projects under the agents.

The scripts are killed and resized. Each continues from its own checkpoint, both as a plain process and as a fork of a
parent that has imported the framework. The checks of the training use only what the scripts print.
"""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

import concertina_protocol as p
from builders.programs import SEARCH_PATH
from builders.train.replicas import UID, Job, Replica, running
from builders.until import until_async

SCRIPTS = Path(__file__).parents[3] / "examples" / "scripts"
LIMIT = 400.0
"""Seconds; only a limit: several processes import torch at once, on whatever this machine has left."""
ENDLESS = 10**9
WARM, PLAIN = ({"CONCERTINA_WARM_START": json.dumps({"enabled": warm})} for warm in (True, False))
READS = "it reads LOCAL_RANK when it is imported"
ARROW = dict.fromkeys(["datasets", "pandas", "pyarrow", "torchtitan"], "it has 2 threads")
"""pyarrow's, and so of all that imports it."""
LIGHTNING = {"lightning": READS, "torchmetrics": READS}
LEFT_OUT = {
    "lightning_fit.py": LIGHTNING,
    "nemo_model.py": {**LIGHTNING, "nemo": READS.replace("LOCAL", "GROUP"), "nv_one_logger": READS},
    "torchtitan_debug.py": ARROW,
}
"""Of each script: packages that a parent can't hold, and why."""
pytestmark = pytest.mark.timeout(LIMIT * 3)


def command(script: str, checkpoints: Path, steps: int, *more: str) -> list[str]:
    arguments = ["--steps", str(steps), "--save-every", "5", "--checkpoints", str(checkpoints), *more]
    return ["--", sys.executable, str(SCRIPTS / script), *arguments]


def starts(replica: Replica) -> list[tuple[int, int, int]]:
    """(rank, world, step) of each start of a worker here."""
    found = re.findall(r"rank (\d+) of (\d+) starts at step (\d+)", replica.log())
    return [(int(rank), int(world), int(step)) for rank, world, step in found]


def saved(*replicas: Replica) -> int:
    """Return the last step that any process reports as saved, or -1."""
    said = [re.findall(r"saved step (\d+)", replica.log()) for replica in replicas]
    return max((int(step) for steps in said for step in steps), default=-1)


async def wait(job: Job, what: str, holds) -> None:
    """Until it holds; a failure meanwhile ends the waiting, and the last that every replica said is shown."""

    def failures() -> list[p.Failure]:
        reports = [each.report for each in job.replicas.values() if each.report]
        newest = max((report.round for report in reports), default=0)
        return [failure for report in reports if report.round == newest for failure in report.failures]

    def last_words() -> str:
        return "\n\n".join(f"{each.name}: {each.report}\n{each.log()[-1000:]}" for each in job.replicas.values())

    await until_async(lambda: holds() or failures(), what, last_words, LIMIT, pause=0.2)  # each look reads whole logs
    assert holds(), f"{what} did not come: {failures()}\n{last_words()}"


def learned(replica: Replica) -> list[dict]:
    """Return what the agent has reported about each parent that had imported the script's modules.

    Only the present process of the agent counts.
    """
    events = replica.events()
    begun = max(place for place, event in enumerate(events) if event["event"] == "agent_started")
    return [event for event in events[begun:] if event["event"] == "script_parent" and event["learned"]]


def forked_from_torch(replica: Replica) -> bool:
    """Whether its workers are forks of a process that has imported torch."""
    pid = [event["pid"] for event in replica.events() if event["event"] == "worker_started"][-1]
    parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    assert replica.report is not None
    assert replica.report.warm_start_disabled_reason == ""
    return "libtorch_cpu" in Path(f"/proc/{parent}/maps").read_text()


async def lose_a_worker(job: Job, warm: bool) -> None:
    """Train and save on all replicas, and then kill the last rank."""
    *_, last = replicas = list(job.replicas.values())
    await job.begin(1, *replicas)
    await wait(job, "a checkpoint of all", lambda: saved(job[0]) >= 10)
    if warm:
        await wait(job, "what was learned", lambda: all(map(learned, job.replicas.values())))
    pids = last.worker_pids()
    os.kill(pids[max(pids)], signal.SIGKILL)
    report = await job.until(job[0], lambda report: report.failures, "the coordinator never heard of it")
    assert [(f.replica, f.reason) for f in report.failures if not f.secondary] == [(last.name, "WorkerSignaled")]


async def go_on_with_one_less(job: Job, warm: bool) -> None:
    """Continue with another coordinator and one replica less, and then stop them."""
    before = saved(job[0])
    fewer = [job[1], job[0]][: len(job.replicas) - 1]
    await job.begin(2, *fewer)
    await wait(job, "a checkpoint of one less", lambda: saved(job[1]) > before)
    assert [forked_from_torch(replica) for replica in fewer] == [warm] * len(fewer)
    drain = p.Drain(UID, 2, "claim-2", "a replica joins", durable=False, grace_seconds=5.0)
    assert isinstance(await job.call(job[1], drain), p.Accepted)
    report = await job.until(job[1], lambda report: report.state == "drained", "never drained")
    assert not report.failures


async def end_with_all(job: Job, arguments: list[str]) -> None:
    """All agents are lost and come back; the script is to end soon now."""
    *others, last = replicas = list(job.replicas.values())
    for replica in replicas:
        replica.restart(arguments)
    await job.ready()
    await job.begin(3, last, *others)
    await wait(job, "success", lambda: last.report is not None and last.report.state == "succeeded")


FSDP = "tests/train/scripts/test_unmodified.py::test_an_unmodified_script_survives_and_is_resized_warm[fsdp.py]"
DDP = (
    "tests/cluster/operator/training/test_scripts.py"
    "::test_a_script_that_uses_trainingjob_has_progress_and_loses_no_step_to_a_change"
)
OTHERS = ["ddp.py", "hf_accelerate.py", "hf_trainer.py", "lightning_fit.py", "megatron_style.py"]
TENSOR = ["--tensor-model-parallel-size", "2"]
LARGE = [
    ("deepspeed_zero.py", ["--stage", "2"]),
    ("deepspeed_zero.py", ["--stage", "3"]),
    ("megatron_core.py", TENSOR),
    ("torchtitan_debug.py", []),
    ("nemo_model.py", []),
]
PACKAGE = {
    "deepspeed_zero.py": "deepspeed",
    "megatron_core.py": "megatron",
    "torchtitan_debug.py": "torchtitan",
    "nemo_model.py": "nemo",
}
FRAMEWORKS = os.environ.get("CONCERTINA_FRAMEWORKS", "")
"""Folders that `pip install --target` has filled (notebook/scripts.md says with what): too large to be in the lock."""


@pytest.mark.parametrize("script", ["fsdp.py", *(pytest.param(s, marks=pytest.mark.long(law=FSDP)) for s in OTHERS)])
def test_an_unmodified_script_survives_and_is_resized_warm(script, folder):
    """The script of the gate trains in worlds of two, one and two, and the others in worlds of three, two and three."""
    survives_and_is_resized(script, folder, warm=True, count=2 if script == "fsdp.py" else 3)


@pytest.mark.long(law=FSDP)
@pytest.mark.parametrize(("script", "more"), LARGE, ids=lambda each: each if isinstance(each, str) else "".join(each))
def test_a_large_framework_survives_and_is_resized_warm(script, more, folder):
    places = [*FRAMEWORKS.split(os.pathsep), *sys.path]
    place = next((each for each in places if PathFinder.find_spec(PACKAGE[script], [each])), None)
    if place is None:
        pytest.skip(f"{PACKAGE[script]} is not installed, nor in a folder of CONCERTINA_FRAMEWORKS")
    survives_and_is_resized(script, folder, True, *more, path=[SEARCH_PATH, place])


@pytest.mark.long(law=FSDP)
@pytest.mark.parametrize("script", ["fsdp.py"])
def test_an_unmodified_script_survives_and_is_resized_plainly(script, folder):
    survives_and_is_resized(script, folder, warm=False)


def survives_and_is_resized(
    script: str, folder: Path, warm: bool, *more: str, path: Sequence[str] = (SEARCH_PATH,), count: int = 3
) -> None:
    checkpoints = folder / "checkpoints"
    if script == "megatron_style.py":
        more = tuple(TENSOR)
    workers = 2 if TENSOR[0] in more else 1
    environment = {**(WARM if warm else PLAIN), "PYTHONPATH": os.pathsep.join(path)}

    async def body() -> None:
        arguments = command(script, checkpoints, ENDLESS, *more)
        async with running(folder, count, arguments, workers, **environment) as job:
            await lose_a_worker(job, warm)
            left_out = [parents[-1]["left_out"] for parents in map(learned, job.replicas.values()) if parents]
            assert left_out == [LEFT_OUT.get(script, {})] * count * warm
            await go_on_with_one_less(job, warm)
            last = saved(job[0], job[1])
            await end_with_all(job, command(script, checkpoints, last + 20, *more))
            assert [bool(learned(replica)) for replica in job.replicas.values()] == [warm] * count

            by_world = [start for replica in job.replicas.values() for start in starts(replica)]
            first, second, third = ([s for s in by_world if s[1:] == key] for key in _rounds(job[1], workers))
            large, small = count * workers, (count - 1) * workers
            assert [len(first), len(second), len(third)] == [large, small, large], by_world
            assert first[0][1:] == (large, 0)
            assert second[0][1] == small
            assert 0 < second[0][2] <= third[0][2] <= last + 10
            assert sorted(rank for rank, *_ in third) == list(range(large))
            for rank in range(large):
                line = f"rank {rank} of {large} is through at step {last + 20}"
                assert sum(line in replica.log() for replica in job.replicas.values()) == 1

    asyncio.run(body())


def _rounds(replica: Replica, workers: int) -> list[tuple[int, int]]:
    """(world, step) of the three rounds, from a replica that was in all of them."""
    assert len(starts(replica)) == 3 * workers, replica.log()[-4000:]
    return [(world, step) for _, world, step in starts(replica)[::workers]]


@pytest.mark.long(law=DDP)
def test_it_is_the_same_file_that_torchrun_runs(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for steps, begun in ((10, 0), (15, 10)):
        run = subprocess.run(
            [*torchrun, *command("ddp.py", tmp_path, steps)[2:]],
            env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=LIMIT,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        assert sorted(re.findall(r"rank \d of 2 starts at step \d+", run.stdout)) == [
            f"rank {rank} of 2 starts at step {begun}" for rank in range(2)
        ]
        assert f"rank 0 of 2 is through at step {steps}" in run.stdout
