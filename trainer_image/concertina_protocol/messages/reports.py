"""Reports of an agent about itself, and of a coordinator about its round."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Optional

from concertina_protocol.codec.typed_json import Absent, OpenEnum
from concertina_protocol.messages.records import Rollback, SnapshotId, State, Storage

OUT_OF_MEMORY = "the container ran out of memory; raise resources.limits.memory of the container trainer"
"""Message of both sides: the agent uses it for a worker, and the operator for the whole container."""

MOST_LAST_LINES, LONGEST_LAST_LINE = 20, 400
"""Maximum number of lines of a worker's output in a report, and maximum length of a line in characters."""


class FailureReason(OpenEnum):
    """Reason why a member of a round failed; the operator has its own reasons for failures that it detects itself."""

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
    """The data differ from those that the state was trained on."""
    DOES_NOT_FIT = "DoesNotFit"
    """The model needs more memory than the devices have."""
    DAMAGED = "Damaged"
    """The data that were read differ from those that were written."""
    LOSS_SPIKE = "LossSpike"
    LOSS_NOT_FINITE = "LossNotFinite"
    SILENT_CORRUPTION = "SilentCorruption"
    ROLLED_BACK = "RolledBack"
    """The member was rolled back because another rank's state was corrupted."""


BAD_INPUTS = frozenset(
    {
        FailureReason.INVALID_INPUT,
        FailureReason.DATA_CHANGED,
        FailureReason.DOES_NOT_FIT,
        FailureReason.DAMAGED,
    }
)
"""Reasons for which a retry cannot help."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """Failure of a member.

    The first one of a round is the cause. Its consequences (lost peers) have `secondary`.
    """

    replica: str
    reason: FailureReason
    message: str
    """Sentence with the exit code or signal."""
    last_lines: tuple[str, ...] = ()
    """Last lines of the worker's output, at most MOST_LAST_LINES for the operator.

    A coordinator sends them only for the cause, and for failures that no new round can repair, because the lines of all
    failures would not fit on one line of the protocol.
    """
    rank: Annotated[Optional[int], Absent(-1)] = None
    exit_code: int = 0
    """Exit code of the worker with that rank."""
    step: Annotated[Optional[int], Absent(-1)] = None
    permanent: bool = False
    """Whether a retry cannot help (the reason is one of BAD_INPUTS, and the worker exited with 78, EX_CONFIG)."""
    secondary: bool = False
    provoked: bool = False
    """Whether the worker's last output is that of a rank that lost a peer, and so says nothing about the script."""
    at: Annotated[Optional[float], Absent(0.0)] = None
    rollback: Optional[Rollback] = None
    """Rollback that the failure requires.

    It comes with LossSpike, LossNotFinite and SilentCorruption, and with Damaged under `checkpoint.onDamage:
    UsePrevious`.
    """


@dataclasses.dataclass(frozen=True)
class CheckpointInterval:
    """Current and optimal interval of checkpoints."""

    seconds: Annotated[Optional[float], Absent(0.0)]
    """Interval in seconds, or None if checkpoints are not written by time."""
    suggested: float
    save_seconds: float
    """Longest time for which training waited for a save, or 0 before the first one of this round."""
    failure_seconds: float
    """Time between failures in seconds."""


@dataclasses.dataclass(frozen=True)
class SnapshotInterval:
    """Current interval of snapshots."""

    steps: int
    """Number of steps between the last two snapshots, which is the most that a failure causes to be trained again."""
    overhead: float
    """Share of the training time that snapshots take."""


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """Result of an evaluation on the held-out documents."""

    step: int
    loss: float


