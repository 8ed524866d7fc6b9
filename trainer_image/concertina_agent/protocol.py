"""What the operator and the agents say to each other, and what an agent may be in.

Standard library only and Python 3.9+: this file is imported by both sides and by the simulation.

The wire: TLS with the job's own CA, one JSON object a line, at most MAX_LINE bytes. A connection carries one request;
the answer is one line, or for `Watch` and `Join` a line whenever something changes and at least every BEAT_SECONDS.
A line is {"v": VERSION, "kind": class name, "body": fields}. One version more or less than one's own is understood, for
agents run on while their operator is upgraded: unknown fields are ignored, new ones have defaults.

Who may ask what (checked against the certificate's name): the operator `<uid>.operator` alone may send Prepare,
Assign, Drain, Save and Watch; agents `<uid>.agent` may send each other Ping, Join, Index and Pull.

The states of an agent; every arrow is one message or one event, and nothing else moves it:

                    Prepare(N)                Assign(N)               all own workers exit 0
      +-------+  ----------------> +----------+ ---------> +---------+ --------------------> +-----------+
      | idle  |                    | prepared |            | running |                       | succeeded |
      +-------+  <---------------- +----------+            +---------+                       +-----------+
          ^        (never: only a     ^   ^                  |     |  a worker fails, or the lead is lost
          |         higher Prepare)   |   |   Prepare(N+k)   |     v
          |                           |   +------------------+  +--------+      Drain: workers stop after   +---------+
          |                           +-------------------------| failed |      the same step, snapshot --> | drained |
          |                               Prepare(N+k)          +--------+                                  +---------+
          |                                                                          Prepare(N+k) leads out of it too
          +-- start of the agent: a new instance id; the highest (round, claim) ever seen is read back from its volume

Rules, each enforced by `concertina_agent.rounds` and asserted by the simulation:
- Prepare or Assign of a round lower than the highest seen is refused, and so is the same round under another claim.
- Prepare kills the workers of every older round before it is answered. The same Prepare again gets the same answer.
- Assign is accepted only for the prepared (round, claim) and only if the instance id named for this agent is its own.
  The same Assign again is acknowledged without starting anything twice.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Mapping
from typing import Any, Optional, Union

from concertina_agent.typed_json import ProtocolError, from_json

VERSION = 1
PORT = 29400
"""The agent's TCP port, where the pod does not say otherwise (CONCERTINA_PORT)."""
EXIT_OLD_PYTHON = 69
"""Of an agent that was started by a Python older than 3.9."""
MAX_LINE = 4 * 1024 * 1024
BEAT_SECONDS = 0.5
SILENCE_SECONDS = 3.0
"""A stream without a line for this long is lost."""


@dataclasses.dataclass(frozen=True)
class SnapshotId:
    """One state of the whole world: `shards` arenas, all of the same round, step and layout."""

    round: int
    step: int
    layout: str
    """Digest of names, dtypes, global shapes and how they are cut into shards."""
    shards: int


@dataclasses.dataclass(frozen=True)
class Held:
    """Shards of one snapshot that an agent holds complete and checked, its own or as a peer's copy."""

    id: SnapshotId
    shards: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Durable:
    """What `LATEST` names in durable storage."""

    uid: str
    round: int
    step: int
    uri: str
    """The checkpoint's own folder."""
    complete: bool = False
    """The run's last step: a re-created job with it is complete at once."""
    at: float = 0.0
    """Unix seconds when it became durable."""


