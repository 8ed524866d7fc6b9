"""Steps of scripts that say nothing of themselves, counted by torch's hook: plainly and warm."""

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys

import pytest

import concertina_protocol as p
from builders.programs import PROGRAMS
from builders.train.replicas import running
from concertina_agent.settings import HOOK
from concertina_agent.workers.optimizer_steps import VARIABLE

SCRIPT = ["--", sys.executable, str(PROGRAMS / "unmodified.py")]
SHELL = ["--", "sh", "-c", f"if true; then {shlex.join(SCRIPT[1:])}; fi"]
PLAIN, WARM = ({"CONCERTINA_WARM_START": json.dumps({"enabled": warm})} for warm in (False, True))
pytestmark = pytest.mark.timeout(600)
COUNTED = "tests/train/scripts/test_steps.py::test_an_unmodified_script_has_steps_and_counts_anew_after_a_restart[warm]"


def test_steps_of_loops_as_people_write_them(folder):
    environment = {**os.environ, "PYTHONPATH": HOOK, VARIABLE: str(folder / "steps")}
    said = subprocess.run(
        [sys.executable, str(PROGRAMS / "step_kinds.py")], env=environment, capture_output=True, text=True, check=True
    )
    counted = json.loads(said.stdout.splitlines()[-1])
    # The first step of another optimizer belongs to the step that the last one began.
    assert counted == {
        "loop": 4,
        "fused": 4,
        "gan": 4,
        "critics": 9,
        "accumulation": 2,
        "scaler": 3,
        "lbfgs": 4,
        "one for each parameter": 4,
        "compiled": 4,
    }


@pytest.mark.parametrize(
    ("command", "environment"),
    [
        pytest.param(SCRIPT, PLAIN, id="plain", marks=pytest.mark.long(law=COUNTED)),
        pytest.param(SCRIPT, WARM, id="warm"),
        pytest.param(SHELL, WARM, id="behind a condition of a shell", marks=pytest.mark.long(law=COUNTED)),
    ],
)
def test_an_unmodified_script_has_steps_and_counts_anew_after_a_restart(folder, command, environment):
    async def body():
        async with running(folder, 1, command, **environment) as job:
            await job.begin(1, job[0])
            report = await job.until(job[0], lambda r: r.progress and r.progress.step >= 20, "no steps were counted")
            assert report.progress.optimizer == "SGD"
            assert report.progress.step_seconds > 0
            assert report.progress.restored_step is None, "where it continues is its own business"
            os.kill(job[0].worker_pids()[0], signal.SIGKILL)
            await job.until(job[0], lambda r: r.failures, "the end of the worker was not noticed")
            await job.begin(2, job[0])
            again = await job.until(
                job[0], lambda r: r.round == 2 and r.progress and r.progress.first_step_at, "no steps after the restart"
            )
            assert again.progress.step < 1000
            assert again.progress.first_step_at > report.progress.first_step_at

    asyncio.run(body())


@pytest.mark.long(law="tests/unit/agent/core/test_step_counts.py::test_a_round_whose_counts_stand_still_hangs")
def test_an_unmodified_script_that_hangs_is_found_by_its_steps(folder):
    async def body():
        async with running(folder, 2, [*SCRIPT, "hang"], **PLAIN) as job:
            message = job.assignment(await job.prepare(1, job[0], job[1]))
            await job.assign(p.Assign(**{**vars(message), "limits": p.Limits(hang_seconds=3.0)}))
            hang = (await job.until(job[0], lambda r: r.hang, "no hang was found")).hang
            assert hang.phase == "between steps"
            assert hang.step == 20
            assert job[0].report.progress.step == 20
            assert not job[0].report.failures, "what follows is the operator's to decide"

    asyncio.run(body())


@pytest.mark.long(law="tests/unit/agent/core/test_step_counts.py::test_a_script_that_reports_its_steps_is_not_counted")
def test_a_script_that_reports_is_not_counted(folder):
    async def body():
        async with running(folder, 1, [*SCRIPT, "report"], **PLAIN) as job:
            await job.begin(1, job[0])
            report = await job.until(job[0], lambda r: r.progress and r.progress.step > 1010, "it reports no steps")
            assert report.progress.optimizer == ""
            assert report.progress.restored_step == 1000

    asyncio.run(body())
