"""Port of a pod's metrics, how Prometheus finds it, and what prevents metrics."""

from __future__ import annotations

import json
from typing import Any

import pytest

from builders.manifests import container, environment, job, made
from concertina.controller.settings import OperatorSettingsError, from_environment
from concertina.kube.manifests.agent_container import METRICS_HOST_PORTS, AgentMetrics, PodSettings
from concertina.kube.parse.views import pod_view
from concertina.kube.resources import Raw
from concertina.plan.actions import CreatePod, Rendezvous
from concertina_agent import settings as agent_settings

SERVED = PodSettings("agent", AgentMetrics(9400, annotated=True))
SCRAPED = {"prometheus.io/scrape": "true", "prometheus.io/port": "9400", "prometheus.io/path": "/metrics"}
OPERATOR = {"CONCERTINA_NAMESPACE": "n", "CONCERTINA_MASTER_KEY_SECRET": "s", "CONCERTINA_IMAGE_AGENT": "i"}


def pod(
    settings: PodSettings = SERVED,
    *,
    trainer: Raw | None = None,
    annotations: dict[str, str] | None = None,
    metrics: Raw | None = None,
    create: CreatePod = CreatePod(1, 2),  # noqa: B008
    more: Raw | None = None,
    **fields: Any,
) -> Raw:
    containers = [{"name": "trainer", "image": "i", "command": ["x"], **(trainer or {})}]
    template = {"metadata": {"annotations": annotations or {}}, "spec": {"containers": containers, **fields}}
    spec = {"template": template, **({"metrics": metrics} if metrics else {}), **(more or {})}
    return made(job(spec), create, settings)


def ports(made_pod: Raw) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container(made_pod)["ports"]}


def scraped(made_pod: Raw) -> dict[str, str]:
    return {key: text for key, text in made_pod["metadata"]["annotations"].items() if key.startswith("prometheus.io/")}


def served(made_pod: Raw) -> agent_settings.MetricsSettings | None:
    """Return the settings of the metrics as the agent reads them."""
    values = {name: value if isinstance(value, str) else "x" for name, value in environment(made_pod).items()}
    return agent_settings.read({**values, "CONCERTINA_VOLUME": "/tmp"}, ("x",)).metrics


def test_a_pod_says_where_its_metrics_are_and_the_agent_hears_of_it() -> None:
    manifest = pod()
    assert ports(manifest) == {"concertina": 29400, "agent-metrics": 9400}
    assert scraped(manifest) == SCRAPED
    assert served(manifest) == agent_settings.MetricsSettings("n", "j", "x", 9400)
    view = pod_view({**manifest, "metadata": {**manifest["metadata"], "uid": "u", "namespace": "n",
                                           "creationTimestamp": "2026-01-01T00:00:00Z"}}).view  # fmt: skip
    assert view.port == 29400


def test_without_the_operators_setting_there_is_nothing_of_it() -> None:
    manifest = pod(PodSettings("agent"))
    assert ports(manifest) == {"concertina": 29400}
    assert scraped(manifest) == {}
    assert "CONCERTINA_METRICS" not in environment(manifest)
    assert served(manifest) is None


def test_a_monitor_needs_no_annotations() -> None:
    manifest = pod(PodSettings("agent", AgentMetrics(9500)))
    assert (ports(manifest)["agent-metrics"], scraped(manifest)) == (9500, {})


@pytest.mark.parametrize("theirs", [{"prometheus.io/scrape": "false"}, {"prometheus.io/port": "8000"}])
def test_the_templates_own_words_to_prometheus_take_the_place_of_all_of_ours(theirs: dict[str, str]) -> None:
    assert scraped(pod(annotations=theirs)) == theirs


def test_a_port_of_the_templates_own_is_left_to_it() -> None:
    manifest = pod(trainer={"ports": [{"name": "mine", "containerPort": 9400}]})
    assert ports(manifest) == {"mine": 9400, "concertina": 29400}
    assert (scraped(manifest), served(manifest)) == ({}, None)


def test_a_job_may_have_none_or_those_of_each_worker() -> None:
    assert served(pod(metrics={"enabled": False})) is None
    each = served(pod(metrics={"perRank": True}))
    assert each is not None
    assert each.per_rank


def test_in_the_hosts_network_the_port_depends_on_the_replica_and_is_the_hosts() -> None:
    found = [pod(hostNetwork=True, create=CreatePod(index, 0)) for index in range(3)]
    declared = [next(p for p in container(each)["ports"] if p["name"] == "agent-metrics") for each in found]
    assert len({port["containerPort"] for port in declared}) == 3
    for each, port in zip(found, declared, strict=True):
        assert port["hostPort"] == port["containerPort"] == int(scraped(each)["prometheus.io/port"])
        assert port["containerPort"] in METRICS_HOST_PORTS
        assert (asked := served(each)) is not None
        assert asked.port == port["containerPort"]


def test_a_token_comes_from_a_secret_of_the_namespace_that_may_be_missing() -> None:
    manifest = pod(PodSettings("agent", AgentMetrics(9400, token_secret="mine")))
    key = {"name": "mine", "key": "token", "optional": True}
    assert environment(manifest)["CONCERTINA_METRICS_TOKEN"] == {"secretKeyRef": key}
    assert json.loads(environment(manifest)["CONCERTINA_METRICS"])["token"] is True
    values = {name: value for name, value in environment(manifest).items() if isinstance(value, str)}
    pods_own = {"CONCERTINA_REPLICA": "r", "CONCERTINA_POD_IP": "10.0.0.1", "CONCERTINA_VOLUME": "/tmp"}
    missing = agent_settings.read({**values, **pods_own}, ("x",)).metrics
    there = agent_settings.read({**values, **pods_own, "CONCERTINA_METRICS_TOKEN": "s3cret\n"}, ("x",))
    assert missing is not None
    assert missing.token == ""
    assert there.metrics is not None
    assert there.metrics.token == "s3cret"
    assert "CONCERTINA_METRICS_TOKEN" not in there.environment, "workers don't get it"


def test_torchruns_pods_have_no_agent_and_no_metrics() -> None:
    manifest = pod(create=CreatePod(0, 0, rendezvous=Rendezvous("a:1", 1, 1)), more={"launcher": "Torchrun"})
    assert "CONCERTINA_METRICS" not in environment(manifest)
    assert scraped(manifest) == {}


@pytest.mark.parametrize("text", ["x", "-1", "65536", "29400", "9400.0"])
def test_a_port_that_can_not_be_is_named(text: str) -> None:
    with pytest.raises(
        OperatorSettingsError, match=r"CONCERTINA_POD_METRICS is '.*'; it must be a port from 1 to 65535"
    ):
        from_environment({**OPERATOR, "CONCERTINA_POD_METRICS": text})


def test_what_the_chart_says_is_read() -> None:
    chart = {"CONCERTINA_POD_METRICS": "9400", "CONCERTINA_POD_METRICS_ANNOTATIONS": "true",
             "CONCERTINA_POD_METRICS_TOKEN_SECRET": "mine"}  # fmt: skip
    assert from_environment({**OPERATOR, **chart}).pods == PodSettings("i", AgentMetrics(9400, True, "mine"))
    assert from_environment({**OPERATOR, **chart, "CONCERTINA_POD_METRICS": "0"}).pods.metrics is None
    assert from_environment(OPERATOR).pods.metrics is None
