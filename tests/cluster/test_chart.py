"""The chart on a real cluster: the operator runs with its permissions and no others, and one acts at a time."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from builders import chart_values, pages
from builders.cluster.operator_process import JOBS
from builders.manifests import job as manifest
from builders.manifests import made
from builders.until import until
from concertina.controller.master_keys import key_id
from concertina.controller.settings import from_environment
from concertina.kube.manifests.agent_container import PodSettings
from concertina.local.binaries import programs
from concertina.local.cluster import LocalCluster
from concertina.local.control_plane.api import ControlPlaneError
from concertina.local.errors import LocalClusterError

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "concertina"
WITHOUT_CRD = "--set=crds.enabled=false"
"""It is large, and rendering it takes a while."""


@dataclass(frozen=True)
class Release:
    """The chart, installed once for the tests of this file: two operators that serve one namespace."""

    cluster: LocalCluster
    helm: Path
    name: str
    jobs: str
    """The namespace that it serves."""

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"KUBECONFIG": str(self.cluster.kubeconfig)}
        command = [str(self.helm), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)

    def install(self, *settings: str, chart: Path = CHART) -> None:
        sets = [f"--set={setting}" for setting in settings]
        # The cluster may have the CRD already, of a test that applied it or of another release.
        options = ("--namespace", self.name, "--take-ownership")
        done = self.run("upgrade", "--install", self.name, str(chart), *options, *sets)
        assert done.returncode == 0, done.stderr

    def kubectl(self, *arguments: str) -> str:
        return self.cluster.kubectl("-n", self.name, *arguments)

    def may(self, verb: str, resource: str, namespace: str, *options: str) -> bool:
        """Whether the operator's service account may do that."""
        account = f"system:serviceaccount:{self.name}:{self.operator}"
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {"user": account, "groups": ["system:serviceaccounts", "system:authenticated"]},
        }
        group, _, plural = resource.rpartition("/")
        plural, _, subresource = plural.partition(":")
        review["spec"]["resourceAttributes"] = {  # type: ignore[index]
            "verb": verb,
            "group": group,
            "resource": plural,
            "subresource": subresource,
            "namespace": namespace,
            "name": options[0] if options else "",
        }
        answer = self.cluster.api.call("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
        return bool(answer["status"]["allowed"])

    @property
    def operator(self) -> str:
        """What the chart names things after."""
        return f"{self.name}-concertina"

    def master_key(self) -> str:
        return self.kubectl("get", "secret", f"{self.operator}-master-key", "-o", "jsonpath={.data.key}")

    def pods(self) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = self.cluster.api.call("GET", f"/api/v1/namespaces/{self.name}/pods")["items"]
        return items

    def holder(self) -> str:
        """Return the name of the pod that holds the Lease, or "" if there is none."""
        return holder(self.cluster, self.name, f"{self.operator}-operator")


def holder(cluster: LocalCluster, namespace: str, lease: str) -> str:
    """Return who holds a Lease. Tests that wait for a holder ask often, and kubectl would take half a core for that."""
    with suppress(ControlPlaneError):
        stored = cluster.api.call("GET", f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{lease}")
        return str(stored["spec"].get("holderIdentity") or "")
    return ""


@pytest.fixture(scope="module")
def release(cluster: LocalCluster) -> Iterator[Release]:
    name = f"chart-{uuid.uuid4().hex[:6]}"
    made = Release(cluster, programs.helm(print), name, f"{name}-jobs")
    cluster.kubectl("create", "namespace", made.jobs)
    cluster.create_namespace(name)
    cluster.kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
    made.install("replicas=2", f"watchNamespaces={{{made.jobs}}}")
    made.kubectl("rollout", "status", f"deployment/{made.operator}", "--timeout=90s")
    yield made
    made.run("uninstall", name, "--namespace", name)
    cluster.kubectl("delete", "namespace", name, made.jobs, "--wait=false")


def job(release: Release, namespace: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = release.cluster.api.call("GET", f"{JOBS.format(namespace)}/{name}")
    return found


def ready(release: Release, namespace: str, name: str) -> dict[str, Any]:
    """Return the condition Ready of a job, or an empty dict if it has none."""
    conditions = job(release, namespace, name).get("status", {}).get("conditions", [])
    return next((c for c in conditions if c["type"] == "Ready"), {})


JOB = """
apiVersion: concertina.dev/v1beta1
kind: TrainingJob
metadata: {name: simple}
spec:
  template: {spec: {containers: [{name: trainer, image: concertina/trainer, command: [sleep, "3"]}]}}
"""


def test_a_job_of_a_served_namespace_gets_pods_and_another_none(release: Release) -> None:
    cluster = release.cluster
    cluster.kubectl("-n", release.jobs, "apply", "-f", "-", stdin=JOB)
    cluster.kubectl("-n", release.name, "apply", "-f", "-", stdin=JOB)
    until(lambda: ready(release, release.jobs, "simple"), "a status of the job")
    listed = until(
        lambda: json.loads(cluster.kubectl("-n", release.jobs, "get", "pods,secrets", "-o", "json"))["items"],
        "a pod of the job",
    )
    owners = [item["metadata"].get("ownerReferences", [{}])[0] for item in listed]
    assert {owner["name"] for owner in owners if owner} == {"simple"}
    assert ready(release, release.name, "simple") == {}
    selector = "involvedObject.kind%3DTrainingJob,involvedObject.name%3Dsimple"
    events = f"/api/v1/namespaces/{release.jobs}/events?fieldSelector={selector}"
    until(lambda: cluster.api.call("GET", events)["items"], "the event of its end")
    logs = release.kubectl("logs", "-l", "app.kubernetes.io/name=concertina-operator", "--tail=-1")
    assert "forbidden" not in logs
    cluster.kubectl("-n", release.jobs, "delete", "tj", "simple", "--wait=false")
    cluster.kubectl("-n", release.name, "delete", "tj", "simple")


def test_another_operator_takes_over(release: Release) -> None:
    pods = release.kubectl("get", "pods", "-o", "jsonpath={.items[*].metadata.name}").split()
    first = until(release.holder, "an operator that holds the lease")
    assert len(pods) == 2
    assert first in pods
    release.kubectl("delete", "pod", first, "--wait=false")
    assert until(lambda: release.holder() not in ("", first), "another operator that holds the lease")


def test_of_two_operators_one_stays_while_nodes_are_drained(release: Release) -> None:
    path = f"/apis/policy/v1/namespaces/{release.name}/poddisruptionbudgets/{release.operator}"

    def budget() -> tuple[int, int]:
        status = release.cluster.api.call("GET", path).get("status", {})
        return status.get("disruptionsAllowed", 0), status.get("expectedPods", 0)

    until(lambda: budget() == (1, 2), "a budget of one", budget)


@pytest.mark.long(law="tests/cluster/test_chart.py::test_another_operator_takes_over")
def test_operators_leave_a_lost_node(release: Release) -> None:
    first = until(release.holder, "an operator that holds the lease")
    lost = release.kubectl("get", "pod", first, "-o", "jsonpath={.spec.nodeName}")

    def elsewhere() -> bool:
        pods = json.loads(release.kubectl("get", "pods", "-o", "json"))["items"]
        running = [pod for pod in pods if pod["status"]["phase"] == "Running" and pod["spec"]["nodeName"] != lost]
        return len(running) == 2 and release.holder() in [pod["metadata"]["name"] for pod in running]

    release.cluster.kill_node(lost)
    try:
        until(elsewhere, "two operators on other nodes, one with the lease")
    finally:
        release.cluster.start_node(lost)


def test_each_operator_says_whether_it_acts_to_who_may_read_metrics(release: Release) -> None:
    cluster, reader = release.cluster, f"{release.operator}-metrics-reader"
    bind = ("create", "clusterrolebinding", reader, f"--clusterrole={reader}")
    token = release.kubectl("create", "token", "default").strip()

    def acting() -> dict[str, float]:
        """Return status and text by pod, for the pods that answer."""
        found = {}
        for pod in release.pods():
            with suppress(OSError, KeyError):
                url = f"http://{pod['status']['podIP']}:{pod['metadata']['annotations']['prometheus.io/port']}/metrics"
                request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
                with urllib.request.urlopen(request, timeout=10) as answer:
                    families = {each.name: each for each in text_string_to_metric_families(answer.read().decode())}
                found[pod["metadata"]["name"]] = families["leader_election_master_status"].samples[0].value
        return found

    def one_of_two() -> bool:
        seen, holder = acting(), release.holder()
        return len(seen) == 2 and [name for name, acts in seen.items() if acts] == [holder]

    assert acting() == {}, "an account of the cluster alone is not enough"
    cluster.kubectl(*bind, f"--serviceaccount={release.name}:default")
    try:
        until(one_of_two, "two operators, of which the one with the lease says so", acting)
    finally:
        cluster.kubectl("delete", "clusterrolebinding", reader)


def test_each_operator_names_the_leader_and_is_ready_to_be_it(release: Release) -> None:
    """The standby, too: it would act as soon as it gets the Lease."""

    def answers(path: str) -> dict[str, tuple[int, str]]:
        """By pod, for those that answer."""
        found = {}
        for pod in release.pods():
            with (
                suppress(OSError, KeyError),
                urllib.request.urlopen(f"http://{pod['status']['podIP']}:8080{path}", timeout=10) as answer,
            ):
                found[pod["metadata"]["name"]] = (answer.status, answer.read().decode())
        return found

    def one_leads() -> bool:
        said = {name: json.loads(text) for name, (_, text) in answers("/leaderz").items()}
        holder = release.holder()
        return len(said) == 2 and all(
            each == {"leads": name == holder, "leader": holder} for name, each in said.items()
        )

    until(one_leads, "two operators that name the same leader", lambda: answers("/leaderz"))
    for path in ("/healthz", "/readyz"):
        until(lambda path=path: list(answers(path).values()) == [(200, "ok\n")] * 2, f"two answers to {path}")


def test_helm_test_finds_the_leader(release: Release) -> None:
    until(release.holder, "an operator that holds the lease")
    done = release.run("test", release.name, "--namespace", release.name, "--logs")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"leads: it renews the Lease {release.name}/{release.operator}-operator" in done.stdout
    assert f"TrainingJobs can be listed in {release.jobs}" in done.stdout


def can(cluster: LocalCluster, verb: str, resource: str, *options: str) -> bool:
    """Return whether that user may; `kubectl auth can-i` fails where not."""
    with suppress(LocalClusterError):
        return cluster.kubectl("auth", "can-i", verb, resource, *options).strip() == "yes"
    return False


def test_a_user_with_the_role_edit_runs_jobs_and_one_with_view_reads_them(release: Release) -> None:
    """The roles that every cluster has are enough: no user needs one of their own."""
    cluster = release.cluster
    for role in ("edit", "view"):
        cluster.kubectl("-n", release.jobs, "create", "rolebinding", role, f"--clusterrole={role}", f"--user={role}")
    as_editor, as_viewer = (("-n", release.jobs, f"--as={user}") for user in ("edit", "view"))

    # Kubernetes aggregates roles a moment after they were made.
    until(lambda: can(cluster, "create", "trainingjobs", *as_editor), "the role to be aggregated")
    assert not can(cluster, "patch", "trainingjobs", "--subresource=status", *as_editor)
    suspended = JOB.replace("spec:\n", "spec:\n  suspend: true\n").replace("name: simple", "name: of-a-user")
    cluster.kubectl(*as_editor, "apply", "-f", "-", stdin=suspended)
    cluster.kubectl(*as_editor, "scale", "tj", "of-a-user", "--replicas=3")
    until(lambda: can(cluster, "get", "trainingjobs", *as_viewer), "the role to be aggregated")
    seen = json.loads(cluster.kubectl(*as_viewer, "get", "tj", "of-a-user", "-o", "json"))
    assert seen["spec"]["replicas"] == 3
    assert not can(cluster, "patch", "trainingjobs", *as_viewer)
    assert not can(cluster, "update", "trainingjobs", "--subresource=scale", *as_viewer)
    cluster.kubectl(*as_editor, "delete", "tj", "of-a-user")


def test_whoever_administers_a_namespace_installs_the_namespaced_mode(release: Release) -> None:
    """The role admin and what docs/install.md adds to it are enough. The job runs, and says what it does without."""
    cluster, team = release.cluster, f"{release.name}-team"
    cluster.create_namespace(team)
    page = (ROOT / "docs" / "install.md").read_text()
    (installer,) = (text for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "kind: ClusterRole" in text)
    cluster.kubectl("apply", "-f", "-", stdin=installer)
    for role in ("admin", yaml.safe_load(installer)["metadata"]["name"]):
        cluster.kubectl("-n", team, "create", "rolebinding", role, f"--clusterrole={role}", "--user=ada")
    until(lambda: can(cluster, "patch", "trainingjobs", "-n", team, "--as=ada"), "the role to be aggregated")
    assert not can(cluster, "list", "nodes", "--as=ada")
    (block,) = pages.beginning_with(*pages.NAMESPACED_INSTALL)
    (words,) = block.commands
    assert words[:4] == ["helm", "install", "concertina", "charts/concertina"]
    options = [word.replace("team-a", team) for word in words[4:]]
    done = release.run("install", "mine", str(CHART), *options, "--kube-as-user=ada")
    assert done.returncode == 0, done.stderr
    cluster.kubectl("-n", team, "apply", "-f", "-", stdin=JOB)

    def said() -> str:
        return str(job(release, team, "simple").get("status", {}).get("nodesNotWatched", ""))

    until(said, "a status that says what the job does without")
    pods = f"/api/v1/namespaces/{team}/pods?labelSelector=concertina.dev%2Fjob%3Dsimple"
    until(lambda: cluster.api.call("GET", pods)["items"], "a pod")
    logs = cluster.kubectl("-n", team, "logs", "-l", "app.kubernetes.io/name=concertina-operator", "--tail=-1")
    assert "forbidden" not in logs
    assert release.run("uninstall", "mine", "--namespace", team).returncode == 0
    cluster.kubectl("delete", "clusterrole", yaml.safe_load(installer)["metadata"]["name"])
    cluster.kubectl("delete", "namespace", team, "--wait=false")


ALLOWED = [
    ("list", "nodes"),
    ("watch", "concertina.dev/trainingjobs"),
    ("delete", "concertina.dev/trainingjobs"),
    ("patch", "concertina.dev/trainingjobs:status"),
    ("create", "pods"),
    ("patch", "pods"),
    ("delete", "pods"),
    ("create", "secrets"),
    ("create", "events"),
    ("patch", "events"),
]
FORBIDDEN = [
    ("patch", "concertina.dev/trainingjobs"),
    ("update", "concertina.dev/trainingjobs"),
    ("create", "concertina.dev/trainingjobs"),
    ("get", "secrets"),
    ("list", "secrets"),
    ("delete", "secrets"),
    ("update", "secrets"),
    ("update", "pods"),
    ("create", "pods:exec"),
    ("get", "pods:log"),
    ("patch", "nodes"),
    ("get", "configmaps"),
    ("create", "apps/deployments"),
    ("create", "rbac.authorization.k8s.io/rolebindings"),
    ("impersonate", "users"),
    ("create", "serviceaccounts:token"),
]


def test_permissions_where_jobs_are(release: Release) -> None:
    assert [case for case in ALLOWED if not release.may(*case, release.jobs)] == []
    assert [case for case in FORBIDDEN if release.may(*case, release.jobs)] == []


def test_permissions_elsewhere(release: Release) -> None:
    elsewhere = [case for case in ALLOWED if release.may(*case, "default")]
    assert elsewhere == [("list", "nodes")]
    assert release.may("get", "secrets", release.name, f"{release.operator}-master-key")
    assert not release.may("update", "secrets", release.name, f"{release.operator}-master-key")
    assert release.may("update", "coordination.k8s.io/leases", release.name, f"{release.operator}-operator")
    assert not release.may("update", "coordination.k8s.io/leases", release.name, "another")
    assert not release.may("create", "coordination.k8s.io/leases", "kube-system")
    assert [case for case in FORBIDDEN if release.may(*case, release.name)] == []


OLD_MASTER_KEY = """
apiVersion: v1
kind: Secret
metadata:
  name: {{ include "concertina.masterKeySecret" . }}
  namespace: {{ .Release.Namespace }}
  labels:
    {{- include "concertina.labels" . | nindent 4 }}
  annotations:
    helm.sh/resource-policy: keep
type: Opaque
data:
  key: {{ randAlphaNum 64 | b64enc }}
"""
"""Of the chart as it was when it made the key itself."""


def test_upgrades_and_uninstalls_keep_the_master_key(release: Release, tmp_path: Path) -> None:
    scoped = f"watchNamespaces={{{release.jobs}}}"
    before = release.master_key()
    assert len(before) >= 64
    release.install("replicas=0", scoped, "logLevel=DEBUG")
    assert release.master_key() == before
    assert release.run("uninstall", release.name, "--namespace", release.name).returncode == 0
    assert release.master_key() == before
    release.kubectl("delete", "secret", f"{release.operator}-master-key")
    old = tmp_path / "concertina"
    shutil.copytree(CHART, old)
    (old / "templates/masterkey.yaml").write_text(OLD_MASTER_KEY)
    release.install("replicas=0", chart=old)
    before = release.master_key()
    release.install("replicas=1")
    release.kubectl("rollout", "status", f"deployment/{release.operator}", "--timeout=90s")
    until(release.holder, "an operator that holds the lease")
    release.cluster.kubectl("-n", release.jobs, "apply", "-f", "-", stdin=JOB)
    status = until(lambda: job(release, release.jobs, "simple").get("status"), "a status of the job")
    assert status["masterKey"] == key_id(base64.b64decode(before))
    assert release.master_key() == before
    assert [case for case in ALLOWED if not release.may(*case, "default")] == [], "all namespaces without names"
    assert [case for case in FORBIDDEN if release.may(*case, "default")] == []


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("replica=2", "additional properties 'replica' not allowed"),
        ("replicas=two", "got string, want integer"),
        ("metrics.discovery=Podmonitor", "value must be one of 'Annotations', 'PodMonitor', 'ServiceMonitor', 'None'"),
        ("logLevel=LOUD", "value must be one of 'DEBUG', 'INFO', 'WARNING', 'ERROR'"),
        ("watchNamespaces={A_B}", "does not match pattern"),
        ("agentImage.pullPolicy=Often", "value must be one of 'Always', 'IfNotPresent', 'Never'"),
    ],
)
def test_values_that_can_not_be(release: Release, setting: str, message: str) -> None:
    done = release.run("template", "x", str(CHART), WITHOUT_CRD, f"--set={setting}")
    assert done.returncode != 0
    assert message in done.stderr


@pytest.mark.parametrize(
    ("discovery", "kinds"),
    [
        ("Annotations", []),
        ("PodMonitor", ["PodMonitor"]),
        ("ServiceMonitor", ["Service", "ServiceMonitor"]),
        ("None", []),
    ],
)
def test_metrics_are_found_in_one_way(release: Release, discovery: str, kinds: list[str]) -> None:
    """With a token, too: no sample may be there twice, and nobody is told of a port that is not there."""
    settings = (f"metrics.discovery={discovery}", "metrics.tokenSecret=mine", "metrics.labels.release=stack")
    done = release.run("template", "x", str(CHART), WITHOUT_CRD, *(f"--set={setting}" for setting in settings))
    assert done.returncode == 0, done.stderr
    rendered = [part for part in yaml.safe_load_all(done.stdout) if part]
    parts = {part["kind"]: part for part in rendered if not part["metadata"]["name"].endswith("-training-pods")}
    assert sorted(parts.keys() & {"PodMonitor", "Service", "ServiceMonitor"}) == kinds
    template = parts["Deployment"]["spec"]["template"]
    (container,) = template["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    environment = {entry["name"]: entry for entry in container["env"]}
    assert environment["CONCERTINA_METRICS"]["value"] == f"$(POD_IP):{ports['metrics']}"
    secret = {"name": "mine", "key": "token"}
    assert environment["CONCERTINA_METRICS_TOKEN"]["valueFrom"] == {"secretKeyRef": secret}
    annotations = template["metadata"].get("annotations", {})
    assert annotations.get("prometheus.io/port") == (str(ports["metrics"]) if discovery == "Annotations" else None)
    selector = parts["Deployment"]["spec"]["selector"]["matchLabels"]
    for kind in kinds:
        spec, labels = parts[kind]["spec"], parts[kind]["metadata"]["labels"]
        if kind == "Service":
            assert (spec["selector"], spec["ports"][0]["targetPort"]) == (selector, "metrics")
            assert selector.items() <= labels.items(), "what the ServiceMonitor selects by"
        else:
            assert spec["selector"]["matchLabels"] == selector
            assert labels["release"] == "stack"
            (endpoint,) = spec.get("podMetricsEndpoints") or spec["endpoints"]
            authorization = {"type": "Bearer", "credentials": secret}
            assert endpoint == {"port": "metrics", "honorLabels": True, "authorization": authorization}


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        (["metrics.discovery=Annotations"], False),
        (
            [
                "metrics.discovery=PodMonitor",
                "metrics.pods.tokenSecret=mine",
                "metrics.labels.release=stack",
                "watchNamespaces={a}",
            ],
            True,
        ),
        (["metrics.discovery=ServiceMonitor", "watchNamespaces={a,b}"], True),
        (["metrics.discovery=ServiceMonitor", "metrics.pods.port=0"], False),
        (["metrics.discovery=None"], False),
    ],
)
def test_training_pods_are_found_in_one_way(release: Release, settings: list[str], found: bool) -> None:
    """By what the operator puts into pods: its settings are those that it reads."""
    done = release.run("template", "x", str(CHART), WITHOUT_CRD, *(f"--set={setting}" for setting in settings))
    assert done.returncode == 0, done.stderr
    parts = {(part["kind"], part["metadata"]["name"]): part for part in yaml.safe_load_all(done.stdout) if part}
    deployment = parts["Deployment", "x-concertina"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    environment = {
        each["name"]: each.get("value", "x") for each in container["env"] if each["name"] != "CONCERTINA_HEALTH"
    }
    told = from_environment({**environment, "CONCERTINA_METRICS": ""}).pods.metrics
    assert (told is None) == ("metrics.pods.port=0" in settings)
    if told is not None:
        assert told.annotated == ("metrics.discovery=Annotations" in settings)
    monitor = parts.get(("PodMonitor", "x-concertina-training-pods"))
    assert (monitor is not None) == found
    if monitor is None:
        return
    assert told is not None
    pod = made(manifest({"template": {"spec": {"containers": [{"name": "trainer", "image": "i", "command": ["x"]}]}}}),
               settings=PodSettings("a", told))  # fmt: skip
    selector = monitor["spec"]["selector"]
    assert selector["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert {each["key"] for each in selector["matchExpressions"]} <= pod["metadata"]["labels"].keys()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    (trainer,) = pod["spec"]["containers"]
    assert endpoint["port"] in {port["name"] for port in trainer["ports"]}
    assert "honorLabels" not in endpoint, "a pod says what it likes of its namespace"
    (drop,) = endpoint["metricRelabelings"]
    assert drop == {"action": "labeldrop", "regex": "exported_namespace"}
    scoped = "watchNamespaces={a,b}" in settings
    assert monitor["spec"].get("namespaceSelector") == ({"matchNames": ["a", "b"]} if scoped else None)
    secret = endpoint.get("authorization", {}).get("credentials", {}).get("name", "")
    assert secret == told.token_secret == ("" if scoped else "mine")
    assert monitor["metadata"]["labels"].get("release") == (None if scoped else "stack")
    if not scoped:
        documents = [document for block in pages.blocks(pages.DOCS / "metrics.md") for document in block.manifests]
        [shown] = [document["spec"] for document in documents if document.get("kind") == "PodMonitor"]
        shown["podMetricsEndpoints"][0]["authorization"]["credentials"]["name"] = "mine"
        assert shown == monitor["spec"], "the PodMonitor of docs/metrics.md"


def test_alerts_and_dashboards_are_there_where_they_are_asked_for(release: Release) -> None:
    def rendered(*settings: str) -> dict[tuple[str, str], dict[str, Any]]:
        done = release.run("template", "x", str(CHART), WITHOUT_CRD, *(f"--set={setting}" for setting in settings))
        assert done.returncode == 0, done.stderr
        made = [part for part in yaml.safe_load_all(done.stdout) if part]
        return {(part["kind"], part["metadata"]["name"]): part for part in made}

    plain = rendered()
    assert not {kind for kind, _ in plain} & {"PrometheusRule", "ConfigMap"}
    made = rendered(
        "monitoring.alerts.enabled=true",
        "monitoring.dashboards.enabled=true",
        "monitoring.runbookUrl=https://docs.example/runbooks",
        "metrics.labels.release=stack",
    )
    rule = made["PrometheusRule", "x-concertina"]
    assert rule["metadata"]["labels"]["release"] == "stack"
    written = yaml.safe_load(
        (CHART / "rules" / "concertina.yaml").read_text().replace("docs/", "https://docs.example/")
    )
    assert rule["spec"] == written
    maps = {part["metadata"]["name"]: part for (kind, _), part in made.items() if kind == "ConfigMap"}
    files = sorted(CHART.glob("dashboards/*.json"))
    assert sorted(maps) == [f"x-concertina-dashboard-{path.stem}" for path in files]
    for path, part in zip(files, (maps[name] for name in sorted(maps)), strict=True):
        assert part["metadata"]["labels"]["grafana_dashboard"] == "1"
        (text,) = part["data"].values()
        assert json.loads(text) == json.loads(path.read_text())
        release.cluster.kubectl("apply", "--dry-run=server", "-f", "-", stdin=json.dumps(part))
    refused = release.run("template", "x", str(CHART), WITHOUT_CRD, "--set-string=monitoring.runbookUrl=a b/")
    assert "runbookUrl" in refused.stderr


def test_a_policy_lets_in_probes_and_who_may_scrape(release: Release, tmp_path: Path) -> None:
    peer = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    (tmp_path / "values.yaml").write_text(json.dumps({"networkPolicy": {"enabled": True, "metricsFrom": [peer]}}))
    values = ("--namespace", release.name, "--values", str(tmp_path / "values.yaml"))
    done = release.run("template", release.name, str(CHART), *values, "--show-only=templates/networkpolicy.yaml")
    (tmp_path / "policy.yaml").write_text(done.stdout)
    stored = json.loads(
        release.kubectl("apply", "--dry-run=server", "-o", "json", "-f", str(tmp_path / "policy.yaml"))
    )["spec"]
    pods = json.loads(release.kubectl("get", "deployment", release.operator, "-o", "json"))["spec"]["template"]
    assert stored["podSelector"]["matchLabels"].items() <= pods["metadata"]["labels"].items()
    assert stored["policyTypes"] == ["Ingress"], "what it connects to is left free"
    named = {port["name"] for port in pods["spec"]["containers"][0]["ports"]}
    let_in = {rule["ports"][0]["port"]: rule.get("from") for rule in stored["ingress"]}
    assert let_in == {"health": None, "metrics": [peer]}
    assert let_in.keys() == named


@pytest.mark.parametrize("settings", [[], ["tracing.endpoint=http://c.o:4318", "tracing.headersSecret=mine"]])
def test_traces_go_where_the_values_say(release: Release, settings: list[str]) -> None:
    done = release.run("template", "x", str(CHART), WITHOUT_CRD, *(f"--set={setting}" for setting in settings))
    assert done.returncode == 0, done.stderr
    (deployment,) = (part for part in yaml.safe_load_all(done.stdout) if part and part["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    environment = {entry["name"]: entry for entry in container["env"]}
    assert from_environment({name: entry.get("value", "a=b") for name, entry in environment.items()}).tracing == bool(
        settings
    )
    headers = environment.get("OTEL_EXPORTER_OTLP_HEADERS", {}).get("valueFrom")
    assert headers == ({"secretKeyRef": {"name": "mine", "key": "headers"}} if settings else None)


@pytest.mark.parametrize(
    ("name", "lease"), [("concertina", "concertina-operator"), ("concertina-b", "concertina-b-operator")]
)
def test_each_release_has_a_lease_of_its_own(release: Release, name: str, lease: str) -> None:
    """Two in a namespace act side by side; the one of the name that all have keeps its Lease in an upgrade."""
    parts = [part for part in yaml.safe_load_all(release.run("template", name, str(CHART), WITHOUT_CRD).stdout) if part]
    (deployment,) = (part for part in parts if part["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    environment = {entry["name"]: entry.get("value", "ns") for entry in container["env"]}
    assert from_environment(environment).lease == lease
    rules = [rule for part in parts if part["kind"] == "Role" for rule in part["rules"]]
    assert [rule["resourceNames"] for rule in rules if "update" in rule["verbs"]] == [[lease]]


def test_a_key_of_ones_own(release: Release) -> None:
    rendered = release.run("template", "x", str(CHART), WITHOUT_CRD, "--set=masterKey.existingSecret=mine").stdout
    parts = {part["kind"]: part for part in yaml.safe_load_all(rendered) if part}
    (container,) = parts["Deployment"]["spec"]["template"]["spec"]["containers"]
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert environment["CONCERTINA_MASTER_KEY_SECRET"] == "mine"
    assert environment["CONCERTINA_MASTER_KEY_CREATE"] == "false"
    assert parts["Role"]["rules"][-1] == {
        "apiGroups": [""],
        "resources": ["secrets"],
        "resourceNames": ["mine"],
        "verbs": ["get"],
    }


UNKNOWN_GROUPS = ("monitoring.coreos.com/", "run.ai/")
"""API groups whose CRDs this cluster lacks."""


@pytest.mark.parametrize("installation", chart_values.Installation, ids=lambda installation: installation.name.lower())
def test_the_api_server_takes_the_manifests_of_all_values(
    release: Release, installation: chart_values.Installation
) -> None:
    settings = [f"--set-json={each.replace(':=', '=', 1)}" for each in chart_values.settings(installation)]
    done = release.run("template", "x", str(CHART), "--no-hooks", "--namespace", release.name, *settings, WITHOUT_CRD)
    assert done.returncode == 0, done.stderr
    objects = [each for each in yaml.load_all(done.stdout, yaml.CSafeLoader) if each]
    known = [each for each in objects if not each["apiVersion"].startswith(UNKNOWN_GROUPS)]
    listed = {"apiVersion": "v1", "kind": "List", "items": known}
    said = release.cluster.kubectl(
        "create", "--dry-run=server", "--validate=strict", "-f", "-", stdin=json.dumps(listed)
    )
    assert said.count(" created (server dry run)") == len(known)
    assert "Deployment" in {each["kind"] for each in known}


def test_two_renders_are_the_same_bytes_and_hold_no_secret(release: Release) -> None:
    """Argo CD renders again and again, without a cluster."""
    first, second = (release.run("template", "x", str(CHART), WITHOUT_CRD).stdout for _ in range(2))
    assert first == second
    assert "kind: Secret" not in first


CLUSTER_WIDE = ("clusterroles", "clusterrolebindings", "customresourcedefinitions")
EVERYTHING = {
    "image": {"pullPolicy": "Never"},
    "agentImage": {"pullPolicy": "Never"},
    "imagePullSecrets": [{"name": "registry"}],
    "serviceAccount": {"name": "mine", "annotations": {"cloud/role": "r"}, "labels": {"team": "a"}},
    "extraEnv": [{"name": "NO_PROXY", "value": "10.0.0.0/8"}],
    "extraVolumes": [{"name": "more", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "more", "mountPath": "/tmp/more"}],
    "podAnnotations": {"example.com/note": "n"},
    "podLabels": {"team": "a"},
    "affinity": {
        "nodeAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {"weight": 1, "preference": {"matchExpressions": [{"key": "pool", "operator": "Exists"}]}}
            ]
        }
    },
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {}}
    ],
    "fullnameOverride": "trainings",
}
"""Values that teams ask for first, all at once."""


def test_an_operator_runs_with_all_that_teams_ask_for_and_an_uninstall_leaves_what_the_notes_name(
    release: Release, tmp_path: Path
) -> None:
    """The commands that NOTES.txt prints remove the rest: afterwards nothing is left of the release."""
    cluster, own = release.cluster, f"{release.name}-own"
    cluster.create_namespace(own)
    (tmp_path / "values.yaml").write_text(json.dumps({**EVERYTHING, "watchNamespaces": [own]}))
    options = ("--namespace", own, "--take-ownership", "--values", str(tmp_path / "values.yaml"))
    before = {kind: names_of(cluster, kind) for kind in CLUSTER_WIDE}
    done = release.run("upgrade", "--install", "whole", str(CHART), *options)
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("To uninstall")[2]
    cluster.kubectl("-n", own, "rollout", "status", "deployment/trainings", "--timeout=90s")
    pod = json.loads(cluster.kubectl("-n", own, "get", "pods", "-l", "team=a", "-o", "json"))["items"][0]
    assert pod["spec"]["serviceAccountName"] == "mine"
    name = pod["metadata"]["name"]
    until(lambda: holder(cluster, own, "trainings-operator") == name, "an operator that holds the lease")

    cluster.kubectl("-n", own, "delete", "rolebindings", "--all")
    assert release.run("test", "whole", "--namespace", own).returncode != 0, "the check has no permission"

    commands = [line.split("#")[0].split() for line in notes.splitlines() if line.startswith("  ")]
    (uninstall,) = (number for number, command in enumerate(commands) if command[0] == "helm")
    cluster.kubectl(*commands[0][1:])
    assert release.run(*commands[uninstall][1:]).returncode == 0
    assert names_of(cluster, "pods", own) == {"trainings-test"}, (
        "the command returns after the end of the operator's pod"
    )
    named = {(command[2], command[3]) for command in commands[uninstall + 1 :]}
    left = {(kind, name) for kind in ("lease", "secret", "pod") for name in names_of(cluster, kind, own)}
    crd = ("crd", "trainingjobs.concertina.dev")
    assert left | {crd} == named, "what is left is what the notes name"
    assert names_of(cluster, "trainingjobs", release.jobs) is not None, "the CRD is there, and jobs with it"
    for command in commands[uninstall + 1 :]:
        if command[2:4] != list(crd):
            cluster.kubectl(*command[1:])
    namespaced = cluster.kubectl("api-resources", "--namespaced", "--verbs=list", "-o", "name").split()
    kinds = ",".join(kind for kind in namespaced if not kind.startswith("events"))
    rest = set(cluster.kubectl("-n", own, "get", kinds, "-o", "name").split())
    assert rest == {"serviceaccount/default", "configmap/kube-root-ca.crt"}, "these are of Kubernetes"
    assert {kind: names_of(cluster, kind) for kind in CLUSTER_WIDE} == before
    cluster.kubectl("delete", "namespace", own, "--wait=false")


def names_of(cluster: LocalCluster, kind: str, namespace: str = "default") -> set[str]:
    """Return the names of all objects of a kind."""
    path = "-o=jsonpath={.items[*].metadata.name}"
    return set(cluster.kubectl("-n", namespace, "get", kind, path).split())


def test_a_second_release_does_not_take_the_crd_of_the_first(release: Release) -> None:
    """Helm names the owner, and crds.enabled=false is the way out."""
    options = ("--namespace", release.name, "--dry-run=server", "--set=fullnameOverride=second")
    refused = release.run("install", "second", str(CHART), *options)
    assert refused.returncode != 0
    assert "meta.helm.sh/release-name" in refused.stderr
    assert release.run("install", "second", str(CHART), *options, WITHOUT_CRD).returncode == 0
