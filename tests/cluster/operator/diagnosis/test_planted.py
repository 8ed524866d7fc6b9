"""Problems that are planted in real runs: the commands of docs/diagnosis.md find each of them, and its alert fires.

One run has no problem.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from builders.cluster.operator_process import Jobs
from builders.cluster.planted import LOOK_BACK, SECONDS, Alerts, bundled, fault, follow, past, run
from builders.prometheus import FOUND as PROMETHEUS
from builders.prometheus import needed
from builders.until import until
from concertina.cli.diagnose import FOUND
from concertina.diagnosis.problems import Problem

pytestmark = pytest.mark.timeout(600)
Object = dict[str, Any]
REPORTS_NAN = """
import time, trainingjob
for step in range(1, 10**6):
    trainingjob.report(step=step, loss=1 / step if step < 20 else float("nan"))
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def planted(jobs: Jobs, data: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Jobs:
    """Start the gate's planted jobs at once, observed by Prometheus if it is installed."""
    if PROMETHEUS:
        request.getfixturevalue("alerts")
    faults = tmp_path_factory.mktemp("faults")
    # On a busy machine, ranks wait for each other. Steps are so long that this stays a small part of their time.
    bundled(jobs, data, "healthy", replicas=2, pace="1.5")
    bundled(jobs, data, "reads-slowly", fault(faults, "0 read_slowly 0.3"))
    bundled(jobs, data, "one-is-slow", fault(faults, "1 slow 0.4"), pace="0.2", replicas=2)
    explodes = {"learningRate": 10.0, "weightDecay": 10.0, "warmupSteps": 0}
    bundled(jobs, data, "explodes", trainer={"optimizer": explodes})
    jobs.create("tells-nan", REPORTS_NAN)
    jobs.create("raises", "raise ValueError('no such sample')")
    absent = {"name": "trainer", "image": "concertina/trainer:test", "command": ["pyton", "train.py"]}
    jobs.create("no-command", pod={"containers": [absent]})
    jobs.create("nowhere", "pass", pod={"nodeSelector": {"disk": "absent"}})
    return jobs


GATE = {
    "Nothing is wrong": ("healthy", lambda jobs: past(jobs, "healthy", 6)),
    "A slow reader": ("reads-slowly", lambda jobs: past(jobs, "reads-slowly", 20)),
    "A slow rank": (
        "one-is-slow",
        lambda jobs: jobs.wait("one-is-slow", lambda job: job.get("status", {}).get("stragglers")),
    ),
    "A script that raises an exception": ("raises", lambda jobs: jobs.wait_true("raises", "Failed")),
    "A command that can't be started": ("no-command", lambda jobs: jobs.wait_true("no-command", "Failed")),
    "Pods that can't be scheduled": ("nowhere", lambda jobs: jobs.wait_reason("nowhere", "Waiting")),
    "The loss is not finite": ("explodes", lambda jobs: jobs.wait_true("explodes", "Failed")),
}
"""Jobs by heading, each with the condition to wait for."""
ALERT_OF = {
    "reads-slowly": Problem.INPUT_BOTTLENECK,
    "one-is-slow": Problem.STRAGGLER,
    "explodes": Problem.LOSS_NAN,
    "tells-nan": Problem.LOSS_NAN,
}
"""Alert of each job."""
TELLS_NAN = ("tells-nan", lambda jobs: past(jobs, "tells-nan", 40))


def diagnosed(shell: Mapping[str, str], what: str) -> Object:
    done = run(shell, f"concertina diagnose {what} --seconds {SECONDS} --json")
    assert done.stdout, done.stderr
    diagnosis: Object = json.loads(done.stdout)
    assert done.returncode == (FOUND if diagnosis["findings"] else 0)
    return diagnosis


def problems(found: Object) -> list[str]:
    return [finding["problem"] for finding in found["findings"]]


def reads_jobs_alone(jobs: Jobs, shell: Mapping[str, str], file: Path) -> Mapping[str, str]:
    """Return the environment of a user who may read TrainingJobs and nothing else."""
    for command in (
        "create serviceaccount reader",
        "create role reader --verb=get --resource=trainingjobs.concertina.dev",
        f"create rolebinding reader --role=reader --serviceaccount={jobs.namespace}:reader",
    ):
        assert run(shell, f"kubectl {command}").returncode == 0
    kubeconfig = yaml.safe_load(Path(shell["KUBECONFIG"]).read_text())
    (user,) = kubeconfig["users"]
    user["user"] = {"token": run(shell, "kubectl create token reader").stdout.strip()}
    file.write_text(yaml.safe_dump(kubeconfig))
    return {**shell, "KUBECONFIG": str(file)}


def written(shell: Mapping[str, str], file: Path) -> str:
    """Return the page about the slow reader."""
    done = run(shell, f"concertina report reads-slowly --out {file} --seconds {SECONDS}")
    assert done.returncode == 0, done.stderr
    return file.read_text()


@dataclass(frozen=True)
class Asked:
    ready: float
    """Unix time in seconds by which all jobs trained, or had failed."""
    found: Mapping[str, Future[Any]]


@pytest.fixture(scope="module")
def asked(planted: Jobs, shell: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    """Run all commands of the gate's tests at once, because most of their time is waiting."""
    folder = tmp_path_factory.mktemp("asked")
    reader = reads_jobs_alone(planted, shell, folder / "reader")

    for _, ready in (*GATE.values(), TELLS_NAN):
        ready(planted)
    at = time.time()
    (slow, _), (healthy, _), (nan, _) = GATE["A slow reader"], GATE["Nothing is wrong"], TELLS_NAN
    coordinator = planted.members(planted.get(slow))[0]
    with ThreadPoolExecutor(len(GATE) + 5) as beside:
        futures: dict[str, Future[Any]] = {
            section: beside.submit(follow, shell, section, name, coordinator) for section, (name, _) in GATE.items()
        }
        for key, name in {"healthy": healthy, "slow": slow, "nan": nan}.items():
            futures[key] = beside.submit(diagnosed, shell, name)
        futures["reader"] = beside.submit(diagnosed, reader, slow)
        futures["page"] = beside.submit(written, shell, folder / "page.html")
        yield Asked(at, futures)


@pytest.mark.parametrize("section", GATE)
def test_what_is_planted_is_found(asked: Asked, section: str) -> None:
    asked.found[section].result()


@needed
@pytest.mark.parametrize("name", ALERT_OF)
def test_its_alert_fires_and_no_other(asked: Asked, alerts: Alerts, name: str) -> None:
    alerts.wait(name, ALERT_OF[name])


@needed
def test_a_healthy_run_of_the_same_length_raises_none(asked: Asked, alerts: Alerts) -> None:
    """The check begins once no rule looks back at the run's start, which is not shortened as the rules are."""
    since = asked.ready + LOOK_BACK
    for name, problem in ALERT_OF.items():
        alerts.wait(name, problem)
    until(lambda: alerts.judged("healthy", since) > 10, "something to judge it by")
    assert not alerts.raised("healthy", since) | alerts.firing("healthy")


def test_what_was_seen_is_told_and_a_file_of_it_tells_the_same(
    asked: Asked, jobs: Jobs, shell: Mapping[str, str], tmp_path: Path
) -> None:
    """The file may be written by kubectl, or by the command itself with its two readings."""
    healthy, slow, nan = (asked.found[key].result() for key in ("healthy", "slow", "nan"))
    assert [problems(each) for each in (healthy, slow, nan)] == [[], [Problem.INPUT_BOTTLENECK], [Problem.LOSS_NAN]]
    assert any(sentence.startswith("time of the last ") for sentence in healthy["saw"])
    assert "agents asked: 2" in healthy["saw"]
    assert slow["findings"][0]["lost"] > 0.1, "0.3 s of each step; a busy machine makes the rest of a step longer"

    saved, record = tmp_path / "job.yaml", tmp_path / "record.json"
    saved.write_text(jobs.cluster.kubectl("get", "tj", "reads-slowly", "-n", jobs.namespace, "-o", "yaml"))
    record.write_text(json.dumps(slow))
    assert problems(diagnosed(shell, str(saved))) == [Problem.INPUT_BOTTLENECK]
    assert diagnosed(shell, str(record))["findings"] == slow["findings"]


def test_who_may_read_the_job_alone_is_told_what_is_missing(asked: Asked) -> None:
    answer = asked.found["reader"].result()
    assert problems(answer) == [Problem.INPUT_BOTTLENECK]
    assert any("the job's pods could not be listed" in sentence for sentence in answer["saw"])
    assert any("the log of reads-slowly-0-0 could not be read" in sentence for sentence in answer["saw"])


class Elements(HTMLParser):
    """Elements of a page: tags, attributes that load something, and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[object] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [each for each in attrs if re.match("src|.*href|style|on", each[0])]

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


def test_a_page_about_a_run(asked: Asked, jobs: Jobs) -> None:
    elements = Elements(asked.found["page"].result())
    assert not elements.loads
    assert not {"script", "link", "img", "iframe", "object"} & set(elements.tags)
    assert elements.tags.count("polyline") == 3, "world, loss and seconds of steps"
    for text in (f"Run {jobs.namespace}/reads-slowly", "InputBottleneck", "Training was never interrupted", "input"):
        assert text in elements.text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("diagnose nothing", '"nothing" not found'),
        ("report nothing", '"nothing" not found'),
        ("diagnose ./nothing.yaml", "nothing.yaml can't be read: No such file or directory"),
        ("diagnose - <<< 'kind: Pod'", "standard input holds no TrainingJob"),
        ("diagnose - <<< '{\"record\": {}}'", "is not output of `concertina diagnose --json`"),
    ],
)
def test_what_can_t_be_looked_at_is_said(shell: Mapping[str, str], arguments: str, sentence: str) -> None:
    done = run(shell, f"concertina {arguments}")
    assert sentence in done.stderr
    assert (done.returncode, done.stdout) == (1, "")
