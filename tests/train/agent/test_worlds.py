"""Workers that train in a world of their own, below a launcher that the operator could not see: real processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping

import pytest

from builders.train.replicas import GIVE_UP, running
from concertina_agent.workers import worlds

OF_THE_ROUND = {
    "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "round",
}  # fmt: skip
ITS_OWN = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "29500"}
"""What a launcher such as deepspeed sets for its processes."""
CHILD = "import time; print('up', flush=True); time.sleep(600)"
PARENT = """
import json, os, socket, subprocess, sys, time

port = int(os.environ["MASTER_PORT"])
joined = socket.create_connection(("127.0.0.1", port)) if "joins" in sys.argv else None
if "forks" in sys.argv:
    if os.fork():
        time.sleep(600)
    print("up", flush=True)
    time.sleep(600)
subprocess.run([sys.executable, "-c", sys.argv[1]], env={**os.environ, **json.loads(sys.argv[2])})
"""


@pytest.fixture
def port() -> Iterator[int]:
    """Return the port of the round's rendezvous, on which a server listens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


@contextlib.contextmanager
def worker(port: int, child: Mapping[str, str], *what: str, **started_with: str) -> Iterator[int]:
    """Start a worker that starts a process with these variables; yields the worker's pid."""
    environment = {**os.environ, **OF_THE_ROUND, "MASTER_PORT": str(port), **started_with}
    command = [sys.executable, "-c", PARENT, CHILD, json.dumps(dict(child)), *what]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        yield process.pid
    finally:
        os.killpg(process.pid, 9)
        process.wait()


def round_at(port: int, size: int = 2) -> worlds.LaunchedWorld:
    return worlds.LaunchedWorld(0, size, "127.0.0.1", str(port), "round")


def test_a_worker_below_which_processes_have_a_smaller_world_is_alone(port: int) -> None:
    with worker(port, ITS_OWN) as pid:
        clause = worlds.alone((pid,), round_at(port), "")
    name = os.path.basename(sys.executable)
    assert clause == f"processes with WORLD_SIZE=1 were started by {name} in a round of 2 workers"


def test_it_stays_so_when_the_processes_have_ended_until_the_worker_joins_the_round(port: int) -> None:
    with worker(port, {}) as pid:
        assert worlds.alone((pid,), round_at(port), "alone") == "alone"
    with worker(port, {}, "joins") as pid:
        assert worlds.alone((pid,), round_at(port), "alone") == ""


def test_it_stays_so_when_the_worker_has_ended_and_nobody_has_waited_for_it(port: int) -> None:
    """The kernel does not show a zombie's files to its own user. Root sees none."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    try:
        assert worlds.alone((process.pid,), round_at(port), "alone") == "alone"
    finally:
        process.wait()


def test_it_stays_so_while_the_worker_ends(port: int) -> None:
    """The kernel frees the memory of a process before its state changes, and hides its files from then on."""
    process = subprocess.Popen(
        [sys.executable, "-c", "print(len(bytearray(100 << 20)), flush=True)"], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    try:
        while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            assert worlds.alone((process.pid,), round_at(port), "alone") == "alone"
    finally:
        process.stdout.close()
        process.wait()


def test_a_launcher_that_serves_its_rendezvous_at_the_rounds_port_is_seen_by_its_run_id(port: int) -> None:
    theirs = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}
    with worker(port, theirs, "joins") as pid:
        assert worlds.alone((pid,), round_at(port), "") != ""


@pytest.mark.parametrize(
    ("child", "what", "started_with"),
    [
        pytest.param({}, (), {}, id="a process that inherits the variables"),
        pytest.param(ITS_OWN, ("joins",), {}, id="a launcher below a worker that trains with its round"),
        pytest.param({"RANK": "0", "WORLD_SIZE": "1"}, (), {}, id="an evaluation with WORLD_SIZE alone changed"),
        pytest.param({**ITS_OWN, "RANK": "1"}, (), {}, id="a rank beyond the smaller world"),
        pytest.param({**ITS_OWN, "WORLD_SIZE": "8", "RANK": "7"}, (), {}, id="a larger world"),
        pytest.param({**ITS_OWN, "WORLD_SIZE": ""}, (), {}, id="no number"),
        pytest.param(
            {},
            ("forks",),
            {**ITS_OWN, "TORCHELASTIC_RUN_ID": "template"},
            id="forks of a warm process whose variables are the template's",
        ),
    ],
)
def test_nothing_else_counts_as_a_world_of_its_own(
    port: int, child: Mapping[str, str], what: tuple[str, ...], started_with: Mapping[str, str]
) -> None:
    with worker(port, child, *what, **started_with) as pid:
        assert worlds.alone((pid,), round_at(port), "") == ""


def test_a_worker_that_has_ended_is_not_alone() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert worlds.alone((process.pid,), round_at(1), "") == ""


def test_looks_are_ever_rarer() -> None:
    assert [worlds.seconds_to_next_look(age) for age in (0, 1, 20, 100, 10_000)] == [0.5, 0.5, 2, 10, 60]


def test_torchrun_in_a_shells_file_is_reported_by_the_coordinator_once_all_replicas_have_it(folder) -> None:
    (folder / "t.py").write_text(
        textwrap.dedent("""
            import os, time
            parent = os.getppid()
            print("TRAINS", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
            while os.getppid() == parent:  # torchrun gives it a session of its own, so no signal of the agent ends it
                time.sleep(0.2)
        """)
    )
    file, ready = folder / "run.sh", folder / "ready"
    file.write_text(
        f"if [ $RANK = 1 ]; then while [ ! -e {ready} ]; do sleep 0.1; done; fi\n"
        f"{sys.executable} -m torch.distributed.run --nproc_per_node=1 {folder}/t.py\n"
    )

    async def trains(replica) -> None:
        async with asyncio.timeout(GIVE_UP):
            while "TRAINS 0 of 1" not in replica.log():
                await asyncio.sleep(0.05)

    async def body() -> None:
        async with running(folder, 2, ["--", "bash", str(file)]) as job:
            await job.begin(1, job[0], job[1])
            await trains(job[0])
            async with asyncio.timeout(GIVE_UP):
                while not any(event["event"] == "WorldsSeen" for event in job[0].events()):
                    await asyncio.sleep(0.05)
            assert job[0].report.world_mismatch == "", "one of two replicas alone may prepare something"
            ready.touch()
            report = await job.until(job[0], lambda report: report.world_mismatch, "it is never reported")
            clause = "processes with WORLD_SIZE=1 were started by torch.distributed.run in a round of 2 workers"
            assert report.world_mismatch == clause
            assert report.state == "running"
            assert job[1].report.world_mismatch == "", "the coordinator alone tells it"

    asyncio.run(body())
