"""Count the GPUs that the container `trainer` gets from resource claims (DRA), for `workersPerReplica: Auto`.

DRA is Dynamic Resource Allocation. A pod template contains only the names of its claims. A ResourceClaimTemplate or
ResourceClaim object says what a claim requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from concertina.api.spec import JobSpec

GPU_DEVICE_CLASSES = ("gpu.nvidia.com", "mig.nvidia.com", "gpu.amd.com")
"""Device classes for which `workersPerReplica: Auto` starts one worker per device.

Devices of other classes, such as network cards, are not counted.
"""
SET_A_NUMBER = "set spec.workersPerReplica to a number"


class GpusUnknown(Exception):
    """Error that the number of GPUs of a claim can't be determined. The message says why, and what the user can do."""


@dataclass(frozen=True)
class TrainerClaim:
    """Resource claim that the container `trainer` uses."""

    name: str
    """Name of the claim in the pod template."""
    object_name: str
    from_template: bool
    """True if `object_name` is that of a ResourceClaimTemplate rather than of a ResourceClaim."""
    requests: tuple[str, ...]
    """Names of the claim's requests that the container uses; empty for all requests."""


def trainer_claims(spec: JobSpec) -> tuple[TrainerClaim, ...]:
    """Return the resource claims whose GPUs determine the number of workers; empty if the spec sets that number."""
    if spec.workers_per_replica != "Auto":
        return ()
    requests_by_claim: dict[str, list[str]] = {}
    for entry in _mappings((spec.template.trainer.model_extra or {}).get("resources"), "claims"):
        requests_by_claim.setdefault(str(entry.get("name")), []).append(str(entry.get("request") or ""))
    claims = []
    for entry in _mappings(spec.template.spec.model_extra, "resourceClaims"):
        if (requests := requests_by_claim.get(str(entry.get("name")))) is not None:
            template = entry.get("resourceClaimTemplateName")
            name = str(template or entry.get("resourceClaimName") or "")
            used = () if "" in requests else tuple(dict.fromkeys(requests))
            claims.append(TrainerClaim(str(entry["name"]), name, bool(template), used))
    return tuple(claims)


def with_gpus(spec: JobSpec, claimed: int) -> JobSpec:
    """Return the spec with `workersPerReplica: Auto` replaced by a number.

    The number follows from `claimed`, the number of GPUs that the resource claims give to the trainer container.
    """
    return spec.model_copy(update={"workers_per_replica": spec.limited_gpus + claimed or 1})


def gpus_of(claim: TrainerClaim, stored: Mapping[str, Any]) -> int:
    """Return the number of GPUs that a claim gives to the container.

    Args:
        claim: The claim.
        stored: Manifest of its ResourceClaimTemplate or ResourceClaim.

    Raises:
        GpusUnknown: When the number is not known before the claim is allocated.
    """
    spec: Mapping[str, Any] = stored.get("spec") or {}
    if claim.from_template:
        spec = spec.get("spec") or {}
    # A container may name one alternative of a request in the form request/alternative.
    names = {name.partition("/")[0] for name in claim.requests}
    requests = _mappings(spec.get("devices"), "requests")
    return sum(_gpus_of_request(claim, request) for request in requests if not names or request.get("name") in names)


def _gpus_of_request(claim: TrainerClaim, request: Mapping[str, Any]) -> int:
    alternatives = _mappings(request, "firstAvailable") or [request.get("exactly") or {}]
    counts = {_count(claim, request, alternative) for alternative in alternatives}
    if len(counts) > 1:
        raise GpusUnknown(
            f"request {request.get('name')} of claim {claim.name} has alternatives with different numbers of GPUs: "
            f"{SET_A_NUMBER}"
        )
    return counts.pop()


def _count(claim: TrainerClaim, request: Mapping[str, Any], exactly: Mapping[str, Any]) -> int:
    if exactly.get("deviceClassName") not in GPU_DEVICE_CLASSES or exactly.get("adminAccess"):
        return 0
    if exactly.get("allocationMode", "ExactCount") != "ExactCount":
        raise GpusUnknown(f"request {request.get('name')} of claim {claim.name} asks for all GPUs: {SET_A_NUMBER}")
    return int(exactly.get("count", 1))


def _mappings(holder: object, field: str) -> Sequence[Mapping[str, Any]]:
    entries = holder.get(field) if isinstance(holder, Mapping) else None
    return [entry for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, list | tuple) else []