@dataclasses.dataclass(frozen=True)
class Storage:
    """What an agent last learned about durable storage. `state` is Unknown until the first look, then Ready or Error.

    None: the job has no checkpoint.uri, or runs a command of its own."""

    state: str
    latest: Optional[Durable] = None
    message: str = ""
    """With Error: a sentence that says what to do."""
    round: int = -1
    """As of which round: the one that the agent was a member of when it last learnt this, or the highest it had seen
    when it looked by itself. -1 where it does not say (version 1 at first)."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    replica: str
    """Pod name, unique per attempt."""
    address: str
    """host:port of the agent."""


@dataclasses.dataclass(frozen=True)
class Member:
    replica: str
    instance: str
    address: str
    first_rank: int
    workers: int


@dataclasses.dataclass(frozen=True)
class Rollback:
    """What was trained after `step` is not to be trusted."""

    step: int
    skipped: tuple[tuple[int, int], ...] = ()
    """Positions [begin, end) that are left out from now on: all that ever were."""


@dataclasses.dataclass(frozen=True)
class Restore:
    """Where the round's state comes from. source is Fresh, Memory or Storage.

    With Memory, `holders` says for every shard which members hold it (the nearest is tried first by the agent, a bad
    one is passed over); with Storage, `durable` names the checkpoint. (base_round, step) becomes the new round's base:
    snapshots of lower rounds with a later step are void and dropped."""

    source: str
    step: int = 0
    id: Optional[SnapshotId] = None
    holders: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """Shard number, as a string, to replica names."""
    durable: Optional[Durable] = None
    skipped: tuple[tuple[int, int], ...] = ()
    """Positions that are left out, beside those that the state itself says."""
    at_most: int = -1
    """With Storage, after a rollback: the newest checkpoint of this job up to this step; -1: what `durable` names."""


# --- requests and their answers -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Prepare:
    """Operator to every candidate: stop what is older, say what you have. Answer: Prepared or Refused."""

    uid: str
    round: int
    claim: str
    candidates: tuple[Candidate, ...]


@dataclasses.dataclass(frozen=True)
class Prepared:
    replica: str
    instance: str
    round: int
    claim: str
    workers: int
    store: str
    """host:port at which this agent would serve the c10d store of this round (already bound)."""
    reachable: tuple[str, ...]
    """Candidates, itself included, that answered this agent's Ping."""
    snapshots: tuple[Held, ...] = ()
    storage: Optional[Storage] = None


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the lead looks out for, from spec.failurePolicy."""

    hang_seconds: float = 0.0
    """The round hangs when no rank moves for so long; 0: by the usual step time."""
    straggler_factor: float = 0.0
    """A rank whose own work in a step takes so many times the others' is a straggler; 0: none is looked for."""


@dataclasses.dataclass(frozen=True)
class History:
    """Of the job, when a round begins."""

    seconds: float = 0.0
    """Since its start."""
    failures: int = 0
    """Whatever their cause."""


@dataclasses.dataclass(frozen=True)
class CheckpointInterval:
    """How often checkpoints are written, and how often it would be best."""

    seconds: float
    """0: not by the clock."""
    suggested: float
    save_seconds: float
    """That training waited for a save, at most; 0 before the first of this round."""
    failure_seconds: float
    """Between failures."""


@dataclasses.dataclass(frozen=True)
class Assign:
    """Operator to every member, after the commit; also to those with a notice that were asked and are none: they need
    not stay for what they hold. Answer: Accepted or Refused. members[0] is the lead."""

    uid: str
    round: int
    claim: str
    members: tuple[Member, ...]
    store: str
    restore: Restore
    limits: Limits = Limits()
    history: History = History()


@dataclasses.dataclass(frozen=True)
class Drain:
    """Operator to the lead: stop after the same step. `durable`: a checkpoint must be in storage before `drained`; in a
    job without storage, a world that leaves as a whole then stays for its grace: successors may come for its state."""

    uid: str
    round: int
    claim: str
    reason: str
    durable: bool
    grace_seconds: float


@dataclasses.dataclass(frozen=True)
class Save:
    """Operator to the lead: make the state after the next step durable. Answer: Accepted or Refused."""

    uid: str
    round: int
    claim: str
    request: str
    """Which request of a person this is: the same again changes nothing."""


@dataclasses.dataclass(frozen=True)
class Accepted:
    round: int
    claim: str


@dataclasses.dataclass(frozen=True)
class Refused:
    """`round` and `claim` are the highest this agent has seen."""

    reason: str
    round: int
    claim: str


@dataclasses.dataclass(frozen=True)
class Watch:
    """Operator to any agent: a stream of Report, each one whole (the last one wins)."""

    uid: str


@dataclasses.dataclass(frozen=True)
class Join:
    """Member to lead: opens the stream on which the member sends MemberState lines and the lead sends Drain,
    StopAt, DurableMoved and beats (MemberState of its own)."""

    uid: str
    round: int
    claim: str
    replica: str
    instance: str


@dataclasses.dataclass(frozen=True)
class DurableMoved:
    """Lead to members: `LATEST` names this now; older parts of this job may be forgotten."""

    durable: Durable


