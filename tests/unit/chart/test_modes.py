"""Objects that the chart makes: permissions in each mode, roles for users, and access to metrics."""

from __future__ import annotations

import pytest

from builders.chart import Objects, helm, rendered
from builders.gang_crds import problems
from concertina.api import GROUP, KIND, VERSION
from concertina.controller.settings import MetricsAccess, OperatorSettings, from_environment

NAMESPACED = ("nodes.enabled=false", "rbac.aggregate=false", "watchNamespaces={a,b}")


def names(objects: Objects, *kinds: str) -> list[tuple[str, str]]:
    return sorted((namespace, name) for kind, namespace, name in objects if kind in kinds)


def settings_of(objects: Objects) -> OperatorSettings:
    """Return the settings as the operator would read them."""
    (container,) = objects["Deployment", "sys", "x-concertina"]["spec"]["template"]["spec"]["containers"]
    environment = {entry["name"]: entry.get("value", "from-a-secret") for entry in container["env"]}
    return from_environment({**environment, "CONCERTINA_HEALTH": "", "CONCERTINA_METRICS": ""})


def resources(objects: Objects, name: str) -> set[str]:
    rules = objects["ClusterRole", "", name]["rules"]
    return {resource for rule in rules for resource in rule.get("resources", ())}


def test_kai_is_told_of_training_jobs_where_that_is_asked_for() -> None:
    assert names(rendered(), "Karta") == []
    objects = rendered("kai.enabled=true", "kai.podGrouper.namespace=kai")
    karta = objects["Karta", "", "concertina-dev-trainingjob-v1beta1"]
    assert problems(karta, "karta") == []
    root = karta["spec"]["structureDefinition"]["rootComponent"]
    assert root["kind"] == {"group": GROUP, "version": VERSION, "kind": KIND}
    assert root["scaleDefinition"]["minReplicasPath"] == ".spec.elastic.minReplicas"
    # KAI finds the object by its labels alone.
    found_by = {f"run.ai/karta-{part}": value for part, value in root["kind"].items()}
    assert found_by.items() <= karta["metadata"]["labels"].items()
    assert resources(objects, "x-concertina-kai") == {"trainingjobs"}
    (subject,) = objects["ClusterRoleBinding", "", "x-concertina-kai"]["subjects"]
    assert (subject["namespace"], subject["name"]) == ("kai", "pod-grouper")


def test_without_nodes_and_with_names_nothing_belongs_to_the_whole_cluster() -> None:
    objects = rendered(*NAMESPACED)
    assert names(objects, "ClusterRole", "ClusterRoleBinding") == []
    assert {namespace for _, namespace, _ in objects} == {"sys", "a", "b"}
    assert names(objects, "Role") == [("a", "x-concertina"), ("b", "x-concertina"), ("sys", "x-concertina-own")]
    settings = settings_of(objects)
    assert (settings.watch_nodes, settings.watch_namespaces) == (False, ("a", "b"))
    assert (settings.metrics_access, settings.metrics_token) == (MetricsAccess.TOKEN, ""), "nobody is answered yet"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ((), {"nodes", "tokenreviews", "subjectaccessreviews", "trainingjobs", "pods"}),
        (("watchNamespaces={a}",), {"nodes", "tokenreviews", "subjectaccessreviews"}),
        (("watchNamespaces={a}", "metrics.open=true"), {"nodes"}),
        (("nodes.enabled=false", "metrics.tokenSecret=t"), {"trainingjobs", "pods"}),
        (("namespaceSelector=serve=true", "metrics.tokenSecret=t"), {"nodes", "namespaces", "trainingjobs", "pods"}),
    ],
)
def test_the_cluster_role_has_what_the_mode_needs(settings: tuple[str, ...], expected: set[str]) -> None:
    known = {"nodes", "namespaces", "tokenreviews", "subjectaccessreviews", "trainingjobs", "pods"}
    objects = rendered(*settings)
    assert resources(objects, "x-concertina") & known == expected
    read = settings_of(objects)
    assert read.watch_nodes == ("nodes" in expected)
    assert (read.metrics_access is MetricsAccess.REVIEW) == ("tokenreviews" in expected)
    assert bool(read.namespace_selector) == ("namespaces" in expected)


