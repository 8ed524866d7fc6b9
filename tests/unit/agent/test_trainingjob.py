"""`trainingjob` outside of a job, where it has no effect, and inside one, with the agreement on a step."""

import json
import math
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import trainingjob
from concertina_agent import main
from concertina_agent.core import events as e
from concertina_agent.core.round import stopping
from concertina_agent.core.round.stopping import Stopping
from concertina_protocol import MemberState, Progress
from concertina_protocol import worker_channel as w
from concertina_protocol.worker_channel.rounds import RoundChannel
from concertina_state.step_trace import Traces
from trainingjob._channel import Channel, StepReport


def test_nothing_happens_outside_of_a_job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("CONCERTINA") or name in ("RANK", "WORLD_SIZE")]:
        monkeypatch.delenv(name)
    assert trainingjob.world() == trainingjob.World()
    assert (trainingjob.World().size, trainingjob.World().round) == (1, 0)
    trainingjob.report(step=1, loss=0.5)
    assert not any(trainingjob.should_checkpoint() for _ in range(3))
    assert trainingjob.checkpoint_dir().resolve() == tmp_path / "checkpoints"
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_importing_it_costs_nothing():
    code = "import sys; before = set(sys.modules); import trainingjob; print(*(set(sys.modules) - before))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "trainingjob" in printed.split()
    assert not {"torch", "numpy", "asyncio", "socket", "concertina_protocol"} & set(printed.split())


def test_the_world_is_torchruns(monkeypatch):
    values = {
        "RANK": 5,
        "WORLD_SIZE": 6,
        "LOCAL_RANK": 1,
        "LOCAL_WORLD_SIZE": 2,
        "GROUP_RANK": 2,
        "GROUP_WORLD_SIZE": 3,
    }
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("CONCERTINA_ROUND", "7")
    assert trainingjob.world() == trainingjob.World(5, 6, 1, 2, 2, 3, 7)


def test_where_checkpoints_belong(tmp_path, monkeypatch):
    monkeypatch.setenv("CONCERTINA_UID", "u")
    monkeypatch.setenv("CONCERTINA_VOLUME", str(tmp_path / "volume"))
    monkeypatch.setenv("CONCERTINA_CHECKPOINT", "null")
    assert trainingjob.checkpoint_dir() == tmp_path / "volume" / "checkpoints"
    monkeypatch.setenv("CONCERTINA_CHECKPOINT", json.dumps({"uri": f"file://{tmp_path}/a%20run"}))
    assert trainingjob.checkpoint_dir() == tmp_path / "a run"
    assert trainingjob.checkpoint_dir().is_dir()
    monkeypatch.setenv("CONCERTINA_CHECKPOINT", json.dumps({"uri": "s3://bucket/run"}))
    with pytest.raises(ValueError, match="s3://bucket/run, which is not a folder"):
        trainingjob.checkpoint_dir()


IN_A_JOB = """
import sys, trainingjob
print(trainingjob.__file__, "concertina_protocol" in sys.modules)
trainingjob.report(step=1)
print(sys.modules["concertina_protocol"].__file__, *{"asyncio", "ssl", "torch", "concertina_agent"} & set(sys.modules))
"""


def test_the_init_container_installs_it_and_so_does_the_zipapp(tmp_path):
    """Its dependencies are installed too, for any Python.

    They are imported at the script's first report, without asyncio.
    """
    first, second = tmp_path / "first", tmp_path / "second"
    pyz = main.install(first)
    subprocess.run([sys.executable, str(pyz), "install", str(second)], check=True, capture_output=True)
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(str(tmp_path / "s"))
        agent.listen()
        for folder in (first, second):
            packages = folder / "python"
            assert {path.name for path in packages.iterdir()} == {
                "concertina_data",
                "concertina_protocol",
                "concertina_state",
                "concertina_tracking",
                "trainingjob",
            }
            environment = {"PYTHONPATH": str(packages), "RANK": "0", "CONCERTINA_SOCKET": str(tmp_path / "s")}
            output = subprocess.run(
                [sys.executable, "-Sc", IN_A_JOB], env=environment, capture_output=True, text=True, check=True
            )
            expected = [packages / "trainingjob/__init__.py", False, packages / "concertina_protocol/__init__.py"]
            assert (output.stdout.split(), output.stderr) == ([str(each) for each in expected], "")
            connection, _ = agent.accept()
            with connection, connection.makefile("rb") as stream:
                assert [type(w.decode(line)) for line in stream] == [w.Hello, Progress]


