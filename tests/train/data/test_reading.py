"""Reading: from disk and a real store, through a bounded cache that is checked on every use, whatever goes wrong."""

import collections
import concurrent.futures
import contextlib
import datetime
import fcntl
import gc
import http.server
import os
import re
import resource
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from builders.programs import SEARCH_PATH
from builders.until import until
from concertina_data import cache, fetch
from concertina_data.data_manifest import parse
from concertina_data.files import documents_file, tokens_file
from concertina_data.opening import read_manifest
from concertina_data.order import GROUPS, by_group
from concertina_data.places import CacheSettings
from concertina_data.sequences import Sequences
from concertina_state.errors import InvalidInput
from concertina_state.objects.prefix import ObjectPrefix, StorageError
from concertina_trainer.config.data_config import DataConfig
from concertina_trainer.data.build.build import build
from concertina_trainer.data.read import batches
from concertina_trainer.data.read.batch import plan_batch
from concertina_trainer.data.read.batches import Batches
from concertina_trainer.data.read.sequence_reader import Reader

pytestmark = pytest.mark.usefixtures("data_cache")

LENGTH = 50
IN_ORDER = by_group(range(20), GROUPS)
"""Numbers of the sequences of the first batch of 20, in the order in which ranks share them."""


@pytest.fixture
def files(tmp_path):
    generator = np.random.default_rng(1)
    paths = []
    for i in range(40):
        path = tmp_path / f"{i:02}.txt"
        path.write_bytes(generator.integers(32, 127, 300 + i, dtype=np.uint8).tobytes())
        paths.append(path)
    return paths


@pytest.fixture
def local(files, tmp_path):
    list(build(files, str(tmp_path / "local"), shard_bytes=700))
    return tmp_path / "local"


@pytest.fixture
def expected(local):
    return Reader(DataConfig(uri=str(local)), LENGTH, seed=1).read(0, 600)


@pytest.fixture
def stored(s3, files, tmp_path):
    uri = f"s3://train/data-{tmp_path.name}"
    list(build(files, uri, shard_bytes=700))
    return uri


def held(folder):
    return sorted(folder.glob("*.data"))


def threads_of_readers():
    return [thread for thread in threading.enumerate() if thread.name == "concertina-data"]


@pytest.mark.parametrize("make", [
    lambda uri: Reader(DataConfig(uri=uri, documents="Masked"), LENGTH, seed=1),
    lambda uri: Sequences(uri, LENGTH, 1, CacheSettings(1 << 20), 16),
], ids=["trainer", "script"])  # fmt: skip
def test_a_reader_that_nobody_uses_ends_its_threads_and_closes_its_files(local, make):
    """Drop a reader with the collector off: its threads end at once.

    A process with torch in it collects cycles rarely. A test process that made readers had a thousand files open."""
    gc.collect()
    before = threads_of_readers()
    gc.disable()
    try:
        reader = make(str(local))
        if isinstance(reader, Reader):
            reader.read(0, 20)
        else:
            reader.rows(range(20))
        threads = [thread for thread in threads_of_readers() if thread not in before]
        assert threads
        assert str(local) in Path("/proc/self/maps").read_text()
        del reader
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
        assert str(local) not in Path("/proc/self/maps").read_text()
    finally:
        gc.enable()


@pytest.mark.parametrize("threads", [1, 7])
def test_threads_and_the_cache_change_nothing(stored, expected, threads):
    reader = Reader(DataConfig(uri=stored), LENGTH, seed=1, threads=threads)
    assert (reader.read(0, 600) == expected).all()
    pieces = [reader.read(start, min(600, start + 37)) for start in range(0, 600, 37)]
    assert (np.concatenate(pieces) == expected).all()


def test_a_shard_is_fetched_once_for_all_workers_of_a_node(stored, expected, data_cache):
    reader = Reader(DataConfig(uri=stored), LENGTH, seed=1)
    assert (reader.read(0, 600) == expected).all()
    assert len(held(data_cache)) == 20
    ObjectPrefix(stored).delete([f"shard-{i:06}.bin" for i in range(20)])
    assert (Reader(DataConfig(uri=stored), LENGTH, seed=1).read(0, 600) == expected).all(), "from the cache"