def test_names_and_a_selector_exclude_each_other() -> None:
    done = helm("watchNamespaces={a}", "namespaceSelector=serve=true")
    assert "can't both be set" in done.stderr


def test_users_get_training_jobs_with_the_roles_that_they_have() -> None:
    objects = rendered()
    verbs: dict[str, dict[str, set[str]]] = {}
    for word in ("view", "edit"):
        role = objects["ClusterRole", "", f"x-concertina-{word}"]
        for rule in role["rules"]:
            assert rule["apiGroups"] == ([""] if rule["resources"] == ["podtemplates"] else ["concertina.dev"])
            for resource in rule["resources"]:
                verbs.setdefault(word, {})[resource] = set(rule["verbs"])
        prefix = "rbac.authorization.k8s.io/aggregate-to-"
        into = {label.removeprefix(prefix) for label in role["metadata"]["labels"] if label.startswith(prefix)}
        assert into == ({"view"} if word == "view" else {"edit", "admin"})
    reading = {"get", "list", "watch"}
    assert set(verbs["view"]) == {"trainingjobs", "trainingjobs/status", "trainingjobs/scale"}
    assert all(allowed <= reading for allowed in verbs["view"].values())
    assert verbs["edit"]["trainingjobs"] >= reading | {"create", "update", "patch", "delete"}
    assert verbs["edit"]["trainingjobs/scale"] >= {"get", "update", "patch"}
    assert verbs["edit"]["trainingjobs/status"] == {"get"}
    assert verbs["edit"]["podtemplates"] >= reading | {"create", "update", "patch", "delete"}
    without = rendered("rbac.aggregate=false")
    assert not [name for _, name in names(without, "ClusterRole") if name.endswith(("-view", "-edit"))]


@pytest.mark.parametrize("discovery", ["PodMonitor", "ServiceMonitor"])
@pytest.mark.parametrize(
    ("settings", "secret"),
    [
        ((), "x-concertina-metrics-reader"),
        (("metrics.tokenSecret=mine",), "mine"),
        (("metrics.open=true",), None),
        (("metrics.open=true", "metrics.tokenSecret=mine"), None),
        ((*NAMESPACED, "metrics.tokenSecret=mine"), "mine"),
    ],
)
def test_a_monitor_shows_the_token_that_is_asked_for(
    discovery: str, settings: tuple[str, ...], secret: str | None
) -> None:
    objects = rendered(f"metrics.discovery={discovery}", *settings)
    spec = objects[discovery, "sys", "x-concertina"]["spec"]
    (endpoint,) = spec.get("podMetricsEndpoints") or spec["endpoints"]
    assert endpoint.get("authorization", {}).get("credentials", {}).get("name") == secret
    reader = "x-concertina-metrics-reader"
    assert (("Secret", "sys", reader) in objects) == (secret == reader)
    if secret != reader:
        return
    token = objects["Secret", "sys", reader]
    assert token["type"] == "kubernetes.io/service-account-token"
    assert token["metadata"]["annotations"] == {"kubernetes.io/service-account.name": reader}
    assert objects["ClusterRole", "", reader]["rules"] == [{"nonResourceURLs": ["/metrics"], "verbs": ["get"]}]
    binding = objects["ClusterRoleBinding", "", reader]
    assert binding["roleRef"]["name"] == reader
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": reader, "namespace": "sys"}]


def test_the_token_of_pods_is_shown_within_its_namespace_alone() -> None:
    monitors = ("metrics.discovery=PodMonitor", "metrics.pods.tokenSecret=mine")
    found = rendered(*monitors, "watchNamespaces={a,b}")
    assert names(found, "PodMonitor") == [
        ("a", "x-concertina-training-pods"), ("b", "x-concertina-training-pods"), ("sys", "x-concertina"),
    ]  # fmt: skip
    for namespace in ("a", "b"):
        spec = found["PodMonitor", namespace, "x-concertina-training-pods"]["spec"]
        assert "namespaceSelector" not in spec, "it selects pods of its own namespace"
        assert spec["podMetricsEndpoints"][0]["authorization"]["credentials"] == {"name": "mine", "key": "token"}
    everywhere = rendered(*monitors)
    assert names(everywhere, "PodMonitor") == [("sys", "x-concertina")]
