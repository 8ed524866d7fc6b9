"""Test `trainingjob.State` without torch.

Arrays are of numpy and of the standard library, in one process and in several that communicate in their own way.
"""

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

import concertina_protocol as p
from builders.programs import PROGRAMS, SEARCH_PATH
from builders.train.replicas import UID, newest_complete, running, trained
from concertina_state.checkpoints.catalogue import verify
from concertina_state.checkpoints.reader import StoredCheckpoint, resolve

SCRIPT = PROGRAMS / "with_arrays.py"
JAX = Path(__file__).parents[3] / "examples" / "scripts" / "jax_state.py"
PLACES = [*os.environ.get("CONCERTINA_FRAMEWORKS", "").split(os.pathsep), *sys.path]
LIMIT = 200.0
pytestmark = pytest.mark.timeout(LIMIT)


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory) -> str:
    """Return a search path without torch, and without numpy for scripts that must not have it."""
    folder = tmp_path_factory.mktemp("without")
    (folder / "torch.py").write_text("raise ImportError('there is no torch')\n")
    return os.pathsep.join([str(folder), SEARCH_PATH])


def start(folder: Path, path: str, port: int, rank: int, world: int, *command: str) -> subprocess.Popen[str]:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": path, "RANK": str(rank), "WORLD_SIZE": str(world)}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, *command], cwd=folder, env=environment, text=True, stdout=pipe, stderr=pipe
    )


def run(folder: Path, path: str, world: int, *command: str, code: int = 0) -> list[tuple[str, str]]:
    """Of each rank, what it says."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = [start(folder, path, port, rank, world, *command) for rank in range(world)]
    said = [each.communicate(timeout=LIMIT) for each in ranks]
    assert {each.returncode for each in ranks} == {code}, said
    return said


def losses(text: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss (\S+)", text)}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, without_torch) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("undisturbed")
    [(out, _)] = run(folder, without_torch, 1, str(SCRIPT), "--steps", "150", "--pause", "0")
    found = losses(out)
    assert found[140] < found[0] / 10
    return found


ALL = """
    import array, collections, random, numpy, trainingjob
    Pair = collections.namedtuple("Pair", "mean count")
    random.seed(1), numpy.random.seed(1)
    kept = {
        "whole": numpy.zeros((2, 3), numpy.float32), "turned": numpy.zeros((3, 2)).T, "swapped": numpy.zeros(2, ">f4"),
        "one": numpy.zeros(()), "none": numpy.zeros((0, 4)), "key": numpy.array([7, 2**32 - 9], numpy.uint32),
        "pair": Pair(numpy.zeros(2), 0), "deep": [{"a": numpy.zeros(1, bool)}, (numpy.zeros(1, numpy.int8),)],
        "plain": array.array("d", [0, 0]), "names": ["a"], "seen": 0,
    }
    own = kept["whole"], kept["plain"]
    class Sampler:
        at = 0
        def state_dict(self): return {"at": self.at}
        def load_state_dict(self, state): self.at = state["at"]
    sampler = Sampler()
    state = trainingjob.State(kept=kept, sampler=sampler)
    begin = state.restore(default=0)
    for step in range(begin, begin + 3):
        for name in ("whole", "turned", "swapped", "one", "key"):
            kept[name] += 1
        kept["pair"].mean[:] += 1; kept["pair"] = kept["pair"]._replace(count=step)
        kept["deep"][0]["a"] ^= True; kept["deep"][1][0][:] += 1
        kept["plain"][1] += 0.5; kept["names"].append(str(step)); kept["seen"] += 1
        sampler.at += 2
        print(step, kept, sampler.at, random.random(), numpy.random.rand())
        assert own[0] is kept["whole"] and own[1] is kept["plain"], "they are filled, not replaced"
        state.commit(step, durable=True)
"""


def test_all_that_it_keeps_comes_back(tmp_path, without_torch):
    """Arrays with gaps, of other byte order, of one element and of none; in lists, tuples and namedtuples."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(ALL))
    [(first, _)], [(second, _)] = (run(tmp_path, without_torch, 1, str(script)) for _ in range(2))
    (tmp_path / "whole").mkdir()
    script.write_text(textwrap.dedent(ALL).replace("begin + 3", "begin + 6"))
    [(whole, _)] = run(tmp_path / "whole", without_torch, 1, str(script))
    assert first + second == whole
    assert len(whole.splitlines()) > 6


@pytest.mark.parametrize("library", ["numpy", "standard"])
def test_worlds_of_any_size_train_as_one(tmp_path, without_torch, undisturbed, library):
    """What all hold is kept once; what each has some rows of is cut anew."""
    path = without_torch
    if library == "standard":
        (tmp_path / "numpy.py").write_text("raise ImportError('there is no numpy')\n")
        path = os.pathsep.join([str(tmp_path), path])
    for world, begin, end in ((3, 0, 5), (1, 5, 10), (2, 10, 15), (2, 15, 20)):
        said = run(tmp_path, path, world, str(SCRIPT), "--library", library, "--steps", str(end), "--pause", "0")
        assert {int(step) for out, _ in said for step in re.findall(r"starts at step (\d+)", out)} == {begin}
        assert losses(said[0][0]) == pytest.approx({step: undisturbed[step] for step in range(begin, end)})


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ("differs", "kept.weights differs between ranks"),
        ("part", "kept.momentum is declared as a box of [12] at [12] of an array of [23], which is too small"),
        (
            "gather",
            "gather() must return one answer from each of the 2 ranks, in the order of ranks: it returned 1 answers",
        ),
    ],
)
def test_what_can_not_be_kept_is_said(tmp_path, without_torch, wrong, sentence):
    said = run(tmp_path, without_torch, 2, str(SCRIPT), "--wrong", wrong, "--steps", "1", code=1)
    assert sentence in said[1][1]


