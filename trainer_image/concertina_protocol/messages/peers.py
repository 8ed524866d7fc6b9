"""Messages between agents, and between the coordinator and its members."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Optional

from concertina_protocol.messages.records import Durable, SnapshotId


@dataclasses.dataclass(frozen=True)
class Join:
    """Request from a member to the coordinator that opens their stream.

    On this stream, the member sends MemberState lines. The coordinator sends Drain, StopAt, DurableMoved and heartbeats
    (its own MemberState).
    """

    uid: str
    round: int
    claim: str
    replica: str
    instance: str


@dataclasses.dataclass(frozen=True)
class DurableMoved:
    """Message from the coordinator to members: `LATEST` names this checkpoint now.

    Members may forget older parts of this job.
    """

    durable: Durable


@dataclasses.dataclass(frozen=True)
class StopAt:
    """Message from the coordinator to members during a drain of a user's own command.

    `call` is the last call of should_checkpoint() (see `stopping`). If it is 0, the workers receive SIGTERM.
    """

    call: int


@dataclasses.dataclass(frozen=True)
class Ping:
    """Request from an agent to another agent, answered with Accepted (its highest round and claim).

    The answer proves reachability and the job's CA.
    """

    uid: str


@dataclasses.dataclass(frozen=True)
class Trace:
    """Request from within a pod (`concertina-agent trace`) to its agent to let a worker trace some steps.

    See `worker_channel.TraceSteps`. The answer is Accepted or Refused.
    """

    uid: str
    rank: int
    first_step: int
    steps: int
    name: str
    """Name of the trace, in hexadecimal digits."""


@dataclasses.dataclass(frozen=True)
class Learn:
    """Request from an agent to another agent for the modules that the script imports.

    The answer is Learned or Refused.
    """

    uid: str


@dataclasses.dataclass(frozen=True)
class Learned:
    """Modules that a parent process of the answering agent has imported for the script, to be imported here too."""

    modules: str
    """Modules, one a line, in the format of the agent's `learned`."""
    left_out: Mapping[str, str]
    """Packages that a parent process must not import, with the reason for each."""


@dataclasses.dataclass(frozen=True)
class Index:
    """Request from an agent to another agent for the JSON header of one shard.

    The answer is ShardHeader or Refused.
    """

    uid: str
    id: SnapshotId
    shard: int


@dataclasses.dataclass(frozen=True)
class Pull:
    """Request from an agent to another agent for one shard of a snapshot.

    The answer is ShardHeader followed by the shard's bytes, or Refused. The requesting agent then sends Copied.

    An agent that can receive several parts in parallel asks for part 0 of `parts`. It then asks for each of the other
    parts, as many as the `parts` of the answered header says, on a connection of its own. Part k of n is the bytes from
    size * k // n up to size * (k + 1) // n.

    If `id` is None, the request opens the stream of a peer copy: the next snapshot of `shard` newer than `after_step`
    in `round` is sent as soon as it is committed, repeatedly. The copying agent sends Copied after each snapshot.
    """

    uid: str
    shard: int
    id: Optional[SnapshotId] = None
    round: int = 0
    after_step: int = -1
    part: int = 0
    parts: int = 1


@dataclasses.dataclass(frozen=True)
class ShardHeader:
    """Answer to Index and Pull: size and checksum of one shard."""

    id: SnapshotId
    shard: int
    size: int
    checksum: int
    """crc32 of the whole shard."""
    header: str = ""
    """Safetensors header (JSON) of the shard file, in the answer to Index."""
    parts: int = 1
    """Number of parts that the shard is divided into. The bytes of the requested part follow this header.

    An agent of the previous version does not support parts and sends the whole shard.
    """


@dataclasses.dataclass(frozen=True)
class Copied:
    """Confirmation that a shard has been copied."""

    id: SnapshotId
    shard: int
