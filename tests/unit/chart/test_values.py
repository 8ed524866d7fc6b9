"""Values of the chart: each does what its comment says; values.yaml, its schema and the README name the same ones."""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from builders.chart import CHART, WITH_CRD, everything, helm, rendered
from builders.chart_values import TABLE, Row, settings
from concertina.api import GROUP, PLURAL
from concertina.controller.settings import from_environment
from concertina.kube.manifests.agent_container import PullPolicy

sys.path.append(str(Path(__file__).resolve().parents[3] / "tools"))
import chart_readme

DIGEST = "sha256:" + "a" * 64
PEER = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": []}}
SPREAD = [{"maxSkew": 2, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}]
VOLUME, MOUNT = {"name": "ca", "configMap": {"name": "ca"}}, {"name": "ca", "mountPath": "/ca", "readOnly": True}
PROXY = {"name": "HTTPS_PROXY", "value": "http://proxy:3128"}


def deployment(*settings: str) -> dict[str, Any]:
    (found,) = (each for (kind, _, _), each in rendered(*settings).items() if kind == "Deployment")
    return found


def pods(*settings: str) -> list[dict[str, Any]]:
    """Return the specs of the operator's pod and of the test's, which have most of their fields in common."""
    (test,) = (each for (kind, _, _), each in everything(*settings).items() if kind == "Pod")
    return [deployment(*settings)["spec"]["template"]["spec"], test["spec"]]


def container(pod: dict[str, Any]) -> dict[str, Any]:
    (found,) = pod["containers"]
    return dict(found)


def environment(pod: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "x") for entry in container(pod)["env"]}


@pytest.mark.parametrize(
    ("settings", "image"),
    [
        ((), "concertina/operator:0.1.0"),
        (("image.repository=reg.io:5000/o", "image.tag=v9"), "reg.io:5000/o:v9"),
        ((f"image.digest={DIGEST}",), f"concertina/operator@{DIGEST}"),
        ((f"image.digest={DIGEST}", "image.tag=v9"), f"concertina/operator@{DIGEST}"),
    ],
)
def test_an_image_is_named_by_tag_or_by_digest(settings: tuple[str, ...], image: str) -> None:
    assert [container(pod)["image"] for pod in pods(*settings)] == [image, image]
    agent = [setting.replace("image.", "agentImage.") for setting in settings]
    (operator, _) = pods(*agent)
    assert environment(operator)["CONCERTINA_IMAGE_AGENT"] == image.replace("concertina/operator", "concertina/agent")


def test_images_are_pulled_as_the_values_say() -> None:
    settings = ("image.pullPolicy=Always", "agentImage.pullPolicy=Never", 'imagePullSecrets:=[{"name": "registry"}]')
    for pod in pods(*settings):
        assert container(pod)["imagePullPolicy"] == "Always"
        assert pod["imagePullSecrets"] == [{"name": "registry"}]
        read = from_environment({**environment(pod), "CONCERTINA_HEALTH": "", "CONCERTINA_METRICS": ""})
        assert read.pods.agent_pull_policy is PullPolicy.NEVER


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ((), "x-concertina"),
        (("nameOverride=training",), "x-training"),
        (("nameOverride=x",), "x"),
        (("fullnameOverride=mine", "nameOverride=other"), "mine"),
    ],
)
def test_all_objects_have_the_name_that_the_values_say(settings: tuple[str, ...], name: str) -> None:
    more = (
        "metrics.discovery=ServiceMonitor",
        "networkPolicy.enabled=true",
        "replicas=2",
        "monitoring.alerts.enabled=true",
    )
    objects = everything(*settings, *more)
    assert not {found for _, _, found in objects if not found.startswith(name)}
    (operator, _) = pods(*settings)
    assert environment(operator)["CONCERTINA_LEASE"] == f"{name}-operator"


def test_the_operator_has_a_service_account_of_its_own_or_an_existing_one() -> None:
    settings = ("serviceAccount.annotations.cloud/role=r", "serviceAccount.labels.team=a", "serviceAccount.name=mine")
    account = rendered(*settings)["ServiceAccount", "sys", "mine"]
    assert account["metadata"]["annotations"] == {"cloud/role": "r"}
    assert account["metadata"]["labels"]["team"] == "a"
    for chosen in (settings, ("serviceAccount.create=false", "serviceAccount.name=mine")):
        objects = rendered(*chosen)
        assert [pod["serviceAccountName"] for pod in pods(*chosen)] == ["mine", "mine"]
        bound = [
            subject["name"]
            for (kind, _, name), each in objects.items()
            if kind in ("RoleBinding", "ClusterRoleBinding") and "reader" not in name
            for subject in each["subjects"]
        ]
        assert set(bound) == {"mine"}
    assert "ServiceAccount" not in {kind for kind, _, _ in objects}
    assert helm("serviceAccount.create=false").returncode != 0, "which one, then?"


def test_pods_have_more_labels_and_annotations_and_keep_those_that_select_them() -> None:
    made = deployment(
        "podLabels.team=a",
        r"podLabels.app\.kubernetes\.io/name=other",
        r"podAnnotations.sidecar\.istio\.io/inject=no",
    )
    metadata = made["spec"]["template"]["metadata"]
    assert made["spec"]["selector"]["matchLabels"].items() <= metadata["labels"].items()
    assert metadata["labels"]["team"] == "a"
    assert metadata["annotations"]["prometheus.io/scrape"] == "true"
    assert metadata["annotations"]["sidecar.istio.io/inject"] == "no"
    (bare,) = (deployment("metrics.discovery=None")["spec"]["template"]["metadata"],)
    assert "annotations" not in bare