class Agent:
    """Other end of the socket, which speaks with the agent's own messages."""

    def __init__(self, folder: Path, rank: int) -> None:
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(folder / "s"))
        listening.listen()
        self.script = Channel(RoundChannel(w.WorkerEnd(str(folder / "s")), abort=lambda: None), rank, Traces)
        self._connection, _ = listening.accept()
        self._stream = self._connection.makefile("rwb")
        listening.close()

    def hears(self) -> w.Message:
        return w.decode(self._stream.readline())

    def says(self, message: w.Message) -> None:
        self._stream.write(w.encode(message))
        self._stream.flush()

    def hang_up(self) -> None:
        self._connection.shutdown(socket.SHUT_RDWR)


def test_what_a_script_says_is_what_the_agent_understands(tmp_path):
    agent = Agent(tmp_path, 0)
    assert agent.hears() == w.Hello(0, os.getpid(), traces=True, lists_calls=True)
    agent.script.report(StepReport(41, 100, None, 9.0, 320, "training"))
    agent.script.report(StepReport(43, 100, 0.5, 9.0, 328, "evaluating"))
    first, second = agent.hears(), agent.hears()
    assert isinstance(first, Progress)
    assert isinstance(second, Progress)
    assert (first.step, first.restored_step, first.position) == (41, 40, 320)
    assert math.isnan(first.loss)
    assert (second.step, second.steps, second.loss, second.phase) == (43, 100, 0.5, "evaluating")
    assert second.first_step_at == first.first_step_at > 0
    assert second.step_seconds >= 0


def test_the_other_ranks_give_signs_of_life(tmp_path):
    agent = Agent(tmp_path, 3)
    assert agent.hears() == w.Hello(3, os.getpid(), traces=True, lists_calls=True)
    agent.script.report(StepReport(41, 100, 0.1, 9.0, 320, "training"))
    assert agent.hears() == w.Beat(3, 41, "training")


def test_samples_are_told_where_the_script_says_nothing_of_them(tmp_path):
    agent = Agent(tmp_path, 0)
    agent.script.count_samples_by(lambda: 640)
    agent.script.report(StepReport(1, 0, None, 0.0, 0, "training"))
    agent.script.report(StepReport(2, 0, None, 0.0, 700, "training"))
    agent.script.report_commit(3, 3, 0.1)
    agent.hears()
    assert [agent.hears().position for _ in range(3)] == [640, 700, 640]


@pytest.mark.parametrize("rank", [0, 3])
def test_a_script_that_waits_for_data_says_so_and_is_alive(tmp_path, rank):
    agent = Agent(tmp_path, rank)
    agent.hears()
    agent.script.report_stall("the store is away", 1.0)  # Before the first step there is nothing to repeat.
    agent.script.add_stall(2.0)
    agent.script.report(StepReport(7, 9, 0.5, 1.0, 70, "training"))
    agent.script.report_stall("the store is away", 3.0)
    before, waiting = agent.hears(), agent.hears()
    assert (waiting.step, waiting.phase) == (7, "loading data")
    if rank == 0:
        assert (before.stalled_seconds, before.waits_for) == (2.0, "")
        assert (waiting.stalled_seconds, waiting.waits_for) == (5.0, "the store is away")
        assert (waiting.position, waiting.loss) == (70, 0.5)


