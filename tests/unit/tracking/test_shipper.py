"""Tracker after any order of rounds and rollbacks: it has each step that counts, once.

The shipper is killed before or after any request, and a coordinator may ship late.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from concertina_protocol.tracking.spool import SpoolReader, SpoolWriter
from concertina_protocol.tracking.tracking_records import Checkpointed, Record, RoundBegan, RunOutcome, StepDone
from concertina_tracking.shipper import Shipper


class Killed(BaseException):
    pass


class Server:
    """Tracker that keeps everything that it received."""

    def __init__(self, forgets: bool) -> None:
        self.forgets = forgets
        self.points: list[tuple[int, int]] = []
        """Steps and rounds in the order of their arrival."""
        self.kill_in = -1
        """Number of requests until the shipper is killed; even: before the request is carried out, odd: after it."""

    def request(self, carry_out: Callable[[], None]) -> None:
        self.kill_in -= 1
        if self.kill_in == 0:
            raise Killed
        carry_out()
        if self.kill_in == 1:
            self.kill_in = -1
            raise Killed


class Run:
    def __init__(self, server: Server) -> None:
        self.server = server

    def go_on(self, step: int, *, latest: bool) -> Collection[int]:
        server = self.server
        if not (server.forgets and latest):
            self.server.request(lambda: None)
            return frozenset(known for known, _ in server.points if known > step)
        server.request(lambda: server.points.__setitem__(slice(None), [p for p in server.points if p[0] <= step]))
        return ()

    def log(self, steps: Sequence[StepDone]) -> None:
        points = [(step.step, int(step.metrics["round"])) for step in steps]
        self.server.request(lambda: self.server.points.extend(points))

    def annotate(self, name: str, text: str) -> None:
        pass

    def reference(self, checkpoint: Checkpointed, made_of: Mapping[str, str]) -> None:
        pass

    def end(self, outcome: RunOutcome) -> None:
        pass

    def close(self) -> None:
        pass


class Node:
    """Spool of one replica, and its shipper."""

    def __init__(self, folder: Path, server: Server) -> None:
        self.folder, self.server = folder, server
        self.writer = SpoolWriter(folder, segment_bytes=1000)
        self.shipper = self._start()

    def _start(self) -> Shipper:
        return Shipper(SpoolReader(self.folder), lambda: Run(self.server), lambda uri: {})

    def append(self, record: Record) -> None:
        self.writer.append(record)

    def ship(self, kill_in: int = -1) -> None:
        self.server.kill_in = kill_in
        try:
            while self.shipper.ship():
                pass
        except Killed:
            if kill_in % 3:  # Otherwise the tracker failed, and the same process tries again.
                self.shipper = self._start()
        self.server.kill_in = -1


ROUNDS = st.lists(
    st.tuples(
        st.integers(0, 2),  # The replica that coordinates.
        st.integers(0, 8),  # The number of steps back at which it begins.
        st.integers(0, 12),  # The number of steps that it trains.
        st.lists(
            st.tuples(st.integers(0, 2), st.integers(-1, 8)), max_size=3
        ),  # The replica that ships then, and the request at which it is killed.
    ),
    min_size=1,
    max_size=6,
)


def test_what_is_trained_again_and_was_not_shipped_is_never_told(tmp_path: Path) -> None:
    """The next coordinator does not ship it either, although it may ship at the same time."""
    server = Server(forgets=False)
    node = Node(tmp_path, server)
    node.append(RoundBegan(1, 0, 0.0, coordinates=True))
    for number in range(1, 6):
        node.append(StepDone(1, number, 0.0, {}))
    node.append(RoundBegan(2, 3, 0.0, coordinates=False))
    node.ship()
    assert server.points == [(1, 1), (2, 1), (3, 1)]


@pytest.mark.parametrize("forgets", [False, True])
@settings(max_examples=150, deadline=None)
@given(rounds=ROUNDS)
def test_each_step_once_whatever_happens(
    forgets: bool, rounds: list[tuple[int, int, int, list[tuple[int, int]]]]
) -> None:
    folder = Path(tempfile.mkdtemp())
    server = Server(forgets)
    nodes = [Node(folder / str(number), server) for number in range(3)]
    try:
        at, values = 0, dict[int, set[int]]()
        newest = dict[int, int]()
        for number, (coordinator, back, count, ships) in enumerate(rounds, 1):
            at = max(0, at - back)
            newest = {step: round for step, round in newest.items() if step <= at}
            for node in nodes:
                node.append(RoundBegan(number, at, 0.0, coordinates=node is nodes[coordinator], workers=2, replicas=2))
            for _ in range(count):
                at += 1
                nodes[coordinator].append(StepDone(number, at, 0.0, {}))
                values.setdefault(at, set()).add(number)
                newest[at] = number
            for who, kill_in in ships:
                nodes[who].ship(kill_in)
        for node in nodes:
            node.ship()
        found = [step for step, _ in server.points if step <= at]
        assert sorted(found) == sorted(newest), "each step once, and none is missing"
        assert all(round in values[step] for step, round in server.points)
        if forgets and len({coordinator for coordinator, *_ in rounds}) == 1:
            assert {point for point in server.points if point[0] <= at} == set(newest.items()), "the last values count"
    finally:
        for node in nodes:
            node.writer.close()
        shutil.rmtree(folder)
