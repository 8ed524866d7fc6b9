"""The operator's settings, from the environment that the chart gives it."""

from __future__ import annotations

import enum
import os
import re
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

from concertina.controller.operator_log import LogLevel
from concertina.kube.manifests.agent_container import AgentMetrics, PodSettings
from concertina.kube.parse import notice_taints
from concertina.kube.parse.notice_taints import NOTICE_TAINTS
from concertina_protocol import PORT, addresses
from concertina_protocol.log import LogFormat

TAINTS = "CONCERTINA_NOTICE_TAINTS"
"""A list with commas; absent: the well-known ones; empty: none."""


POD_METRICS = "CONCERTINA_POD_METRICS"
"""The port at which agents serve their metrics; absent or 0: they serve none."""


LEASE = "concertina-operator"
"""Of a release called concertina; others name theirs by CONCERTINA_LEASE: two of a namespace act side by side."""


OTLP = "OTEL_EXPORTER_OTLP"
"""OpenTelemetry's own variables begin so; what is for traces alone, with _TRACES after it, goes before."""
_HEADERS = re.compile(r"([\w.-]+ *=[ !#-+\--:<-\[\]-~]*(, *|$))+", re.ASCII)


class MetricsAccess(enum.Enum):
    """The clients that may read the operator's metrics."""

    OPEN = "Open"
    """Everybody who reaches the port."""
    TOKEN = "Token"
    """Whoever shows the token of the settings; nobody where there is none."""
    REVIEW = "Review"
    """Whoever shows a token of the cluster and may `get` the URL /metrics, by the API server's word."""


class OperatorSettingsError(Exception):
    """A setting is missing or wrong; the sentence says which."""


@dataclass(frozen=True)
class OperatorSettings:
    namespace: str
    """Of the operator itself: its Lease is there."""
    identity: str
    """Of this process, in the Lease."""
    master_key_secret: str
    """In that namespace."""
    makes_master_key: bool
    """Where that Secret is missing; else it is a person's to make."""
    pods: PodSettings
    watch_namespaces: tuple[str, ...]
    """Empty: all, or those that `namespace_selector` selects."""
    health: tuple[str, int] | None
    """Host and port of the probes; None: no probes."""
    lease: str = LEASE
    """Its name: who has the same one takes turns."""
    metrics: tuple[str, int] | None = None
    """Host and port of /metrics; None: none are served."""
    metrics_access: MetricsAccess = MetricsAccess.OPEN
    metrics_token: str = ""
    """For `MetricsAccess.TOKEN`."""
    namespace_selector: str = ""
    """A label selector of the namespaces that are served; empty: labels do not matter."""
    watch_nodes: bool = True
    """False: the operator may not look at nodes, and decides without them."""
    tracing: bool = False
    """Rounds are told to a collector."""
    log_level: LogLevel = LogLevel.INFO
    log_format: LogFormat = LogFormat.JSON
    notice_taints: tuple[str, ...] = NOTICE_TAINTS
    """Taints, as key or key=value, that announce the end of a node."""


