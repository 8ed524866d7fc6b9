"""`trainingjob.run` with the test in the place of the agent: how a script leaves its rounds, and what stays behind."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

import trainingjob
from concertina_protocol import Restore
from concertina_protocol import worker_channel as w
from concertina_protocol.worker_channel.rounds import RoundChannel, RoundLeft
from concertina_state import process_groups
from concertina_state.errors import InvalidInput
from trainingjob import _channel, _connection, _rounds
from trainingjob._refusals import check_not_in_run

START = w.Start(Restore("Fresh"), 1, "uid", stays=True)
LOST = "[pair.cc:545] Connection closed by peer [127.0.0.1]:1"


class Agent:
    """The agent's end, while the script runs in a thread."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(self.path)
        self._listening.listen()
        self.result: Future[Any] = Future()

    def run(self, main: Callable[[], object]) -> None:
        def script() -> None:
            try:
                self.result.set_result(trainingjob.run(main))
            except BaseException as error:
                self.result.set_exception(error)

        self.thread = threading.Thread(target=script, daemon=True)
        self.thread.start()
        connection, _ = self._listening.accept()
        connection.settimeout(60)
        self._stream = connection.makefile("rwb")

    def hear(self) -> w.Message:
        return w.decode(self._stream.readline())

    def begin(self) -> None:
        """Hear the first message of a round, and answer it."""
        hello = self.hear()
        assert hello == w.Hello(int(os.environ["RANK"]), os.getpid(), traces=True, stays=True, lists_calls=True)
        self.say(START)

    def say(self, *messages: w.Message) -> None:
        self._stream.write(b"".join(map(w.encode, messages)))
        self._stream.flush()

    def close(self) -> None:
        self._listening.close()


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    agent = Agent(tmp_path / "s")
    for name, value in {"CONCERTINA_SOCKET": agent.path, "RANK": "0", "CONCERTINA_ROUND": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(process_groups, "can_stay", lambda: True)
    for name, fresh in {"_channel": None, "_tried": False}.items():
        monkeypatch.setattr(_channel, name, fresh)
    monkeypatch.setattr(DeviceMesh, "__init__", DeviceMesh.__init__)
    helper = "_new_process_group_helper"
    monkeypatch.setattr(distributed_c10d, helper, getattr(distributed_c10d, helper))
    yield agent
    agent.close()
    distributed_c10d._world.group_count = 0


def next_round(rank: int = 0) -> w.Enter:
    return w.Enter({"RANK": str(rank), "CONCERTINA_ROUND": str(int(os.environ["CONCERTINA_ROUND"]) + 1)})


def test_main_is_called_once_if_it_returns(agent: Agent) -> None:
    agent.run(lambda: trainingjob.world().round)
    agent.begin()
    assert agent.result.result(60) == 1


def test_outside_of_a_job_main_is_called_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CONCERTINA_SOCKET", raising=False)
    assert trainingjob.run(lambda: "done") == "done"


def test_main_is_called_again_with_the_variables_of_the_next_round(agent: Agent) -> None:
    worlds = []

    def main() -> int:
        worlds.append((trainingjob.world().round, trainingjob.world().rank))
        if len(worlds) == 1:
            trainingjob.should_checkpoint()  # waits for an answer
        return len(worlds)

    agent.run(main)
    agent.begin()
    assert agent.hear() == w.Register(0)
    agent.say(w.Leave(1))
    assert agent.hear() == w.Left(1, 1)
    agent.say(next_round(rank=3))
    assert agent.hear() == w.Hello(3, os.getpid(), traces=True, stays=True, lists_calls=True)
    assert agent.result.result(60) == 2
    assert worlds == [(1, 0), (2, 3)]


def test_each_round_tells_how_often_the_script_has_called(agent: Agent) -> None:
    """The thread that reads is older than every round but the first."""

    def main() -> int:
        while trainingjob.world().round < 3 and not trainingjob.should_checkpoint():
            pass
        return trainingjob.world().round

    agent.run(main)
    for round in (1, 2):
        agent.begin()
        assert agent.hear() == w.Register(0)
        agent.say(w.QueryCalls())
        assert agent.hear() == w.CallCount(0, 0)
        agent.say(w.StopAtCall(2))
        assert agent.hear() == w.Left(round, 0)
        agent.say(next_round())
    agent.begin()
    assert agent.result.result(60) == 3


def test_a_round_can_be_asked_while_it_is_left(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    end_round = RoundChannel.end_round

    def end_after_a_question(rounds: RoundChannel) -> None:
        agent.say(w.QueryCalls())
        answers.append(agent.hear())
        end_round(rounds)

    monkeypatch.setattr(RoundChannel, "end_round", end_after_a_question)
    answers: list[w.Message] = []
    agent.run(once(lost))
    agent.begin()
    while not answers and agent.thread.is_alive():
        agent.thread.join(0.01)
    assert answers == [w.CallCount(0, 0)]
    assert isinstance(agent.hear(), w.Left)
    agent.say(next_round())
    agent.begin()
    assert agent.result.result(60) == "done"


def test_a_round_that_is_over_before_it_is_entered_is_left_without_main(agent: Agent) -> None:
    called = []

    def main() -> int:
        called.append(trainingjob.world().round)
        if len(called) == 1:
            raise RuntimeError(LOST)
        return 0

    agent.run(main)
    agent.begin()
    left = agent.hear()
    assert isinstance(left, w.Left)
    agent.say(next_round(), w.Leave(2))
    assert agent.hear() == w.Left(2, 1)
    os.environ["CONCERTINA_ROUND"] = "2"
    agent.say(next_round())
    agent.begin()
    assert agent.result.result(60) == 0
    assert called == [1, 3]


def wrapped() -> None:
    try:
        raise RuntimeError(LOST)
    except RuntimeError as error:
        raise ValueError("evaluation failed") from error


def lost() -> None:
    raise RuntimeError(LOST)


def once(ends: Callable[[], None]) -> Callable[[], str]:
    """Return a `main` whose first call ends as this function does, and whose later calls return."""
    calls: list[None] = []

    def main() -> str:
        calls.append(None)
        if len(calls) == 1:
            ends()
        return "done"

    return main


@pytest.mark.parametrize("fails", [lost, wrapped])
def test_one_that_has_lost_a_peer_leaves_by_itself_and_says_what_it_saw(agent: Agent, fails) -> None:
    agent.run(once(fails))
    agent.begin()
    left = agent.hear()
    assert isinstance(left, w.Left)
    assert (left.round, left.code) == (1, 1)
    assert any(LOST in line for line in left.output)
    agent.say(next_round())
    agent.begin()
    assert agent.result.result(60) == "done"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuntimeError("CUDA out of memory"), None),
        (ValueError(LOST), None),
        (SystemExit(0), 0),
        (KeyboardInterrupt(), None),
    ],
)
def test_any_other_end_of_main_is_the_end_of_the_process(agent: Agent, error: BaseException, code: object) -> None:
    def main() -> None:
        raise error

    agent.run(main)
    agent.begin()
    assert agent.result.exception(60) is error


