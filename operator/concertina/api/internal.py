"""status.internal: state that only the operator needs, and lists of the status in a compact form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from concertina.api.accounting import Count, Incident, Name, RoundWaits, Timestamp
from concertina.api.model import StatusModel
from concertina.api.packed import MOST_CHARACTERS
from concertina.api.restarts import unpacked_restarts
from concertina.api.world import Member, unpacked_members

Packed = Annotated[str, Field(max_length=MOST_CHARACTERS)]


class UndoneStates(StatusModel):
    """Training states that a rollback has made invalid."""

    round: Count = Field(
        description="The last round whose states are invalid. The states of earlier rounds are invalid too."
    )
    step: Count = Field(description="The last step of these rounds whose states are still valid.")


class Growth(StatusModel):
    """When replicas last joined the running job, and how often in a row replicas that joined were lost soon after."""

    round: Count = Field(default=0, description="The round that the replicas joined; 0 if none has joined.")
    joined: tuple[Name, ...] = Field(default=(), max_length=100, description="Names (the first hundred).")
    failures: Count = Field(
        default=0, description="Number of times in a row that replicas were lost soon after they joined."
    )
    at: Timestamp | None = Field(default=None, description="When that was seen last.")
    message: Annotated[str, Field(max_length=1024)] = Field(default="", description="The last failure, as a sentence.")


class RequeueState(StatusModel):
    """State of a job that takes turns with other jobs that wait for resources.

    The state says when the job's turn began, when its last turn ended without a start, and whether the job has deleted
    its pods so that other jobs can start.
    """

    count: Count = Field(default=0, description="Number of times in a row that the job released its pods or its turn.")
    since: Timestamp | None = Field(
        default=None, description="When the job released its pods. Absent: it may still have pods."
    )
    turn: Timestamp | None = Field(
        default=None, description="When the job's turn began. Absent: it is not the job's turn."
    )
    passed: Timestamp | None = Field(default=None, description="When the last turn ended without a start.")
    passed_fitting: bool = Field(
        default=False,
        description="Whether the resources of all waiting jobs together seemed to be enough for this job then.",
    )
    priority: int = Field(default=0, description="Priority of its pods.")
    message: Annotated[str, Field(max_length=1024)] = Field(
        default="", description="The job that the pods were released for, and the reason."
    )


class Internal(StatusModel):
    """State of the operator about a job, which it needs after a restart."""

    attempts: tuple[int, ...] = Field(
        default=(),
        max_length=11000,
        description="Number of the current attempt for each replica index; 0 for indexes beyond the end of the list.",
    )
    container_restarts: tuple[int, ...] = Field(
        default=(),
        max_length=10000,
        description="Restarts of the container in the current pod of each replica index; 0 for indexes beyond the "
        "end of the list.",
    )
    requeue_state: RequeueState = Field(
        default=RequeueState(), description="Resources that the job released for other jobs."
    )
    growth: Growth = Field(default=Growth(), description="How joining went.")
    invalidated_checkpoints: tuple[UndoneStates, ...] = Field(
        default=(),
        max_length=16,
        description="States that rollbacks have invalidated. The job never continues from them.",
    )
    hardware_faults: tuple[Annotated[str, Field(max_length=300)], ...] = Field(
        default=(),
        max_length=16,
        description="Members with faulty hardware that an event has reported: name and kind of the fault.",
    )
    round_waits: RoundWaits = Field(
        default=RoundWaits(), description="Waiting times of this round that the goodput already includes."
    )
    incident: Incident | None = Field(
        default=None, description="Incident in progress. When it ends, it moves to status.incidents."
    )
    tokens_before: Count | None = Field(
        default=None, description="Part of progress.tokens that an earlier job trained on and this job continues."
    )
    members: Packed | None = Field(
        default=None,
        description="Members of the round with the ids of their pods and agents, packed. In a small round, "
        "world.members lists the members too.",
    )
    first_claim: Name = Field(
        default="",
        description="Id of the claim of the first round, chosen with the first status. Absent: a later claim exists.",
    )
    restarts: Packed | None = Field(
        default=None,
        description="Failures of the window that are older than restarts.recent, packed. Absent: restarts.recent "
        "has all of them.",
    )


PACKED = ("members", "restarts")
"""Packed fields of `internal`. plan() reads the unpacked lists in world.members and restarts.recent instead."""


def with_packed(status: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a status with its packed lists unpacked into the fields to which they belong."""
    internal = status.get("internal")
    if not isinstance(internal, Mapping) or internal.keys().isdisjoint(PACKED):
        return status
    unpacked = {**status, "internal": {**internal}}
    members, restarts = (unpacked["internal"].pop(name, None) for name in PACKED)
    if isinstance(members, str) and isinstance(world := status.get("world"), Mapping):
        unpacked["world"] = {**world, "members": _with_nodes(unpacked_members(members), world.get("members"))}
    if isinstance(restarts, str) and isinstance(restarts_field := status.get("restarts"), Mapping):
        listed = restarts_field.get("recent") or ()
        unpacked["restarts"] = {**restarts_field, "recent": [*unpacked_restarts(restarts), *listed]}
    return unpacked


def _with_nodes(members: tuple[Member, ...], listed: Any) -> Sequence[Member | Mapping[str, Any]]:
    """Return `members`, with each node's name added from the member list of the status, `listed`.

    A member whose node is in `listed` becomes a mapping, which the caller validates because `listed` has not been
    validated yet. Other members stay as they are.
    """
    entries = [entry for entry in listed if isinstance(entry, Mapping)] if isinstance(listed, list) else []
    node_by_replica = {str(entry.get("replica")): entry["node"] for entry in entries if "node" in entry}
    return [
        {**member.__dict__, "node": node_by_replica[member.replica]} if member.replica in node_by_replica else member
        for member in members
    ]
