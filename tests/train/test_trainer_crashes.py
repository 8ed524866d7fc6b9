"""What LATEST names always loads: a process that saves all the time is killed, its node is lost with its memory, and
the storage server is killed, at random moments. CONCERTINA_CRASHES says how often (a few in the suite)."""

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
from concertina_trainer.storage.stored import StoredCheckpoint

CRASHES = int(os.environ.get("CONCERTINA_CRASHES", "16"))
GIVE_UP = 60.0
LONGEST = 0.12
"""Seconds until a kill: a few saves."""


def loaded(uri):
    """(round, step) of what LATEST names, every byte of it read and checked; None where there is no LATEST."""
    latest = read_latest(Folder(uri))
    if latest is None:
        return None
    parts = StoredCheckpoint(latest.uri).parts
    assert len(parts) == RANKS
    for rank, part in enumerate(parts):
        header = part.header
        assert (header.facts.id.round, header.facts.id.step, header.facts.shard) == (latest.round, latest.step, rank)
        begin = header.chunks["x"].begin
        [data] = part.read([(begin, begin + 4 * ELEMENTS)])
        assert (torch.frombuffer(bytearray(data), dtype=torch.float32) == latest.step).all()
    return latest.round, latest.step


def wait_for(holds, what):
    give_up = time.monotonic() + GIVE_UP
    while not holds():
        assert time.monotonic() < give_up, what
        time.sleep(0.002)


def test_what_latest_names_always_loads(folder, parent, storage_uri, request):
    server = request.getfixturevalue("s3") if storage_uri.startswith("s3") else None
    victims = ["trainer", "node"] + ["storage"] * (server is not None)
    chance, before, unfinished = random.Random(os.environ.get("CONCERTINA_SEED", "1")), (0, 0), 0
    for number in range(1, CRASHES // 2 + 1):
        said, memory = folder / f"said-{number}", folder / "memory"
        environment = {
            "CONCERTINA_CHECKPOINT": f'{{"uri": "{storage_uri}", "keep": 2}}', "CONCERTINA_UID": UID,
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
        found = loaded(storage_uri)
        assert found >= (number, before[1] + published()), "what was said to be durable is gone"
        assert found[0] == number
        parts = [key for key in Folder(storage_uri).list(f"{UID}/round-{number}") if f"/step-{found[1] + 1}/" in key]
        before, unfinished = found, unfinished + bool(parts)
    assert unfinished, "no kill fell into a save"
    print(f"{CRASHES // 2} crashes, {unfinished} in the middle of a save")
