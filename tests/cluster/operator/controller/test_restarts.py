"""The operator is killed and restarted at any moment: no pod is doubled, and no needless round begins."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from builders.cluster.operator_process import Jobs, Operator
from builders.until import until

SAY = "import os; print('rank', os.environ['RANK'])"
STAY = SAY + "; import time; time.sleep(3600)"
ELASTIC = {"minReplicas": 1, "scaleUp": {"stabilizationWindowSeconds": 1}}
KILLED = "tests/cluster/operator/controller/test_restarts.py::test_killed_between_any_two_writes"
Object = dict[str, Any]


def uids(pods: list[Object]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods}


@pytest.mark.long(
    law="tests/cluster/operator/controller/test_master_key.py::test_a_chart_applied_again_as_argo_cd_does_and_a_restart_change_no_round"
)
def test_a_restart_changes_nothing(jobs: Jobs, operator: Operator) -> None:
    jobs.create("a", STAY, replicas=3)
    before, pods = jobs.wait_training("a", 3), uids(jobs.pods("a"))
    operator.end(signal.SIGKILL)
    operator.start()
    # Once the operator has run another job, it has also looked at this one.
    jobs.create("b", SAY)
    jobs.wait_true("b", "Complete")
    time.sleep(4)  # This is longer than the operator waits for agents that it does not know yet.
    after = jobs.get("a")
    assert uids(jobs.pods("a")) == pods
    assert after["status"]["world"] == before["status"]["world"]
    assert jobs.condition(after, "Running")["status"] == "True"


@pytest.mark.long(law="tests/cluster/operator/controller/test_restarts.py::test_killed_between_any_two_writes[0]")
def test_what_happened_while_it_was_away_is_seen(jobs: Jobs, operator: Operator) -> None:
    for name in ("ends", "shrinks", "goes"):
        jobs.create(name, STAY, replicas=2, elastic=ELASTIC)
    for name in ("ends", "shrinks", "goes"):
        jobs.wait_training(name, 2)
    operator.end(signal.SIGKILL)
    jobs.patch("ends", {"suspend": True})
    jobs.kill_pod("shrinks-1-0")
    jobs.delete("goes")
    jobs.create("new", SAY)
    operator.start()
    jobs.wait_true("ends", "Suspended")
    jobs.wait("shrinks", lambda job: job["status"].get("rounds", 0) > 1)
    jobs.wait_training("shrinks", 2)
    jobs.wait_true("new", "Complete")
    assert jobs.gone("goes")


def test_sigterm_ends_it_cleanly_and_gives_the_lease_back(jobs: Jobs, operator: Operator) -> None:
    assert operator.end(signal.SIGTERM) == 0
    lease = jobs.cluster.api.call(
        "GET", "/apis/coordination.k8s.io/v1/namespaces/concertina-tests/leases/tests-concertina-operator"
    )
    assert not lease["spec"].get("holderIdentity")
    operator.start(POD_NAME="another-one")  # The new process need not wait until the Lease expires.
    operator.end(signal.SIGTERM)
    operator.start()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long(law=KILLED)) for seed in (1, 2, 3))])
def test_killed_between_any_two_writes(jobs: Jobs, operator: Operator, seed: int, tmp_path: Path) -> None:
    """A job starts, loses a replica, grows back and ends, under an operator that is killed again and again."""
    dice = random.Random(seed)
    marks = str(tmp_path)
    # The script ends once all three replicas have been in one world after the second start of rank 0.
    script = (
        "import os, time, pathlib; "
        f"p = pathlib.Path({marks!r}); "
        "rank, world = os.environ['RANK'], os.environ['WORLD_SIZE']; "
        "(p / f'{os.environ[\"TORCHELASTIC_RESTART_COUNT\"]}-{rank}-{world}').touch(); "
        "exec(\"while not (p / 'enough').exists(): time.sleep(0.05)\")"
    )
    jobs.create("a", script, replicas=3, elastic=ELASTIC, failurePolicy={"maxRestarts": 100})
    seen: dict[str, str] = {}

    def look() -> None:
        """Check that a replica has at most one live pod at a time, and that no name is used twice."""
        for pod in jobs.pods("a"):
            name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
            assert "deletionTimestamp" in pod["metadata"] or seen.setdefault(uid, name) == name
        live = [
            pod["metadata"]["labels"]["concertina.dev/replica-index"]
            for pod in jobs.pods("a")
            if "deletionTimestamp" not in pod["metadata"] and pod["status"]["phase"] in ("Pending", "Running")
        ]
        assert len(live) == len(set(live)), live

    for turn in range(6):
        time.sleep(dice.uniform(0.0, 1.2))
        operator.end(signal.SIGKILL)
        look()
        if turn == 3 and (pods := jobs.pods("a")):
            victim = dice.choice(pods)["metadata"]["name"]
            jobs.kill_pod(victim)
        operator.start(wait=False)
    jobs.wait_training("a", 3)
    look()
    claims = [line["claim"] for line in operator.lines("claimed", f"{jobs.namespace}/a")]
    commits = [line["round"] for line in operator.lines("committed", f"{jobs.namespace}/a")]
    assert len(claims) == len(set(claims))
    assert commits == sorted(set(commits)), "a round was committed twice"
    (Path(marks) / "enough").touch()
    jobs.wait_true("a", "Complete")


def test_a_second_operator_takes_over_from_one_that_sleeps_which_then_ends(
    jobs: Jobs, operator: Operator, tmp_path: Path
) -> None:
    """The first operator is stopped like a machine that hangs. When it continues, it has lost the Lease, and ends."""
    jobs.create("a", STAY, replicas=2)
    before = jobs.wait_training("a", 2)
    second = Operator(tmp_path, {**operator.environment, "POD_NAME": "second"})
    second.start(wait=False)
    try:
        assert operator.process is not None
        operator.process.send_signal(signal.SIGSTOP)
        until(lambda: second.lines("started"), "a second operator that works", second.text)
        operator.process.send_signal(signal.SIGCONT)
        assert operator.process.wait(timeout=60) == 1
        assert operator.lines("lease lost")
        jobs.kill_pod("a-1-0")
        after = jobs.wait_training("a", 2, past=before["status"]["world"]["round"])
        assert second.lines("claimed", f"{jobs.namespace}/a")
        assert jobs.members(before)[0] in jobs.members(after)
    finally:
        second.end(signal.SIGTERM)
        operator.start()
