"""Cache of data, with a folder for each user of the machine."""

import errno
import os
import subprocess
import sys
import threading
import time
import zlib

import pytest

from builders.programs import SEARCH_PATH
from concertina_data import cache, fetch
from concertina_data.cache import Stored
from concertina_data.files import ManifestFile
from concertina_data.places import CacheSettings, folder_on_node
from concertina_state.objects.prefix import StorageError

UNSHARE = ["unshare", "--user", "--map-user", "4321"]


def test_a_user_has_one_folder_inside_and_outside_of_a_user_namespace(monkeypatch):
    monkeypatch.delenv("CONCERTINA_CACHE", raising=False)
    if subprocess.run([*UNSHARE, "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody make a user namespace")
    script = "import os; from concertina_data.places import folder_on_node; print(os.getuid(), folder_on_node())"
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": SEARCH_PATH}
    if "TMPDIR" in os.environ:
        environment["TMPDIR"] = os.environ["TMPDIR"]
    inside = subprocess.run(
        [*UNSHARE, sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert inside.stdout.split() == ["4321", str(folder_on_node())]


class Robbed(Stored):
    """Data set whose drafts another process deletes while they are written, as an older release does."""

    def _room_for(self, path, size):
        draft = super()._room_for(path, size)
        path.with_suffix(".draft").unlink()
        return draft


def test_a_file_whose_draft_another_process_deletes_is_read_and_not_kept(tmp_path):
    content, (stored, folder) = b"content", (tmp_path / name for name in ("stored", "cache"))
    stored.mkdir()
    (stored / "a.bin").write_bytes(content)
    data = Robbed(stored.as_uri(), CacheSettings(1 << 20, folder=folder))
    assert data.open(ManifestFile("a.bin", len(content), "0" * 64, zlib.crc32(content)))[:] == content
    assert not [*folder.glob("*.data"), *folder.glob("*.draft")]


CONTENT = b"content"
FILE = ManifestFile("a.bin", len(CONTENT), "0" * 64, zlib.crc32(CONTENT))


@pytest.fixture
def stored(tmp_path):
    """Return a function that opens a data set of one file."""
    (tmp_path / "stored").mkdir()
    (tmp_path / "stored" / "a.bin").write_bytes(CONTENT)
    return lambda folder="cache": Stored(
        (tmp_path / "stored").as_uri(), CacheSettings(1 << 20, folder=tmp_path / folder)
    )


def test_data_sets_of_a_process_wait_for_room_in_memory(stored, tmp_path, monkeypatch):
    """Locks of files are polled, with up to 50 ms between two attempts."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "cache")
    first, second, opened = stored(), stored("link"), []
    polled = threading.Event()
    monkeypatch.setattr(cache.time, "sleep", lambda seconds: polled.set())
    reading = threading.Thread(target=lambda: opened.append(second.open(FILE)[:]))
    with first._making_room() as alone:
        assert alone
        reading.start()
        assert not polled.wait(0.3)
    reading.join()
    assert opened == [CONTENT]


def test_the_wait_for_a_thread_is_not_time_without_an_answer(stored, monkeypatch):
    data, busy = stored(), threading.Event()

    def fail(key, span):
        raise StorageError("away")

    monkeypatch.setattr(data._source, "get_part", fail)
    waits = [fetch.requesters().submit(busy.wait) for _ in range(fetch.MOST_REQUESTS)]
    errors = []

    def ask():
        try:
            data._open(FILE)
        except cache._Unanswered as error:
            errors.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    while not list(data._folder.glob("*.draft")):
        assert asking.is_alive()
        time.sleep(0.01)
    time.sleep(0.1)
    free = time.monotonic()
    busy.set()
    asking.join()
    assert all(wait.result() for wait in waits)
    assert errors[0].requested_at >= free


def test_a_disk_that_is_full_in_the_middle_leaves_nothing_behind(stored, monkeypatch):
    data, write = stored(), os.pwrite

    def full(descriptor, content, begin):
        if begin:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, content, begin)

    monkeypatch.setattr(fetch, "PIECE", 4)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(StorageError, match=r"can't take a shard of 7 bytes \(No space left on device\)"):
            data.open(FILE)
    assert not [*data._folder.glob("*.data"), *data._folder.glob("*.draft")]
    assert data.open(FILE)[:] == CONTENT


FORKED = """
import os, sys, zlib
from pathlib import Path
from concertina_data.cache import Stored, _try_lock
from concertina_data.files import ManifestFile
from concertina_data.opening import OpenShards
from concertina_data.places import CacheSettings
from concertina_data.threads import Threads
from concertina_state.errors import InvalidInput

def opened():
    return Stored(Path("stored").resolve().as_uri(), CacheSettings(1 << 20, folder=Path("cache")))

def refused(read):
    try:
        read()
    except InvalidInput as error:
        print(error)

def in_fork(work):
    sys.stdout.flush()
    child = os.fork()
    if not child:
        work()
        sys.stdout.flush()
        os._exit(0)
    return child

data, file = opened(), ManifestFile("a.bin", 7, "0" * 64, zlib.crc32(b"content"))
"""
OPENED, USED = "these data were opened before this process was forked", "forked from a process that has used storage"
PROGRAMS = {
    "shards": (OPENED, """
shards = OpenShards([7], 7, lambda index: index, Threads(1), 1)
shards.expect([0])
os.waitpid(in_fork(lambda: refused(lambda: shards.get(0))), 0)
"""),
    "data set": (OPENED, "os.waitpid(in_fork(lambda: refused(lambda: data.open(file))), 0)"),
    "store": (USED, """
data.get("a.bin")
os.waitpid(in_fork(lambda: refused(lambda: opened().open(file))), 0)
"""),
}  # fmt: skip


def run_in(folder, program):
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": SEARCH_PATH}
    command = [sys.executable, "-c", FORKED + program]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=True, timeout=60
    ).stdout


@pytest.mark.usefixtures("stored")
@pytest.mark.parametrize(("sentence", "program"), PROGRAMS.values(), ids=PROGRAMS)
def test_a_forked_process_does_not_wait_for_threads_of_its_parent(tmp_path, sentence, program):
    assert sentence in run_in(tmp_path, program)


@pytest.mark.usefixtures("stored")
def test_a_forked_process_reads_what_it_opens_itself(tmp_path):
    """Its parent has started threads, but has sent no request."""
    program = "os.waitpid(in_fork(lambda: print(opened().open(file)[:])), 0)"
    assert run_in(tmp_path, program) == "b'content'\n"


@pytest.mark.usefixtures("stored")
def test_a_forked_process_does_not_keep_a_lock_that_its_parent_held(tmp_path):
    program = """
lock = Path("cache/a.lock")
end, until = os.pipe()
with data._locked(lock) as locked:
    in_fork(lambda: os.close(until) or os.read(end, 1))
print(locked, _try_lock(lock.open("w"), 0))
"""
    assert run_in(tmp_path, program) == "True True\n"
