"""Compiled blocks on CUDA: gradients, the cache of compiled code, and rounds without another compilation."""

import pytest

from builders.train import gpus, node
from builders.train.gradients import whole_gradient

pytestmark = pytest.mark.gpu
BOUND = 1e-4
"""Maximum difference in float32, relative to the gradient's norm."""
LAYOUTS = {"fsdp": {}, "tensor": {"tensor": 2}}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_gradients_are_those_of_eager_blocks(parent, trainer, tmp_path, layout):
    """The embedding's is the one that torch loses if nothing waits before the first block."""
    gpus.need(2)
    changed = {**trainer, "precision": "Float32"}
    eager, compiled = (
        whole_gradient(parent, changed, 2, tmp_path, parallelism=LAYOUTS[layout], **variables)
        for variables in ({}, {"COMPILED": "inductor", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled")})
    )
    assert compiled["graphs"] > 0
    for name, expected in eager["gradients"].items():
        assert (compiled["gradients"][name] - expected).norm() <= BOUND * expected.norm(), name


def test_only_new_processes_compile_after_a_kill_and_from_the_cache(folder, parent, trainer, record_property):
    gpus.need(2)
    cache = folder / "compiled"
    whole = node.Job(folder / "whole", parent, trainer).run(2)
    job = node.Job(folder / "killed", parent, {**trainer, "compile": "Blocks"}, stays=True)
    job.environment = {"CONCERTINA_GPU_STAYS": "1", "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    first = job.run(2, script=node.Script(kill=(10, (1,))))
    assert [survivor.pid for survivor in job.survivors] == [first.pids[0]], first.output
    assert any(cache.rglob("*")), "code is in the folder that the environment names"
    second = job.run(2, job.newest(), node.Script(drain=(20, False)))
    assert set(second.codes.values()) == {0}, second.output
    assert "compile" not in second.progress[-1].timeline, "rank 0 has survived"
    third = job.run(2, job.newest())
    assert third.pids == {0: second.pids[1], 1: second.pids[0]}, "each has the other's rank"
    assert set(third.codes.values()) == {0}, third.output
    losses = {**first.losses, **second.losses, **third.losses}
    assert losses == pytest.approx(whole.losses, rel=2e-2), "bfloat16, unordered sums"

    job = node.Job(folder / "again", parent, {**trainer, "compile": "Blocks", "steps": 5})
    job.environment = {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
    again = job.run(2)
    assert set(again.codes.values()) == {0}, again.output
    for name, outcome in (("empty", first), ("filled", again)):
        record_property(f"compilation with the cache {name}, s", round(outcome.progress[-1].timeline["compile"], 2))
        record_property(f"step with the cache {name}, s", round(outcome.progress[-1].step_seconds, 4))
    record_property("step of eager blocks, s", round(whole.progress[-1].step_seconds, 4))
