"""Reports of runs on real kubelets to people, Prometheus and a collector, compared with the cluster itself."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from builders.cluster import drills, e2e
from builders.cluster.e2e import Cluster, Object, condition
from builders.otlp import Receiver, check_round
from builders.samples import Samples, parsed, total
from builders.train import states
from builders.train.tensorboard import scalars
from builders.until import until
from concertina.api.status import JobStatus
from concertina.cli.diagnose import FOUND
from concertina.diagnosis.problems import Problem
from concertina_data.opening import open_place, read_manifest
from concertina_data.places import CacheSettings
from concertina_protocol.traces import trace_id

pytestmark = [pytest.mark.usefixtures("operator"), pytest.mark.timeout(600)]
JOB = "observed"
LABELS = {"namespace": e2e.NAMESPACE, "trainingjob": JOB}
RESOURCES: Object = {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "1536Mi"}}
ANNOTATION = "concertina.dev/trace-id"
SCRAPE = """
import sys, urllib.error, urllib.request
try:
    headers = {"Authorization": f"Bearer {sys.argv[2]}"} if sys.argv[2] else {}
    print(urllib.request.urlopen(urllib.request.Request(sys.argv[1], headers=headers), timeout=20).read().decode())
except urllib.error.HTTPError as error:
    print(error.code)
"""


@dataclass(frozen=True)
class Scraper:
    """Client in a pod of the cluster that scrapes as Prometheus would."""

    cluster: Cluster
    token: str

    def text(self, pod: Object, token: str | None = None) -> str:
        """Return the metrics of a pod, found by its annotations, or the HTTP status if it refuses."""
        annotations = {key.partition("/")[2]: value for key, value in pod["metadata"]["annotations"].items()}
        assert annotations["scrape"] == "true"
        url = f"http://{pod['status']['podIP']}:{annotations['port']}{annotations['path']}"
        shown = self.token if token is None else token
        return self.cluster.kubectl("exec", "deployment/concertina", "--", "python3", "-c", SCRAPE, url, shown)

    def ask(self, pod: Object) -> Samples:
        return parsed(self.text(pod))

    def operator(self) -> Samples:
        """Return the operator's metrics of the one job."""
        name, _ = self.cluster.operator_pod()
        pod = json.loads(self.cluster.kubectl("get", "pod", name, "-o", "json"))
        return {key: value for key, value in self.ask(pod).items() if LABELS.items() <= dict(key[1]).items()}


@pytest.fixture
def scraper(cluster: Cluster, token: str) -> Scraper:
    return Scraper(cluster, token)


# --- a run that is hurt -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hurt:
    """Job after the death of a worker, which the coordinator survived."""

    uid: str
    round: int
    """Number of the round that followed."""
    images: frozenset[str]
    """Images that containerd has run in its containers `trainer`."""


@pytest.fixture(scope="module")
def hurt(cluster: Cluster, operator: None, data: None) -> Iterator[Hurt]:
    tracking = {"tracking": {"backend": "TensorBoard", "uri": "file:///runs"}} if e2e.setting("SHARED") else {}
    container = e2e.trainer(resources=RESOURCES)
    pod = e2e.pod(container)
    if tracking:
        container.setdefault("volumeMounts", []).append({"name": "runs", "mountPath": "/runs"})
        pod["volumes"].append({"name": "runs", "hostPath": {"path": str(runs()), "type": "DirectoryOrCreate"}})
    job = e2e.bundled_job(JOB, pod, determinism="Bitwise")
    job["spec"] |= {
        "elastic": {"minReplicas": 1, "scaleUp": {"stabilizationWindowSeconds": 1}},
        "failurePolicy": {"maxRestarts": 100},
    }
    job["spec"]["price"] = {"perReplicaHour": "3.6", "currency": "EUR"}
    with cluster.running(job | {"spec": job["spec"] | tracking}):
        cluster.training(2, name=JOB)
        before = cluster.until("a snapshot", lambda s: (s.get("lastSnapshot") or {}).get("step", 0) > 20, JOB)
        done = drills.drill("kill-worker", "--yes", "-o", "json", "-n", e2e.NAMESPACE, job=JOB)
        assert done.returncode == 0, done.stdout + done.stderr
        trainers = [
            each
            for pod in cluster.pods(JOB)
            for each in pod["status"]["containerStatuses"]
            if each["name"] == "trainer"
        ]
        images = frozenset(each["imageID"] for each in trainers)
        yield Hurt(cluster.job(JOB)["metadata"]["uid"], before["world"]["round"] + 1, images)