@dataclasses.dataclass(frozen=True)
class StopAt:
    """Lead to members, in a drain of a command of one's own: the call of should_checkpoint() that is the last (see
    `stopping`); 0: its workers get SIGTERM."""

    call: int


@dataclasses.dataclass(frozen=True)
class Ping:
    """Agent to agent: answered with Accepted (its highest round and claim); proves reachability and the job's CA."""

    uid: str


@dataclasses.dataclass(frozen=True)
class Index:
    """Agent to agent: the JSON header of one shard. Answer: ShardHeader or Refused."""

    uid: str
    id: SnapshotId
    shard: int


@dataclasses.dataclass(frozen=True)
class Pull:
    """Agent to agent: one shard of a snapshot. Answer: ShardHeader, then `size` raw bytes; or Refused.

    With `id` None: the stream of a peer copy: the next snapshot of `shard` newer than `after_step` in `round` as soon
    as it is committed, again and again; the copier sends Copied after each."""

    uid: str
    shard: int
    id: Optional[SnapshotId] = None
    round: int = 0
    after_step: int = -1


@dataclasses.dataclass(frozen=True)
class ShardHeader:
    id: SnapshotId
    shard: int
    size: int
    checksum: int
    """crc32 of the bytes that follow."""
    header: str = ""
    """With Index: the arena's safetensors header (JSON)."""


@dataclasses.dataclass(frozen=True)
class Copied:
    id: SnapshotId
    shard: int


# --- what is reported -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a member failed. The first of a round is the cause; what follows from it (lost peers) has `secondary`."""

    replica: str
    reason: str
    """WorkerFailed, WorkerSignaled, OutOfMemory, WorkerStopped, WorkerExitedEarly, StartFailed, MemberLost, LeadLost,
    RestoreFailed, BadInput, LossSpike, LossNotFinite, SilentCorruption."""
    message: str
    """A sentence, with the exit code or signal."""
    last_lines: tuple[str, ...] = ()
    rank: int = -1
    exit_code: int = 0
    step: int = -1
    permanent: bool = False
    """Trying again can't help (BadInput: the worker exited 78, EX_CONFIG)."""
    secondary: bool = False
    provoked: bool = False
    """Its last words are those of a rank that lost a peer: they say nothing about the script."""
    at: float = 0.0
    rollback: Optional[Rollback] = None
    """With LossSpike, LossNotFinite, SilentCorruption."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """From rank 0's worker."""

    step: int
    """Steps finished since the run began."""
    steps: int
    """The last step of the run; 0 where unknown."""
    loss: float
    tokens_per_second: float
    step_seconds: float
    position: int
    """Samples consumed."""
    phase: str
    """starting, restoring, training, checkpointing, evaluating."""
    at: float
    first_step_at: float = 0.0
    """Unix seconds at which this round's first step finished; 0 until then."""
    snapshot_step: int = -1
    """Newest snapshot complete on peers."""
    checkpoint_seconds: float = 0.0
    """Seconds this round's training has waited for snapshots and checkpoints."""
    stalled_seconds: float = 0.0
    """Seconds this round's training has waited for data."""
    mfu: float = 0.0
    timeline: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Seconds of this round's start by part: start, group, build, restore, first_step."""
    save_seconds: float = 0.0
    """That the slowest snapshot of this round took; 0 before the first."""
    restored_step: int = -1
    restored_from: str = ""
    skipped: tuple[tuple[int, int], ...] = ()
    """Positions that were left out so far."""
    interval: Optional[CheckpointInterval] = None
    """With durable storage."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One shard of a snapshot that is in durable storage."""

    id: SnapshotId
    shard: int
    complete: bool = False
    """Of the run's last step."""


@dataclasses.dataclass(frozen=True)
class Pulse:
    """Where one worker is, and for how long: ages, for no clock of one machine is compared with another's."""

    rank: int
    step: int
    """Steps finished."""
    phase: str
    """A word of `watchdog.PHASES`; empty where the worker tells nothing of itself."""
    still: float
    """Seconds since it last moved."""
    busy: float = 0.0
    """Seconds of this round's finished steps, its first apart, that were not spent waiting for others."""
    stack: Optional[tuple[str, ...]] = None
    """Once the lead says that the round hangs."""


