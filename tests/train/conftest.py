import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from concertina_trainer.data.build import build

sys.path.insert(0, str(Path(__file__).parent))
import node


@pytest.fixture(scope="session")
def parent():
    parent = node.Parent()
    yield parent
    parent.close()


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Byte-level shards of a few modules of the standard library."""
    files = sorted(Path(os.__file__).parent.glob("[a-d]*.py"))
    out = tmp_path_factory.mktemp("data")
    os.environ["CONCERTINA_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    list(build(files, str(out), shard_bytes=300_000))
    return out


@contextlib.contextmanager
def memory_folder():
    """In memory, as the replica's volume is; short, for the socket's path."""
    root = "/dev/shm" if Path("/dev/shm").is_dir() else None
    path = Path(tempfile.mkdtemp(prefix="concertina-test-", dir=root))
    try:
        yield path
    finally:
        shutil.rmtree(path)


@pytest.fixture
def folder():
    with memory_folder() as path:
        yield path


@pytest.fixture(scope="module")
def folder_of_module():
    with memory_folder() as path:
        yield path


@pytest.fixture(scope="session")
def trainer(data):
    """A configuration that trains in milliseconds a step."""
    return {
        "steps": 12,
        "seed": 7,
        "data": {"uri": str(data)},
        "globalBatchSize": 7,
        "microBatchSize": 2,
        "model": {"layers": 2, "dim": 32, "heads": 2, "kvHeads": 1, "sequenceLength": 32},
        "optimizer": {"learningRate": 0.01, "warmupSteps": 4},
        "logEverySteps": 1,
    }
