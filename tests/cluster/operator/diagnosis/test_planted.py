"""Problems that are planted in real runs: the commands of docs/diagnosis.md find them, and their alerts fire.

The other problems, and a run without a problem, are in the long files of this folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from builders import pages
from builders.cluster.operator_process import Jobs
from builders.cluster.planted import SECONDS, Alerts, bundled, diagnosed, fault, follow, past, problems, run
from builders.prometheus import FOUND as PROMETHEUS
from builders.prometheus import needed
from concertina.cli.diagnose import FOUND
from concertina.diagnosis.problems import Problem

pytestmark = pytest.mark.timeout(600)
REFUSED = "tests/unit/cli/test_evidence.py::test_what_is_no_job_is_refused_in_a_sentence"
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
    bundled(jobs, data, "reads-slowly", fault(faults, "0 read_slowly 0.3"))
    jobs.create("tells-nan", REPORTS_NAN)
    return jobs


SECTION, SLOW = "A slow reader", "reads-slowly"
NAN = "tells-nan"
ALERT_OF = {SLOW: Problem.INPUT_BOTTLENECK, NAN: Problem.LOSS_NAN}
"""Alert of each job."""


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


def by_files(shell: Mapping[str, str], name: str, folder: Path) -> Object:
    """Run the page's commands about files, and return what the command measured."""
    values = {"JOB": name, "--json": f"--seconds {SECONDS} --json"}
    commands = pages.commands("diagnosis.md", "kubectl get tj JOB -o yaml", values)
    done = [run(shell, f"cd {folder} && {' '.join(words)}") for words in commands]
    assert [each.returncode for each in done] == [0, FOUND, FOUND, FOUND], done
    assert all(f"1. {Problem.INPUT_BOTTLENECK}" in each.stdout for each in done[2:])
    measured: Object = json.loads((folder / "measured.json").read_text())
    return measured


Asked = Mapping[str, Future[Any]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the files that the gate's commands write."""
    return tmp_path_factory.mktemp("asked")


@pytest.fixture(scope="module")
def asked(planted: Jobs, shell: Mapping[str, str], files: Path) -> Iterator[Asked]:
    """Run all commands of the gate's tests at once, because most of their time is waiting."""
    reader = reads_jobs_alone(planted, shell, files / "reader")

    past(planted, SLOW, 20)
    past(planted, NAN, 40)
    coordinator = planted.members(planted.get(SLOW))[0]
    with ThreadPoolExecutor(5) as beside:
        yield {
            "followed": beside.submit(follow, shell, SECTION, SLOW, coordinator),
            "slow": beside.submit(by_files, shell, SLOW, files),
            "nan": beside.submit(diagnosed, shell, NAN),
            "reader": beside.submit(diagnosed, reader, SLOW),
            "page": beside.submit(written, shell, files / "page.html"),
        }


def test_what_is_planted_is_found(asked: Asked) -> None:
    asked["followed"].result()


@needed
@pytest.mark.parametrize("name", ALERT_OF)
def test_its_alert_fires_and_no_other(asked: Asked, alerts: Alerts, name: str) -> None:
    alerts.wait(name, ALERT_OF[name])


def test_what_was_seen_is_told_and_a_file_of_it_tells_the_same(
    asked: Asked, shell: Mapping[str, str], files: Path
) -> None:
    """The file may be written by kubectl, or by the command itself with its two readings."""
    slow, nan = (asked[key].result() for key in ("slow", "nan"))
    assert [problems(each) for each in (slow, nan)] == [[Problem.INPUT_BOTTLENECK], [Problem.LOSS_NAN]]
    assert any(sentence.startswith("time of the last ") for sentence in slow["saw"])
    assert "agents asked: 1" in slow["saw"]
    assert slow["findings"][0]["lost"] > 0.1, "0.3 s of each step; a busy machine makes the rest of a step longer"

    assert diagnosed(shell, str(files / "measured.json"))["findings"] == slow["findings"]


def test_who_may_read_the_job_alone_is_told_what_is_missing(asked: Asked) -> None:
    answer = asked["reader"].result()
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
    elements = Elements(asked["page"].result())
    assert not elements.loads
    assert not {"script", "link", "img", "iframe", "object"} & set(elements.tags)
    assert elements.tags.count("polyline") == 3, "world, loss and seconds of steps"
    for text in (f"Run {jobs.namespace}/reads-slowly", "InputBottleneck", "Training was never interrupted", "input"):
        assert text in elements.text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("diagnose nothing", '"nothing" not found'),
        *(
            pytest.param(*case, marks=pytest.mark.long(law=REFUSED))
            for case in [
                ("report nothing", '"nothing" not found'),
                ("diagnose ./nothing.yaml", "nothing.yaml can't be read: No such file or directory"),
                ("diagnose - <<< 'kind: Pod'", "standard input holds no TrainingJob"),
                ("diagnose - <<< '{\"record\": {}}'", "is not output of `concertina diagnose --json`"),
            ]
        ),
    ],
)
def test_what_can_t_be_looked_at_is_said(shell: Mapping[str, str], arguments: str, sentence: str) -> None:
    done = run(shell, f"concertina {arguments}")
    assert sentence in done.stderr
    assert (done.returncode, done.stdout) == (1, "")