def test_an_agent_that_waits_for_the_end_of_the_process_gets_it(agent: Agent) -> None:
    agent.run(lost)
    agent.hear()
    agent.say(w.Start(Restore("Fresh"), 1, "uid"))
    assert isinstance(agent.result.exception(60), RuntimeError)


def stops_by_itself() -> None:
    assert trainingjob.should_checkpoint()


def stops_at_the_next_call() -> None:
    assert trainingjob.should_checkpoint()
    trainingjob.should_checkpoint()


def exits() -> None:
    assert trainingjob.should_checkpoint()
    raise SystemExit


@pytest.mark.parametrize("stops", [stops_by_itself, stops_at_the_next_call, exits])
def test_a_planned_change_is_left_with_code_0(agent: Agent, stops) -> None:
    agent.run(once(stops))
    agent.begin()
    assert agent.hear() == w.Register(0)
    agent.say(w.StopAtCall(1))
    assert agent.hear() == w.Left(1, 0)
    agent.say(next_round())
    agent.begin()
    assert agent.result.result(60) == "done"


def test_nothing_of_an_old_round_lands_in_the_next(agent: Agent) -> None:
    old: list[Any] = []
    go_on, errors, done = threading.Event(), list[BaseException](), threading.Event()

    def lingering() -> None:
        go_on.wait(60)
        for _ in range(2):
            try:
                trainingjob.report(step=999)
            except BaseException as error:
                errors.append(error)
        done.set()

    def main() -> None:
        if not old:
            old.append(_connection.agent_channel())
            threading.Thread(target=lingering, daemon=True).start()
            lost()
        go_on.set()
        assert done.wait(60)
        with pytest.raises(RuntimeError, match="an earlier round"):
            old[0].report_commit(7, None, 0.0)
        trainingjob.report(step=5)

    agent.run(main)
    agent.begin()
    left = agent.hear()
    assert isinstance(left, w.Left)
    agent.say(w.QueryCalls(), w.CopiedUpTo(8), next_round())
    agent.begin()
    progress = agent.hear()
    assert getattr(progress, "step", None) == 5
    assert agent.result.result(60) is None
    assert [type(error) for error in errors] == [RoundLeft, RoundLeft]


def test_a_framework_that_keeps_a_world_is_refused(agent: Agent) -> None:
    agent.run(lambda: check_not_in_run("Accelerate"))
    agent.begin()
    fault = agent.hear()
    assert isinstance(fault, w.Fault)
    assert "Accelerate does not work within trainingjob.run" in fault.message
    assert isinstance(agent.result.exception(60), InvalidInput)


@pytest.mark.parametrize(("state", "found"), [({}, ""), ({"num_processes": 2}, "accelerate")])
def test_a_library_that_keeps_a_world_is_seen(monkeypatch: pytest.MonkeyPatch, state: object, found: str) -> None:
    library = SimpleNamespace(PartialState=SimpleNamespace(_shared_state=state))
    monkeypatch.setitem(sys.modules, "accelerate.state", library)
    assert _rounds._holds_the_world() == found


def test_run_comes_first_and_once(agent: Agent) -> None:
    def main() -> None:
        with pytest.raises(RuntimeError, match="called twice"):
            trainingjob.run(lambda: None)

    agent.run(main)
    agent.begin()
    assert agent.result.result(60) is None
