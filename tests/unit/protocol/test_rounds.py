"""The channel of a worker that stays, from round to round."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from concertina_protocol import Restore
from concertina_protocol.worker_channel import (
    Beat,
    ChannelClosed,
    CopiedUpTo,
    Enter,
    Hello,
    Leave,
    Left,
    Message,
    SaveNow,
    Start,
    WorkerEnd,
    decode,
    encode,
)
from concertina_protocol.worker_channel.rounds import RoundChannel, RoundLeft

START = Start(Restore("Fresh"), 1, "uid", stays=True)


class Ends(NamedTuple):
    agent: socket.socket
    worker: RoundChannel
    aborted: threading.Event

    def say(self, *messages: Message) -> None:
        self.agent.sendall(b"".join(map(encode, messages)))

    def heard(self) -> list[Message]:
        """All that the worker has said so far, up to a line that was cut."""
        return [decode(line) for line in self.agent.recv(1 << 16).splitlines()]


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    path, aborted = str(tmp_path / "s"), threading.Event()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(path)
        listening.listen()
        worker = RoundChannel(WorkerEnd(path), aborted.set)
        agent, _ = listening.accept()
        with agent:
            worker.enter(1, Hello(0, 1, stays=True))
            assert agent.recv(1 << 16)
            yield Ends(agent, worker, aborted)


def leave(ends: Ends) -> None:
    ends.say(Leave(1))
    assert ends.aborted.wait(60)
    with pytest.raises(RoundLeft):
        ends.worker.check()


def test_one_that_waits_leaves_and_the_groups_are_aborted(ends: Ends) -> None:
    ends.say(Leave(1))
    with pytest.raises(RoundLeft):
        ends.worker.receive(Start)
    assert ends.aborted.wait(60)


def test_from_leave_on_nothing_of_the_round_is_said(ends: Ends) -> None:
    leave(ends)
    with pytest.raises(RoundLeft):
        ends.worker.send(Beat(0, 7, "training"))
    with pytest.raises(RoundLeft):
        ends.worker.poll()
    ends.worker.end_round()
    with pytest.raises(RoundLeft):  # as a thread of the old round may
        ends.worker.send(Beat(0, 7, "training"))
    ends.worker.say_left(Left(1, 1))
    assert ends.heard() == [Left(1, 1)]


def test_what_came_for_the_old_round_is_not_heard_in_the_next(ends: Ends) -> None:
    ends.say(CopiedUpTo(3), SaveNow())
    leave(ends)
    ends.worker.end_round()
    ends.say(CopiedUpTo(4), Enter({"RANK": "1"}), CopiedUpTo(1), START)
    assert ends.worker.next_round() == Enter({"RANK": "1"})
    ends.worker.enter(2, Hello(1, 1, stays=True))
    assert ends.worker.receive(Start) == START
    assert ends.worker.poll() == [CopiedUpTo(1)]


def test_a_request_that_crosses_left_aborts_nothing_of_the_next_round(ends: Ends) -> None:
    ends.worker.end_round()
    ends.worker.say_left(Left(1, 1))
    ends.say(Leave(1), Enter({}), START)
    ends.worker.next_round()
    ends.worker.enter(2, Hello(0, 1, stays=True))
    assert ends.worker.receive(Start) == START
    ends.worker.check()
    assert not ends.aborted.is_set()


def test_a_round_that_is_over_before_it_is_entered_is_left_without_a_word(ends: Ends) -> None:
    ends.worker.end_round()
    ends.worker.say_left(Left(1, 1))
    ends.say(Enter({}), Leave(2))
    ends.worker.next_round()
    ends.say(Enter({}))  # read after Leave
    ends.worker.next_round()
    with pytest.raises(RoundLeft):
        ends.worker.enter(2, Hello(0, 1, stays=True))
    assert ends.heard() == [Left(1, 1)]
    assert not ends.aborted.is_set()
    ends.worker.end_round()
    ends.worker.enter(3, Hello(0, 1, stays=True))
    assert ends.heard() == [Hello(0, 1, stays=True)]


def test_one_whose_agent_is_gone_hears_of_it_between_two_steps(ends: Ends) -> None:
    ends.agent.close()
    with pytest.raises(ChannelClosed):
        ends.worker.receive(Start)
    with pytest.raises(ChannelClosed):
        ends.worker.poll()