@pytest.mark.parametrize("fault", [None, "cut", "change"])
def test_a_large_shard_is_fetched_in_pieces(stored, expected, between, hasty, monkeypatch, fault):
    monkeypatch.setattr(fetch, "PIECE", 200)
    between.spoil = lambda name, nth: fault if name.endswith(".bin") and nth == 2 else None
    assert (Reader(DataConfig(uri=stored), LENGTH, seed=1).read(0, 600) == expected).all()
    assert between.asked["shard-000000.bin"] >= 4


@pytest.mark.parametrize("size", [0, 150, 650, 1500])
def test_a_large_shard_of_another_size_is_named(stored, hasty, monkeypatch, size):
    folder = ObjectPrefix(stored)
    folder.put("shard-000000.bin", (folder.get("shard-000000.bin") * 3)[:size])
    monkeypatch.setattr(fetch, "PIECE", 200)
    with pytest.raises(InvalidInput, match=rf"shard-000000.bin is damaged: .* but the file has {size} bytes"):
        Reader(DataConfig(uri=stored), LENGTH, seed=1).read(0, 600)


def test_a_large_shard_with_two_pieces_in_each_others_place_is_named(stored, hasty, monkeypatch):
    folder = ObjectPrefix(stored)
    content = folder.get("shard-000000.bin")
    folder.put("shard-000000.bin", content[200:400] + content[:200] + content[400:])
    monkeypatch.setattr(fetch, "PIECE", 200)
    with pytest.raises(InvalidInput, match=r"shard-000000.bin is damaged"):
        Reader(DataConfig(uri=stored), LENGTH, seed=1).read(0, 600)


def test_a_file_with_a_sha256_alone_is_verified(stored, between, hasty, data_cache):
    data = cache.Stored(stored, CacheSettings(1 << 20))
    first, second, *_ = map(documents_file, read_manifest(data).shards)
    between.spoil = lambda name, nth: "change" if nth == 1 or name == second.file else None
    assert data.open(first)[:] == ObjectPrefix(stored).get(first.file)
    assert between.asked[first.file] >= 2
    with pytest.raises(InvalidInput, match=f"{second.file} is damaged"):
        data.open(second)
    assert len(held(data_cache)) == 1


def test_a_cache_for_one_shard_serves_threads_that_fetch_several(stored, between, data_cache):
    data, folder = cache.Stored(stored, CacheSettings(800)), ObjectPrefix(stored)
    between.spoil = lambda name, nth: time.sleep(0.01)
    shards = list(map(tokens_file, read_manifest(data).shards))
    assert all(shard.size <= 800 for shard in shards)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert [content[:] for content in pool.map(data.open, shards)] == [folder.get(shard.file) for shard in shards]
    assert 0 < sum(path.stat().st_size for path in held(data_cache)) <= 800
    assert not list(data_cache.glob("*.draft"))


def test_a_request_that_fails_leaves_no_draft(stored, between, data_cache):
    data = cache.Stored(stored, CacheSettings(1 << 20, patience=0))
    wanted = tokens_file(read_manifest(data).shards[0])
    between.spoil = lambda name, nth: "refuse"
    with pytest.raises(StorageError, match="It was retried for 0 s"):
        data.open(wanted)
    assert not [*held(data_cache), *data_cache.glob("*.draft")]
    between.spoil = lambda name, nth: None
    assert data.open(wanted)[:] == ObjectPrefix(stored).get(wanted.file)


FETCHES = """
import sys
from concertina_data.cache import Stored
from concertina_data.files import documents_file, tokens_file
from concertina_data.opening import read_manifest
from concertina_data.places import CacheSettings

data = Stored(sys.argv[1], CacheSettings(1 << 20))
data.open(tokens_file(read_manifest(data).shards[0]))
"""


