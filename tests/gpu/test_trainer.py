"""The trainer on CUDA and NCCL: the same code as on CPU, with snapshots, a kill and a resume."""

import shutil
import tempfile
from pathlib import Path

import pytest
import torch

from builders.train import node
from concertina.demo import text
from concertina_trainer.data.build.build import build

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device: NCCL was not tried"),
]


@pytest.fixture
def folder():
    path = Path(tempfile.mkdtemp(prefix="concertina-gpu-"))
    yield path
    shutil.rmtree(path)


def test_a_killed_run_on_a_gpu_goes_on_from_its_snapshot(folder, monkeypatch):
    monkeypatch.setenv("CONCERTINA_CACHE", str(folder / "cache"))
    (folder / "text").mkdir()
    list(build(text.write(folder / "text", 35, 27_000), str(folder / "data")))
    trainer = {
        "steps": 40,
        "data": {"uri": str(folder / "data")},
        "globalBatchSize": 16,
        "microBatchSize": 4,
        "model": {"layers": 4, "dim": 256, "heads": 4, "sequenceLength": 256},
        "optimizer": {"learningRate": 0.001, "warmupSteps": 10},
    }
    parent = node.Parent()
    try:
        whole = node.Job(folder / "whole", parent, trainer).run(1)
        assert whole.codes == {0: 0}, whole.output
        assert whole.losses[40] < whole.losses[1] - 1
        job = node.Job(folder / "killed", parent, trainer)
        first = job.run(1, script=node.Script(kill=(20, (0,))))
        restore = job.newest()
        assert restore.step >= 18
        second = job.run(1, restore)
        assert second.codes == {0: 0}, second.output
        assert {**first.losses, **second.losses} == pytest.approx(whole.losses, rel=2e-2), "bfloat16, unordered sums"
    finally:
        parent.close()