def runs() -> Path:
    """Return the folder of TensorBoard's files, as this machine and all nodes see it."""
    return Path(e2e.setting("SHARED")) / f"runs-{e2e.RUN}"


def facts(log: str) -> list[Object]:
    """Return the log lines that are JSON: all of the operator's, and those of an agent that the agent itself wrote."""
    return [json.loads(line) for line in log.splitlines() if line.startswith("{")]


def test_a_round_is_one_trace_whose_id_stands_in_logs_and_events(
    cluster: Cluster, hurt: Hurt, collector: Receiver | None
) -> None:
    if collector is None:
        pytest.skip("set CONCERTINA_E2E_HOST to an address of this machine that pods reach")
    trace = trace_id(hurt.uid, hurt.round)
    spans = until(lambda: collector.traces().get(trace), "the round's trace", lambda: list(collector.traces()))
    log = cluster.kubectl("logs", "deployment/concertina")
    assert len(facts(log)) == len(log.splitlines()), "each line is an object"
    lines = [line for line in facts(log) if line.get("trace") == trace]
    assert {"claimed", "committed", "prepare", "assign"} <= {line["event"] for line in lines}
    (committed,) = (line for line in lines if line["event"] == "committed")
    root = check_round(spans, JOB, "WorkerSignaled", committed["members"])
    incident = next(each for each in cluster.status(JOB)["incidents"] if each["round"] == hurt.round - 1)
    assert incident["seconds"] == pytest.approx((root.end_time_unix_nano - root.start_time_unix_nano) / 1e9, abs=0.1)
    for replica in committed["members"]:
        of_agent = [line for line in facts(cluster.log(replica)) if line["event"] == "worker_started"]
        assert {line["round"]: line["trace"] for line in of_agent}[hurt.round] == trace
    for reason in ("WorkerSignaled", "RoundCommitted"):
        of_it = f"involvedObject.name={JOB},reason={reason}"
        events = json.loads(cluster.kubectl("get", "events", "--field-selector", of_it, "-o", "json"))["items"]
        assert trace in {event["metadata"]["annotations"][ANNOTATION] for event in events}


USED = """
import json
def first(*paths):
    for path in paths:
        try:
            return open(path).read()
        except FileNotFoundError:
            pass
cpu = first("/sys/fs/cgroup/cpu.stat", "/sys/fs/cgroup/cpuacct/cpuacct.usage").split()
memory = first("/sys/fs/cgroup/memory.stat", "/sys/fs/cgroup/memory/memory.stat").splitlines()
memory = dict(line.split()[:2] for line in memory)
network = [line.split() for line in open("/proc/net/dev") if ":" in line and not line.strip().startswith("lo:")]
print(json.dumps({
    "cpu": int(cpu[1]) / 1e6 if len(cpu) > 1 else int(cpu[0]) / 1e9,
    "memory": int(memory.get("anon") or memory["rss"]),
    "received": sum(int(line[1]) for line in network),
}))
"""
"""Program that prints, in a container, the seconds and bytes that its own cgroup has used, and its network traffic."""


def used(cluster: Cluster, replica: str) -> dict[str, float]:
    usage: dict[str, float] = json.loads(cluster.kubectl("exec", replica, "-c", "trainer", "--", "python3", "-c", USED))
    return usage


def test_what_an_agent_says_of_its_workers_is_their_container_s_and_not_the_node_s(
    cluster: Cluster, hurt: Hurt, scraper: Scraper
) -> None:
    for pod in cluster.pods(JOB):
        replica = pod["metadata"]["name"]
        assert scraper.text(pod, token="").strip() == scraper.text(pod, token="another").strip() == "401"
        before, metrics = used(cluster, replica), scraper.ask(pod)
        assert {dict(labels)["replica"] for _, labels in metrics} == {replica}
        assert total(metrics, "concertina_worker_running", **LABELS) == 1

        def trained(since: Samples = metrics, pod: Object = pod) -> Samples:
            now = scraper.ask(pod)
            return now if cpu(now) > cpu(since) + 2 else {}

        later, after = until(trained, "two more seconds of processor time"), used(cluster, replica)
        assert cpu(later) < after["cpu"]
        assert cpu(later) - cpu(metrics) > 0.3 * (after["cpu"] - before["cpu"])
        parts = ("concertina_worker_resident_memory_bytes", "concertina_agent_resident_memory_bytes")
        assert 0.3 * after["memory"] < sum(total(later, part) for part in parts) < 1536 << 20
        assert before["received"] < total(later, "concertina_pod_network_received_bytes_total") <= after["received"]


