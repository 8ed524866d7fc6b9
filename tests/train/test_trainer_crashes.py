"""What LATEST names always loads, and what a crash leaves is collected. A process that saves without a pause is killed,
its node is lost with its memory, and the storage server is killed, at random moments. CONCERTINA_CRASHES says how often
(a few in the suite)."""

import os
import random
import shutil
import signal
import sys
import time

import torch
from saver import ELEMENTS, RANKS, UID

from concertina_trainer.storage.checkpoint import read_latest
from concertina_trainer.storage.folder import Folder
from concertina_trainer.storage.manifest import Place
from concertina_trainer.storage.retention import found
from concertina_trainer.storage.stored import StoredCheckpoint

CRASHES = int(os.environ.get("CONCERTINA_CRASHES", "16"))
GIVE_UP = 60.0
KEEP = 2
LONGEST = 0.12
"""Seconds until a kill: a few saves."""


def read(checkpoint):
    """(round, step) of a checkpoint, every byte of it read and checked."""
    id = checkpoint.manifest.id
    assert len(checkpoint.parts) == RANKS
    for rank, part in enumerate(checkpoint.parts):
        header = part.header
        assert (header.facts.id, header.facts.shard) == (id, rank)
        begin = header.chunks["x"].begin
        [data] = part.read([(begin, begin + 4 * ELEMENTS)])
        assert (torch.frombuffer(bytearray(data), dtype=torch.float32) == id.step).all()
    return id.round, id.step


def left(uri, before):
    """What a crash left: the (round, step) that LATEST names, and the places of unfinished checkpoints, none of which
    had been there `before`. Whatever has a manifest loads, and there is no more of that than is kept."""
    folder = Folder(uri)
    latest = read_latest(folder)
    assert read(StoredCheckpoint(latest.uri)) == (latest.round, latest.step)
    places, finished = found(folder.entries())
    for place in finished:
        assert read(StoredCheckpoint(f"{uri}/{place.folder}")) == (place.round, place.step)
    assert 1 <= len(finished) <= KEEP + 2, "one is finished and one is swept at a time"
    assert not before & places, "the round after has not collected this"
    return (latest.round, latest.step), places - finished


def wait_for(holds, what):
    give_up = time.monotonic() + GIVE_UP
    while not holds():
        assert time.monotonic() < give_up, what
        time.sleep(0.002)


def test_what_latest_names_always_loads(folder, parent, storage_uri, request):
    server = request.getfixturevalue("s3") if storage_uri.startswith("s3") else None
    victims = ["trainer", "node"] + ["storage"] * (server is not None)
    chance, before, unfinished = random.Random(os.environ.get("CONCERTINA_SEED", "1")), (0, 0), 0
    leftovers = set()
    for number in range(1, CRASHES // 2 + 1):
        said, memory = folder / f"said-{number}", folder / "memory"
        environment = {
            "CONCERTINA_CHECKPOINT": f'{{"uri": "{storage_uri}", "keep": {KEEP}}}', "CONCERTINA_UID": UID,
            "CONCERTINA_ROUND": str(number), "FIRST_STEP": str(before[1] + 1),
            "CONCERTINA_SNAPSHOTS": str(memory / f"round-{number}"), "SAID": str(said),
        }  # fmt: skip
        said.touch()
        pid = parent.fork("saver:main", environment, sys.stderr.fileno())
        published = lambda said=said: said.read_text().count("\n")  # noqa: E731
        wait_for(published, "nothing is ever published")
        time.sleep(chance.uniform(0, LONGEST))
        victim = chance.choice(victims)
        if victim == "storage":
            seen = published()
            server.restart()
            wait_for(lambda seen=seen, published=published: published() > seen, "it does not save any more")
        os.kill(pid, signal.SIGKILL)
        parent.wait(pid)
        if victim == "node":
            shutil.rmtree(memory)
        latest, leftovers = left(storage_uri, leftovers)
        assert latest >= (number, before[1] + published()), "what was said to be durable is gone"
        assert latest[0] == number
        before, unfinished = latest, unfinished + (Place(UID, number, latest[1] + 1) in leftovers)
    assert unfinished, "no kill fell into a save"
    print(f"{CRASHES // 2} crashes, {unfinished} in the middle of a save")