@dataclasses.dataclass(frozen=True)
class Hang:
    """No rank of the round moves."""

    replica: str
    """Whose worker the others wait for; empty where all wait alike."""
    rank: int
    """Of that worker; -1 with no replica."""
    step: int
    """Steps it has finished."""
    phase: str
    """What it does."""
    others: str
    """What most of the others do; empty without others."""
    seconds: float
    """For how long nobody had moved when this was found."""
    suspects: int = 1
    """How many ranks are behind like this one."""
    stack: tuple[str, ...] = ()
    """Of that worker, innermost frames first, bounded; in full it is in the pod's log."""


@dataclasses.dataclass(frozen=True)
class Straggler:
    """A rank that the others wait for in every step, as found when it was first named."""

    replica: str
    rank: int
    seconds: float
    """That its own work in a step takes."""
    others: float
    """The median of that of the others."""


@dataclasses.dataclass(frozen=True)
class MemberState:
    """One member as the lead knows it. state: starting, running, draining, drained, succeeded, failed."""

    replica: str
    instance: str
    round: int
    claim: str
    state: str
    step: int = -1
    failure: Optional[Failure] = None
    notice: float = 0.0
    """Seconds of grace that it was given with a SIGTERM; 0 where it may stay."""
    leaving: tuple[str, ...] = ()
    """On the lead: members with such a notice. Who leaves beside another one may be needed for what it holds."""
    snapshot_step: int = -1
    """On the lead: newest snapshot of this round that is complete on all peers; older rounds' may then be dropped."""
    durable_parts: tuple[Part, ...] = ()
    """Shards of this round in storage that are not under `LATEST` yet; the lead publishes them once all are there."""
    pulses: tuple[Pulse, ...] = ()
    """Of its workers that run; the lead keeps them to itself."""
    hung: bool = False
    """On the lead: no rank moves; every member collects the stacks of its workers."""
    next_call: Optional[int] = None
    """In a drain of a command of one's own: see `stopping`."""


@dataclasses.dataclass(frozen=True)
class Report:
    """All that an agent knows, whole. Only a lead has `members`, `progress` and failures of others."""

    replica: str
    instance: str
    ready: bool
    """Warm: workers can start at once."""
    round: int
    claim: str
    """The highest seen."""
    state: str
    """idle, prepared, running, draining, drained, succeeded, failed: of this agent. A lead's drained and succeeded
    stand for the whole round: every member is, and the checkpoint that this asks for is under `LATEST`."""
    lead: bool = False
    members: Mapping[str, MemberState] = dataclasses.field(default_factory=dict)
    failures: tuple[Failure, ...] = ()
    """Of the current round, in order of arrival."""
    progress: Optional[Progress] = None
    hang: Optional[Hang] = None
    stragglers: tuple[Straggler, ...] = ()
    storage: Optional[Storage] = None
    startup_error: str = ""
    """Why this agent can never be ready, in a sentence."""
    notice: float = 0.0
    """Seconds of grace that it was given with a SIGTERM; 0 where it may stay."""


Message = Union[
    Prepare, Prepared, Assign, Drain, Save, Accepted, Refused, Watch, Join, DurableMoved, StopAt, Ping, Index, Pull,
    ShardHeader, Copied, MemberState, Report,
]  # fmt: skip
KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in typing.get_args(Message)}


def encode(message: Message) -> bytes:
    """One line, newline included."""
    body = dataclasses.asdict(message)
    line = json.dumps({"v": VERSION, "kind": type(message).__name__, "body": body}, separators=(",", ":")).encode()
    if len(line) >= MAX_LINE:
        raise ProtocolError(f"a {type(message).__name__} of {len(line)} bytes is over the limit of {MAX_LINE}")
    return line + b"\n"


def decode(line: bytes) -> Message:
    """The message in one line; raises ProtocolError with a sentence."""
    try:
        frame = json.loads(line)
        version, kind, body = frame["v"], KINDS[frame["kind"]], frame["body"]
    except (ValueError, KeyError, TypeError) as error:
        raise ProtocolError(f"not a message of this protocol: {line[:80]!r}") from error
    if version not in (VERSION - 1, VERSION, VERSION + 1):
        raise ProtocolError(f"protocol version {version}, this side speaks {VERSION}, and one more or less")
    return typing.cast(Message, from_json(kind, body))
