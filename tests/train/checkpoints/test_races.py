"""Test concurrent access to storage, with real folders and stores.

A reader and a deletion meet in every order of their requests, and two jobs publish at the same time. The tests control
only whose request is next.
"""

import contextlib
import itertools
import shutil
import threading

from builders.train.published import publish
from concertina_state.checkpoints.latest import read_latest
from concertina_state.checkpoints.manifest import NAME, CheckpointKey
from concertina_state.checkpoints.reader import StoredCheckpoint, opened
from concertina_state.checkpoints.retention import remove
from concertina_state.objects.prefix import Changed, ObjectPrefix, StorageError

GIVE_UP = 60.0
REQUESTS = ("get", "put", "delete", "entries", "read_into")
READER, DELETER = 4, 6
"""How many requests each of them makes at most: a lease, the manifest, a part, no lease; and leases, the manifest, no
manifest, leases again, what there is, all of it gone."""


class Turns:
    """Each of some threads makes a request only when it is its turn."""

    def __init__(self, monkeypatch):
        self._turns, self._waits = threading.local(), {}
        for name in REQUESTS:
            monkeypatch.setattr(ObjectPrefix, name, self._in_turn(getattr(ObjectPrefix, name)))

    def _in_turn(self, request):
        def when_it_is_its_turn(folder, *arguments):
            mine, self._turns.mine = getattr(self._turns, "mine", None), None
            if mine is None:
                return request(folder, *arguments)
            mine[1].release()  # at a request
            assert mine[0].acquire(timeout=GIVE_UP)
            try:
                return request(folder, *arguments)
            finally:
                self._turns.mine = mine

        return when_it_is_its_turn

    def play(self, order, **actors):
        """Begin all, let them make their requests in this order; their results."""
        results, ended = {}, set()
        signs = {name: (threading.Semaphore(0), threading.Semaphore(0)) for name in actors}

        def run(name):
            self._turns.mine = signs[name]
            try:
                results[name] = actors[name]()
            except Exception as error:
                results[name] = error
            ended.add(name)
            signs[name][1].release()

        threads = [threading.Thread(target=run, args=(name,)) for name in actors]
        for thread in threads:
            thread.start()
        for _, arrived in signs.values():
            assert arrived.acquire(timeout=GIVE_UP)
        for name in order:
            self._go(name, signs, ended)
        for thread in threads:
            thread.join(GIVE_UP)
        assert ended == actors.keys(), "they make more requests than the order has turns"
        return results

    @staticmethod
    def _go(name, signs, ended):
        if name not in ended:
            go, arrived = signs[name]
            go.release()
            assert arrived.acquire(timeout=GIVE_UP)


def read(uri):
    """As whoever reads a checkpoint does: opened, and then its part."""
    try:
        with opened(uri) as checkpoint:
            part = checkpoint.shards[1]
            return bytes(part.read([(0, part.file.size)])[0])
    except StorageError as error:
        return "gone" if "was deleted because" in str(error) else error


def test_in_every_order_of_their_requests_a_reader_has_it_whole_or_is_told_that_it_is_gone(tmp_path, monkeypatch):
    published = publish(f"file://{tmp_path}/published", tmp_path, 1, 1).durable.uri
    whole, outcomes, place = read(published), set(), CheckpointKey("u1", 1, 1)
    turns = Turns(monkeypatch)
    for number, mine in enumerate(itertools.combinations(range(READER + DELETER), READER)):
        shutil.copytree(tmp_path / "published", tmp_path / str(number))
        folder, uri = ObjectPrefix(f"file://{tmp_path}/{number}"), f"file://{tmp_path}/{number}/{place.folder}"
        now = max(entry.at for entry in folder.entries().values())
        order = ["reader" if at in mine else "deleter" for at in range(READER + DELETER)]
        found = turns.play(order, reader=lambda u=uri: read(u), deleter=lambda f=folder, n=now: remove(f, place, n))
        assert found["reader"] in (whole, "gone"), (order, found)
        left = set(folder.list(place.folder))
        if f"{place.folder}/{NAME}" in left:
            assert read(uri) == whole, (order, "a manifest names what is gone")
        else:
            assert (found["deleter"], left) == (True, set()), (order, "something is left")
        outcomes.add((found["reader"] == "gone", found["deleter"]))
    assert outcomes == {(False, False), (False, True), (True, True), (True, False)}


def test_latest_never_goes_back_while_two_publish_at_the_same_time(storage_uri, tmp_path):
    """One the even steps and one the odd ones: whoever was taken finds LATEST there, or beyond, ever after."""
    begin, taken, wrong = threading.Barrier(2), [], []

    def run(first):
        (tmp_path / str(first)).mkdir()
        begin.wait(GIVE_UP)
        for step in range(first, 24, 2):
            durable = publish(storage_uri, tmp_path / str(first), 1, step).durable
            if durable is not None:
                taken.append(step)
                least = max(taken)
                latest = read_latest(ObjectPrefix(storage_uri))
                if latest.step < least:
                    wrong.append((latest.step, least))

    threads = [threading.Thread(target=run, args=(first,)) for first in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GIVE_UP)
    assert not wrong
    assert read_latest(ObjectPrefix(storage_uri)).step == max(taken) >= 22
    assert StoredCheckpoint(read_latest(ObjectPrefix(storage_uri)).uri).manifest.id.step == max(taken)


def test_no_conditional_write_is_lost(storage_uri):
    """Four who count up together, each from what it has read, lose no count; files have no such write but ours."""
    folder, begin = ObjectPrefix(storage_uri, create=True), threading.Barrier(4)
    most = 50 if storage_uri.startswith("file") else 8
    folder.put_if("LATEST", b"0", None)

    def count_up():
        begin.wait(GIVE_UP)
        counted = 0
        while counted < most:
            value, version = folder.get_version("LATEST")
            with contextlib.suppress(Changed):
                folder.put_if("LATEST", str(int(value) + 1).encode(), version)
                counted += 1

    threads = [threading.Thread(target=count_up) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GIVE_UP)
    assert folder.get("LATEST") == str(4 * most).encode()
