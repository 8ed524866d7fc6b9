"""Command `concertina-agent trace`, over TLS, with the server and the rules of an agent."""

from __future__ import annotations

import asyncio
import base64
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import concertina_protocol as p
from builders.agent import UID, Driver
from concertina.agents.authority import Authority
from concertina_agent.core import events as e
from concertina_agent.main import main
from concertina_agent.net import tls
from concertina_agent.net.server import AgentServer
from concertina_agent.runtime.nursery import TaskGroup
from concertina_protocol import step_traces
from concertina_protocol import worker_channel as w

TRACE = bytes(range(256)) * 100
"""Contents of a trace that take several lines of the output."""


class Pod:
    """Agent with the workers of ranks 0 and 1. The workers write a trace as soon as they are asked."""

    def __init__(self, volume: Path) -> None:
        self.volume = volume
        self.asked: list[tuple[int, int, int]] = []
        """Rank, first step and number of steps of each request that reached a worker."""
        self.watch = self.learn = self.relay = self.join = self.index = self.pull = None
        self.driver = Driver("a")
        self.driver.prepared()
        self.driver.ask(p.Assign(UID, 1, "claim-1", (p.Member("a", "a-1", "a:1", 0, 2),), "a:9", p.Restore("Fresh")))
        for rank in range(2):
            self.driver.say(w.Hello(1, 7, traces=True), rank=rank)

    async def answer(self, message: p.Trace) -> p.Message:
        effects = self.driver.ask(message)
        for sent in (effect for effect in effects if isinstance(effect, e.SendToWorker)):
            self.asked.append((sent.rank, sent.message.first_step, sent.message.steps))
            file = step_traces.trace_file(step_traces.folder(self.volume), sent.message.name, sent.rank)
            assert step_traces.wanted_file(file).exists()
            file.write_bytes(TRACE)
        return next(effect.message for effect in effects if isinstance(effect, e.Reply))


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pod]:
    """Serve an agent in a thread, and set the environment variables of its container."""
    identity, volume = tmp_path / "identity", tmp_path / "volume"
    identity.mkdir()
    volume.mkdir()
    for name, content in Authority(b"m" * 32, UID, 1_700_000_000.0).secret_data().items():
        (identity / name).write_bytes(base64.b64decode(content))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for name, value in (("UID", UID), ("REPLICA", "a"), ("POD_IP", "127.0.0.1"), ("PORT", str(port)),
                        ("VOLUME", str(volume)), ("IDENTITY", str(identity))):  # fmt: skip
        monkeypatch.setenv(f"CONCERTINA_{name}", value)
    made, loop, listening, ended = Pod(volume), asyncio.new_event_loop(), threading.Event(), asyncio.Event()

    async def serve() -> None:
        tasks = TaskGroup()
        server = AgentServer(UID, tls.server_context(identity), made, tasks)
        server.start("127.0.0.1", port)
        listening.set()
        await ended.wait()
        await server.close()
        await tasks.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert listening.wait(20.0)
    yield made
    loop.call_soon_threadsafe(ended.set)
    thread.join()
    loop.close()


def trace(rank: int, first: int, steps: int) -> int:
    return main(["trace", "--rank", str(rank), "--first-step", str(first), "--steps", str(steps), "--seconds", "20"])


def test_each_rank_traces_the_steps_that_were_asked_for(pod: Pod, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    for rank in range(2):
        assert trace(rank, 7, 3) == 0
        lines = capfdbinary.readouterr().out.splitlines()
        assert (b"".join(map(base64.b64decode, lines)), len(lines) > 1) == (TRACE, True)
    assert pod.asked == [(0, 7, 3), (1, 7, 3)]
    assert list(step_traces.folder(pod.volume).iterdir()) == []


@pytest.mark.parametrize(
    ("rank", "steps", "said"),
    [(7, 2, "rank 7 is not a worker of a now"), (0, 0, "from 1 to 100 steps"), (0, 101, "from 1 to 100 steps")],
)
def test_what_can_not_be_traced_is_refused(
    pod: Pod, capsys: pytest.CaptureFixture[str], rank: int, steps: int, said: str
) -> None:
    assert trace(rank, 7, steps) == 1
    assert said in capsys.readouterr().err
    assert (pod.asked, list(step_traces.folder(pod.volume).iterdir())) == ([], [])
