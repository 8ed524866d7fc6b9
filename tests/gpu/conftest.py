import shutil
import tempfile
from pathlib import Path

import pytest

from builders.train import node
from concertina.demo import text
from concertina_trainer.data.build.build import build
from concertina_trainer.data.build.recipe import Recipe


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


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    (folder / "text").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONCERTINA_CACHE", str(folder / "cache"))
        list(build(text.write(folder / "text", 35, 27_000), str(folder / "data"), recipe=Recipe(validation=0.1)))
        yield folder / "data"


@pytest.fixture
def trainer(data):
    """Return a configuration that a test may change. A snapshot follows each step, whatever it costs.

    Blocks are compiled in the tests of test_compiled.py only, because compilation takes longer than these runs.
    """
    return {
        "steps": 40,
        "compile": "Never",
        "data": {"uri": str(data)},
        "globalBatchSize": 16,
        "microBatchSize": 4,
        "model": {"layers": 4, "dim": 256, "heads": 4, "sequenceLength": 256},
        "optimizer": {"learningRate": 0.001, "warmupSteps": 10},
        "snapshot": {"overhead": 100},
    }