class StepPart(OpenEnum):
    """Part of a step's time, as rank 0 measures it; time spent waiting for other ranks is in no other part."""

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
"""Parts of exposed communication, for which training waits; in a pipeline, it also waits for the other stages."""
MOST_METRICS = 32
"""Maximum number of metrics that a worker may report under its own names."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """Progress that rank 0's worker reports."""

    step: int
    """Steps finished since the run began."""
    steps: Annotated[Optional[int], Absent(0)]
    """Last step of the run, or None if it is unknown."""
    loss: float
    tokens_per_second: float
    step_seconds: float
    position: int
    """Samples consumed."""
    phase: str
    """Phase for messages, a `heartbeat.WorkerPhase`: starting, restoring, training, checkpointing or evaluating."""
    at: float
    first_step_at: Annotated[Optional[float], Absent(0.0)] = None
    """Time at which this round's first step finished, in Unix seconds, or None until then."""
    snapshot_step: Annotated[Optional[int], Absent(-1)] = None
    """Step of the newest snapshot that is complete on peers."""
    checkpoint_seconds: float = 0.0
    """Seconds that this round's training has waited for snapshots and checkpoints."""
    stalled_seconds: float = 0.0
    """Seconds that this round's training has waited for data."""
    mfu: Annotated[Optional[float], Absent(0.0)] = None
    """Share of the devices' peak arithmetic that is used, with causal attention counted."""
    timeline: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Duration of each part of this round's start in seconds: start, group, build, restore, first_step."""
    save_seconds: Annotated[Optional[float], Absent(0.0)] = None
    """Duration of the slowest snapshot of this round in seconds, or None before the first one."""
    restored_step: Annotated[Optional[int], Absent(-1)] = None
    restored_from: str = ""
    skipped: tuple[tuple[int, int], ...] = ()
    """Positions that have been skipped so far."""
    interval: Optional[CheckpointInterval] = None
    """Interval of checkpoints, with durable storage."""
    waits_for: str = ""
    """Reason, in a sentence, why no data arrive while their store is unavailable."""
    evaluated: Optional[Evaluated] = None
    """Last evaluation of this round."""
    shares: tuple[int, ...] = ()
    """Number of sequences in a step by rank, if it follows their speed (`data.balance: Speed`)."""
    tokens: Optional[int] = None
    """Tokens trained on since the run began, each counted once even if it was trained again, or None if unknown."""
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Seconds of this round's steps, except the first, by `StepPart`. A script reports the parts that it knows."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Metrics of this step by name: gradient_norm, learning_rate ..., at most MOST_METRICS."""
    mfu_full_attention: Annotated[Optional[float], Absent(0.0)] = None
    """Share of the devices' peak arithmetic with all of attention counted, as torchtitan does."""
    snapshots: Optional[SnapshotInterval] = None
    """Interval of snapshots in this round, from its second snapshot on."""
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Values that the trainer chose for fields that spec.trainer does not set, by path below spec.trainer."""
    optimizer: str = ""
    """Class of the optimizer whose steps `step` counts since the process started, or empty if the worker reports steps.

    A script that continues from a checkpoint of its own then counts from 1 again, and its step of the run is unknown.
    """


@dataclasses.dataclass(frozen=True)
class Part:
    """One shard of a snapshot that is in durable storage."""

    id: SnapshotId
    shard: int
    complete: bool = False
    """Whether the snapshot is of the run's last step."""


@dataclasses.dataclass(frozen=True)
class Heartbeat:
    """Phase of one worker and its age; ages are used so that clocks of different machines are never compared."""

    rank: int
    step: int
    """Steps finished."""
    phase: str
    """Phase of the worker, a `heartbeat.WorkerPhase`, or empty if the worker writes no heartbeat."""
    still: float
    """Seconds since the worker last made progress."""
    busy: float = 0.0
    """Seconds of this round's finished steps, except the first, that were not spent waiting for others."""
    stack: Optional[tuple[str, ...]] = None
    """Stack of the worker, once the coordinator reports that the round hangs."""


@dataclasses.dataclass(frozen=True)
class Hang:
    """Hang of the round: no rank makes progress."""

    replica: str
    """Replica whose worker the other workers wait for, or empty if no worker is behind."""
    rank: Annotated[Optional[int], Absent(-1)]
    """Rank of that worker, or None if there is no replica."""
    step: int
    """Steps that the worker has finished."""
    phase: str
    """Phase of the worker."""
    others: str
    """Phase of most of the other ranks, or empty if there are no other ranks."""
    seconds: float
    """Time without progress of any rank when the hang was detected."""
    suspects: int = 1
    """Number of ranks that are as far behind as this rank."""
    stack: tuple[str, ...] = ()
    """Stack of that worker, innermost frames first, truncated. The pod's log has all of it."""


