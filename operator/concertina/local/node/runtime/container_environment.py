"""Environment variables of a container, from the manifest, the downward API, ConfigMaps and Secrets.

Variables of the calling process are not passed on. A command that works here therefore also works in a real container.
"""

import base64
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from concertina_protocol.quantities import parse_quantity

Object = dict[str, Any]
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_REFERENCE = re.compile(r"\$\$|\$\(([-._a-zA-Z][-._a-zA-Z0-9]*)\)")
_SUBSCRIPT = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]$")


class ConfigError(Exception):
    """Error: a container cannot be configured (CreateContainerConfigError). The message gives the reason."""


@dataclass(frozen=True)
class Sources:
    """Objects and values, in addition to the container's manifest, that its environment variables come from."""

    pod: Object  # with status.podIP and status.hostIP
    allocatable: Mapping[str, str]  # of the node, for limits that are not set
    api_host: str
    api_port: int
    config_maps: Mapping[str, Object | None] = field(default_factory=dict)  # None: there is none of this name
    secrets: Mapping[str, Object | None] = field(default_factory=dict)


def references(container: Object) -> tuple[set[str], set[str]]:
    """Return the names of the ConfigMaps and of the Secrets to which a container's variables refer."""
    maps, secrets = set(), set()
    for source in container.get("envFrom") or []:
        maps |= {source["configMapRef"]["name"]} if "configMapRef" in source else set()
        secrets |= {source["secretRef"]["name"]} if "secretRef" in source else set()
    for variable in container.get("env") or []:
        source = variable.get("valueFrom") or {}
        maps |= {source["configMapKeyRef"]["name"]} if "configMapKeyRef" in source else set()
        secrets |= {source["secretKeyRef"]["name"]} if "secretKeyRef" in source else set()
    return maps, secrets


def build(container: Object, sources: Sources, environment: str | None) -> dict[str, str]:
    """Return all environment variables of a container.

    Args:
        container: Manifest of the container.
        sources: Other sources of variables.
        environment: Folder of the virtual environment that takes the place of the image; None if there is none.
    """
    host, port = sources.api_host, str(sources.api_port)
    result = {"PATH": _PATH, "HOME": "/tmp", "LANG": "C.UTF-8", "HOSTNAME": sources.pod["metadata"]["name"]}
    if environment:
        result |= {"PATH": f"{environment}/bin:{_PATH}", "VIRTUAL_ENV": environment}
    result |= {
        "KUBERNETES_SERVICE_HOST": host,
        "KUBERNETES_SERVICE_PORT": port,
        "KUBERNETES_SERVICE_PORT_HTTPS": port,
        "KUBERNETES_PORT": f"tcp://{host}:{port}",
    }
    for source in container.get("envFrom") or []:
        result |= _all_keys(source, sources)
    for variable in container.get("env") or []:
        value = _value(variable, container, sources, result)
        if value is not None:
            result[variable["name"]] = value
    return result


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Return `text` with $(NAME) replaced by the variable's value.

    Unknown names are left unchanged, and $$ becomes a dollar sign.
    """

    def replace(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else variables.get(match[1], match[0])

    return _REFERENCE.sub(replace, text)


def _all_keys(source: Object, sources: Sources) -> dict[str, str]:
    reference = source.get("configMapRef") or source.get("secretRef") or {}
    data = _data(sources, "configMapRef" in source, reference)
    return {source.get("prefix", "") + key: value for key, value in data.items()}


def _data(sources: Sources, is_map: bool, reference: Object) -> dict[str, str]:
    name = reference["name"]
    manifest = (sources.config_maps if is_map else sources.secrets).get(name)
    if manifest is None:
        if reference.get("optional"):
            return {}
        raise ConfigError(f'{"configmap" if is_map else "secret"} "{name}" not found')
    data = manifest.get("data") or {}
    return dict(data) if is_map else {key: base64.b64decode(value).decode() for key, value in data.items()}


def _value(variable: Object, container: Object, sources: Sources, variables: Mapping[str, str]) -> str | None:
    source = variable.get("valueFrom")
    if not source:
        return expand(variable.get("value", ""), variables)
    if "fieldRef" in source:
        return field_value(sources.pod, source["fieldRef"]["fieldPath"])
    if "resourceFieldRef" in source:
        return resource_value(source["resourceFieldRef"], container, sources.allocatable)
    is_map = "configMapKeyRef" in source
    reference = source["configMapKeyRef"] if is_map else source.get("secretKeyRef")
    if reference is None:
        raise ConfigError(f"environment variable {variable['name']}: its valueFrom is not known to the local cluster")
    data = _data(sources, is_map, reference)
    if reference["key"] in data:
        return data[reference["key"]]
    if reference.get("optional"):
        return None
    kind = "ConfigMap" if is_map else "Secret"
    namespace = sources.pod["metadata"]["namespace"]
    raise ConfigError(f"couldn't find key {reference['key']} in {kind} {namespace}/{reference['name']}")


def field_value(pod: Object, path: str) -> str:
    """Return the value of a pod's field, as in the downward API.

    Raises:
        ConfigError: When the field is not supported.
    """
    metadata, spec, status = pod["metadata"], pod["spec"], pod.get("status", {})
    subscript = _SUBSCRIPT.match(path)
    if subscript:
        return str((metadata.get(subscript[1]) or {}).get(subscript[2], ""))
    if path in ("metadata.labels", "metadata.annotations"):
        entries = metadata.get(path.split(".")[1]) or {}
        return "\n".join(f'{key}="{_quote(value)}"' for key, value in sorted(entries.items()))
    values = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata["namespace"],
        "metadata.uid": metadata["uid"],
        "spec.nodeName": spec.get("nodeName", ""),
        "spec.serviceAccountName": spec.get("serviceAccountName", ""),
        "status.hostIP": status.get("hostIP", ""),
        "status.hostIPs": status.get("hostIP", ""),
        "status.podIP": status.get("podIP", ""),
        "status.podIPs": status.get("podIP", ""),
    }
    if path not in values:
        raise ConfigError(f"fieldPath {path} is not known to the local cluster")
    return str(values[path])


def _quote(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def resource_value(reference: Object, container: Object, allocatable: Mapping[str, str]) -> str:
    """Return the container's limit or request that `reference` names, as a multiple of the reference's divisor.

    If the container has no such limit, the node's allocatable amount is used.
    """
    kind, _, resource = reference["resource"].partition(".")
    resources = container.get("resources") or {}
    quantity = (resources.get(kind) or {}).get(resource)
    if quantity is None and kind == "limits":
        quantity = allocatable.get(resource)
    if quantity is None and kind == "requests":
        quantity = (resources.get("limits") or {}).get(resource)
    return _in_units(str(quantity or "0"), str(reference.get("divisor") or "1"))


def _in_units(quantity: str, divisor: str) -> str:
    """Return a quantity as a multiple of the divisor, rounded up, as in the downward API. A divisor of 0 means 1."""
    return str(math.ceil(parse_quantity(quantity) / (parse_quantity(divisor) or 1)))
