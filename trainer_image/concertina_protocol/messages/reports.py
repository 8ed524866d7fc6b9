"""What an agent tells of itself, and a coordinator of its round."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Optional

from concertina_protocol.codec.typed_json import Absent, OpenEnum
from concertina_protocol.messages.records import Rollback, SnapshotId, State, Storage

OUT_OF_MEMORY = "the container ran out of memory; raise resources.limits.memory of the container trainer"
"""In the words of both sides: the agent says it of a worker, the operator of the whole container."""

MOST_LAST_LINES, LONGEST_LAST_LINE = 20, 400
"""Of a worker's output that the operator is told, and characters of one line."""


class FailureReason(OpenEnum):
    """Of a member of a round; what the operator finds by itself has words of its own."""

    WORKER_FAILED = "WorkerFailed"
    WORKER_SIGNALED = "WorkerSignaled"
    OUT_OF_MEMORY = "OutOfMemory"
    WORKER_STOPPED = "WorkerStopped"
    WORKER_EXITED_EARLY = "WorkerExitedEarly"
    START_FAILED = "StartFailed"
    MEMBER_LOST = "MemberLost"
    COORDINATOR_LOST = "CoordinatorLost"
    RESTORE_FAILED = "RestoreFailed"
    INVALID_INPUT = "InvalidInput"
    DATA_CHANGED = "DataChanged"
    """The data are others than those that the state was trained on."""
    DAMAGED = "Damaged"
    """What was read is not what was written."""
    LOSS_SPIKE = "LossSpike"
    LOSS_NOT_FINITE = "LossNotFinite"
    SILENT_CORRUPTION = "SilentCorruption"
    ROLLED_BACK = "RolledBack"
    """Because of another rank's corruption."""


BAD_INPUTS = frozenset({FailureReason.INVALID_INPUT, FailureReason.DATA_CHANGED, FailureReason.DAMAGED})
"""Where trying again can't help."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a member failed. The first of a round is the cause; what follows from it (lost peers) has `secondary`."""

    replica: str
    reason: FailureReason
    message: str
    """A sentence, with the exit code or signal."""
    last_lines: tuple[str, ...] = ()
    """A coordinator tells those of the cause, and of what no new round can mend: all of them would not fit on a line.
    The operator is told MOST_LAST_LINES."""
    rank: Annotated[Optional[int], Absent(-1)] = None
    exit_code: int = 0
    """Of the worker of that rank."""
    step: Annotated[Optional[int], Absent(-1)] = None
    permanent: bool = False
    """Trying again can't help (one of BAD_INPUTS, and the worker exited 78, EX_CONFIG)."""
    secondary: bool = False
    provoked: bool = False
    """Its last words are those of a rank that lost a peer: they say nothing about the script."""
    at: Annotated[Optional[float], Absent(0.0)] = None
    rollback: Optional[Rollback] = None
    """With LossSpike, LossNotFinite, SilentCorruption; with Damaged under `checkpoint.onDamage: UsePrevious`."""


@dataclasses.dataclass(frozen=True)
class CheckpointInterval:
    """How often checkpoints are written, and how often it would be best."""

    seconds: Annotated[Optional[float], Absent(0.0)]
    """None: not by the clock."""
    suggested: float
    save_seconds: float
    """That training waited for a save, at most; 0 before the first of this round."""
    failure_seconds: float
    """Between failures."""


@dataclasses.dataclass(frozen=True)
class SnapshotInterval:
    """How often snapshots are taken."""

    steps: int
    """From the snapshot before the last one to the last one. As many steps are trained again after a failure, at
    most."""
    overhead: float
    """Share of the training time that snapshots take."""


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """On the documents that were set aside."""

    step: int
    loss: float


class StepPart(OpenEnum):
    """Where the time of steps goes, as rank 0 measures it; what it waits for others is in no other part."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"
    TENSOR = "tensor"
    CONTEXT = "context"
    PIPELINE = "pipeline"
    EVALUATION = "evaluation"
    COMPILE = "compile"


COMMUNICATION = (
    StepPart.ALL_GATHER, StepPart.REDUCE_SCATTER, StepPart.ALL_REDUCE, StepPart.ALL_TO_ALL, StepPart.TENSOR,
    StepPart.CONTEXT, StepPart.PIPELINE,
)  # fmt: skip
"""Exposed: training waits for it; in a pipeline for the other stages."""
MOST_METRICS = 32
"""That a worker may tell of itself by names of its own."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """From rank 0's worker."""

    step: int
    """Steps finished since the run began."""
    steps: Annotated[Optional[int], Absent(0)]
    """The last step of the run; None where unknown."""
    loss: float
    tokens_per_second: float
    step_seconds: float
    position: int
    """Samples consumed."""
    phase: str
    """A `heartbeat.WorkerPhase` of those for messages: starting, restoring, training, checkpointing or evaluating."""
    at: float
    first_step_at: Annotated[Optional[float], Absent(0.0)] = None
    """Unix seconds at which this round's first step finished; None until then."""
    snapshot_step: Annotated[Optional[int], Absent(-1)] = None
    """Newest snapshot complete on peers."""
    checkpoint_seconds: float = 0.0
    """Seconds this round's training has waited for snapshots and checkpoints."""
    stalled_seconds: float = 0.0
    """Seconds this round's training has waited for data."""
    mfu: Annotated[Optional[float], Absent(0.0)] = None
    """Share of the devices' peak arithmetic that is used, causal attention counted."""
    timeline: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Seconds of this round's start by part: start, group, build, restore, first_step."""
    save_seconds: Annotated[Optional[float], Absent(0.0)] = None
    """That the slowest snapshot of this round took; None before the first."""
    restored_step: Annotated[Optional[int], Absent(-1)] = None
    restored_from: str = ""
    skipped: tuple[tuple[int, int], ...] = ()
    """Positions that were left out so far."""
    interval: Optional[CheckpointInterval] = None
    """With durable storage."""
    waits_for: str = ""
    """Why no data come, in a sentence, while that is so for want of their store."""
    evaluated: Optional[Evaluated] = None
    """The last time in this round."""
    shares: tuple[int, ...] = ()
    """Sequences of a step by rank, where that follows their speed (`data.balance: Speed`)."""
    tokens: Optional[int] = None
    """Trained on since the run began, each once, whatever was trained again. None: not known."""
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Of this round's steps, its first apart, by `StepPart`; a script says what it knows."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """As of this step, by name: gradient_norm, learning_rate ..., at most MOST_METRICS."""
    mfu_full_attention: Annotated[Optional[float], Absent(0.0)] = None
    """The same share with all of attention counted, as torchtitan does."""
    snapshots: Optional[SnapshotInterval] = None
    """Of this round, from its second snapshot on."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One shard of a snapshot that is in durable storage."""

    id: SnapshotId
    shard: int
    complete: bool = False
    """Of the run's last step."""


