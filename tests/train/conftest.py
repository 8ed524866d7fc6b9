import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from builders.programs import AUDIO, CLICKS, EMBEDDINGS, SEARCH_PATH
from builders.stores import azurite, gcs_testbench
from builders.train import node
from builders.until import until
from concertina.demo import text
from concertina.local.s3 import serve
from concertina_trainer.data.build.build import build


@pytest.fixture(scope="module", autouse=True)
def on_the_processor():
    """Use the CPU even where there is a GPU.

    The bounds are for float32, and ranks would have to share the GPU. `tests/gpu` has the tests on GPUs.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


@pytest.fixture(scope="session")
def parent():
    """In an image, and with the job, of a model of a user's own."""
    parent = node.Parent(
        CONCERTINA_TRAINER='{"model": {"entrypoint": "audio_model:spec"}}',
        PYTHONPATH=os.pathsep.join([SEARCH_PATH, str(AUDIO), str(CLICKS), str(EMBEDDINGS)]),
    )
    yield parent
    parent.close()


@pytest.fixture
def data_cache(tmp_path, monkeypatch):
    """Return the node's cache folder of data shards, a separate one for each test."""
    monkeypatch.setenv("CONCERTINA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Byte-level shards of text that is the same everywhere."""
    out = tmp_path_factory.mktemp("data")
    os.environ["CONCERTINA_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    list(build(text.write(tmp_path_factory.mktemp("text"), 35, 27_000), str(out), shard_bytes=300_000))
    return out


@contextlib.contextmanager
def memory_folder():
    """In memory, as the replica's volume is; short, for the socket's path."""
    root = "/dev/shm" if Path("/dev/shm").is_dir() else None
    path = Path(tempfile.mkdtemp(prefix="concertina-test-", dir=root))
    try:
        yield path
    finally:
        until(lambda: _is_removed(path), f"the end of all who write below {path}")


def _is_removed(path: Path) -> bool:
    shutil.rmtree(path, ignore_errors=True)  # who is just ending may still write there
    return not path.exists()


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
    """Return a configuration that trains a step in milliseconds, and takes a snapshot after each step at any cost."""
    return {
        "steps": 12,
        "seed": 7,
        "data": {"uri": str(data)},
        "globalBatchSize": 7,
        "microBatchSize": 2,
        "model": {"layers": 2, "dim": 32, "heads": 2, "kvHeads": 1, "sequenceLength": 32},
        "optimizer": {"learningRate": 0.01, "warmupSteps": 4},
        "snapshot": {"overhead": 100},
    }


@pytest.fixture(scope="session")
def s3():
    """Run a real S3 server with the bucket `train`, and set its credentials in the environment."""
    with serve(f"train-tests-{os.getpid()}", ["train"]) as server:
        before = dict(os.environ)
        os.environ.update(server.environment())
        yield server
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="session")
def azure():
    """Azurite with the container `train`, its variables in the environment; where it is installed."""
    if azurite.missing():
        pytest.skip(f"az:// is not tried: {azurite.missing()}")
    with azurite.serve(f"azure-tests-{os.getpid()}") as url, pytest.MonkeyPatch.context() as patch:
        for name, value in azurite.environment(url).items():
            patch.setenv(name, value)
        yield url


@pytest.fixture(scope="session")
def google():
    """Google's testbench with the bucket `train`, its variable in the environment; where there is a checkout of it."""
    if gcs_testbench.missing():
        pytest.skip(f"gs:// is not tried: {gcs_testbench.missing()}")
    with gcs_testbench.serve(f"google-tests-{os.getpid()}") as url, pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", url)
        yield url


@pytest.fixture(params=["file", "s3", "az", "gs"])
def storage_uri(request, tmp_path):
    """Return an unused place in each kind of durable storage."""
    if request.param == "file":
        return f"file://{tmp_path}/checkpoints"
    if request.param == "az":
        request.getfixturevalue("azure")
        return f"az://train/{tmp_path.name}"
    if request.param == "gs":
        request.getfixturevalue("google")
        return f"gs://train/{tmp_path.name}"
    request.getfixturevalue("s3")
    return f"s3://train/{tmp_path.name}"
