"""Test that LATEST always names a checkpoint that loads, and that the remains of a crash are deleted.

A process that saves without a pause is killed at random moments, or its node is lost with its memory, or the storage
server is killed. CONCERTINA_CRASHES is the number of crashes.
"""

import os
import random
import shutil
import signal
import sys
import time

import torch

from builders.until import until
from concertina_state.checkpoints.latest import read_latest
from concertina_state.checkpoints.manifest import CheckpointKey
from concertina_state.checkpoints.reader import StoredCheckpoint
from concertina_state.checkpoints.retention import found
from concertina_state.objects.prefix import ObjectPrefix
from programs.saver import ELEMENTS, RANKS, UID

CRASHES = int(os.environ.get("CONCERTINA_CRASHES", "16"))
KEEP = 2
LONGEST = 0.12
"""Seconds until a kill: a few saves."""


def read(checkpoint):
    """(round, step) of a checkpoint, every byte of it read and checked."""
    id = checkpoint.manifest.id
    assert len(checkpoint.shards) == RANKS
    for rank, part in enumerate(checkpoint.shards):
        header = part.header
        assert (header.metadata.id, header.metadata.shard) == (id, rank)
        begin = header.chunks["x"].begin
        [data] = part.read([(begin, begin + 4 * ELEMENTS)])
        assert (torch.frombuffer(bytearray(data), dtype=torch.float32) == id.step).all()
    return id.round, id.step


def left(uri, before):
    """Return what a crash left: the (round, step) that LATEST names, and the places of unfinished checkpoints.

    None of these places may be in `before`. Every checkpoint with a manifest must load, and there must not be more of
    them than are kept.
    """
    folder = ObjectPrefix(uri)
    latest = read_latest(folder)
    assert read(StoredCheckpoint(latest.uri)) == (latest.round, latest.step)
    places, finished = found(folder.entries())
    for place in finished:
        assert read(StoredCheckpoint(f"{uri}/{place.folder}")) == (place.round, place.step)
    assert 1 <= len(finished) <= KEEP + 2, "one is finished and one is swept at a time"
    assert not before & places, "the round after has not collected this"
    return (latest.round, latest.step), places - finished


def saving(parent, folder, uri, number, first, **more):
    """Start a process that saves. Return its pid, and a function for the number of saves reported as durable."""
    said = folder / f"said-{number}"
    said.touch()
    environment = {
        "CONCERTINA_CHECKPOINT": f'{{"uri": "{uri}", "keep": {KEEP}}}', "CONCERTINA_UID": UID,
        "CONCERTINA_ROUND": str(number), "FIRST_STEP": str(first),
        "CONCERTINA_SNAPSHOTS": str(folder / "memory" / f"round-{number}"), "SAID": str(said), **more,
    }  # fmt: skip
    return parent.fork("saver:main", environment, sys.stderr.fileno()), lambda: said.read_text().count("\n")


def test_killed_before_any_request_of_a_save(folder, parent, tmp_path):
    """One after the other: each that writes or deletes, from the first part to the last file of what is not kept."""
    uri, step, leftovers, codes = f"file://{tmp_path}/run", 0, set(), []
    while not codes or codes[-1]:
        number = len(codes) + 1
        pid, published = saving(parent, folder, uri, number, step + 1, KILLED_AT=str(number))
        codes.append(parent.wait(pid))
        assert published() == 2 - bool(codes[-1])
        latest, leftovers = left(uri, leftovers)
        assert latest >= (number, step + published()), "what was said to be durable is gone"
        step = latest[1]
    assert {*codes[:-1]} == {-signal.SIGKILL}
    # A part is written, and given its name.
    assert len(codes) > 3 * RANKS + 2 + 2 * RANKS + 1, "parts and marks, the manifest and LATEST, and what goes"


def test_what_latest_names_always_loads(folder, parent, storage_uri, request):
    server = request.getfixturevalue("s3") if storage_uri.startswith("s3") else None
    victims = ["trainer", "node"] + ["storage"] * (server is not None)
    chance, before, unfinished = random.Random(os.environ.get("CONCERTINA_SEED", "1")), (0, 0), 0
    leftovers, number = set(), 0
    # Whether a kill falls into a save is chance, and where storage is slow few do: more of them until one has.
    while number < CRASHES // 2 or (not unfinished and number < 10 * CRASHES):
        number += 1
        pid, published = saving(parent, folder, storage_uri, number, before[1] + 1)
        until(published, "the first checkpoint")
        time.sleep(chance.uniform(0, LONGEST))
        victim = chance.choice(victims)
        if victim == "storage":
            seen = published()
            server.restart()
            until(lambda seen=seen, published=published: published() > seen, "another checkpoint", pause=0.002)
        os.kill(pid, signal.SIGKILL)
        parent.wait(pid)
        if victim == "node":
            shutil.rmtree(folder / "memory")
        latest, leftovers = left(storage_uri, leftovers)
        assert latest >= (number, before[1] + published()), "what was said to be durable is gone"
        assert latest[0] == number
        before, unfinished = latest, unfinished + (CheckpointKey(UID, number, latest[1] + 1) in leftovers)
    assert unfinished, "no kill fell into a save"
    print(f"{number} crashes, {unfinished} in the middle of a save")