def test_several_processes_have_to_say_how_they_agree(tmp_path, without_torch):
    script = "import trainingjob; trainingjob.State(kept={})"
    for _, error in run(tmp_path, without_torch, 2, "-c", script, code=1):
        assert "2 processes share one state, but have no way to communicate" in error


def safe_at(step: int):
    return lambda report: report.progress is not None and (report.progress.snapshot_step or 0) >= step


@pytest.mark.long(law="tests/train/scripts/test_run.py::test_a_script_keeps_its_process")
def test_it_goes_on_from_memory_under_agents(folder, without_torch, undisturbed):
    """Three; one of them is killed, two go on; three end it, and the last state is a checkpoint that can be read."""
    uri = f"file://{folder}/checkpoints"
    spec = json.dumps({"uri": uri, "everySteps": 40, "everySeconds": 600, "keep": 3})

    async def body() -> str:
        arguments = ["--", sys.executable, str(SCRIPT), "--steps", "120", "--pause", "0.02"]
        async with running(folder, 3, arguments, CONCERTINA_CHECKPOINT=spec, PYTHONPATH=without_torch) as job:
            await job.begin(1, job[0], job[1], job[2])
            report = await job.until(job[0], safe_at(5), "no snapshot")
            assert report.keeps_state
            os.kill(job[1].worker_pids()[1], signal.SIGKILL)
            report = await job.until(job[0], lambda r: r.failures, "the failure was not heard of")
            safe = report.progress.snapshot_step
            job[1].kill()  # its memory with it: a peer has a copy

            prepared = await job.prepare(2, job[2], job[0])
            restore = newest_complete(prepared)
            assert restore.step >= safe
            await job.assign(job.assignment(prepared, restore))
            report = await job.until(job[2], lambda r: r.round == 2 and trained(restore.step + 5)(r), "no way on")
            assert report.progress.restored_step == restore.step
            job[1].start()
            drain = p.Drain(UID, 2, "claim-2", "one joins", durable=False, grace_seconds=60.0)
            assert isinstance(await job.call(job[2], drain), p.Accepted)
            report = await job.until(job[2], lambda r: r.state == "drained", "never drained")
            stopped = report.progress.step

            prepared = await job.prepare(3, job[1], job[2], job[0])
            restore = newest_complete(prepared)
            assert restore.step == stopped, "a step was lost to a planned change"
            await job.assign(job.assignment(prepared, restore))
            report = await job.until(job[1], lambda r: r.state == "succeeded", "never done")
            assert report.storage.latest.step == 120
            return "\n".join(job[i].log() for i in range(3))

    seen = losses(asyncio.run(body()))
    assert seen == pytest.approx({step: undisturbed[step] for step in range(120)})
    stored = StoredCheckpoint(resolve(uri))
    assert verify(stored, lambda count: None) == []
    held = [shard.header.chunks for shard in stored.shards]
    weights = [stored.chunk for each in held for name, stored in each.items() if name == "kept.weights"]
    assert sum(chunk.size for chunk in weights) == 23 * 8, "kept once"


@pytest.mark.long(law="tests/train/scripts/test_arrays.py::test_worlds_of_any_size_train_as_one")
def test_jax_goes_on_in_any_world(folder):
    """Weights that all processes have, and moments that are cut over them: two, then three, then two."""
    place = next((each for each in PLACES if PathFinder.find_spec("jax", [each])), None)
    if place is None:
        pytest.skip("jax is not installed, nor in a folder of CONCERTINA_FRAMEWORKS")
    path = os.pathsep.join([SEARCH_PATH, place])
    [(alone, _)] = run(folder, path, 1, str(JAX), "--steps", "60")
    shutil.rmtree(folder / "checkpoints")

    async def body() -> str:
        arguments = ["--", sys.executable, str(JAX), "--steps", "60", "--pause", "0.1"]
        async with running(folder, 3, arguments, PYTHONPATH=path) as job:
            await job.begin(1, job[0], job[1])
            await job.until(job[0], safe_at(5), "no snapshot")
            os.kill(job[1].worker_pids()[1], signal.SIGKILL)
            report = await job.until(job[0], lambda r: r.failures, "the failure was not heard of")
            safe, last = report.progress.snapshot_step, report.progress.step
            prepared = await job.prepare(2, job[0], job[1], job[2])
            restore = newest_complete(prepared)
            assert safe <= restore.step <= last + 1
            await job.assign(job.assignment(prepared, restore))
            report = await job.until(job[0], lambda r: r.round == 2 and trained(restore.step + 5)(r), "no way on")
            drain = p.Drain(UID, 2, "claim-2", "one leaves", durable=False, grace_seconds=60.0)
            assert isinstance(await job.call(job[0], drain), p.Accepted)
            report = await job.until(job[0], lambda r: r.state == "drained", "never drained")
            prepared = await job.prepare(3, job[2], job[0])
            restore = newest_complete(prepared)
            assert restore.step == report.progress.step, "a step was lost to a planned change"
            await job.assign(job.assignment(prepared, restore))
            await job.until(job[2], lambda r: r.state == "succeeded", "never done")
            return "\n".join(job[i].log() for i in range(3))

    assert losses(asyncio.run(body())) == pytest.approx(losses(alone), rel=1e-4)
