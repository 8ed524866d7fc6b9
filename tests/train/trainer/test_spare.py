"""Processes that are warmed up before they become workers."""

import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from builders.train import node, states

STAND_BY = "concertina_agent.workers.spare:stand_by"
FINGERPRINT = "fingerprint:main"
WARM_UP, WORKER = "concertina_trainer.warm_up:warm_up", "concertina_trainer.worker:main"


class Spare:
    """A spare, and the agent's end of its socket."""

    def __init__(self, parent: node.Parent, output: int, warm_up: str, target: str, environment: Mapping[str, str]):
        self._own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._own.settimeout(node.GIVE_UP)
        self.pid = parent.fork(STAND_BY, dict(environment), output, theirs.fileno(), more=(warm_up, target))
        theirs.close()
        self.said = self._own.recv(64)

    def become(self, environment: Mapping[str, str]) -> None:
        self._own.send(json.dumps({**os.environ, **environment}).encode())
        self._own.close()

    def drop(self) -> None:
        self._own.close()


@pytest.mark.parametrize("determinism", ["Order", "Bitwise"])
def test_a_spare_differs_from_a_new_worker_in_nothing_that_decides_numbers(parent, tmp_path, trainer, determinism):
    environment = {"CONCERTINA_TRAINER": json.dumps({**trainer, "determinism": determinism}), "OMP_NUM_THREADS": "2"}
    worker = {**environment, "RANK": "1", "CONCERTINA_POD_IP": "127.0.0.1"}
    cold, warm = tmp_path / "cold", tmp_path / "warm"
    with cold.open("wb") as output:
        assert parent.wait(parent.fork(FINGERPRINT, worker, output.fileno())) == 0
    with warm.open("wb") as output:
        spare = Spare(parent, output.fileno(), WARM_UP, FINGERPRINT, environment)
        assert json.loads(spare.said) == {"warm": True}
        spare.become(worker)
        assert parent.wait(spare.pid) == 0
    one, other = found(cold), found(warm)
    assert one["variables"]["RANK"] == "1"
    assert {name for name in one if one[name] != other[name]} == set()


class WithSpares:
    """A parent of which each worker is a spare."""

    def __init__(self, parent: node.Parent, trainer: str) -> None:
        self._parent, self._trainer = parent, trainer
        self.pids: set[int] = set()

    def __getattr__(self, name: str) -> object:
        return getattr(self._parent, name)

    def fork(self, target: str, environment: dict[str, str], output: int, *fds: int) -> int:
        if target != WORKER:
            return self._parent.fork(target, environment, output, *fds)
        spare = Spare(self._parent, output, WARM_UP, target, {"CONCERTINA_TRAINER": self._trainer})
        assert json.loads(spare.said) == {"warm": True}
        spare.become(environment)
        self.pids.add(spare.pid)
        return spare.pid


@pytest.mark.parametrize(
    "determinism",
    [
        "Order",
        pytest.param(
            "Bitwise",
            marks=pytest.mark.long(
                law="tests/train/trainer/test_spare.py::test_spares_compute_the_same_bits_as_new_workers"
            ),
        ),
    ],
)
def test_spares_compute_the_same_bits_as_new_workers(parent, folder, trainer, determinism):
    """The round drains, and others go on from the snapshot in their memory."""
    trainer = {**trainer, "determinism": determinism}
    spares = WithSpares(parent, json.dumps(trainer))
    cold, warm = node.Job(folder / "cold", parent, trainer), node.Job(folder / "warm", spares, trainer)
    losses = []
    for job in (cold, warm):
        job.run(2, script=node.Script(drain=(5, False)))
        outcome = job.run(2, job.newest())
        assert outcome.progress[-1].step == trainer["steps"]
        losses.append(outcome.losses)
    assert len(spares.pids) == 4
    assert losses[0] == losses[1]
    one, other = states.whole(cold), states.whole(warm)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def found(output: Path) -> dict[str, object]:
    """Return the fingerprint that was printed, without the connection of the output itself."""
    return json.loads(output.read_text().splitlines()[-1])


def test_a_spare_that_is_not_needed_ends(parent, tmp_path):
    with (tmp_path / "output").open("wb") as output:
        spare = Spare(parent, output.fileno(), "tiny.warm_up:warm_up", FINGERPRINT, {})
        spare.drop()
        assert parent.wait(spare.pid) == 0
    assert (tmp_path / "output").read_text() == ""


def test_a_spare_that_cannot_warm_up_ends(parent, tmp_path):
    with (tmp_path / "output").open("wb") as output:
        spare = Spare(parent, output.fileno(), "tiny.warm_up:no_such_function", FINGERPRINT, {})
        assert spare.said == b""
        assert parent.wait(spare.pid) == 1
    assert "no_such_function" in (tmp_path / "output").read_text()
