"""`concertina trace` of running jobs: the bundled trainer, and a script that reports its steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from builders import pages
from builders.cluster.operator_process import Jobs, bundled

pytestmark = pytest.mark.usefixtures("operator")
SCRIPT = """
import time, torch, trainingjob
for step in range(1, 1_000_000):
    torch.ones(8, 8) @ torch.ones(8, 8)
    time.sleep(0.05)
    trainingjob.report(step=step)
"""


def trace(jobs: Jobs, *options: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "concertina"), "trace", "a", "-n", jobs.namespace, *options]
    environment = os.environ | {"KUBECONFIG": str(jobs.cluster.kubeconfig)}
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


def steps_of(file: Path) -> dict[str, list[str]]:
    """Return the marks of steps in a trace by the name of their process."""
    events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    marks: dict[str, list[str]] = {}
    for event in events:
        if event["ph"] == "X" and event["name"].startswith("step "):
            marks.setdefault(names[event["pid"]], []).append(event["name"])
    return marks


def trained(jobs: Jobs, step: int) -> None:
    jobs.wait("a", lambda job: job.get("status", {}).get("progress", {}).get("step", 0) >= step)


@pytest.mark.long(law="tests/unit/cli/test_trace.py::test_all_ranks_are_asked_for_the_same_steps")
def test_all_ranks_trace_the_same_steps_and_training_goes_on(jobs: Jobs, data: Path, tmp_path: Path) -> None:
    jobs.create("a", replicas=2, **bundled(data, tmp_path / "no-fault"))
    trained(jobs, 2)
    out = tmp_path / "a-trace.json"
    [words] = pages.commands("cli.md", "concertina trace demo", {"demo": "a"})
    done = trace(jobs, *words[3:], folder=tmp_path)
    assert done.returncode == 0, done.stderr
    marks = steps_of(out)
    assert list(marks) == ["rank 0 (a-0-0)", "rank 1 (a-1-0)"]
    first, second = marks.values()
    assert first == second
    assert len(first) == 3
    events = json.loads(out.read_text())["traceEvents"]
    assert any(event.get("cat") == "cpu_op" for event in events)
    assert any(event.get("cat") == "collective" for event in events), "what the flight recorder has"
    trained(jobs, int(second[-1].split()[1]) + 1)
    assert jobs.get("a")["status"].get("rounds", 0) == 1
    refused = trace(jobs, "--ranks", "7")
    assert (refused.returncode, "ranks 0 to 1 now, and no rank 7" in refused.stderr) == (1, True)
    assert "takes 1 to 100" in trace(jobs, "--steps", "0").stderr


@pytest.mark.long(
    law="tests/unit/state/test_step_trace.py::test_it_holds_the_steps_that_were_asked_for_and_the_next_one_takes_its_turn"
)
def test_a_script_that_reports_its_steps(jobs: Jobs, tmp_path: Path) -> None:
    jobs.create("a", script=SCRIPT)
    trained(jobs, 2)
    out = tmp_path / "trace.json"
    done = trace(jobs, "--steps", "3", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert [len(marks) for marks in steps_of(out).values()] == [3]
    assert any(event["name"] == "aten::mm" for event in json.loads(out.read_text())["traceEvents"])


@pytest.mark.long(law="tests/unit/agent/core/test_drains.py::test_a_trace_that_can_not_be_is_refused")
def test_a_script_that_tells_of_no_step_has_none(jobs: Jobs) -> None:
    jobs.create("a", script="import time; time.sleep(1000)")
    jobs.wait_true("a", "Running")
    done = trace(jobs)
    assert done.returncode == 1
    assert "a script that has not yet called trainingjob.report or State.commit" in done.stderr
