"""Messages between agents, and between the coordinator (the agent of rank 0) and its members."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Optional

from concertina_protocol.messages.records import Durable, SnapshotId


@dataclasses.dataclass(frozen=True)
class Join:
    """Request from a member to the coordinator (the agent of rank 0) to open a stream in both directions.

    On this stream, the member sends MemberState lines. The coordinator sends Drain, StopAt and DurableMoved, and its
    own MemberState as a heartbeat.

    In a drain, all ranks stop after the same step.
    """

    uid: str
    round: int
    claim: str
    replica: str
    instance: str


@dataclasses.dataclass(frozen=True)
class DurableMoved:
    """Message from the coordinator to members: the file `LATEST` in storage now names a different checkpoint.

    Members then remove their records of uploaded shards of older checkpoints.

    The coordinator is the agent of rank 0.
    """

    durable: Durable


@dataclasses.dataclass(frozen=True)
class StopAt:
    """Message from the coordinator to members: the number of the should_checkpoint() call after which workers stop.

    The coordinator is the agent of rank 0. The coordinator sends the message during a drain, so that all ranks stop
    after the same step. `call` is the number of the call that returns True in the script of a user (see `stopping`). If
    `call` is 0, workers receive SIGTERM instead.
    """

    call: int


@dataclasses.dataclass(frozen=True)
class Ping:
    """Request from an agent to another agent. An answer proves that the other agent is reachable and of the same job.

    The answering agent belongs to the same job if the job's CA has issued its certificate. The answer is Accepted, with
    the highest round that the answering agent has seen and the claim of that round (the operator's decision to begin
    the round).

    A round is a period in which a fixed set of replicas trains.
    """

    uid: str


@dataclasses.dataclass(frozen=True)
class Trace:
    """Request from the command `concertina-agent trace` to its pod's agent, to trace some steps of a worker.

    See `worker_channel.TraceSteps`. The answer is Accepted or Refused.
    """

    uid: str
    rank: int
    first_step: int
    steps: int
    name: str
    """Name of the trace, which consists of hexadecimal digits."""


@dataclasses.dataclass(frozen=True)
class Learn:
    """Request from an agent to another agent for the names of the modules that the user's script imports.

    The answer is Learned or Refused.
    """

    uid: str


@dataclasses.dataclass(frozen=True)
class Learned:
    """Answer to Learn: modules that the script imports. A warm start imports them before the script begins."""

    modules: str
    """Names of the modules, one per line, in the format of the agent's file `learned`."""
    left_out: Mapping[str, str]
    """Packages that must not be imported in advance, with the reason for each."""


@dataclasses.dataclass(frozen=True)
class Index:
    """Request from an agent to another agent for the safetensors header of one shard.

    The answer is ShardHeader or Refused.
    """

    uid: str
    id: SnapshotId
    shard: int


@dataclasses.dataclass(frozen=True)
class Pull:
    """Request from an agent to another agent for one shard of a snapshot.

    The answer is ShardHeader followed by the shard's bytes, or Refused. The requesting agent then sends Copied.

    A shard can be sent in parts over several connections. The requesting agent first asks for part 0 of `parts`. The
    ShardHeader in the answer says into how many parts the shard is divided. The requesting agent then asks for each of
    the other parts on a connection of its own. Part k of n has the bytes from size * k // n to size * (k + 1) // n.

    If `id` is None, the request opens a stream of copies. Whenever `round` commits a snapshot of a later step than
    `after_step`, the answering agent sends the shard number `shard` of that snapshot. The requesting agent answers each
    shard with Copied.

    A round is a period in which a fixed set of replicas trains. A snapshot is a copy of the training state in node
    memory.
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
    """Answer to Index and Pull, with the size and the checksum of a shard."""

    id: SnapshotId
    shard: int
    size: int
    checksum: int
    """crc32 of the whole shard."""
    header: str = ""
    """Safetensors header of the shard file as JSON. Set only in the answer to Index."""
    parts: int = 1
    """Number of parts into which the shard is divided. The bytes of the requested part follow this message.

    An agent of the previous version does not support parts. It sends the whole shard.
    """


@dataclasses.dataclass(frozen=True)
class Copied:
    """Confirmation that a shard has been copied completely."""

    id: SnapshotId
    shard: int
