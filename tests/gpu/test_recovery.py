"""Recovery of three replicas that share one GPU: one is killed, and the others and its successor train on."""

import json

import pytest

from builders.train import gpus, node

pytestmark = pytest.mark.gpu
RANKS, KILLED = 3, 2
COMPILES = "has compiled graphs"
"""Words in the log line of a step in which rank 0 has compiled code."""
CASES = {
    "new processes": ("Never", False, {}),
    "survivors": ("Never", True, {}),
    "new processes, compiled": ("Blocks", False, {}),
    "survivors, compiled": ("Blocks", True, {}),
    "survivors, compiled, copies": ("Blocks", True, {"shard": 1}),
}
"""By name: what is compiled, whether workers keep their processes, and the parallel layout."""


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """Return the folder of compiled code, in which the second case of a run finds the code of the first."""
    return tmp_path_factory.mktemp("compiled")


@pytest.mark.parametrize("case", CASES)
def test_three_replicas_on_one_gpu_recover(folder, parent, trainer, cache, record_property, case):
    """The figures are those of the round after the kill, from its start to its first step."""
    gpus.need(RANKS)
    compile, stays, parallelism = CASES[case]
    trainer = {**trainer, "globalBatchSize": 12}
    whole = node.Job(folder / "whole", parent, trainer).run(RANKS)
    assert set(whole.codes.values()) == {0}, whole.output
    job = node.Job(folder / "killed", parent, {**trainer, "compile": compile}, stays=stays)
    job.environment = {
        "CONCERTINA_PARALLELISM": json.dumps(parallelism),
        "CONCERTINA_GPU_STAYS": str(int(stays)),
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
    }
    first = job.run(RANKS, script=node.Script(kill=(10, (KILLED,))))
    before = compilations(job, 1)
    assert before == (1 if compile == "Blocks" else 0), first.output
    second = job.run(RANKS, job.newest())
    assert set(second.codes.values()) == {0}, second.output
    kept = {second.pids[rank] for rank in range(RANKS)} & set(first.pids.values())
    assert kept == ({first.pids[rank] for rank in range(RANKS) if rank != KILLED} if stays else set())
    losses = {**first.losses, **second.losses}
    assert losses == pytest.approx(whole.losses, rel=2e-2), "bfloat16, unordered sums"
    # Rank 0 is a survivor, which writes to the log of the round in which it began, or a new process.
    after = compilations(job, 1) - before if stays else compilations(job, 2)
    assert after == (0 if stays else before)
    last = second.progress[-1]
    assert ("compile" in last.timeline) == (after > 0)
    record_property(f"{case}: from the round's start to its first step, s", round(last.first_step_at - second.t0, 3))
    for part, seconds in last.timeline.items():
        record_property(f"{case}: {part}, s", round(seconds, 3))


def compilations(job, number):
    """Return in how many steps rank 0 has compiled code, by the log of the processes that began in a round."""
    return (job.folder / f"round-{number}.log").read_text().count(COMPILES)
