"""What agents ask of each other, and what goes between the coordinator and its members."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Optional

from concertina_protocol.messages.records import Durable, SnapshotId


@dataclasses.dataclass(frozen=True)
class Join:
    """Member to coordinator: opens the stream on which the member sends MemberState lines and the coordinator sends
    Drain, StopAt, DurableMoved and beats (MemberState of its own)."""

    uid: str
    round: int
    claim: str
    replica: str
    instance: str


@dataclasses.dataclass(frozen=True)
class DurableMoved:
    """Coordinator to members: `LATEST` names this now; older parts of this job may be forgotten."""

    durable: Durable


@dataclasses.dataclass(frozen=True)
class StopAt:
    """Coordinator to members, in a drain of a command of one's own: the call of should_checkpoint() that is the last
    (see `stopping`); 0: its workers get SIGTERM."""

    call: int


@dataclasses.dataclass(frozen=True)
class Ping:
    """Agent to agent: answered with Accepted (its highest round and claim); proves reachability and the job's CA."""

    uid: str


@dataclasses.dataclass(frozen=True)
class Trace:
    """From within a pod (`concertina-agent trace`) to its agent: have a worker trace some steps (see
    `worker_channel.TraceSteps`). Answer: Accepted or Refused."""

    uid: str
    rank: int
    first_step: int
    steps: int
    name: str
    """Of hexadecimal digits."""


@dataclasses.dataclass(frozen=True)
class Learn:
    """Agent to agent: what does the script import? Answer: Learned or Refused."""

    uid: str


@dataclasses.dataclass(frozen=True)
class Learned:
    """What a parent there has imported for the script: it is imported here too."""

    modules: str
    """A line for each, as the agent's `learned` writes them."""
    left_out: Mapping[str, str]
    """Packages that a parent must not import, and why."""


@dataclasses.dataclass(frozen=True)
class Index:
    """Agent to agent: the JSON header of one shard. Answer: ShardHeader or Refused."""

    uid: str
    id: SnapshotId
    shard: int


@dataclasses.dataclass(frozen=True)
class Pull:
    """Agent to agent: one shard of a snapshot. Answer: ShardHeader, then its bytes; or Refused. The puller says Copied.

    Whoever can take several parts side by side asks for part 0 of `parts`, and then, by the `parts` of the header that
    answers, for each of the others on a connection of its own. Part k of n are the bytes from size * k // n up to
    size * (k + 1) // n.

    With `id` None: the stream of a peer copy: the next snapshot of `shard` newer than `after_step` in `round` as soon
    as it is committed, again and again; the copier sends Copied after each."""

    uid: str
    shard: int
    id: Optional[SnapshotId] = None
    round: int = 0
    after_step: int = -1
    part: int = 0
    parts: int = 1


@dataclasses.dataclass(frozen=True)
class ShardHeader:
    id: SnapshotId
    shard: int
    size: int
    checksum: int
    """crc32 of the whole shard."""
    header: str = ""
    """With Index: the shard file's safetensors header (JSON)."""
    parts: int = 1
    """What follows is the part that was asked for of so many. An agent of the version before knows of none and sends
    all."""


@dataclasses.dataclass(frozen=True)
class Copied:
    id: SnapshotId
    shard: int
