"""status.world: the current round and its members."""

from __future__ import annotations

import enum
import functools
from typing import Annotated

from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

from concertina.api.accounting import Count, Name, Timestamp
from concertina.api.model import StatusModel
from concertina.api.packed import pack, unpack


class Distance(enum.StrEnum):
    """Distances between a member and the member that holds the copy of its snapshots."""

    ZONE = "Zone"
    NODE = "Node"
    SAME_NODE = "SameNode"
    NONE = "None"
    """There is no copy, because the round has only one member."""
    NO_SNAPSHOTS = ""
    """The job has no snapshots. Earlier operators wrote an empty string too, so the CRD must continue to accept it."""


class Claim(StatusModel):
    """Decision of the operator to begin a round. The status shows the newest claim, which has the highest round number.

    The operator writes the claim to the status before it stops workers of an older round.
    """

    round: Count = Field(description="Number of the claimed round; it only increases.")
    claim_id: Name = Field(description="Id of this claim. Two operators never have the same one.")
    committed: bool = Field(
        default=False, description="Whether the members were committed under this claim. This happens once."
    )
    at: Timestamp | None = Field(default=None, description="When it was made.")
    reason: Annotated[str, Field(max_length=128)] = Field(default="", description="Why, in one word.")
    message: Annotated[str, Field(max_length=4096)] = Field(default="", description="Why, in a sentence.")
    from_storage: bool = Field(
        default=False, description="The round starts from durable storage, not from node memory."
    )


class Member(StatusModel):
    """A replica that is part of the current round.

    The two ids are not listed in the manifest. They are in `status.internal.members`, since only the operator needs
    them.
    """

    replica: Name = Field(description="Name of its pod.")
    uid: SkipJsonSchema[Name] = Field(exclude=True)
    """Uid of the member's pod."""
    instance: SkipJsonSchema[Name] = Field(exclude=True)
    """Id of the member's agent process. It changes with each start of the agent's container."""
    node: Name = Field(default="", description="The pod's node. Empty if the round has too many members to list.")
    workers: Count = Field(description="Training processes in it.")

    def is_pod(self, uid: str) -> bool:
        """Return whether the member's pod has this uid.

        In a large round, the status has only the first characters of each uid, so only these are compared.
        """
        return _stands_for(self.uid, uid)

    def is_agent(self, instance: str) -> bool:
        """Return whether the member's agent process has this id.

        In a large round, the status has only the first characters of each id, so only these are compared.
        """
        return _stands_for(self.instance, instance)


BEGINNING, CUT = 8, "~"
"""Length and suffix of shortened ids in a large round.

32 bits are enough to distinguish pods or agents that had the same name one after the other.
"""


def shortened(id: str) -> str:
    """Return the first characters of an id, with a suffix that marks it as shortened."""
    return id if len(id) <= BEGINNING or id.endswith(CUT) else id[:BEGINNING] + CUT


def _stands_for(stored_id: str, id: str) -> bool:
    return stored_id == id or (stored_id.endswith(CUT) and id.startswith(stored_id[:-1]))


class Base(StatusModel):
    """State from which the current round started.

    Snapshots of earlier rounds are invalid if their step is larger than `step`.
    """

    round: Count = Field(description="Number of the round.")
    step: Count = Field(description="Steps finished when the round started.")
    source: Annotated[str, Field(max_length=16)] = Field(
        default="", description="Where that state came from: Fresh (there was none), Memory or Storage."
    )


class World(StatusModel):
    """The current round and its members."""

    round: Count = Field(default=0, description="Number of the round that was last committed; 0 before the first.")
    claim: Claim | None = Field(default=None, description="The highest round claimed.")
    size: Annotated[str, Field(max_length=32)] = Field(
        default="", description="Members of the current round and replicas wanted, as 6/8."
    )
    replicas: Count = Field(default=0, description="Members of the current round.")
    workers: Count = Field(default=0, description="Training processes of the current round.")
    coordinator: Name | None = Field(
        default=None, description="The member whose agent coordinates the round (it has rank 0)."
    )
    members: tuple[Member, ...] = Field(
        default=(),
        max_length=10000,
        description="In order of rank. Empty with more than 64: `concertina status --members` lists them.",
    )
    layout: Annotated[str, Field(max_length=256)] | None = Field(
        default=None,
        description="Arrangement of the ranks of the current round, outermost first, as replicate 2 x shard 4 x "
        "tensor 2. Absent: spec.parallelism is not set.",
    )
    cross_domain_groups: Annotated[str, Field(max_length=1024)] | None = Field(
        default=None,
        description="Tensor, context and expert groups that are not within one domain of spec.topology, and the "
        "link that they use. Absent: no such group.",
    )
    copies: Distance = Field(
        default=Distance.NO_SNAPSHOTS,
        description="Location of the copy of each member's snapshots: a member in another zone, on another node or, "
        "for some, on the same node; or none (the job has one member). Empty: a command of your own has "
        "no snapshots.",
    )
    base: Base | None = Field(default=None, description="Step and state from which the current round started.")
    since: Timestamp | None = Field(default=None, description="When the current round was committed.")

    @property
    def latest_round(self) -> int:
        """Number of the round that is being formed, or else of the last round; 0 before the first round.

        A claim is the operator's decision to begin a round. Some claims only end the job or its round. They do not
        count here.
        """
        return self.claim.round if self.claim and not self.claim.committed else self.round

    def ranks_of(self, replica: str) -> range:
        """Return the ranks of a replica's workers; an empty range if the replica is not a member."""
        first = 0
        for member in self.members:
            if member.replica == replica:
                return range(first, first + member.workers)
            first += member.workers
        return range(0)

    def replica_of(self, rank: int) -> str:
        """Return the replica that has a rank; empty if no member has it."""
        first = 0
        for member in self.members:
            if first <= rank < first + member.workers:
                return member.replica
            first += member.workers
        return ""


LISTED_MEMBERS = 64
"""Largest number of members that are listed. More members are packed (decision "Round members are compressed in the
status")."""


@functools.lru_cache(maxsize=16)
def packed_members(members: tuple[Member, ...]) -> str:
    """Return the members as compact text.

    The text lists all names first, then all values of the next field, because similar values next to each other
    compress well. A large round has shortened ids. The text has no node names: `status.world.members` lists the nodes
    of a small round, and the pods show the nodes of a large round.
    """
    cut = shortened if len(members) > LISTED_MEMBERS else str
    rows = ((member.replica, cut(member.uid), cut(member.instance), member.workers) for member in members)
    return pack([list(column) for column in zip(*rows, strict=True)])


@functools.lru_cache(maxsize=16)
def unpacked_members(text: str) -> tuple[Member, ...]:
    """Return the members from their packed text; empty if the text is invalid.

    The result is cached by text.
    """
    try:
        return tuple(
            Member(replica=replica, uid=uid, instance=instance, workers=workers)
            for replica, uid, instance, workers in zip(*unpack(text), strict=True)
        )
    except (ValueError, TypeError):
        return ()