def cpu(samples: Samples) -> float:
    return total(samples, "concertina_worker_cpu_seconds_total") + total(samples, "concertina_agent_cpu_seconds_total")


def test_commands_show_the_run_as_the_cluster_has_it(cluster: Cluster, hurt: Hurt, tmp_path: Path) -> None:
    world = cluster.status(JOB)["world"]
    members = e2e.concertina("status", JOB, "--members", "-n", e2e.NAMESPACE)
    nodes = {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in cluster.pods(JOB)}
    for member in world["members"]:
        line = next(line for line in members.splitlines() if member["replica"] in line and "Running" in line)
        assert nodes[member["replica"]] in line
    assert "WorkerSignaled" in e2e.concertina("status", JOB, "-n", e2e.NAMESPACE)

    (row,) = [each for each in top() if each["name"] == JOB]
    assert row["world"] == "2/2"
    assert row["failures"] == 1
    assert row["cost"] > 0

    coordinator, other = (member["replica"] for member in world["members"])
    logs = [json.loads(line) for line in e2e.concertina("logs", JOB, "-o", "json", "-n", e2e.NAMESPACE).splitlines()]
    assert {line["replica"] for line in logs} == {coordinator, other}
    started = {(line["round"], line["rank"]) for line in logs if line.get("agent", {}).get("event") == "worker_started"}
    assert {(world["round"], 0), (world["round"], 1)} <= started
    failure = e2e.concertina("logs", JOB, "--since-failure", "-n", e2e.NAMESPACE)
    assert '"event":"worker_ended"' in failure

    file = tmp_path / "trace.json"
    e2e.concertina("trace", JOB, "--steps", "2", "--ranks", "0,1", "--out", str(file), "-n", e2e.NAMESPACE)
    events = json.loads(file.read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {
        f"rank 0 ({coordinator})",
        f"rank 1 ({other})",
    }

    diagnosis = diagnosed(JOB)
    assert "agents asked: 2" in diagnosis["saw"]
    assert not [sentence for sentence in diagnosis["saw"] if "could not" in sentence or "sent no metrics" in sentence]


def top() -> list[Object]:
    rows: list[Object] = json.loads(e2e.concertina("top", "-o", "json", "-n", e2e.NAMESPACE))
    return rows


def diagnosed(job: str) -> Any:
    done = e2e.run_concertina("diagnose", job, "--seconds", "8", "--json", "-n", e2e.NAMESPACE)
    diagnosis = json.loads(done.stdout)
    assert done.returncode == (FOUND if diagnosis["findings"] else 0), done.stderr
    return diagnosis


# --- the same run, at rest --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def at_rest(cluster: Cluster, hurt: Hurt) -> Object:
    """Return the suspended job after the operator was killed as well, when only its suspension takes time."""
    done = drills.drill("operator-kill", "--yes", "-o", "json", "-n", e2e.NAMESPACE, job=JOB)
    assert done.returncode == 0, done.stdout + done.stderr
    cluster.kubectl("patch", "tj", JOB, "--type=merge", "-p", '{"spec": {"suspend": true}}')
    cluster.until("rest", lambda status: condition(status, "Suspended")["status"] == "True", JOB)
    return cluster.job(JOB)


def test_the_classes_of_time_add_up_and_all_tell_the_same(
    cluster: Cluster, at_rest: Object, scraper: Scraper, tmp_path: Path
) -> None:
    drills.each_second_is_in_one_class(at_rest)
    status = JobStatus.model_validate(at_rest["status"])
    goodput, cost = status.goodput, status.cost
    assert cost is not None
    assert goodput.productive_seconds > 0
    assert {entry.cause for entry in goodput.recovery} >= {"WorkerSignaled"}

    samples = scraper.operator()
    prefix = "concertina_trainingjob"
    for name, seconds in goodput.by_class.items():
        if name != "suspended":
            assert total(samples, f"{prefix}_time_seconds_total", **{"class": name}) == seconds
    for entry in goodput.recovery:
        assert total(samples, f"{prefix}_recovery_seconds_total", cause=entry.cause) == entry.seconds
    assert total(samples, f"{prefix}_goodput_ratio") == pytest.approx(goodput.percent / 100)
    assert total(samples, f"{prefix}_checkpoint_step") == status.last_checkpoint.step  # type: ignore[union-attr]

    (row,) = [each for each in top() if each["name"] == JOB]
    assert (row["goodputPercent"], row["cost"]) == (goodput.percent, cost.total)
    assert f"{goodput.percent:.1f}% of the time" in e2e.concertina("status", JOB, "-n", e2e.NAMESPACE)
    page = tmp_path / "page.html"
    e2e.concertina("report", JOB, "--out", str(page), "-n", e2e.NAMESPACE)
    text = re.sub("<[^>]+>", "\n", page.read_text())
    assert f"{goodput.percent:.1f}% of the time" in text
    assert f"{cost.total:.2f} {cost.currency} for" in text
    for entry in goodput.recovery:
        assert f"{entry.seconds:.1f} s" in text.splitlines()


def test_a_checkpoint_says_what_ran_and_is_trained_again_to_the_same_bits(
    cluster: Cluster, hurt: Hurt, at_rest: Object, tmp_path: Path
) -> None:
    last = at_rest["status"]["lastCheckpoint"]
    run = at_rest["spec"]["checkpoint"]["uri"]
    manifest = json.loads(e2e.concertina("checkpoint", "show", run, "-o", "json"))
    lineage = manifest["lineage"]
    assert (manifest["uid"], manifest["id"]["step"]) == (hurt.uid, last["step"])
    assert set(lineage["images"]) == hurt.images
    assert lineage["data_sets"] == [read_manifest(open_place(e2e.DATA, CacheSettings(0))).digest]
    assert {each["round"] for each in lineage["rounds"]} >= {hurt.round - 1, hurt.round}
    (image,) = hurt.images
    assert image in "".join(e2e.concertina("checkpoint", "show", run).split())

    file = tmp_path / "again.yaml"
    values = ["--env", f"PYTHONPATH={e2e.SITE}"] if e2e.SITE_PACKAGES else []
    output = e2e.concertina("reproduce", run, "--step", str(last["step"]), *values, "-o", str(file))
    again = yaml.safe_load(file.read_text())
    (container,) = again["spec"]["template"]["spec"]["containers"]
    pinned = "@sha256:" in image
    assert container["image"] == (image if pinned else e2e.TRAINER_IMAGE)
    assert ("the digest of its image is not known" in " ".join(output.split())) != pinned
    with cluster.running(again):
        name = again["metadata"]["name"]
        done = cluster.until("its end", lambda status: e2e.reason(status) == "Complete", name)
        assert done["lastCheckpoint"]["step"] == last["step"]
        trained, before = (states.of_checkpoint(each["uri"]) for each in (done["lastCheckpoint"], last))
    assert trained.keys() == before.keys()
    assert all(torch.equal(trained[key].view(torch.int32), before[key].view(torch.int32)) for key in before)


def test_the_tracker_has_each_step_once(cluster: Cluster, at_rest: Object) -> None:
    if not e2e.setting("SHARED"):
        pytest.skip("set CONCERTINA_E2E_SHARED to a folder that this machine and all nodes see")
    step = at_rest["status"]["progress"]["step"]
    points, texts = scalars(runs() / e2e.NAMESPACE / f"{JOB}-{at_rest['metadata']['uid'][:8]}")
    assert [at for at, _ in points["loss"]] == list(range(1, step + 1))
    assert f"checkpoint/{step}" in texts


# --- a script in an image that knows nothing of us --------------------------------------------------------------------

REPORTS = """
import time, trainingjob
for step in range(1, 10**6):
    time.sleep(0.05)
    told = {"tokens": 100 * step, "tokens_per_second": 2000.0, "metrics": {"accuracy": 0.5}}
    trainingjob.report(step=step, loss=1 / step, **told)
    if step % 20 == 0:
        trainingjob.report(step=step, loss=1 / step, phase="evaluating", **told)
        time.sleep(0.5)
"""


def test_what_a_script_reports_is_told_everywhere(cluster: Cluster, scraper: Scraper) -> None:
    image = e2e.setting("SCRIPT_IMAGE")
    if not image:
        pytest.skip("set CONCERTINA_E2E_SCRIPT_IMAGE to an image with Python and nothing of concertina in it")
    name, container = "reports", {"name": "trainer", "image": image, "command": ["python3", "-c", REPORTS]}
    labels = LABELS | {"trainingjob": name}
    with cluster.running(e2e.own_job(name, {"containers": [container], "terminationGracePeriodSeconds": 5})):
        cluster.training(2, name=name)
        cluster.until("an evaluation", lambda status: status["goodput"].get("evaluationSeconds", 0) > 1, name)
        job = cluster.job(name)
        drills.each_second_is_in_one_class(job)
        metrics = {pod["metadata"]["name"]: scraper.ask(pod) for pod in cluster.pods(name)}
        coordinator = metrics.pop(job["status"]["world"]["coordinator"])
        step = total(coordinator, "concertina_training_step", **labels)
        assert step >= job["status"]["progress"]["step"] > 20
        assert total(coordinator, "concertina_training_run_tokens", **labels) == 100 * step
        assert total(coordinator, "concertina_training_loss", **labels) == pytest.approx(1 / step)
        assert total(coordinator, "concertina_training_metric", name="accuracy", **labels) == 0.5
        (other,) = metrics.values()
        assert "concertina_training_step" not in {each for each, _ in other}
        assert 0 < total(other, "concertina_worker_cpu_seconds_total", **labels) < 30
        assert not [finding for finding in diagnosed(name)["findings"] if finding["problem"] != "CheckpointOld"]


# --- what is wrong, by the kernel's own means -------------------------------------------------------------------------

THROTTLE = (
    e2e.PROCESS_1
    + """
for line in open(f"/proc/{process_1()}/cgroup"):
    _, controllers, path = line.strip().split(":", 2)
    if controllers == "":
        file, limit = f"/sys/fs/cgroup{path}/cpu.max", "10000 100000"
    elif "cpu" in controllers.split(","):
        file, limit = f"/sys/fs/cgroup/cpu{path}/cpu.cfs_quota_us", "10000"
    else:
        continue
    if os.path.exists(file):
        open(file, "w").write(limit)
        sys.exit()
sys.exit("its cgroup is not to be found")
"""
)
"""Program that gives a container a tenth of a processor, on a node."""


def test_a_rank_that_its_cgroup_throttles_is_named(cluster: Cluster, data: None) -> None:
    name, model = "throttled", {"layers": 2, "dim": 128, "heads": 4, "vocabSize": 256, "sequenceLength": 128}
    job = e2e.bundled_job(name, e2e.pod(e2e.trainer(resources=RESOURCES)), model=model)
    job["spec"] |= {"replicas": 3, "elastic": {"minReplicas": 1, "scaleUp": {"stabilizationWindowSeconds": 1}}}
    with cluster.running(job):
        world = cluster.training(3, name=name)["world"]
        victim = world["members"][-1]
        e2e.on_node(victim["node"], "python3", "-c", THROTTLE, victim["replica"])

        def named(status: Object) -> Any:
            return [each for each in status.get("stragglers", ()) if each["replica"] == victim["replica"]]

        (mark,) = named(cluster.until("a straggler", named, name))
        assert (mark["rank"], mark["node"]) == (2, victim["node"])
        (finding,) = [each for each in diagnosed(name)["findings"] if each["problem"] == Problem.STRAGGLER]
        assert f"rank 2 (replica {victim['replica']} on node {victim['node']})" in finding["sentence"]
        assert f"replica {victim['replica']} on node {victim['node']}" in cluster.event(name, "Straggler")


def test_a_disk_that_is_full_is_named(cluster: Cluster, data: None) -> None:
    """The kubelet creates a file system of that size."""
    name, container = "full", e2e.trainer(resources=RESOURCES)
    container.setdefault("volumeMounts", []).append({"name": "full", "mountPath": "/full"})
    pod = e2e.pod(container)
    pod["volumes"].append({"name": "full", "emptyDir": {"medium": "Memory", "sizeLimit": "64Ki"}})
    job = e2e.bundled_job(name, pod)
    job["spec"]["replicas"] = 1
    job["spec"]["checkpoint"] |= {"uri": "file:///full/run", "everySeconds": 1}
    with cluster.running(job):
        cluster.until("a degradation", lambda status: condition(status, "Degraded")["status"] == "True", name)
        assert Problem.STORAGE_REFUSES in [each["problem"] for each in diagnosed(name)["findings"]]