def test_the_draft_of_a_worker_that_is_killed_while_it_fetches_is_swept(stored, expected, between, data_cache):
    killed = threading.Event()
    between.spoil = lambda name, nth: killed.wait() and None if name.endswith(".bin") else None
    environment = {**os.environ, "PYTHONPATH": SEARCH_PATH}
    with subprocess.Popen([sys.executable, "-c", FETCHES, stored], env=environment) as worker:
        until(lambda: list(data_cache.glob("*.draft")), "wait for the draft", worker.poll, pause=0.01)
        worker.kill()
    assert list(data_cache.glob("*.draft"))
    killed.set()
    assert (Reader(DataConfig(uri=stored), LENGTH, seed=1).read(0, 600) == expected).all()
    until(lambda: not list(data_cache.glob("*.draft")), "wait for threads that read ahead", pause=0.01)


def together(count, work):
    """In threads that begin at the same time, each as another worker of the node: locks of files tell them apart."""
    begin = threading.Barrier(count)

    def one(_):
        begin.wait()
        return work()

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def test_workers_that_begin_together_fetch_each_shard_once_between_them(stored, expected, between):
    between.spoil = lambda name, nth: time.sleep(0.01)
    found = together(4, lambda: Reader(DataConfig(uri=stored), LENGTH, seed=1).read(0, 600))
    assert all((each == expected).all() for each in found)
    shards = {name: count for name, count in between.asked.items() if name.endswith(".bin")}
    assert shards == dict.fromkeys([f"shard-{i:06}.bin" for i in range(20)], 1)


def test_the_cache_is_bounded_for_all_workers_of_a_node_together(stored, expected, data_cache):
    config = DataConfig.model_construct(**{**dict(DataConfig(uri=stored)), "cache_size": "2000"})
    most = []

    def work():
        reader = Reader(config, LENGTH, seed=1)
        for start in range(0, 600, 20):
            assert (reader.read(start, start + 20) == expected[start : start + 20]).all()
            sizes = 0
            for path in [*data_cache.glob("*.data"), *data_cache.glob("*.draft")]:
                with contextlib.suppress(FileNotFoundError):  # it has given way meanwhile
                    sizes += path.stat().st_size
            most.append(sizes)

    together(3, work)
    assert 0 < max(most) <= 2000


def test_the_cache_is_bounded(stored, expected, data_cache):
    config = DataConfig.model_construct(**{**dict(DataConfig(uri=stored)), "cache_size": "2000"})
    reader = Reader(config, LENGTH, seed=1)
    for start in range(0, 600, 20):
        assert (reader.read(start, start + 20) == expected[start : start + 20]).all()
        assert sum(path.stat().st_size for path in held(data_cache)) <= 2000
    assert held(data_cache)


def test_a_draft_that_another_process_writes_keeps_its_room_until_the_process_ends(stored, expected, data_cache):
    config = DataConfig.model_construct(**{**dict(DataConfig(uri=stored)), "cache_size": "2000"})
    data_cache.mkdir()
    with (data_cache / "0123.draft").open("wb") as draft:
        draft.truncate(900)
        fcntl.flock(draft, fcntl.LOCK_EX)
        for cached in (True, False):
            reader = Reader(config, LENGTH, seed=1)
            assert (reader.read(0, 600) == expected).all()
            assert sum(path.stat().st_size for path in held(data_cache)) <= 2000 - 900 * cached
            assert (data_cache / "0123.draft").exists() is cached
            if cached:
                draft.close()


def test_a_shard_damaged_in_the_cache_is_fetched_again(stored, expected, data_cache):
    Reader(DataConfig(uri=stored), LENGTH, seed=1).read(0, 600)
    for i, path in enumerate(held(data_cache)):
        content = path.read_bytes()
        changed = path.with_suffix(".changed")  # renamed over it: it may still be mapped by a thread that reads ahead
        changed.write_bytes([b"?" + content[1:], content[:-1], b""][i % 3])
        changed.replace(path)
    assert (Reader(DataConfig(uri=stored), LENGTH, seed=1).read(0, 600) == expected).all()


def test_a_full_disk_is_named_and_leaves_nothing_behind(stored, expected, data_cache):
    data_cache.mkdir()
    (data_cache / "0123.draft").write_bytes(b"left by who was killed")
    reader = Reader(DataConfig(uri=stored), LENGTH, seed=1, threads=1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, before[1]))
    try:
        with pytest.raises(StorageError, match=r"cache can't take a shard of \d+ bytes \(File too large\): free space"):
            reader.read(0, 600)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (Reader(DataConfig(uri=stored), LENGTH, seed=1).read(0, 600) == expected).all()
    give_up = time.monotonic() + 60
    while list(data_cache.glob("*.draft")):  # the first reader's thread may still be writing
        assert time.monotonic() < give_up, "a draft is left"
        time.sleep(0.01)


