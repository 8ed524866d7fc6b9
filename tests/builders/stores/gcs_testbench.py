"""Google's own emulator of its storage, for tests of gs://: github.com/googleapis/storage-testbench.

It is in no package registry. CONCERTINA_GCS_TESTBENCH names a checkout whose `.venv` has its dependencies.
"""

import contextlib
import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from builders.stores.patient import answer
from concertina.local.host import processes
from concertina.local.state import lifetime
from concertina.local.state import record as state

VARIABLE = "CONCERTINA_GCS_TESTBENCH"


def missing() -> str:
    """Return why the testbench can't run here and what to do, or "" if it can."""
    folder = os.environ.get(VARIABLE, "")
    if not folder:
        return f"name a checkout of github.com/googleapis/storage-testbench by {VARIABLE}"
    advice = f"`cd {folder} && python3 -m venv .venv && .venv/bin/pip install -e .`"
    return "" if _python().exists() else f"there is no {_python()}: {advice}"


@contextlib.contextmanager
def serve(name: str, buckets: tuple[str, ...] = ("train",)) -> Iterator[str]:
    """Run the testbench in memory with these buckets, and yield its URL. It ends with this process in any case."""
    [port] = processes.free_ports("127.0.0.1", 1)
    url, folder = f"http://127.0.0.1:{port}", state.directory(name)
    path = f"PYTHONPATH={os.environ[VARIABLE]}:{Path(__file__).parent}"
    server = [str(_python()), "-m", "gunicorn", "--worker-class=gthread", "--threads=8", f"--bind=127.0.0.1:{port}"]
    with lifetime.guarded(name):
        folder.mkdir(parents=True, exist_ok=True)
        lifetime.spawn(folder, "testbench", ["env", path, *server, "gcs_xml:application"])
        for bucket in buckets:
            _post(f"{url}/storage/v1/b?project=test", {"name": bucket})
        yield url


def spoil(url: str, faults: dict[str, list[str]]) -> str:
    """Make the next requests fail, by method, with faults of the testbench's Retry Test API; return the test's id."""
    return f"{url}/retry_test/{_post(f'{url}/retry_test', {'instructions': faults})['id']}"


def spoilt(test: str) -> bool:
    """Return whether all of those faults have occurred."""
    with urllib.request.urlopen(test) as answer:
        return bool(json.load(answer)["completed"])


def forget(test: str) -> None:
    urllib.request.urlopen(urllib.request.Request(test, method="DELETE")).close()


def _python() -> Path:
    return Path(os.environ[VARIABLE], ".venv/bin/python")


def _post(url: str, body: dict[str, object]) -> dict[str, str]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.loads(answer(request))