def from_environment(environment: Mapping[str, str] = os.environ) -> OperatorSettings:
    token = environment.get("CONCERTINA_METRICS_TOKEN", "").strip()
    access = MetricsAccess.TOKEN if token else MetricsAccess.OPEN
    names = environment.get("CONCERTINA_WATCH_NAMESPACES", "").replace(",", " ").split()
    return OperatorSettings(
        namespace=_required(environment, "CONCERTINA_NAMESPACE", "the namespace that the operator runs in"),
        identity=environment.get("POD_NAME") or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}",
        master_key_secret=_required(environment, "CONCERTINA_MASTER_KEY_SECRET", "the Secret with the master key"),
        makes_master_key=environment.get("CONCERTINA_MASTER_KEY_CREATE") == "true",
        pods=PodSettings(
            _required(environment, "CONCERTINA_IMAGE_AGENT", "the image that holds the agent"),
            _pod_metrics(environment),
        ),
        watch_namespaces=tuple(names),
        health=_address(environment, "CONCERTINA_HEALTH"),
        lease=environment.get("CONCERTINA_LEASE") or LEASE,
        metrics=_address(environment, "CONCERTINA_METRICS"),
        metrics_access=_one_of(MetricsAccess, environment, "CONCERTINA_METRICS_ACCESS", access),
        metrics_token=token,
        namespace_selector=environment.get("CONCERTINA_NAMESPACE_SELECTOR", "").strip(),
        watch_nodes=environment.get("CONCERTINA_WATCH_NODES") != "false",
        tracing=_tracing(environment),
        log_level=_one_of(LogLevel, environment, "CONCERTINA_LOG_LEVEL", LogLevel.INFO),
        log_format=_one_of(LogFormat, environment, "CONCERTINA_LOG_FORMAT", LogFormat.JSON),
        notice_taints=notice_taints.parse(taints) if (taints := environment.get(TAINTS)) is not None else NOTICE_TAINTS,
    )


def _required(environment: Mapping[str, str], name: str, meaning: str) -> str:
    if not environment.get(name):
        raise OperatorSettingsError(f"{name} is not set; it is {meaning}")
    return environment[name]


E = TypeVar("E", bound=enum.Enum)


def _one_of(words: type[E], environment: Mapping[str, str], name: str, default: E) -> E:
    """In capitals or not."""
    text = environment.get(name) or default.value
    found = next((word for word in words if word.value.lower() == text.lower()), None)
    if found is None:
        raise OperatorSettingsError(
            f"{name} is {text!r:.200}; it must be one of {', '.join(word.value for word in words)}"
        )
    return found


def _pod_metrics(environment: Mapping[str, str]) -> AgentMetrics | None:
    text = environment.get(POD_METRICS, "").strip()
    if text in ("", "0"):
        return None
    if not text.isdecimal() or not 1 <= int(text) <= 65535 or int(text) == PORT:
        raise OperatorSettingsError(
            f"{POD_METRICS} is {text!r:.200}; it must be a port from 1 to 65535, not {PORT}, or 0 for none"
        )
    annotated = environment.get(f"{POD_METRICS}_ANNOTATIONS") == "true"
    return AgentMetrics(int(text), annotated, environment.get(f"{POD_METRICS}_TOKEN_SECRET", "").strip())


def _tracing(environment: Mapping[str, str]) -> bool:
    """Whether a collector is named. The SDK would go on without what it can't read, or log a header with its secret."""

    def value(name: str) -> tuple[str, str]:
        both = f"{OTLP}_TRACES_{name}", f"{OTLP}_{name}"
        return next(((each, text) for each in both if (text := environment.get(each, "").strip())), (both[1], ""))

    variable, endpoint = value("ENDPOINT")
    if not endpoint:
        return False
    try:
        url = urlsplit(endpoint)
        good = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        good = False
    if not good:
        raise OperatorSettingsError(f"{variable} is {endpoint!r:.200}; it must be a URL as http://collector:4318")
    variable, protocol = value("PROTOCOL")
    if protocol not in ("", "http/protobuf"):
        raise OperatorSettingsError(
            f"{variable} is {protocol!r:.200}; this operator speaks http/protobuf, for which collectors have port 4318"
        )
    variable, headers = value("HEADERS")
    if headers and not _HEADERS.fullmatch(headers):
        raise OperatorSettingsError(
            f"{variable} must be name=value, several with commas between; a comma in a value is %2C"
        )
    return True


def _address(environment: Mapping[str, str], name: str) -> tuple[str, int] | None:
    text = environment.get(name)
    if not text:
        return None
    try:
        return addresses.split(text)
    except ValueError as error:
        raise OperatorSettingsError(f"{name} is {text!r:.200}; it must be HOST:PORT") from error
