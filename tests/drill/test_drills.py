"""Every scenario of `concertina drill`, run with the real command on the local cluster, one after the other."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from builders import pages
from builders.cluster import drills
from builders.until import until
from concertina.cli.main import app
from concertina.demo.stage import Stage
from concertina.drill.scenarios import SCENARIOS

PODS = "tests/cluster/operator/pods"
REFUSALS = "tests/unit/plan/pods/test_refusals.py"
RECOVERY = "tests/cluster/operator/recovery"
VERDICTS = "tests/simulation/stories/test_verdicts.py"
DRILL = "tests/unit/cli/test_drill.py"
HEARD = "tests/unit/agents/test_connections.py"
SAME = {
    "kill-node": f"{RECOVERY}/test_faults.py::test_a_node_that_dies_without_a_word_and_comes_back[OnFailure]",
    "notice": "tests/cluster/operator/rounds/test_notices.py::test_a_taint_a_cordon_a_drain_and_a_deletion",
    "kill-coordinator": f"{PODS}/test_pods.py::test_a_sidecar_that_never_ends_holds_up_neither_success_nor_replacement",
    "operator-kill": "tests/cluster/operator/controller/test_restarts.py::test_killed_between_any_two_writes[0]",
    "stop-node": f"{RECOVERY}/test_faults.py::test_a_node_that_dies_without_a_word_and_comes_back",
    "apiserver-restart": f"{RECOVERY}/test_faults.py::test_an_api_server_that_is_restarted",
    "hang": "tests/simulation/stories/test_verdicts.py::test_a_hang_is_found_and_its_replica_replaced_or_only_reported",
    "straggle": f"{VERDICTS}::test_a_straggler_is_found_and_replaced_where_that_is_wanted",
    "operator-stop": f"{HEARD}::test_time_in_which_the_operator_stood_still_does_not_count_against_an_agent",
    "refused-pods": f"{REFUSALS}::test_a_job_that_trains_goes_on_and_a_person_is_told_once",
    "hostile-agent": f"{DRILL}::test_a_flood_is_what_an_operator_takes",
    "long-queue": f"{DRILL}::test_the_tenants_of_a_drill_go_however_it_ends[a-queue]",
}
"""Test of the gate that injects the same fault without the command, by scenario. The gate runs the other scenarios by
the command."""
PLAYED = [
    pytest.param(name, marks=[pytest.mark.long(law=SAME[name])] if name in SAME else [])
    for name, scenario in SCENARIOS.items()
    if not isinstance(scenario.local, str) and name != "faulty-node"  # test_faulty_node.py
]


@pytest.mark.parametrize("scenario", PLAYED)
def test_the_drill_passes(drill: Callable[[str], Any], scenario: str, stage: Stage, job: str) -> None:
    verdict = drill(scenario)
    assert verdict["passed"], verdict["reasons"]
    drills.each_second_is_in_one_class(stage.job(job))


@pytest.mark.long(law=SAME["kill-node"])
def test_the_drill_of_the_page_passes(stage: Stage, job: str) -> None:
    [words] = pages.commands("drills.md", "concertina drill demo", {"demo": job})
    command = [str(Path(sys.executable).parent / words[0]), *words[1:]]
    environment = os.environ | {"KUBECONFIG": str(stage.cluster.kubeconfig)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS" in done.stdout


@contextmanager
def interrupted(stage: Stage, job: str, scenario: str, done: str) -> Iterator[str]:
    """Run a drill, and yield what the pattern `done` finds in its output. Send Ctrl-C at the end of the block."""
    command = [sys.executable, "-m", "concertina.cli", "drill", job, "--scenario", scenario]
    environment = os.environ | {"KUBECONFIG": str(stage.cluster.kubeconfig)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as playing:
        assert playing.stderr is not None
        (match,) = next(match for line in playing.stderr if (match := re.findall(done, line)))
        yield match
        playing.send_signal(signal.SIGINT)
        assert playing.wait(timeout=120) == 130


def test_ctrl_c_heals_what_was_hurt(stage: Stage, job: str) -> None:
    with interrupted(stage, job, "stop-node", r"stopped node (\S+)") as node:
        process = stage.cluster.running()[node]
        assert process is not None
        # A SIGSTOP takes effect when the process is next scheduled, after kill() has returned.
        until(lambda: state(process.pid) == "T", "a stopped node process", lambda: state(process.pid))
    assert state(process.pid) != "T"
    whole(stage, job)


@pytest.mark.long(law="tests/drill/test_drills.py::test_ctrl_c_heals_what_was_hurt")
def test_ctrl_c_takes_the_webhook_away(stage: Stage, job: str) -> None:
    hooks = ("get", "validatingwebhookconfigurations", "-o", "name")
    with interrupted(stage, job, "refused-pods", r"deleted (\S+)"):
        assert stage.job(job)["metadata"]["uid"] in stage.cluster.kubectl(*hooks)
    assert stage.cluster.kubectl(*hooks) == ""
    whole(stage, job)


def whole(stage: Stage, job: str) -> None:
    until(
        lambda: stage.job(job)["status"]["world"]["size"] == "3/3",
        "a world of three again",
        lambda: json.dumps(stage.job(job)["status"]),
    )


def state(pid: int) -> str:
    """Return the state of a process as in /proc: R, S, T (stopped), ..."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def refusal(scenario: str, kubeconfig: str, *options: str) -> str:
    without = dict.fromkeys(name for name in os.environ if name.startswith("CONCERTINA_DRILL_"))
    command = ["drill", "some-job", "--scenario", scenario, *options]
    done = CliRunner().invoke(app, command, env={"KUBECONFIG": kubeconfig, **without})
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit)
    assert done.stdout == ""
    return done.stderr


def test_what_is_not_a_local_cluster_is_left_alone(tmp_path: Path) -> None:
    """Nothing listens at the address: the drill is refused before any request is sent."""
    kubeconfig = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}],
        "users": [{"name": "c", "user": {}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
    }
    (tmp_path / "config").write_text(json.dumps(kubeconfig))
    assert "Add --yes" in refusal("kill-worker", str(tmp_path / "config"))
    assert "CONCERTINA_DRILL_NODE_KILL" in refusal("kill-node", str(tmp_path / "config"), "--yes")


@pytest.mark.long(law="tests/unit/cli/test_drill.py::test_every_scenario_can_be_played_or_says_why")
def test_what_the_local_cluster_cannot_do_is_said(stage: Stage) -> None:
    for scenario in ("partition", "operator-partition"):
        assert "On real kubelets" in refusal(scenario, str(stage.cluster.kubeconfig))
