"""Problems that are planted in real runs, each found by the commands of docs/diagnosis.md; and a run without any."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from builders.cluster.operator import Jobs, Operator, endless, paced
from builders.stores.hostile import proxy
from concertina.cli.diagnose import FOUND
from concertina.diagnosis.problems import Problem
from concertina.local import s3
from concertina.local.cluster import LocalCluster

pytestmark = pytest.mark.timeout(600)
Object = dict[str, Any]
ROOT = Path(__file__).resolve().parents[4]
SECONDS = "8"
LAW = "tests/cluster/operator/diagnosis/test_planted.py::test_what_is_planted_is_found[A slow reader]"
REPORTS_NAN = """
import time, trainingjob
for step in range(1, 10**6):
    trainingjob.report(step=step, loss=1 / step if step < 20 else float("nan"))
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def operator(installed: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """One whose pods serve metrics."""
    running = Operator(tmp_path_factory.mktemp("operator"), installed)
    running.start(CONCERTINA_POD_METRICS="9400")
    yield running
    running.end(signal.SIGTERM)


@pytest.fixture(scope="module")
def jobs(cluster: LocalCluster, operator: Operator) -> Iterator[Jobs]:
    """Of a namespace for all tests of this file: runs go on side by side, and pause most of the time."""
    namespace = f"t-{uuid.uuid4().hex[:8]}"
    cluster.create_namespace(namespace)
    yield Jobs(cluster, namespace)
    cluster.kubectl("delete", "namespace", namespace, "--wait=false")


@pytest.fixture(scope="module")
def shell(jobs: Jobs, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """The environment of somebody whose context is this namespace, with both commands on the path."""
    folder = tmp_path_factory.mktemp("shell")
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(jobs.cluster.kubeconfig.read_text())
    commands = (str(Path(sys.executable).parent), str(Path(jobs.cluster.record.kubectl).parent), os.environ["PATH"])
    environment = {**os.environ, "KUBECONFIG": str(kubeconfig), "PATH": os.pathsep.join(commands)}
    subprocess.run(
        ["kubectl", "config", "set-context", "--current", f"--namespace={jobs.namespace}"], env=environment, check=True
    )
    return environment


# --- the page ---------------------------------------------------------------------------------------------------------


def page() -> dict[str, list[tuple[str, str]]]:
    """By heading: commands, and what they print."""
    text = (ROOT / "docs" / "diagnosis.md").read_text().partition("\n## ")[2]
    found = {}
    for section in text.split("\n## "):
        lines = re.findall(r"^((?:concertina|kubectl) .*?) +# (.*)$", section, re.MULTILINE)
        found[section.partition("\n")[0]] = lines
    return found


PAGE = page()


def run(shell: Mapping[str, str], command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command], env=dict(shell), capture_output=True, text=True, timeout=300, check=False
    )


def follow(shell: Mapping[str, str], section: str, name: str, lead: str = "", uri: str = "") -> None:
    """Each command of a section says what the page says. `lead`: the pod with rank 0, where the section asks for it."""
    assert PAGE[section]
    for command, says in PAGE[section]:
        for word, value in {"JOB": name, "POD": lead, "URI": uri}.items():
            command = re.sub(rf"\b{word}\b", value, command)
        diagnoses = command.startswith("concertina diagnose")
        done = run(shell, f"{command} --seconds {SECONDS}" if diagnoses else command)
        print(command, done.stdout, done.stderr, sep="\n")
        assert says, f"the page says nothing of {command}"
        assert says in done.stdout + done.stderr, f"{command}: {says} is not in {done.stdout}{done.stderr}"
        if diagnoses:
            assert done.returncode == (0 if "Healthy" in says else FOUND)
            assert f"1. {says}" in done.stdout or "Healthy" in says, "it is not what costs most"


# --- runs -------------------------------------------------------------------------------------------------------------


def bundled(jobs: Jobs, data: Path, name: str, fault: Path | None = None, pace: str = "0.1", **more: Any) -> None:
    """`more`: of the spec; `trainer` is merged, `container` and `volumes` are parts of the pod."""
    trainer, container, volumes = (more.pop(key, {}) for key in ("trainer", "container", "volumes"))
    variables: Object = {"PACE": pace, **({"FAULT": fault} if fault else {})}
    pod = {"containers": [{**paced(**variables), **container}], "volumes": volumes or []}
    jobs.create(name, trainer=endless(data, **trainer), pod=pod, **more)


def fault(folder: Path, text: str) -> Path:
    path = folder / text.replace(" ", "-")
    path.write_text(text)
    return path


def past(jobs: Jobs, name: str, step: int) -> Object:
    """As soon as its status tells of this step."""
    return jobs.wait(name, lambda job: (job.get("status", {}).get("progress") or {}).get("step", 0) >= step)


@pytest.fixture(scope="module")
def planted(jobs: Jobs, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """Those of the gate, all begun at once."""
    faults = tmp_path_factory.mktemp("faults")
    bundled(jobs, data, "healthy", replicas=2, pace="0.4")
    bundled(jobs, data, "reads-slowly", fault(faults, "0 read_slowly 0.3"))
    bundled(jobs, data, "one-is-slow", fault(faults, "1 slow 0.4"), pace="0.2", replicas=2)
    explodes = {"learningRate": 10.0, "weightDecay": 10.0, "warmupSteps": 0}
    bundled(jobs, data, "explodes", trainer={"optimizer": explodes})
    jobs.create("tells-nan", REPORTS_NAN)
    return jobs


GATE = {
    "Nothing is wrong": ("healthy", lambda jobs: past(jobs, "healthy", 20)),
    "A slow reader": ("reads-slowly", lambda jobs: past(jobs, "reads-slowly", 20)),
    "A slow rank": (
        "one-is-slow",
        lambda jobs: jobs.wait("one-is-slow", lambda job: job.get("status", {}).get("stragglers")),
    ),
    "The loss is not finite": ("explodes", lambda jobs: jobs.wait_true("explodes", "Failed")),
}
"""By heading: the job, and how it is waited for."""
TELLS_NAN = ("tells-nan", lambda jobs: past(jobs, "tells-nan", 40))


def diagnosed(shell: Mapping[str, str], what: str) -> Object:
    done = run(shell, f"concertina diagnose {what} --seconds {SECONDS} --json")
    assert done.stdout, done.stderr
    found: Object = json.loads(done.stdout)
    assert done.returncode == (FOUND if found["findings"] else 0)
    return found


def problems(found: Object) -> list[str]:
    return [finding["problem"] for finding in found["findings"]]


def reads_jobs_alone(jobs: Jobs, shell: Mapping[str, str], file: Path) -> Mapping[str, str]:
    """The environment of somebody who may read TrainingJobs, and nothing else."""
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
    """The page about the slow reader."""
    done = run(shell, f"concertina report reads-slowly --out {file} --seconds {SECONDS}")
    assert done.returncode == 0, done.stderr
    return file.read_text()


Asked = Mapping[str, Future[Any]]


@pytest.fixture(scope="module")
def asked(planted: Jobs, shell: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    """What tests of the gate ask for, all at once: most of it is waiting."""
    folder = tmp_path_factory.mktemp("asked")
    reader = reads_jobs_alone(planted, shell, folder / "reader")

    for _, ready in (*GATE.values(), TELLS_NAN):
        ready(planted)
    (slow, _), (healthy, _), (nan, _) = GATE["A slow reader"], GATE["Nothing is wrong"], TELLS_NAN
    lead = planted.members(planted.get(slow))[0]
    with ThreadPoolExecutor(len(GATE) + 5) as beside:
        found: dict[str, Future[Any]] = {
            section: beside.submit(follow, shell, section, name, lead) for section, (name, _) in GATE.items()
        }
        for key, name in {"healthy": healthy, "slow": slow, "nan": nan}.items():
            found[key] = beside.submit(diagnosed, shell, name)
        found["reader"] = beside.submit(diagnosed, reader, slow)
        found["page"] = beside.submit(written, shell, folder / "page.html")
        yield found


@pytest.mark.parametrize("section", GATE)
def test_what_is_planted_is_found(asked: Asked, section: str) -> None:
    asked[section].result()


def test_what_was_seen_is_told_and_a_file_of_it_tells_the_same(
    asked: Asked, jobs: Jobs, shell: Mapping[str, str], tmp_path: Path
) -> None:
    """Both what kubectl writes, and what the command itself wrote: with its two readings."""
    healthy, slow, nan = (asked[key].result() for key in ("healthy", "slow", "nan"))
    assert [problems(each) for each in (healthy, slow, nan)] == [[], [Problem.INPUT_BOTTLENECK], [Problem.LOSS_NAN]]
    assert any(sentence.startswith("time of the last ") for sentence in healthy["saw"])
    assert "agents asked: 2" in healthy["saw"]
    assert slow["findings"][0]["lost"] > 0.4

    saved, record = tmp_path / "job.yaml", tmp_path / "record.json"
    saved.write_text(jobs.cluster.kubectl("get", "tj", "reads-slowly", "-n", jobs.namespace, "-o", "yaml"))
    record.write_text(json.dumps(slow))
    assert problems(diagnosed(shell, str(saved))) == [Problem.INPUT_BOTTLENECK]
    assert diagnosed(shell, str(record))["findings"] == slow["findings"]


def test_who_may_read_the_job_alone_is_told_what_is_missing(asked: Asked) -> None:
    found = asked["reader"].result()
    assert problems(found) == [Problem.INPUT_BOTTLENECK]
    assert any("the job's pods could not be listed" in sentence for sentence in found["saw"])
    assert any("the log of reads-slowly-0-0 could not be read" in sentence for sentence in found["saw"])


class Elements(HTMLParser):
    """Of a page: tags, attributes that load something, and text."""

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
    found = Elements(asked["page"].result())
    assert not found.loads
    assert not {"script", "link", "img", "iframe", "object"} & set(found.tags)
    assert found.tags.count("polyline") == 3, "world, loss and seconds of steps"
    for text in (f"Run {jobs.namespace}/reads-slowly", "InputBottleneck", "Training was never interrupted", "input"):
        assert text in found.text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("diagnose nothing", '"nothing" not found'),
        ("report nothing", '"nothing" not found'),
        ("diagnose ./nothing.yaml", "nothing.yaml can't be read: No such file or directory"),
        ("diagnose - <<< 'kind: Pod'", "standard input holds no TrainingJob"),
        ("diagnose - <<< '{\"record\": {}}'", "is no output of `concertina diagnose --json`"),
    ],
)
def test_what_can_t_be_looked_at_is_said(shell: Mapping[str, str], arguments: str, sentence: str) -> None:
    done = run(shell, f"concertina {arguments}")
    assert sentence in done.stderr
    assert (done.returncode, done.stdout) == (1, "")


# --- the long suite ---------------------------------------------------------------------------------------------------


@pytest.mark.long(law=LAW)
def test_batches_too_small(jobs: Jobs, shell: Mapping[str, str], data: Path) -> None:
    bundled(jobs, data, "tiny", pace="0", replicas=2, trainer={"globalBatchSize": 2})
    past(jobs, "tiny", 200)
    follow(shell, "Batches too small", "tiny")
    jobs.delete("tiny")


@pytest.mark.long(law=LAW)
def test_workers_that_are_killed(jobs: Jobs, shell: Mapping[str, str], data: Path) -> None:
    bundled(jobs, data, "killed")
    for number in range(1, 5):
        job = jobs.wait_training("killed", 1, past=number - 1)
        past(jobs, "killed", (job["status"].get("progress") or {}).get("step", 0) + 3)
        jobs.kill_worker("killed", jobs.members(job)[0])
    jobs.wait_training("killed", 1, past=4)
    follow(shell, "Workers that are killed again and again", "killed")
    jobs.delete("killed")


@pytest.mark.long(law=LAW)
def test_a_slow_store(jobs: Jobs, shell: Mapping[str, str], data: Path, tmp_path: Path) -> None:
    with (
        s3.running(tmp_path / "s3", buckets=("there",)) as storage,
        proxy(storage.environment()["AWS_ENDPOINT_URL"]) as way,
    ):
        way.delay = 4.0
        variables = {**storage.environment(), "AWS_ENDPOINT_URL": way.url}
        body = {"metadata": {"name": "slow"}, "stringData": variables}
        jobs.cluster.api.call("POST", f"/api/v1/namespaces/{jobs.namespace}/secrets", body)
        checkpoint = {"uri": "s3://there/slow-store", "everySeconds": 2, "secretName": "slow"}
        bundled(jobs, data, "slow-store", checkpoint=checkpoint)
        past(jobs, "slow-store", 60)
        follow(shell, "A slow store for checkpoints", "slow-store")
        jobs.delete("slow-store")


@pytest.mark.long(law=LAW)
def test_a_flipped_bit(jobs: Jobs, shell: Mapping[str, str], data: Path, tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/run"
    bundled(jobs, data, "saved", checkpoint={"uri": uri, "everySteps": 5}, trainer={"steps": 10})
    jobs.wait_true("saved", "Complete")
    checkpoint = jobs.get("saved")["status"]["lastCheckpoint"]["uri"]
    (shard,) = Path(checkpoint.removeprefix("file://")).glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-100] ^= 1
    shard.write_bytes(content)
    resumed = {"uri": f"file://{tmp_path}/next", "resumeFrom": uri}
    bundled(jobs, data, "flipped", checkpoint=resumed, failurePolicy={"maxRestarts": 1})
    jobs.wait_true("flipped", "Failed")
    follow(shell, "A flipped bit in a checkpoint", "flipped", uri=uri)


@pytest.mark.long(law=LAW)
def test_a_full_disk(jobs: Jobs, shell: Mapping[str, str], data: Path) -> None:
    full = {"name": "full", "emptyDir": {"medium": "Memory", "sizeLimit": "64Ki"}}
    mounted = {"volumeMounts": [{"name": "full", "mountPath": "/full"}]}
    checkpoint = {"uri": "file:///full/run", "everySteps": 5}
    bundled(jobs, data, "full-disk", checkpoint=checkpoint, container=mounted, volumes=[full])
    jobs.wait_true("full-disk", "Stalled")
    follow(shell, "A full disk", "full-disk")
    jobs.delete("full-disk")


@pytest.mark.long(law=LAW)
def test_memory_that_grows(jobs: Jobs, shell: Mapping[str, str], data: Path, tmp_path: Path) -> None:
    bundled(jobs, data, "leaks", fault(tmp_path, "0 leak 1000000"))
    past(jobs, "leaks", 20)
    follow(shell, "Memory that grows", "leaks")
    jobs.delete("leaks")
