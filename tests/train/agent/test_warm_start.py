"""Agents that start a command of one's own as a fork of a parent that has imported what it needs."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path

import pytest

import concertina_protocol as p
from builders.programs import SEARCH_PATH
from builders.train.replicas import GIVE_UP, UID, Job, Replica, running
from concertina_agent import main
from concertina_agent.workers.warm_start import SILENT

HERE = "tests/train/agent/test_warm_start.py"
LEFT_OUT = f"{HERE}::test_a_package_that_must_not_be_imported_before_the_fork_is_left_out"
PIP_RECORDED = (
    f"{HERE}::test_a_folder_is_one_of_installed_packages_where_pip_has_recorded_what_it_put_there[heavy-1.0-]"
)
PLAINLY = f"{HERE}::test_where_it_can_not_be_warm_it_starts_plainly_and_says_why"
LEARNED = f"{HERE}::test_a_new_replica_is_ready_once_it_has_imported_what_others_have_learned[a shell line]"

SCRIPT = """
import os, sys
before = [name for name in ("heavy", "ranked", "threaded") if name in sys.modules]
import heavy, {more}
print("UP", os.environ["TORCHELASTIC_RESTART_COUNT"], heavy.VALUE, *before, flush=True)
import time; time.sleep(600)
"""
PACKAGES = {
    "heavy": "VALUE = 'first'",
    "ranked": "import os; RANK = os.environ.get('RANK')",
    "threaded": "import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
}


def prepared(folder: Path, more: str = "json", place: str = "site-packages") -> dict[str, str]:
    """Return the environment of a job with a script in the folder that imports installed packages."""
    for name, text in PACKAGES.items():
        (folder / place / name).mkdir(parents=True)
        (folder / place / name / "__init__.py").write_text(text)
    (folder / "script.py").write_text(SCRIPT.format(more=more))
    path = os.pathsep.join([SEARCH_PATH, str(folder / place)])
    return {"PYTHONPATH": path, "CONCERTINA_WARM_START": json.dumps({"enabled": True, "preload": []})}


def python(folder: Path) -> list[str]:
    return ["--", sys.executable, str(folder / "script.py")]


async def seen(replica: Replica, what: str) -> None:
    async with asyncio.timeout(GIVE_UP):
        while what not in replica.log():
            await asyncio.sleep(0.02)


async def learned(replica: Replica, times: int = 1) -> None:
    """So many parents have imported what the script did."""
    async with asyncio.timeout(GIVE_UP):
        while sum(e["event"] == "script_parent" and bool(e["learned"]) for e in replica.events()) < times:
            await asyncio.sleep(0.05)


def warm_parents(replica: Replica) -> list[int]:
    agent = replica.process.pid
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    return [int(pid) for pid in children if Path(f"/proc/{pid}/comm").read_text() == "concertina-warm\n"]


async def killed_and_begun(job: Job, round: int) -> None:
    (pid,) = job[0].worker_pids().values()
    os.kill(pid, signal.SIGKILL)
    await job.until(job[0], lambda report: report.failures, "the failure is never told")
    await job.begin(round, job[0])


def test_a_killed_script_comes_back_with_its_modules_imported_and_a_new_agent_knows_them(folder):
    async def body():
        async with running(folder, 1, python(folder), **prepared(folder)) as job:
            await job.begin(1, job[0])
            await seen(job[0], "UP 1 first\n")
            await learned(job[0])
            await killed_and_begun(job, 2)
            await seen(job[0], "UP 2 first heavy\n")
            assert job[0].report.warm_start_disabled_reason == ""

            job[0].restart(python(folder))  # a container of the same pod
            await job.ready()
            await job.begin(3, job[0])
            await seen(job[0], "UP 3 first heavy\n")

    asyncio.run(body())


@pytest.mark.long(
    law="tests/train/agent/test_warm_start.py::test_a_killed_script_comes_back_with_its_modules_imported_and_a_new_agent_knows_them"
)
def test_a_script_that_is_killed_as_it_imports_is_warm_from_its_second_start_on(folder):
    environment = prepared(folder)
    slow = "import time; VALUE = 'first'; 'warm' in open('/proc/self/comm').read() or time.sleep(600)"
    (folder / "site-packages" / "heavy" / "__init__.py").write_text(slow)

    async def body():
        async with running(folder, 1, python(folder), **environment) as job:
            await job.begin(1, job[0])
            await learned(job[0])
            await killed_and_begun(job, 2)
            await seen(job[0], "UP 2 first heavy\n")

    asyncio.run(body())


LINES = {
    "a condition and a failure": "R=a; [ -e old ] && R=b; touch old; python script.py $R || exit 3",
    "another folder, a pipe and a limit": "ulimit -n 500; mkdir -p runs; cd runs; python ../script.py 2>&1 | tee log",
    "a wrapper": "env A=1 nice -n 1 sh -c 'python script.py'",
}


FIRST_LINE = next(iter(LINES))
LINE_LAW = f"{HERE}::test_a_script_behind_a_shell_line_comes_back_with_its_modules_imported[{FIRST_LINE}]"


@pytest.mark.parametrize(
    "line", [line if line == FIRST_LINE else pytest.param(line, marks=pytest.mark.long(law=LINE_LAW)) for line in LINES]
)
def test_a_script_behind_a_shell_line_comes_back_with_its_modules_imported(line, folder, monkeypatch):
    monkeypatch.chdir(folder)
    environment = {**prepared(folder), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    async def body():
        async with running(folder, 1, ["--", "bash", "-c", LINES[line]], **environment) as job:
            await job.begin(1, job[0])
            await seen(job[0], "UP 1 first\n")
            await learned(job[0])
            await killed_and_begun(job, 2)
            await seen(job[0], "UP 2 first heavy\n")
            assert job[0].report.warm_start_disabled_reason == ""
            (pid,) = job[0].worker_pids().values()
            os.killpg(pid, signal.SIGTERM)  # the shell's group, of which the script is a member
            await job.until(job[0], lambda report: report.round == 2 and report.failures, "it never ends")

    asyncio.run(body())


@pytest.mark.long(
    law="tests/train/agent/test_warm_start.py::test_a_killed_script_comes_back_with_its_modules_imported_and_a_new_agent_knows_them"
)
def test_a_kill_while_an_earlier_python_of_the_command_runs_changes_nothing(folder, monkeypatch):
    monkeypatch.chdir(folder)
    environment = {**prepared(folder), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    wait = "import os, time\nwhile not os.path.exists('prepared'): time.sleep(0.02)"
    (folder / "prepare.py").write_text(f"import heavy\nprint('PREPARES', flush=True)\n{wait}")

    async def body():
        async with running(
            folder, 1, ["--", "bash", "-c", "python prepare.py; python script.py"], **environment
        ) as job:
            await job.begin(1, job[0])
            await seen(job[0], "PREPARES\n")
            await killed_and_begun(job, 2)
            (folder / "prepared").touch()
            await seen(job[0], "UP 2 first\n")
            await learned(job[0], times=2)
            await killed_and_begun(job, 3)
            await seen(job[0], "UP 3 first heavy\n")

    asyncio.run(body())


def test_what_a_shell_left_in_the_background_ends_with_its_round(folder, monkeypatch):
    """End background processes with the round, as in a plain start: the shell's end alone leaves them."""
    monkeypatch.chdir(folder)
    environment = {**prepared(folder), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    line = "python script.py & until [ -e go ]; do sleep 0.02; done; rm go; exit 3"

    async def body():
        async with running(folder, 1, ["--", "bash", "-c", line], **environment) as job:
            for round, up in ((1, "UP 1 first\n"), (2, "UP 2 first heavy\n")):
                await job.begin(round, job[0])
                await seen(job[0], up)
                await learned(job[0])
                before = scripts(folder)
                (folder / "go").touch()
                await job.until(job[0], lambda r, n=round: r.round == n and r.failures, "the shell's end is never told")
                assert before, "the script ran"
                assert scripts(folder) == before, "it still runs"
            await job.prepare(3, job[0])
            assert not scripts(folder)

    asyncio.run(body())


def scripts(folder: Path) -> list[int]:
    """Return the processes of the script, but for warm parents and interpreters that stand in."""
    found = []
    for place in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if place.name.isdigit() and (place / "cwd").readlink() == folder:
                runs_script = "python\0script.py" in (place / "cmdline").read_text()
                is_parent = "warm" in (place / "comm").read_text()
                stands_in = (place / "fd" / "1").readlink() == Path(os.devnull)
                found += [int(place.name)] if runs_script and not is_parent and not stands_in else []
    return sorted(found)


def test_a_drain_does_not_wait_for_the_imports_of_workers_that_are_to_end(folder):
    """The parent imports for longer than this test lasts; a worker, which knows its rank, does not."""
    environment = prepared(folder)
    slow = "import os, time; VALUE = 'first'; 'RANK' in os.environ or time.sleep(600)"
    (folder / "site-packages" / "heavy" / "__init__.py").write_text(slow)

    async def body():
        async with running(folder, 1, python(folder), **environment) as job:
            await job.begin(1, job[0])
            await seen(job[0], "UP 1 first\n")
            await killed_and_begun(job, 2)
            drain = p.Drain(UID, 2, "claim-2", "scale", durable=False, grace_seconds=500.0)
            assert isinstance(await job.call(job[0], drain), p.Accepted)
            await job.until(job[0], lambda r: r.round == 2 and r.state == "drained", "never drained")
            events = [(e["event"], e.get("round")) for e in job[0].events()]
            assert ("worker_started", 2) not in events
            assert ("worker_not_started", 2) in events

    asyncio.run(body())


@pytest.mark.parametrize(
    ("recorded", "imported"),
    [
        ("heavy-1.0", ""),
        pytest.param("heavy-1.0.dist-info", " heavy", marks=pytest.mark.long(law=PIP_RECORDED)),
    ],
)
def test_a_folder_is_one_of_installed_packages_where_pip_has_recorded_what_it_put_there(recorded, imported, folder):
    async def body():
        async with running(folder, 1, python(folder), **prepared(folder, place="target")) as job:
            (folder / "target" / recorded).mkdir()
            await job.begin(1, job[0])
            await learned(job[0])
            await killed_and_begun(job, 2)
            await seen(job[0], f"UP 2 first{imported}\n")

    asyncio.run(body())


def test_a_module_that_was_edited_is_imported_anew(folder):
    async def body():
        async with running(folder, 1, python(folder), **prepared(folder)) as job:
            await job.begin(1, job[0])
            await learned(job[0])
            (folder / "site-packages" / "heavy" / "__init__.py").write_text("VALUE = 'edited'")
            await killed_and_begun(job, 2)
            await seen(job[0], "UP 2 edited heavy\n")
            (why,) = [event["why"] for event in job[0].events() if event["event"] == "imported_again"]
            assert why == f"{folder}/site-packages/heavy/__init__.py has changed"

    asyncio.run(body())


@pytest.mark.parametrize(
    ("package", "why"),
    [
        ("ranked", "it reads the variable RANK when it is imported"),
        pytest.param("threaded", "it has 2 threads", marks=pytest.mark.long(law=LEFT_OUT)),
    ],
)
def test_a_package_that_must_not_be_imported_before_the_fork_is_left_out(package, why, folder):
    async def body():
        async with running(folder, 1, python(folder), **prepared(folder, more=package)) as job:
            await job.begin(1, job[0])
            await learned(job[0])
            await killed_and_begun(job, 2)
            await seen(job[0], "UP 2 first heavy\n")
            assert [e["left_out"] for e in job[0].events() if e["event"] == "script_parent"][-1] == {package: why}

    asyncio.run(body())


@pytest.mark.parametrize(
    ("command", "why"),
    [
        pytest.param(
            ["bash", "-c", "true; exec python3 -I -c 'print(1)'"], SILENT, marks=pytest.mark.long(law=PLAINLY)
        ),
        ([sys.executable, "-I", "-c", "print(1)"], "with -I Python is isolated"),
        pytest.param(["./python3", "-c", "print(1)"], SILENT, marks=pytest.mark.long(law=PLAINLY)),
    ],
)  # fmt: skip
def test_where_it_can_not_be_warm_it_starts_plainly_and_says_why(command, why, folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "python3").write_text(f'#!/bin/sh\nunset PYTHONPATH\nexec {sys.executable} "$@"\n')
    (folder / "python3").chmod(0o755)

    async def body():
        async with running(folder, 1, ["--", *command], **prepared(folder)) as job:
            await job.begin(1, job[0])
            await job.until(job[0], lambda report: report.state == "succeeded", "it never ran")
            await job.until(job[0], lambda report: report.warm_start_disabled_reason == why, "it is never said")

    asyncio.run(body())


def test_a_replica_is_ready_once_what_is_to_be_preloaded_is_imported(folder):
    environment = prepared(folder)
    (folder / "site-packages" / "heavy" / "__init__.py").write_text(
        f"import os, time\nopen({str(folder / 'begun')!r}, 'w')\n"
        f"while not os.path.exists({str(folder / 'go')!r}): time.sleep(0.02)\nVALUE = 'late'"
    )
    environment["CONCERTINA_WARM_START"] = json.dumps({"enabled": True, "preload": ["heavy"]})

    async def body():
        job = Job(folder, 1, python(folder), **environment)
        try:
            job[0].start()
            await job.until(job[0], lambda report: True)
            async with asyncio.timeout(GIVE_UP):
                while not (folder / "begun").exists():
                    await asyncio.sleep(0.02)
            assert not job[0].report.ready
            (folder / "go").touch()
            await job.ready()
            await job.begin(1, job[0])
            await seen(job[0], "UP 1 late heavy\n")
        finally:
            await job.stop()

    asyncio.run(body())


def test_a_replica_with_nothing_to_import_is_ready_before_its_parent(folder):
    (folder / "slow").mkdir()
    slow = folder / "slow" / "python3"
    slow.write_text(f'#!/bin/sh\nwhile [ ! -e {folder}/go ]; do sleep 0.02; done\nexec {sys.executable} "$@"\n')
    slow.chmod(0o755)

    async def body():
        async with running(folder, 1, ["--", str(slow), str(folder / "script.py")], **prepared(folder)) as job:
            await job.begin(1, job[0])
            assert not job[0].worker_pids()
            (folder / "go").touch()
            await seen(job[0], "UP 1 first\n")
            assert job[0].report.warm_start_disabled_reason == ""

    asyncio.run(body())


def test_what_can_not_be_preloaded_is_said_and_the_rest_is_warm(folder):
    environment = prepared(folder)
    environment["CONCERTINA_WARM_START"] = json.dumps({"enabled": True, "preload": ["misspelt", "heavy"]})

    async def body():
        async with running(folder, 1, python(folder), **environment) as job:
            await job.begin(1, job[0])
            await seen(job[0], "UP 1 first heavy\n")
            report = await job.until(job[0], lambda report: report.warm_start_skipped_modules, "it is never said")
            assert report.warm_start_skipped_modules == "misspelt (ModuleNotFoundError: No module named 'misspelt')"
            assert not report.warm_start_disabled_reason

    asyncio.run(body())


@pytest.mark.parametrize("way", [pytest.param("python", marks=pytest.mark.long(law=LEARNED)), "a shell line"])
def test_a_new_replica_is_ready_once_it_has_imported_what_others_have_learned(way, folder, monkeypatch):
    monkeypatch.chdir(folder)
    environment = {
        **prepared(folder, more="ranked"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    line = "export HF_HOME=$PWD; cd site-packages; if true; then python -u ../script.py; fi"
    command = python(folder) if way == "python" else ["--", "bash", "-c", line]

    async def body():
        job = Job(folder, 2, command, **environment)
        try:
            job[0].start()
            await job.until(job[0], lambda report: report.ready, "never ready")
            job.coordinator = job[0].address
            await job.begin(1, job[0])
            await learned(job[0])
            job[1].start()
            await job.until(job[1], lambda report: report.ready, "never ready")
            (parent,) = [event for event in job[1].events() if event["event"] == "script_parent"]
            assert parent["learned"] > 0
            assert parent["left_out"] == {"ranked": "it reads the variable RANK when it is imported"}
            await job.begin(2, *job.replicas.values())
            await seen(job[1], "UP 2 first heavy\n")
        finally:
            await job.stop()

    asyncio.run(body())


@pytest.mark.long(law=LEARNED)
def test_a_replica_that_stands_by_learns_what_the_others_learn_later(folder):
    async def body():
        job = Job(folder, 2, python(folder), **prepared(folder))
        job.coordinator = job[0].address
        try:
            for replica in job.replicas.values():
                replica.start()
            await job.ready()
            await job.begin(1, job[0])
            await learned(job[1])
            assert not job[1].worker_pids()
            assert job[1].report.ready
        finally:
            await job.stop()

    asyncio.run(body())


def test_a_parent_that_was_killed_is_followed_by_another(folder):
    async def body():
        async with running(folder, 1, python(folder), **prepared(folder)) as job:
            await job.begin(1, job[0])
            await seen(job[0], "UP 1 first\n")
            await learned(job[0])
            for pid in warm_parents(job[0]):
                os.kill(pid, signal.SIGKILL)
            await learned(job[0], times=2)
            await killed_and_begun(job, 2)
            await seen(job[0], "UP 2 first heavy\n")
            for pid in warm_parents(job[0]):
                os.kill(pid, signal.SIGKILL)
            await job.until(job[0], lambda r: r.round == 2 and r.failures, "the worker of the killed parent still runs")
            await job.begin(3, job[0])
            await seen(job[0], "UP 3 first heavy\n")

    asyncio.run(body())


def test_an_agent_in_one_file_as_pods_have_it_starts_warm(folder):
    built = main.install(folder)
    path = str(folder / "site-packages")
    environment = {**prepared(folder), "PYTHONPATH": path}

    async def body():
        job = Job(folder, 1, python(folder), **environment)
        job[0].program = [sys.executable, str(built)]
        try:
            job[0].start()
            await job.ready()
            await job.begin(1, job[0])
            await learned(job[0])
            await killed_and_begun(job, 2)
            await seen(job[0], "UP 2 first heavy\n")
        finally:
            await job.stop()

    asyncio.run(body())


TORCH = """
import os, sys
imported = "torch" in sys.modules
import time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters())
while True:
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
    print("STEP of round", os.environ["TORCHELASTIC_RESTART_COUNT"], "imported", imported, time.time(), flush=True)
    time.sleep(0.2)
"""


@pytest.mark.long(
    law="tests/train/scripts/test_unmodified.py::test_an_unmodified_script_survives_and_is_resized_warm[fsdp.py]"
)
def test_a_torch_script_that_was_killed_trains_again_without_importing_torch(folder):
    environment = prepared(folder)
    (folder / "script.py").write_text(TORCH)

    async def body():
        async with running(folder, 2, python(folder), **environment) as job:
            await job.begin(1, job[0], job[1])
            await asyncio.gather(*(seen(replica, "STEP of round 1 imported False") for replica in (job[0], job[1])))
            os.kill(job[1].worker_pids()[1], signal.SIGKILL)
            await job.until(job[0], lambda report: report.failures, "the failure is never told")
            await job.begin(2, job[0], job[1])
            await asyncio.gather(*(seen(replica, "STEP of round 2 imported True") for replica in (job[0], job[1])))

    asyncio.run(body())
