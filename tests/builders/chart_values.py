"""A value other than the default for each value of the chart, and the text by which it shows in the manifests.

Some values exclude each other. The table therefore has two installations, which together set all values.
"""

from __future__ import annotations

import json
from enum import Enum
from typing import Any, NamedTuple

DIGEST = "sha256:" + "b" * 64
SPREAD = {"maxSkew": 3, "topologyKey": "zone-x", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {}}
PREFERENCE = {"matchExpressions": [{"key": "affinity-x", "operator": "Exists"}]}
AFFINITY = {
    "nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "preference": PREFERENCE}]}
}


class Installation(Enum):
    NAMED = "named namespaces, objects of the Prometheus operator and of KAI"
    SELECTED = "selected namespaces, no access to nodes, an existing service account"


class Row(NamedTuple):
    value: Any
    shown: str
    """Regular expression. It matches the manifests with this value, and does not match those of the defaults."""
    installation: Installation = Installation.NAMED
    removes: bool = False
    """True: the expression matches the manifests of the defaults only."""


def variable(name: str, value: str) -> str:
    return rf'- name: CONCERTINA_{name}\n +value: "?{value}"?$'


NAMED, SELECTED = Installation
TABLE = {
    "nameOverride": Row("name-x", "^  name: x-name-x$"),
    "fullnameOverride": Row("full-x", "^  name: full-x$", SELECTED),
    "crds.enabled": Row(False, "^kind: CustomResourceDefinition$", removes=True),
    "replicas": Row(2, "^  replicas: 2$"),
    "image.repository": Row("registry.example/operator", "image: .registry.example/operator:"),
    "image.tag": Row("tag-x", "image: .*:tag-x.$"),
    "image.digest": Row(DIGEST, f"image: .concertina/operator@{DIGEST}", SELECTED),
    "image.pullPolicy": Row("Always", "imagePullPolicy: Always"),
    "agentImage.repository": Row("registry.example/agent", variable("IMAGE_AGENT", "registry.example/agent@.*")),
    "agentImage.digest": Row(DIGEST, variable("IMAGE_AGENT", f".*@{DIGEST}")),
    "agentImage.tag": Row("tag-y", variable("IMAGE_AGENT", ".*:tag-y"), SELECTED),
    "agentImage.pullPolicy": Row("Never", variable("IMAGE_AGENT_PULL_POLICY", "Never")),
    "imagePullSecrets": Row([{"name": "registry-x"}], "- name: registry-x$"),
    "watchNamespaces": Row(["default"], variable("WATCH_NAMESPACES", "default")),
    "namespaceSelector": Row("serve=true", variable("NAMESPACE_SELECTOR", "serve=true"), SELECTED),
    "nodes.enabled": Row(False, variable("WATCH_NODES", "false"), SELECTED),
    "rbac.aggregate": Row(False, "aggregate-to-edit", SELECTED, removes=True),
    "serviceAccount.create": Row(False, "^kind: ServiceAccount$", SELECTED, removes=True),
    "serviceAccount.name": Row("account-x", "serviceAccountName: account-x", SELECTED),
    "serviceAccount.annotations": Row({"cloud/role": "r"}, "cloud/role: r$"),
    "serviceAccount.labels": Row({"account-label": "a"}, "account-label: a$"),
    "kai.enabled": Row(True, "^kind: Karta$"),
    "kai.podGrouper.namespace": Row("kai-x", "namespace: kai-x"),
    "kai.podGrouper.serviceAccount": Row("grouper-x", "name: grouper-x"),
    "masterKey.existingSecret": Row("key-x", variable("MASTER_KEY_SECRET", "key-x")),
    "noticeTaints": Row(["a/b=c", "d"], variable("NOTICE_TAINTS", "a/b=c,d")),
    "faultConditions": Row(["Bad=True", "Hot"], variable("FAULT_CONDITIONS", "Bad=True,Hot")),
    "metrics.discovery": Row("PodMonitor", "^kind: PodMonitor$"),
    "metrics.labels": Row({"monitor-label": "m"}, "monitor-label: m$"),
    "metrics.tokenSecret": Row("scrape-x", "name: .scrape-x., key: token", SELECTED),
    "metrics.open": Row(True, variable("METRICS_ACCESS", "Open")),
    "metrics.pods.port": Row(9555, variable("POD_METRICS", "9555")),
    "metrics.pods.tokenSecret": Row("pods-x", variable("POD_METRICS_TOKEN_SECRET", "pods-x")),
    "monitoring.alerts.enabled": Row(True, "^kind: PrometheusRule$"),
    "monitoring.dashboards.enabled": Row(True, "grafana_dashboard:"),
    "monitoring.runbookUrl": Row("https://runbooks.example", "runbook_url: .?https://runbooks.example/"),
    "tracing.endpoint": Row("http://collector.example:4318", "value: .http://collector.example:4318"),
    "tracing.headersSecret": Row("headers-x", "name: .headers-x., key: headers"),
    "networkPolicy.enabled": Row(True, "^kind: NetworkPolicy$"),
    "networkPolicy.metricsFrom": Row([{"podSelector": {"matchLabels": {"scraper": "s"}}}], "scraper: s$"),
    "logLevel": Row("DEBUG", variable("LOG_LEVEL", "DEBUG")),
    "logFormat": Row("text", variable("LOG_FORMAT", "text")),
    "resources": Row({"requests": {"cpu": "123m"}}, "cpu: 123m$"),
    "extraEnv": Row([{"name": "EXTRA_X", "value": "e"}], "name: EXTRA_X$"),
    "extraVolumes": Row([{"name": "volume-x", "emptyDir": {}}], "emptyDir: {}\n +name: volume-x$"),
    "extraVolumeMounts": Row([{"name": "volume-x", "mountPath": "/mount-x"}], "mountPath: /mount-x$"),
    "podAnnotations": Row({"pod-annotation": "p"}, "pod-annotation: p$"),
    "podLabels": Row({"pod-label": "p"}, "pod-label: p$"),
    "nodeSelector": Row({"node-label": "pool-x"}, "node-label: pool-x$"),
    "affinity": Row(AFFINITY, "key: affinity-x$"),
    "topologySpreadConstraints": Row([SPREAD], "topologyKey: zone-x$"),
    "tolerations": Row([{"key": "taint-x", "operator": "Exists"}], "key: taint-x$"),
    "priorityClassName": Row("system-cluster-critical", "priorityClassName: system-cluster-critical$"),
}


def settings(installation: Installation) -> list[str]:
    """Return the values of an installation, each as NAME:=JSON."""
    return [f"{name}:={json.dumps(row.value)}" for name, row in TABLE.items() if row.installation is installation]
