"""The concertina command against a real API server: its output and its exit status."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from builders import pages
from builders.cluster.cli import DEMO, GIVE_UP, NOW, ROOT, Cli, status
from concertina.api.restarts import LastFailure
from concertina.api.status import JobStatus, rfc3339


def test_run_status_suspend_resume_scale(cli: Cli) -> None:
    assert "has no TrainingJobs" in cli("status").stdout
    assert "demo is applied, generation 1" in cli("run", str(DEMO), "--detach").stdout
    assert "the operator has not seen it yet" in cli("status", "demo").stdout
    assert "generation 1" in cli("run", "-", "--detach", stdin=DEMO.read_text()).stdout, "nothing has changed"

    cli.write("demo", status("Running", "3 of 3 replicas train", "Running"))
    row = cli("status").stdout.splitlines()[1].split()
    assert row[:5] == ["demo", "Running", "3/3", "100", "25%"]
    detail = cli("status", "demo").stdout
    assert "3 of 3 replicas train" in detail
    assert "step 100 of 400" in detail
    assert "tokens/s 4,321" in detail

    assert "stops after its current step" in cli("suspend", "demo").stdout
    assert "suspended already" in cli("suspend", "demo").stdout
    assert cli.kubectl("get", "tj", "demo", "-o", "jsonpath={.spec.suspend}") == "true"
    assert "demo continues" in cli("resume", "demo").stdout
    assert cli.kubectl("get", "tj", "demo", "-o", "jsonpath={.spec.suspend}") == "false"
    assert "wants 5 replicas (before: 3)" in cli("scale", "demo", "5").stdout
    assert cli.kubectl("get", "tj", "demo", "-o", "jsonpath={.spec.replicas}") == "5"


def test_what_goes_wrong_is_one_sentence_and_exit_1(cli: Cli, tmp_path: Path) -> None:
    two = tmp_path / "two.yaml"
    two.write_text("kind: Secret\n---\nkind: TrainingJob\n")
    wrong = DEMO.read_text().replace("minReplicas: 2", "minReplicas: 4")
    cases: list[tuple[subprocess.CompletedProcess[str], str]] = [
        (cli("status", "nothing"), '"nothing" not found'),
        (cli("suspend", "nothing"), '"nothing" not found'),
        (cli("logs", "nothing"), '"nothing" not found'),
        (cli("run", str(tmp_path / "none.yaml")), "can't be read: No such file or directory"),
        (cli("run", str(two)), "must hold one TrainingJob, and it holds Secret, TrainingJob"),
        (cli("run", "-", stdin="a: ["), "standard input is not YAML"),
        (cli("run", "-", stdin=wrong), "elastic.minReplicas is larger than replicas"),
        (
            cli("run", "-", stdin=DEMO.read_text().replace("minReplicas", "minReplica")),
            "minReplica: field not declared",
        ),
        (cli("run", "-", stdin=DEMO.read_text().replace("v1beta1", "v9")), "this concertina knows concertina.dev/v1"),
        (cli("status", "--kubeconfig", str(tmp_path / "none")), "There is no cluster to connect to"),
    ]
    for done, sentence in cases:
        assert sentence in done.stderr
        assert "Traceback" not in done.stderr
        assert (done.returncode, done.stdout) == (1, "")


@pytest.mark.parametrize("launcher", ["Agent", "Torchrun"])
@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"nodeSelectorr": {"a": "b"}}, ".spec.template.spec.nodeSelectorr: field not declared in schema"),
        ({"activeDeadlineSeconds": -1}, "spec.activeDeadlineSeconds: Invalid value: -1"),
    ],
    ids=["a typo", "a value"],
)
def test_a_template_that_makes_no_pod_is_refused_before_it_is_applied(
    cli: Cli, launcher: str, wrong: dict[str, Any], sentence: str
) -> None:
    job = yaml.safe_load((ROOT / "examples" / "own-command.yaml").read_text())
    job["spec"] |= {"launcher": launcher}
    name = job["metadata"]["name"]
    cli("run", "-", "--detach", stdin=json.dumps(job))
    before = cli.kubectl("get", "tj", name, "-o", "jsonpath={.metadata.generation}")
    job["spec"]["suspend"] = True
    assert cli("run", "-", "--detach", stdin=json.dumps(job)).returncode == 0
    job["spec"]["template"]["spec"] |= wrong
    done = cli("run", "-", "--detach", stdin=json.dumps(job))
    assert (done.returncode, done.stdout) == (1, "")
    assert sentence in done.stderr
    assert cli.kubectl("get", "tj", name, "-o", "jsonpath={.metadata.generation}") == str(int(before) + 1)
    assert cli.kubectl("get", "pods", "-o", "name") == ""


def test_what_a_policy_says_to_the_caller_does_not_stop_it(cli: Cli) -> None:
    """A policy may treat the operator otherwise than the caller."""
    cli.kubectl("label", "ns", cli.namespace, "pod-security.kubernetes.io/enforce=restricted")
    assert "is applied" in cli("run", str(DEMO), "--detach").stdout


@pytest.mark.parametrize(("end", "code"), [("Complete", 0), ("Failed", 1)])
def test_run_follows_to_the_end(cli: Cli, end: str, code: int) -> None:
    with cli.start("run", str(DEMO)) as following:
        assert following.stdout
        assert "is applied" in following.stdout.readline()
        assert "Unseen" in following.stdout.readline()
        cli.write("demo", status("Running", "3 of 3 replicas train"))
        assert following.stdout.readline() == "Running 3/3 3 of 3 replicas train step 100 (25%) loss 2.5\n"
        cli.write("demo", status(end, "it is over", end))
        assert "it is over" in following.stdout.readline()
        assert following.wait(GIVE_UP) == code


def test_following_ends_with_the_job(cli: Cli) -> None:
    cli("run", str(DEMO), "--detach")
    with cli.start("status", "demo", "--follow") as following:
        assert following.stdout
        following.stdout.readline()
        cli.kubectl("delete", "tj", "demo")
        assert "was deleted" in following.stdout.read()
        assert following.wait(GIVE_UP) == 1


def test_ctrl_c_stops_following_and_not_the_job(cli: Cli) -> None:
    with cli.start("run", str(DEMO)) as following:
        assert following.stdout
        following.stdout.readline()
        assert "Unseen" in following.stdout.readline()
        following.send_signal(signal.SIGINT)
        assert "The job continues" in following.stdout.read()
        assert following.wait(GIVE_UP) == 130
    assert cli.kubectl("get", "tj", "demo", "-o", "jsonpath={.spec.suspend}") == "false"


def replica(index: int, script: str, restarts: str = "Never") -> dict[str, Any]:
    """Create a pod as the operator would."""
    labels = {"concertina.dev/job": "demo", "concertina.dev/replica-index": str(index)}
    container = {"name": "trainer", "image": "concertina/trainer", "command": ["sh", "-c", script]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"demo-{index}-0", "labels": labels},
        "spec": {"restartPolicy": restarts, "containers": [container]},
    }


@pytest.mark.long(law="tests/cluster/cli/test_commands.py::test_logs_by_rank_and_round_and_since_a_failure")
def test_logs(cli: Cli, tmp_path: Path) -> None:
    """The logs include those of a replica that starts later, and of a container that is restarted."""
    once = f"until [ -e {tmp_path}/1 ]; do sleep 0.05; done; [ -e {tmp_path}/2 ] || {{ touch {tmp_path}/2; exit 1; }}"
    cli("run", str(DEMO), "--detach")
    assert "no replicas with a log yet" in cli("logs", "demo").stderr
    cli.kubectl("apply", "-f", "-", stdin=json.dumps(replica(0, "echo one; echo two")))
    with cli.start("logs", "demo", "--follow") as following:
        assert following.stdout
        assert following.stdout.readline() == "demo-0-0 | one\n"
        assert following.stdout.readline() == "demo-0-0 | two\n"
        cli.kubectl("apply", "-f", "-", stdin=json.dumps(replica(1, f"echo later; {once}", "OnFailure")))
        assert following.stdout.readline() == "demo-1-0 | later\n"
        (tmp_path / "1").touch()
        assert following.stdout.readline() == "demo-1-0 | later\n", "again"
        cli.write("demo", status("Complete", "all done", "Complete"))
        assert following.stdout.read() == ""
        assert following.wait(GIVE_UP) == 0
    assert cli("logs", "demo").stdout == "demo-0-0 | one\ndemo-0-0 | two\ndemo-1-0 | later\n"
    assert cli("logs", "demo", "--replica", "0", "--tail", "1").stdout == "demo-0-0 | two\n"
    assert "no replica 7 with a log yet" in cli("logs", "demo", "-r", "7").stderr


def started(round: int, rank: int) -> str:
    """Return the line in which an agent says that its worker runs, as the shell prints it."""
    fact = {"t": 1.5, "event": "worker_started", "round": round, "rank": rank}
    return f"echo '{json.dumps(fact, separators=(',', ':'))}'"


def test_logs_by_rank_and_round_and_since_a_failure(cli: Cli, tmp_path: Path) -> None:
    """Each pod prints in two rounds, alternating with the other pod. Between the rounds its rank has changed."""

    def turn(number: int, *words: str) -> str:
        """Return a shell command that waits for this turn, runs `words`, and lets the next turn begin."""
        wait = f"until [ -e {tmp_path}/{number} ]; do sleep 0.05; done"
        return "; ".join([wait, *words, f"sleep 0.05; touch {tmp_path}/{number + 1}"])

    (tmp_path / "0").touch()
    cli("run", str(DEMO), "--detach")
    first = f"{turn(0, started(1, 0), 'echo a')}; {turn(2, started(2, 1), 'echo c')}"
    second = f"{turn(1, started(1, 1), 'echo b')}; {turn(3, started(2, 0), 'echo d')}; sleep 60"
    for index, script in enumerate((first, second)):
        cli.kubectl("apply", "-f", "-", stdin=json.dumps(replica(index, script)))
    whole, follow, of_round, since_failure, as_json = (
        words[1:] for words in pages.commands("cli.md", "concertina logs demo", {})
    )
    with cli.start(*follow) as following:
        assert following.stdout
        while "rank 0 | d" not in following.stdout.readline():
            pass
        following.send_signal(signal.SIGINT)
        following.wait(GIVE_UP)

    def said(*command: str) -> list[str]:
        return [line for line in cli(*command).stdout.splitlines() if "worker_started" not in line]

    lines = ["demo-0-0 rank 0 | a", "demo-1-0 rank 1 | b", "demo-0-0 rank 1 | c", "demo-1-0 rank 0 | d"]
    assert said(*whole) == lines, "by time"
    assert said(*of_round) == lines[2:]
    assert said(*whole, "--rank", "0", "--round", "2") == ["demo-1-0 rank 0 | d"]
    entries = map(json.loads, said(*as_json))
    where = [[entry[name] for name in ("job", "replica", "round", "rank", "text")] for entry in entries]
    assert where[1] == ["demo", "demo-1-0", 1, 1, "b"]
    assert len(where) == len(lines)

    assert "has had no failure" in cli(*since_failure).stderr
    before = LastFailure(
        at=rfc3339(1_700_000_000), round=1, replica="demo-2-0", reason="R", message="it died.", last_lines=("its last",)
    )
    cli.write("demo", JobStatus(last_failure=before))
    gone = cli(*since_failure)
    assert gone.stdout.splitlines()[0] == "demo-2-0 | its last"
    assert "demo-2-0, which failed (it died), has no log anymore" in gone.stderr
    assert len(gone.stdout.splitlines()) > 1, "what comes after it"
    cli.write("demo", JobStatus(last_failure=before.model_copy(update={"at": rfc3339(4_000_000_000)})))
    assert cli("logs", "demo", "--since-failure").stdout.splitlines() == ["demo-2-0 | its last"]


def test_top_and_the_events_of_a_job(cli: Cli) -> None:
    assert cli("top", "--once").stdout.startswith("0 jobs")
    cli("run", str(DEMO), "--detach")
    cli("run", "-", "--detach", stdin=DEMO.read_text().replace("name: demo", "name: other", 1))
    cli.write("demo", status("Training", "3 of 3 replicas train", "Running"))
    cli.kubectl("label", "tj", "demo", "team=red")
    lines = cli("top", "--once", "--group-by", "team").stdout.splitlines()
    assert lines[0].startswith("2 jobs: 1 waiting, 1 training")
    assert [line.split()[:3] for line in lines[2:]] == [["(none)", "other", "Unseen"], ["red", "demo", "Training"]]
    assert [each["name"] for each in json.loads(cli("top", "-o", "json").stdout)] == ["other", "demo"]
    assert "--sort must be one of attention" in cli("top", "--sort", "size").stderr

    uid = cli.kubectl("get", "tj", "demo", "-o", "jsonpath={.metadata.uid}")
    about = {"apiVersion": "concertina.dev/v1beta1", "kind": "TrainingJob", "name": "demo", "namespace": cli.namespace}
    event = {
        "apiVersion": "v1", "kind": "Event", "metadata": {"name": "demo.1"}, "involvedObject": {**about, "uid": uid},
        "type": "Warning", "reason": "MemberLost", "message": "demo-2-0 fell silent", "count": 3, "lastTimestamp": NOW,
    }  # fmt: skip
    cli.kubectl("create", "-f", "-", stdin=json.dumps(event))
    detail = cli("status", "demo").stdout
    (line,) = (line for line in detail.splitlines() if "MemberLost" in line)
    assert line.split()[:4] == ["Warning", "3", "x", "MemberLost"]
    assert "demo-2-0 fell silent" in line
    assert detail.splitlines()[-1].startswith("Next  nothing to do")


def test_help_imports_nothing_heavy() -> None:
    heavy = ("torch", "kubernetes", "kopf", "aiohttp", "pydantic", "cryptography", "matplotlib", "asyncio")
    code = (
        "import sys; from typer.testing import CliRunner; from concertina.cli.main import app;"
        "result = CliRunner().invoke(app, ['--help']); assert 'suspend' in result.output, result;"
        f"import json; print(json.dumps(sorted(set({heavy!r}) & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=GIVE_UP)
    assert json.loads(done.stdout) == []