REFUSALS = {
    "deny": (403, b"<Error><Code>AccessDenied</Code><Message>Access Denied.</Message></Error>"),
    "expired": (400, b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"),
    "hide": (404, b"<Error><Code>NoSuchKey</Code><Message>The key does not exist.</Message></Error>"),
}


@pytest.fixture
def hasty(monkeypatch):
    """As many tries as ever, one soon after the other."""
    monkeypatch.setattr(cache, "GRACE", (0.01, 0.01))
    monkeypatch.setattr(cache, "_BACKOFF", (0.01,))


class Between(http.server.BaseHTTPRequestHandler):
    """Stands between the reader and the S3 server, and spoils answers as its server's `spoil` says."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        name = self.path.partition("?")[0].rpartition("/")[2]
        self.server.asked[name] += 1
        how = self.server.spoil(name, self.server.asked[name])
        if how == "refuse":
            self.close_connection = True
            return
        if how in REFUSALS:
            status, code = REFUSALS[how]
            self.send_response(status)
            self.send_header("Content-Length", str(len(code)))
            self.end_headers()
            self.wfile.write(code)
            return
        headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
        request = urllib.request.Request(self.server.upstream + self.path, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                status, told, body = answer.status, answer.headers, answer.read()
        except urllib.error.HTTPError as error:
            status, told, body = error.code, error.headers, error.read()
        self.send_response(status)
        for key in ("ETag", "Last-Modified", "Content-Type", "Content-Range"):
            if key in told:
                self.send_header(key, told[key])
        whole = len(body)
        if how == "shorten":
            whole, body = whole // 2, body[: whole // 2]
        self.send_header("Content-Length", str(whole))
        self.end_headers()
        if how == "cut":
            self.wfile.write(body[: whole // 2])
            self.close_connection = True
            return
        self.wfile.write(b"?" + body[1:] if how == "change" else body)

    def log_message(self, *args):
        pass


@pytest.fixture
def between(s3, monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Between)
    server.upstream, server.asked, server.spoil = s3.endpoint, collections.Counter(), lambda name, nth: None
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("how", ["shorten", "cut", "change", "refuse"])
def test_what_comes_wrong_once_is_fetched_again(stored, expected, between, how):
    between.spoil = lambda name, nth: how if nth == 1 and name.endswith(".bin") else None
    assert (Reader(DataConfig(uri=stored), LENGTH, seed=1).read(0, 600) == expected).all()
    assert between.asked["shard-000000.bin"] >= 2


def test_what_stays_wrong_is_named(stored, between):
    between.spoil = lambda name, nth: "change" if name == "shard-000003.bin" else None
    with pytest.raises(InvalidInput, match=r"shard-000003\.bin is damaged: the manifest says"):
        Reader(DataConfig(uri=stored), LENGTH, seed=1).read(0, 600)


def test_a_lost_store_is_waited_for_and_then_named(stored, expected, between):
    reader = Reader(DataConfig(uri=stored), LENGTH, seed=1, patience=600, threads=20)
    lost = threading.Event()
    lost.set()
    between.spoil = lambda name, nth: "refuse" if lost.is_set() else None
    found = []
    reading = threading.Thread(target=lambda: found.append(reader.read(0, 600)))
    reading.start()
    while not reader.waiting_for:
        assert reading.is_alive()
        time.sleep(0.01)
    assert "can't be reached" in reader.waiting_for
    lost.clear()
    reading.join()
    assert (found[0] == expected).all()
    assert not reader.waiting_for

    impatient = Reader(DataConfig(uri=stored), LENGTH, seed=1, patience=1)
    for path in os.scandir(os.environ["CONCERTINA_CACHE"]):
        os.unlink(path)
    lost.set()
    with pytest.raises(StorageError, match="It was retried for 1 s"):
        impatient.read(0, 1)


@pytest.mark.parametrize(
    ("change", "uri", "sentence"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, "s3://train/x", "refused the credentials for s3://train/x"),
        ({"AWS_ENDPOINT_URL": "nowhere"}, "s3://train/x", "AWS_ENDPOINT_URL is 'nowhere', which is not an http"),
        ({}, "s3://nowhere/x", "The bucket nowhere does not exist at http://127.0.0.1"),
        ({}, "s3://train/x", "s3://train/x has no manifest.json: build the data there, or correct the URI"),
    ],
)
def test_what_a_store_refuses_is_no_reason_to_wait(s3, monkeypatch, change, uri, sentence, hasty):
    """Not for `patience`, which outlasts this test."""
    for name, value in change.items():
        monkeypatch.setenv(name, value)
    told = []
    with pytest.raises(InvalidInput, match=sentence):
        Reader(DataConfig(uri=uri), LENGTH, seed=1, patience=86400, on_wait=lambda *each: told.append(each))
    assert len(told) <= 2


@pytest.mark.parametrize("how", ["deny", "expired", "hide"])
def test_a_token_being_exchanged_or_an_object_not_visible_yet_is_no_refusal(stored, expected, between, how, hasty):
    between.spoil = lambda name, nth: how if nth <= 2 and (how == "hide") == name.endswith("3.bin") else None
    assert (Reader(DataConfig(uri=stored), LENGTH, seed=1).read(0, 600) == expected).all()
    assert between.asked["shard-000003.bin" if how == "hide" else "manifest.json"] == 3


def test_a_shard_that_is_not_there_is_named(stored, between, hasty):
    between.spoil = lambda name, nth: "hide" if name == "shard-000003.bin" else None
    with pytest.raises(InvalidInput, match=r"shard-000003\.bin is missing, but the manifest names it"):
        Reader(DataConfig(uri=stored), LENGTH, seed=1, patience=86400).read(0, 600)
    assert between.asked["shard-000003.bin"] == 3


@pytest.mark.parametrize("begun", [False, True])
def test_a_refusal_of_what_was_given_before_is_waited_for(stored, expected, between, begun, hasty):
    """A token that has expired, rights that were taken away: in the middle of a run that is as a store that is away."""
    if not begun:
        reader = Reader(DataConfig(uri=stored), LENGTH, seed=1, threads=1)
    between.spoil = lambda name, nth: "deny"
    denied = between.asked.copy()

    def allow():
        while (between.asked - denied).total() < 5:
            time.sleep(0.01)
        between.spoil = lambda name, nth: None

    threading.Thread(target=allow).start()
    if begun:
        reader = Reader(DataConfig(uri=stored), LENGTH, seed=1, begun=True)
    assert (reader.read(0, 600) == expected).all()


def test_a_store_that_is_away_when_a_round_begins_is_waited_for(stored, expected, between):
    """The manifest comes first: it too is asked for until the deadline, and the wait is told."""
    between.spoil = lambda name, nth: "refuse"
    told = []

    def tell(reason, seconds):
        told.append((reason, seconds))
        if len(told) == 2:
            between.spoil = lambda name, nth: None

    reader = Reader(DataConfig(uri=stored), LENGTH, seed=1, on_wait=tell)
    assert (reader.read(0, 600) == expected).all()
    assert "can't be reached" in told[0][0]
    assert 0 < told[0][1] < told[1][1]
    between.spoil = lambda name, nth: "refuse"
    with pytest.raises(StorageError, match="It was retried for 1 s"):
        Reader(DataConfig(uri=stored), LENGTH, seed=1, patience=1)


@pytest.fixture
def held_by_another(stored, data_cache):
    """All shards' locks, as a worker of another job has them who fetches into the same folder; `close` lets go."""
    data_cache.mkdir()
    with contextlib.ExitStack() as locks:
        for shard in parse(ObjectPrefix(stored).get("manifest.json"), stored).shards:
            lock = locks.enter_context((data_cache / f"{shard.sha256[:32]}.lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield locks


@pytest.fixture
def soon_long(monkeypatch):
    monkeypatch.setattr(cache, "_LONG", 0.1)
    monkeypatch.setattr(batches, "_STALL_REPORT_SECONDS", 0.05)


def first_batch(uri, end):
    """And what was told while it was waited for, twice before `end` is called."""
    told = []

    def stalled(reason, seconds):
        told.append(reason)
        if len(told) == 2:
            end()

    ahead = Batches(Reader(DataConfig(uri=uri), LENGTH, seed=1), plan_batch(20, 20, 1), 0, 0, torch.device("cpu"))
    with contextlib.closing(ahead):
        [batch] = ahead.next(stalled)
    return batch.tokens.numpy(), told


def test_a_slow_store_is_told_as_a_stall(stored, expected, between, soon_long):
    sent = threading.Event()
    between.spoil = lambda name, nth: sent.wait() if name.endswith(".bin") else None
    tokens, told = first_batch(stored, sent.set)
    assert (tokens == expected[IN_ORDER]).all()
    assert re.search(r"shard-0000\d\d\.bin \(\d+ bytes\) takes long to arrive", told[0])


def test_waiting_for_who_fetches_the_same_shard_is_told_as_a_stall(stored, expected, held_by_another, soon_long):
    tokens, told = first_batch(stored, held_by_another.close)
    assert (tokens == expected[IN_ORDER]).all()
    assert "takes long to arrive" in told[0]


def test_who_stands_still_with_a_shards_lock_is_not_waited_for(stored, expected, held_by_another, monkeypatch):
    monkeypatch.setattr(cache, "REQUEST", datetime.timedelta(seconds=0.1))
    assert (Reader(DataConfig(uri=stored), LENGTH, seed=1).read(0, 1) == expected[:1]).all()


def test_who_makes_room_for_ever_is_not_waited_for(stored, expected, data_cache, monkeypatch):
    """What was fetched is used, and not kept."""
    monkeypatch.setattr(cache, "REQUEST", datetime.timedelta(seconds=0.1))
    reader = Reader(DataConfig(uri=stored), LENGTH, seed=1)
    with (data_cache / "room.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert (reader.read(0, 1) == expected[:1]).all()
        assert held(data_cache) == []


def test_a_store_that_never_answers_is_told_as_a_hang_in_the_end(stored, between, soon_long, monkeypatch):
    monkeypatch.setattr(cache, "REQUEST", datetime.timedelta(seconds=0.5))
    answers = threading.Event()
    reader = Reader(DataConfig(uri=stored), LENGTH, seed=1, patience=0)
    between.spoil = lambda name, nth: answers.wait() and None
    reading = threading.Thread(target=lambda: reader.read(0, 1))
    reading.start()
    for told in (True, False):
        while bool(reader.waiting_for) != told:
            assert reading.is_alive()
            time.sleep(0.01)
    answers.set()
    reading.join()


def test_who_waits_for_a_store_that_is_away_holds_up_nobody_whose_store_answers(
    s3, stored, between, data_cache, monkeypatch
):
    """Two jobs that share a cache: between tries the other one has its turn, and what it fetches serves both."""
    monkeypatch.setattr(cache, "IMPATIENCE", datetime.timedelta(milliseconds=1))
    away = cache.Stored(stored, CacheSettings(1 << 20, patience=5, begun=True))
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    near = cache.Stored(stored, CacheSettings(1 << 20))
    wanted = tokens_file(read_manifest(near).shards[0])
    between.spoil, found = lambda name, nth: "refuse", []
    waiting = threading.Thread(target=lambda: found.append(bytes(away.open(wanted))))
    waiting.start()
    while not away.waiting_for:
        assert waiting.is_alive()
        time.sleep(0.01)
    content = bytes(near.open(wanted))
    waiting.join()
    assert found == [content]


def test_a_cache_that_can_not_be_used_is_named(stored, data_cache):
    data_cache.write_text("in the folder's place")
    with pytest.raises(StorageError, match=r"can't be used as a cache \(File exists\): make it writable for user"):
        Reader(DataConfig(uri=stored), LENGTH, seed=1)
    data_cache.unlink()
    reader = Reader(DataConfig(uri=stored), LENGTH, seed=1)
    (data_cache / "room.lock").mkdir()
    with pytest.raises(StorageError, match=r"cache can't be used as a cache \(Is a directory\)"):
        reader.read(0, 1)


@pytest.mark.parametrize("name", ["manifest.json", "shard-000003.bin"])
def test_data_on_disk_that_can_not_be_read_are_named(local, name):
    """By a folder in a file's place, which root can read as little as others."""
    (local / name).unlink()
    (local / name).mkdir()
    with pytest.raises(InvalidInput, match=rf"local/{name} can't be read \(Is a directory\): let user \d+ read it"):
        Reader(DataConfig(uri=str(local)), LENGTH, seed=1).read(0, 600)


def test_waiting_for_a_store_is_told_as_a_stall(stored, expected, between):
    reader = Reader(DataConfig(uri=stored), LENGTH, seed=1)
    between.spoil = lambda name, nth: "refuse"
    ahead = Batches(reader, plan_batch(20, 20, 1), 0, 0, torch.device("cpu"))
    told = []

    def stalled(reason, seconds):
        told.append((reason, seconds))
        if len(told) == 2:
            between.spoil = lambda name, nth: None

    [batch] = ahead.next(stalled)
    assert (batch.tokens.numpy() == expected[IN_ORDER]).all()
    assert "can't be reached" in told[0][0]
    assert 0 < told[0][1] < told[1][1] <= ahead.stalled_seconds


@pytest.mark.parametrize(("ahead", "threads"), [(1, 1), (1, 7), (6, 1), (6, 7)])
def test_prefetching_and_threads_never_change_the_order(stored, expected, between, ahead, threads):
    """Shards come in another order than they were asked for, each rank is as far ahead as it may be."""
    between.spoil = lambda name, nth: time.sleep(0.02 * (zlib.crc32(name.encode()) % 4))
    plan, ranks = plan_batch(20, 4, 2), []
    for rank in range(2):
        reader = Reader(DataConfig(uri=stored), LENGTH, seed=1, threads=threads)
        ranks.append(Batches(reader, plan, rank, 0, torch.device("cpu"), ahead))
    for at in range(0, 600, 20):
        parts = [part for rank in ranks for part in rank.next(lambda *_: None)]
        rows = torch.cat([part.tokens[part.weights.sum(1) > 0] for part in parts])
        assert (rows.numpy() == expected[reader.batch(at, 20)]).all()
    for rank in ranks:
        rank.close()
    assert between.asked["shard-000000.bin"]


def test_killing_the_store_in_the_middle_of_reading(s3, stored, expected):
    reader = Reader(DataConfig(uri=stored), LENGTH, seed=1, threads=1)
    with contextlib.ExitStack() as stack:
        restarting = threading.Thread(target=s3.restart)
        restarting.start()
        stack.callback(restarting.join)
        found = [reader.read(start, start + 20) for start in range(0, 600, 20)]
    assert (np.concatenate(found) == expected).all()


def test_a_mixture_reads_from_each_in_its_share(files, tmp_path):
    uris = [str(tmp_path / name) for name in "abc"]
    for i, uri in enumerate(uris):
        list(build(files[i::3], uri, shard_bytes=700))
    config = DataConfig.model_validate(
        {"mixture": [{"uri": uri, "weight": weight} for uri, weight in zip(uris, (5, 3, 2), strict=True)]}
    )
    reader = Reader(config, LENGTH, seed=1)
    tokens, (sets, shards, indexes) = reader.read(0, 900), reader.places(np.arange(900))
    assert np.bincount(sets).tolist() == [450, 270, 180]
    for sequence, i, shard, index in zip(tokens, sets, shards, indexes, strict=True):
        content = (tmp_path / "abc"[i] / f"shard-{shard:06}.bin").read_bytes()
        assert bytes(sequence.astype(np.uint8)) == content[index * LENGTH : index * LENGTH + LENGTH + 1]
    turned = DataConfig.model_validate({"mixture": [{"uri": uri, "weight": 1} for uri in uris]})
    assert Reader(turned, LENGTH, seed=1).digest != reader.digest
    assert Reader(DataConfig(uri=uris[0]), LENGTH, seed=1).digest not in (reader.digest, turned)