@dataclasses.dataclass(frozen=True)
class Heartbeat:
    """Where one worker is, and for how long: ages, for no clock of one machine is compared with another's."""

    rank: int
    step: int
    """Steps finished."""
    phase: str
    """A `heartbeat.WorkerPhase`; empty where the worker tells nothing of itself."""
    still: float
    """Seconds since it last moved."""
    busy: float = 0.0
    """Seconds of this round's finished steps, its first apart, that were not spent waiting for others."""
    stack: Optional[tuple[str, ...]] = None
    """Once the coordinator says that the round hangs."""


@dataclasses.dataclass(frozen=True)
class Hang:
    """No rank of the round moves."""

    replica: str
    """Whose worker the others wait for; empty where all wait alike."""
    rank: Annotated[Optional[int], Absent(-1)]
    """Of that worker; None with no replica."""
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
class Busy:
    """`Heartbeat.busy`, over all ranks of the round."""

    coordinator: float
    """Rank 0's."""
    median: float
    most: float


@dataclasses.dataclass(frozen=True)
class MemberState:
    """One member as the coordinator knows it."""

    replica: str
    instance: str
    round: int
    claim: str
    state: State
    """From starting on."""
    step: Annotated[Optional[int], Absent(-1)] = None
    failure: Optional[Failure] = None
    notice: Annotated[Optional[float], Absent(0.0)] = None
    """Seconds of grace that it was given with a SIGTERM; None where it may stay."""
    leaving: tuple[str, ...] = ()
    """On the coordinator: members with such a notice. Who leaves beside another one may be needed for what it holds."""
    snapshot_step: Annotated[Optional[int], Absent(-1)] = None
    """On the coordinator: newest snapshot of this round that is complete on all peers; older rounds' may then be
    dropped."""
    durable_parts: tuple[Part, ...] = ()
    """Shards of this round in storage that are not under `LATEST` yet; the coordinator publishes them once all are
    there."""
    heartbeats: tuple[Heartbeat, ...] = ()
    """Heartbeats of its workers that run, by their older name; the coordinator keeps them to itself."""
    hung: bool = False
    """On the coordinator: no rank moves; every member collects the stacks of its workers."""
    next_call: Optional[int] = None
    """In a drain of a command of one's own: see `stopping`."""
    saved: Optional[tuple[int, ...]] = None
    """Of a script that is through here: steps of the newest snapshots that each of its workers has whole."""
    ends_at: Optional[int] = None
    """On the coordinator: the newest step that all have whole, which is to be in storage."""
    world_mismatch: bool = False
    """Whether each of its workers trains in a world of its own, below a launcher."""


@dataclasses.dataclass(frozen=True)
class Report:
    """All that an agent knows, whole. Only a coordinator has `members`, `progress` and failures of others."""

    replica: str
    instance: str
    ready: bool
    """Warm: workers can start at once."""
    round: int
    claim: str
    """The highest seen."""
    state: State
    """Of this agent, never starting. A coordinator's drained and succeeded stand for the whole round: every member is,
    and the checkpoint that this asks for is under `LATEST`."""
    coordinator: bool = False
    members: Mapping[str, MemberState] = dataclasses.field(default_factory=dict)
    failures: tuple[Failure, ...] = ()
    """Of the current round, in order of arrival."""
    progress: Optional[Progress] = None
    hang: Optional[Hang] = None
    stragglers: tuple[Straggler, ...] = ()
    storage: Optional[Storage] = None
    startup_error: str = ""
    """Why this agent can never be ready, in a sentence."""
    notice: Annotated[Optional[float], Absent(0.0)] = None
    """Seconds of grace that it was given with a SIGTERM; None where it may stay."""
    warm_start_disabled_reason: str = ""
    """Why this agent starts a command of one's own plainly, though a warm start is asked for."""
    warm_start_skipped_modules: str = ""
    """What each start imports anew, and why, though it is warm."""
    tracking: str = ""
    """Why the tracker does not take what this replica has to tell of the run, in a sentence; empty where it does."""
    keeps_state: bool = False
    """Whether the workers save snapshots: the bundled trainer's, and those of a script with `trainingjob.State`."""
    busy: Optional[Busy] = None
    """On a coordinator whose workers measure it."""
    world_mismatch: str = ""
    """On a coordinator: how every worker of the round trains in a world of its own, in a clause; empty if one does
    not."""
    takes_calls: bool = False
    """Whether Prepare, Assign, Drain and Save may come on the connection of this stream, to be answered between its
    lines."""
