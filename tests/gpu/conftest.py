import shutil
import tempfile
from pathlib import Path

import pytest

from builders.train import node
from concertina.demo import text
from concertina_trainer.data.build.build import build
from concertina_trainer.data.build.write import Recipe


@pytest.fixture(scope="session")
def parent():
    parent = node.Parent()
    yield parent
    parent.close()


@pytest.fixture
def folder():
    path = Path(tempfile.mkdtemp(prefix="concertina-gpu-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def trainer(folder, monkeypatch):
    monkeypatch.setenv("CONCERTINA_CACHE", str(folder / "cache"))
    (folder / "text").mkdir()
    list(build(text.write(folder / "text", 35, 27_000), str(folder / "data"), recipe=Recipe(validation=0.1)))
    return {
        "steps": 40,
        "data": {"uri": str(folder / "data")},
        "globalBatchSize": 16,
        "microBatchSize": 4,
        "model": {"layers": 4, "dim": 256, "heads": 4, "sequenceLength": 256},
        "optimizer": {"learningRate": 0.001, "warmupSteps": 10},
    }
