"""Settings of the operator, from the environment variables that the chart sets."""

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
from concertina.kube.manifests.agent_container import AgentMetrics, PodSettings, PullPolicy
from concertina.kube.parse import notice_taints
from concertina.kube.parse.fault_conditions import FAULT_CONDITIONS
from concertina.kube.parse.notice_taints import NOTICE_TAINTS
from concertina_protocol import PORT, addresses
from concertina_protocol.log import LogFormat

TAINTS, CONDITIONS = "CONCERTINA_NOTICE_TAINTS", "CONCERTINA_FAULT_CONDITIONS"
"""Environment variables of the operator with comma-separated lists of notice taints and of fault conditions.

If a variable is not set, the well-known taints or conditions apply. If it is empty, none apply.
"""


PULL_POLICY = "CONCERTINA_IMAGE_AGENT_PULL_POLICY"
"""Environment variable of the operator with the pull policy of the agent's image.

If it is not set, Kubernetes chooses the policy by the image's tag.
"""


POD_METRICS = "CONCERTINA_POD_METRICS"
"""Environment variable of the operator with the port on which agents serve metrics.

If it is 0 or not set, agents serve no metrics.
"""


LEASE = "concertina-operator"
"""Default name of the Lease, for a Helm release called concertina.

For other releases, the chart sets the environment variable CONCERTINA_LEASE, so that two releases in one namespace do
not share a Lease.
"""


OTLP = "OTEL_EXPORTER_OTLP"
"""Prefix of OpenTelemetry's environment variables for the export.

A variable with _TRACES after this prefix applies only to traces, and takes precedence over the general variable.
"""
_HEADERS = re.compile(r"([\w.-]+ *=[ !#-+\--:<-\[\]-~]*(, *|$))+", re.ASCII)


class MetricsAccess(enum.Enum):
    """Rules for which clients may read the operator's metrics."""

    OPEN = "Open"
    """Every client that can reach the port may read the metrics."""
    TOKEN = "Token"
    """Clients may read the metrics if they present `metrics_token`. If that token is empty, no client may."""
    REVIEW = "Review"
    """Clients may read the metrics if the account of their cluster token may `get` the URL /metrics.
    """


class OperatorSettingsError(Exception):
    """Error: a setting is missing or invalid. The message names the setting."""


@dataclass(frozen=True)
class OperatorSettings:
    """Settings of the operator."""

    namespace: str
    """Namespace in which the operator runs. It contains the operator's Lease."""
    identity: str
    """Identity of this process in the Lease."""
    master_key_secret: str
    """Name of the Secret with the master key, in the operator's namespace."""
    makes_master_key: bool
    """True if the operator creates the Secret with the master key when it does not exist.

    If False, a user must create it.
    """
    pods: PodSettings
    watch_namespaces: tuple[str, ...]
    """Namespaces that the operator serves.

    If empty, it serves all namespaces, or those that match `namespace_selector`.
    """
    health: tuple[str, int] | None
    """Host and port on which the operator serves the kubelet's health probes; None to serve none."""
    lease: str = LEASE
    """Name of the Lease. Only one of the operators with the same Lease acts at a time."""
    metrics: tuple[str, int] | None = None
    """Host and port on which the operator serves /metrics; None to serve no metrics."""
    metrics_access: MetricsAccess = MetricsAccess.OPEN
    metrics_token: str = ""
    """Token that clients must present with `MetricsAccess.TOKEN`."""
    namespace_selector: str = ""
    """Label selector for the namespaces that the operator serves. Empty: all namespaces match."""
    watch_nodes: bool = True
    """True if the operator watches nodes. If False, it decides without information about nodes."""
    tracing: bool = False
    """True if the operator exports a trace of each round to a collector."""
    log_level: LogLevel = LogLevel.INFO
    log_format: LogFormat = LogFormat.JSON
    notice_taints: tuple[str, ...] = NOTICE_TAINTS
    """Taints that announce the termination of a node, as KEY or KEY=VALUE."""
    fault_conditions: tuple[str, ...] = FAULT_CONDITIONS
    """Node conditions that say that a node is faulty, as TYPE or TYPE=STATUS."""


def from_environment(environment: Mapping[str, str] = os.environ) -> OperatorSettings:
    """Read the settings from the environment.

    Raises:
        OperatorSettingsError: When a setting is missing or invalid.
    """
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
            _one_of(PullPolicy, environment, PULL_POLICY, PullPolicy.IF_NOT_PRESENT)
            if environment.get(PULL_POLICY)
            else None,
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
        notice_taints=_names(environment, TAINTS, NOTICE_TAINTS),
        fault_conditions=_names(environment, CONDITIONS, FAULT_CONDITIONS),
    )


def _names(environment: Mapping[str, str], name: str, default: tuple[str, ...]) -> tuple[str, ...]:
    """Return the entries of a comma-separated list in an environment variable, or the default if it is not set."""
    text = environment.get(name)
    return default if text is None else notice_taints.parse(text)


def _required(environment: Mapping[str, str], name: str, meaning: str) -> str:
    """Return the value of the environment variable `name`, which has no default.

    Raises:
        OperatorSettingsError: When the variable is not set.
    """
    if not environment.get(name):
        raise OperatorSettingsError(f"{name} is not set; it is {meaning}")
    return environment[name]


E = TypeVar("E", bound=enum.Enum)


def _one_of(members: type[E], environment: Mapping[str, str], name: str, default: E) -> E:
    """Return the enum member whose value the environment variable `name` contains, ignoring case; `default` if not set.

    Raises:
        OperatorSettingsError: When no member has that value.
    """
    text = environment.get(name) or default.value
    member = next((candidate for candidate in members if candidate.value.lower() == text.lower()), None)
    if member is None:
        raise OperatorSettingsError(
            f"{name} is {text!r:.200}; it must be one of {', '.join(candidate.value for candidate in members)}"
        )
    return member


def _pod_metrics(environment: Mapping[str, str]) -> AgentMetrics | None:
    """Return the settings for the metrics endpoint of agents; None if agents serve no metrics.

    Raises:
        OperatorSettingsError: When the port is invalid.
    """
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
    """Return whether a trace collector is configured, and check OpenTelemetry's variables.

    The SDK itself would ignore an invalid value, or log a header that contains a secret.

    Raises:
        OperatorSettingsError: When a variable is invalid.
    """

    def value(name: str) -> tuple[str, str]:
        variable_names = f"{OTLP}_TRACES_{name}", f"{OTLP}_{name}"
        return next(
            (
                (variable_name, text)
                for variable_name in variable_names
                if (text := environment.get(variable_name, "").strip())
            ),
            (variable_names[1], ""),
        )

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
    """Return the host and port in the environment variable `name`; None if it is not set.

    Raises:
        OperatorSettingsError: When the value is not HOST:PORT.
    """
    text = environment.get(name)
    if not text:
        return None
    try:
        return addresses.split(text)
    except ValueError as error:
        raise OperatorSettingsError(f"{name} is {text!r:.200}; it must be HOST:PORT") from error