@dataclasses.dataclass(frozen=True)
class Straggler:
    """Rank that the other ranks wait for in every step, as measured when it was first reported."""

    replica: str
    rank: int
    seconds: float
    """Seconds of the rank's own work in a step."""
    others: float
    """Median of the other ranks' own work in a step, in seconds."""


@dataclasses.dataclass(frozen=True)
class Busy:
    """`Heartbeat.busy` over all ranks of the round."""

    coordinator: float
    """Value of rank 0."""
    median: float
    most: float


@dataclasses.dataclass(frozen=True)
class MemberState:
    """State of one member as the coordinator knows it."""

    replica: str
    instance: str
    round: int
    claim: str
    state: State
    """State of the member, from starting on."""
    step: Annotated[Optional[int], Absent(-1)] = None
    failure: Optional[Failure] = None
    notice: Annotated[Optional[float], Absent(0.0)] = None
    """Grace period in seconds that came with a SIGTERM, or None if the member may stay."""
    leaving: tuple[str, ...] = ()
    """Members with such a notice; set on the coordinator.

    A leaving member beside another leaving member may be needed for the state that it holds.
    """
    snapshot_step: Annotated[Optional[int], Absent(-1)] = None
    """Step of the newest snapshot of this round that is complete on all peers; set on the coordinator.

    Snapshots of older rounds may then be deleted.
    """
    durable_parts: tuple[Part, ...] = ()
    """Shards of this round in storage that are not under `LATEST` yet.

    The coordinator publishes them once all are there.
    """
    heartbeats: tuple[Heartbeat, ...] = ()
    """Heartbeats of the running workers, which the coordinator does not pass on."""
    hung: bool = False
    """Whether no rank makes progress; set on the coordinator. Every member then collects the stacks of its workers."""
    next_call: Optional[int] = None
    """Next call of should_checkpoint() in a drain of a user's own command (see `stopping`)."""
    saved: Optional[tuple[int, ...]] = None
    """Steps of the newest snapshots that each worker has completely, once the script has finished here."""
    ends_at: Optional[int] = None
    """Newest step that all members have completely and that must be in storage; set on the coordinator."""
    world_mismatch: bool = False
    """Whether each of the workers trains in a world of its own, below a launcher."""


@dataclasses.dataclass(frozen=True)
class Report:
    """Complete report of an agent; only a coordinator has `members`, `progress` and failures of others."""

    replica: str
    instance: str
    ready: bool
    """Whether the agent is warm, so that workers can start at once."""
    round: int
    claim: str
    """Claim of the highest round seen."""
    state: State
    """State of this agent, never starting.

    A coordinator's drained and succeeded apply to the whole round: every member is in that state, and the checkpoint
    that the state requires is under `LATEST`.
    """
    coordinator: bool = False
    members: Mapping[str, MemberState] = dataclasses.field(default_factory=dict)
    failures: tuple[Failure, ...] = ()
    """Failures of the current round, in order of arrival."""
    progress: Optional[Progress] = None
    hang: Optional[Hang] = None
    stragglers: tuple[Straggler, ...] = ()
    storage: Optional[Storage] = None
    startup_error: str = ""
    """Reason, in a sentence, why this agent can never be ready."""
    notice: Annotated[Optional[float], Absent(0.0)] = None
    """Grace period in seconds that came with a SIGTERM, or None if the replica may stay."""
    warm_start_disabled_reason: str = ""
    """Reason why this agent starts a user's own command without a warm start, although one is requested."""
    warm_start_skipped_modules: str = ""
    """Modules that each start imports again although it is warm, with the reason."""
    tracking: str = ""
    """Reason, in a sentence, why the tracker does not accept this replica's records of the run, or empty if it does."""
    keeps_state: bool = False
    """Whether the workers save snapshots, as the bundled trainer and scripts with `trainingjob.State` do."""
    busy: Optional[Busy] = None
    """Own work of the ranks, on a coordinator whose workers measure it."""
    world_mismatch: str = ""
    """Clause that says how every worker of the round trains in a world of its own, on a coordinator.

    It is empty if a worker does not.
    """
    takes_calls: bool = False
    """Whether the connection of this stream accepts the operator's calls.

    These are Prepare, Assign, Release, Drain and Save. They are answered between the lines of the stream.
    """