def test_all_calls_are_false_but_the_one_that_was_agreed_on_and_the_next_ends_the_process(tmp_path):
    agent = Agent(tmp_path, 0)
    call = agent.script.should_checkpoint
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(call)
        assert (agent.hears(), agent.hears()) == (w.Hello(0, os.getpid(), traces=True, lists_calls=True), w.Register(0))
        assert not first.done(), "the first call did not wait for its answer"
        agent.says(w.Registered())
        assert [first.result(10), call(), call()] == [False, False, False]
        agent.says(w.QueryCalls())
        assert agent.hears() == w.CallCount(0, 3)
        fourth = pool.submit(call)
        agent.script.report(StepReport(4, 9, 0.1, 0, 0, "training"))
        assert agent.hears().step == 4
        assert not fourth.done(), "a call after the answer did not wait"
        agent.says(w.StopAtCall(5))
        assert [fourth.result(10), call()] == [False, True]
        agent.script.report(StepReport(6, 9, 0.1, 0, 0, "training"))
        assert isinstance(pool.submit(call).exception(10), SystemExit)
        agent.says(w.QueryCalls())
        assert agent.hears() == w.CallCount(0, 5), "a step beyond the checkpoint was reported"


def test_an_agent_that_is_gone_leaves_the_script_alone(tmp_path):
    agent = Agent(tmp_path, 0)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(agent.script.should_checkpoint)
        agent.hears()
        agent.hang_up()
        assert first.result(10) is False
        agent.script.report(StepReport(4, 9, 0.1, 0, 0, "training"))
        assert agent.script.should_checkpoint() is False


# --- the agents


def member(stopping: Stopping) -> MemberState:
    return MemberState("a", "i", 1, "c", "running", next_call=stopping.next_call)


@given(st.lists(st.lists(st.integers(0, 99), max_size=3), min_size=1, max_size=5))
def test_the_call_is_the_first_that_no_rank_has_passed(calls):
    """`calls` has, for each agent, the calls that each of its attending workers has passed."""
    agents, rank = [Stopping() for _ in calls], 0
    for agent, passed in zip(agents, calls, strict=True):
        ranks = range(rank, rank + len(passed))
        rank += len(passed)
        for one in ranks:
            assert agent.attends(one) == [e.SendToWorker(one, w.Registered())]
        assert agent.ask(0.0) == [e.SendToWorker(one, w.QueryCalls()) for one in ranks]
        assert (agent.next_call is None) == bool(passed)
        for one, number in zip(ranks, passed, strict=True):
            assert agents[0].decide(map(member, agents), 0.1) is None
            agent.passed(one, number)
    decided = agents[0].decide(map(member, agents), 0.1)
    everybody = [number for passed in calls for number in passed]
    assert decided == max(everybody, default=-1) + 1
    for agent, passed in zip(agents, calls, strict=True):
        kinds = {type(effect) for effect in agent.stop_at(decided)}
        assert kinds == ({e.SignalWorkers} if not everybody else {e.SendToWorker} if passed else set())
        assert agent.stop_at(decided) == []
    assert agents[0].decide(map(member, agents), 0.1) is None, "decided twice"


def test_a_rank_that_comes_late_is_told_and_one_that_is_gone_is_not_waited_for():
    agent = Stopping()
    agent.attends(0)
    agent.attends(1)
    agent.ask(0.0)
    agent.passed(0, 4)
    assert agent.next_call is None
    assert agent.attends(2) == [e.SendToWorker(2, w.QueryCalls())]
    agent.ended(1)
    assert agent.next_call == 5
    agent.stop_at(7)
    assert agent.attends(3) == [e.SendToWorker(3, w.StopAtCall(7))]
    assert agent.agreed


def test_a_rank_that_never_answers_costs_the_agreement():
    agent = Stopping()
    agent.attends(0)
    agent.ask(10.0)
    assert agent.decide([member(agent)], 10.0 + stopping.ANSWER_SECONDS - 0.01) is None
    assert agent.decide([member(agent)], 10.0 + stopping.ANSWER_SECONDS) == 0
    assert agent.stop_at(0) == [e.SignalWorkers(15)]
    assert not agent.agreed
