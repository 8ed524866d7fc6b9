"""Types for parts of the pod template that the operator reads and for which the CRD's schema has no types.

The API server would store any value in these parts and then refuse the pods. With these types, the operator reports an
invalid template at once.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from concertina.api.model import Verbatim

Fields = dict[str, Any]


def _amount(value: Any) -> Any:
    if value is None or (isinstance(value, int | float | str) and not isinstance(value, bool)):
        return value
    raise ValueError(f"must be an amount, such as 2 or 4Gi, not {json.dumps(value)[:80]}")


Amounts = dict[str, Annotated[Any, AfterValidator(_amount)]]


class _Resources(Verbatim):
    limits: Amounts | None = None
    requests: Amounts | None = None
    claims: tuple[Fields, ...] | None = None


class _Port(Verbatim):
    container_port: int | None = Field(default=None, alias="containerPort")


class _Container(Verbatim):
    resources: _Resources | None = None
    ports: tuple[_Port, ...] | None = None
    env_from: tuple[Fields, ...] | None = Field(default=None, alias="envFrom")
    security_context: Fields | None = Field(default=None, alias="securityContext")


class _Wishes(Verbatim):
    """Type of podAffinity and podAntiAffinity in a pod template."""

    required: tuple[Fields, ...] | None = Field(default=None, alias="requiredDuringSchedulingIgnoredDuringExecution")
    preferred: tuple[Fields, ...] | None = Field(default=None, alias="preferredDuringSchedulingIgnoredDuringExecution")


class _Term(Verbatim):
    match_fields: tuple[Fields, ...] | None = Field(default=None, alias="matchFields")


class _Terms(Verbatim):
    node_selector_terms: tuple[_Term, ...] | None = Field(default=None, alias="nodeSelectorTerms")


class _NodeAffinity(Verbatim):
    preferred: tuple[Fields, ...] | None = Field(default=None, alias="preferredDuringSchedulingIgnoredDuringExecution")
    required: _Terms | None = Field(default=None, alias="requiredDuringSchedulingIgnoredDuringExecution")


class _Affinity(Verbatim):
    node_affinity: _NodeAffinity | None = Field(default=None, alias="nodeAffinity")
    pod_affinity: _Wishes | None = Field(default=None, alias="podAffinity")
    pod_anti_affinity: _Wishes | None = Field(default=None, alias="podAntiAffinity")


class _PodSpec(Verbatim):
    containers: tuple[_Container, ...]
    init_containers: tuple[_Container, ...] = Field(default=(), alias="initContainers")
    affinity: _Affinity | None = None


class _Template(Verbatim):
    spec: _PodSpec


class Shapes(Verbatim):
    """Model that checks a spec's pod template. Only its errors are used, not the resulting object."""

    template: _Template