def test_pods_run_where_the_values_say() -> None:
    settings = (
        f"affinity:={json.dumps(PEER)}", f"topologySpreadConstraints:={json.dumps(SPREAD)}", "nodeSelector.pool=system",
        'tolerations:=[{"operator": "Exists"}]', "priorityClassName=high",
    )  # fmt: skip
    operator, test = pods(*settings)
    assert (operator["affinity"], operator["topologySpreadConstraints"]) == (PEER, SPREAD)
    for pod in (operator, test):
        assert pod["nodeSelector"] == {"pool": "system"}
        assert pod["tolerations"] == [{"operator": "Exists"}]
        assert pod["priorityClassName"] == "high"
    (plain, _) = pods()
    assert [each["topologyKey"] for each in plain["topologySpreadConstraints"]] == ["kubernetes.io/hostname"]
    assert "affinity" not in plain
    (nowhere, _) = pods("topologySpreadConstraints:=[]")
    assert "topologySpreadConstraints" not in nowhere


def test_pods_have_more_variables_volumes_and_mounts() -> None:
    settings = tuple(
        f"{name}:={json.dumps([value])}"
        for name, value in {"extraEnv": PROXY, "extraVolumes": VOLUME, "extraVolumeMounts": MOUNT}.items()
    )
    for pod in pods(*settings):
        assert container(pod)["env"][-1] == PROXY
        assert pod["volumes"][-1] == VOLUME
        assert container(pod)["volumeMounts"][-1] == MOUNT


@pytest.mark.parametrize("name", ["CONCERTINA_LEASE", "POD_NAME", "POD_IP"])
def test_a_variable_that_the_chart_sets_is_refused(name: str) -> None:
    assert "extraEnv" in helm(f"extraEnv[0].name={name}", "extraEnv[0].value=x").stderr


@pytest.mark.parametrize(
    "setting", ["image.digest=sha256:12", "image.repository=a@sha256:b", "fullnameOverride=A", "image.tag=v1@sha256:b"]
)
def test_a_value_that_names_nothing_is_refused(setting: str) -> None:
    assert setting.split("=")[0].replace(".", "/") in helm(setting).stderr


def test_the_crd_is_part_of_the_release_unless_an_administrator_has_it() -> None:
    crd = rendered(WITH_CRD)["CustomResourceDefinition", "", f"{PLURAL}.{GROUP}"]
    assert crd["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    alone = yaml.safe_load((CHART.parents[1] / "crds" / f"{GROUP}_{PLURAL}.yaml").read_text())
    assert crd["spec"] == alone["spec"]
    assert "CustomResourceDefinition" not in {kind for kind, _, _ in rendered()}
    assert not (CHART / "crds").exists(), "Helm would install it a second time, and never upgrade it"


def test_the_probes_ask_two_questions() -> None:
    (operator, _) = pods()
    probes = {kind: container(operator)[f"{kind}Probe"]["httpGet"]["path"] for kind in ("liveness", "readiness")}
    assert probes == {"liveness": "/healthz", "readiness": "/readyz"}


def test_the_test_runs_once_with_the_operators_rights() -> None:
    (pod,) = (each for (kind, _, _), each in everything().items() if kind == "Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    operator, test = pods()
    assert test["restartPolicy"] == "Never"
    for same in ("serviceAccountName", "securityContext"):
        assert test[same] == operator[same]
    assert container(test)["securityContext"] == container(operator)["securityContext"]
    selector = deployment()["spec"]["selector"]["matchLabels"]
    assert not selector.items() <= pod["metadata"]["labels"].items(), "it is no operator"


def properties(schema: dict[str, Any], root: dict[str, Any], path: str = "") -> Iterator[str]:
    """Yield the path of each leaf of the schema."""
    if (ref := schema.get("$ref")) is not None:
        schema = root["definitions"][ref.rpartition("/")[2]]
    fields = schema.get("properties", {})
    for name, field in fields.items():
        yield from properties(field, root, f"{path}.{name}")
    if not fields:
        yield path.lstrip(".")


def test_values_and_schema_name_the_same() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    named = {re.sub(r"^resources\..*", "resources", name) for name in properties(schema, schema)} - {"global"}
    assert named == {value.name for value in chart_readme.values((CHART / "values.yaml").read_text())}


@functools.cache
def text(*settings: str) -> str:
    done = helm(*settings)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_table_has_every_value_and_no_default() -> None:
    defaults = {value.name: value.default for value in chart_readme.values((CHART / "values.yaml").read_text())}
    assert TABLE.keys() == defaults.keys()
    assert not [name for name, row in TABLE.items() if row.value == defaults[name]]


@pytest.mark.parametrize(("name", "row"), TABLE.items(), ids=TABLE)
def test_each_value_is_seen_in_the_manifests(name: str, row: Row) -> None:
    changed, default = text(*settings(row.installation)), text(WITH_CRD)
    assert bool(re.search(row.shown, changed, re.MULTILINE)) is not row.removes
    assert bool(re.search(row.shown, default, re.MULTILINE)) is row.removes


def test_the_readme_is_that_of_the_values() -> None:
    assert chart_readme.README.read_text() == chart_readme.readme()


def test_a_value_without_a_comment_is_refused() -> None:
    with pytest.raises(ValueError, match=r"b\.d has no comment"):
        list(chart_readme.values("# One.\na: 1\nb:\n  # Two.\n  c: []\n\n  d: x\n"))
