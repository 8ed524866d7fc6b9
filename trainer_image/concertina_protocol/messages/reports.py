"""Reports of an agent about itself, and of a coordinator (the agent of rank 0) about its round.

A round is a period in which a fixed set of replicas trains.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Optional

from concertina_protocol.codec.typed_json import Absent, OpenEnum
from concertina_protocol.messages.collectives import GroupCalls, HungCollective
from concertina_protocol.messages.records import Rollback, SnapshotId, State, Storage

OUT_OF_MEMORY = "the container ran out of memory: raise resources.limits.memory of the container trainer"
"""Sentence for failures from lack of memory. Agents use it for a worker, and the operator for the whole container."""

MOST_LAST_LINES, LONGEST_LAST_LINE = 20, 400
"""Maximum number of lines of a worker's output in a report, and maximum length of such a line in characters."""


class FailureReason(OpenEnum):
    """Reason why a member of a round failed. The operator has more reasons, for failures that it detects itself.

    A round is a period in which a fixed set of replicas trains.
    """

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
    """Stored bytes are not those that were written."""
    LOSS_SPIKE = "LossSpike"
    LOSS_NOT_FINITE = "LossNotFinite"
    SILENT_CORRUPTION = "SilentCorruption"
    ROLLED_BACK = "RolledBack"
    """The member went back to an earlier state because the state of another rank was corrupted."""


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
    """Failure of a member of a round.

    The first failure of a round is the cause of the round's end. If other ranks fail because they have lost the
    connection to the failed rank, their failures have `secondary` set.

    A round is a period in which a fixed set of replicas trains.
    """

    replica: str
    reason: FailureReason
    message: str
    """Sentence that includes the exit code or the signal."""
    last_lines: tuple[str, ...] = ()
    """Last lines of the worker's output. The operator receives at most MOST_LAST_LINES.

    The coordinator sends these lines only for the cause of a round's end, and for failures that no new round can
    repair. The lines of all failures would not fit into one line of the protocol.
    """
    rank: Annotated[Optional[int], Absent(-1)] = None
    exit_code: int = 0
    """Exit code of the worker that failed."""
    step: Annotated[Optional[int], Absent(-1)] = None
    permanent: bool = False
    """True if a retry cannot help. If so, the reason is one of BAD_INPUTS, and the worker exited with 78
    (EX_CONFIG)."""
    secondary: bool = False
    provoked: bool = False
    """True if the worker's last output reports a lost peer, so that the script is probably not at fault."""
    at: Annotated[Optional[float], Absent(0.0)] = None
    rollback: Optional[Rollback] = None
    """Rollback that this failure requires, or None.

    A rollback is required if the failure's reason is LossSpike, LossNotFinite or SilentCorruption. It is also required
    for the reason Damaged if `checkpoint.onDamage` is UsePrevious.
    """


@dataclasses.dataclass(frozen=True)
class CheckpointInterval:
    """Present interval between checkpoints, and the optimal interval according to the measurements so far."""

    seconds: Annotated[Optional[float], Absent(0.0)]
    """Interval in seconds, or None if checkpoints are not taken by time."""
    suggested: float
    save_seconds: float
    """Longest wait of training for a save in this round, in seconds, or 0 before the first save."""
    failure_seconds: float
    """Mean time between failures in seconds."""


@dataclasses.dataclass(frozen=True)
class SnapshotInterval:
    """Interval between snapshots, for the job's status: the number of steps, and the measured cost.

    A snapshot is a copy of the training state in node memory.
    """

    steps: int
    """Number of steps between the last two snapshots. A failure causes at most this many steps to be trained again."""
    overhead: float
    """Share of the training time that snapshots take."""


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """Result of an evaluation on documents that are not used for training."""

    step: int
    loss: float
    """Mean loss of the first set, in nats per token."""
    perplexity: Optional[float] = None
    """exp(`loss`). None if the loss is not a cross-entropy of tokens, or if exp(`loss`) is not finite."""
    sets: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Mean loss of each named set, or empty if the job names no sets."""
    best_step: Optional[int] = None
    """Step with the lowest loss so far, or None if no loss was finite."""
    best_loss: Optional[float] = None
    without_improvement: int = 0
    """Number of evaluations in a row that count as no improvement."""
    stop_reason: str = ""
    """Sentence that says why the run ends after this evaluation, or "" if the run continues."""
    token_accuracy: Optional[float] = None
    """Share of the first set's predicted tokens for which the right token has the largest logit.

    Tokens have the same weights as in the loss. The value is None if the model does not predict tokens.
    """
    bits_per_byte: Optional[float] = None
    """Loss of the first set in bits per byte of text, or None if the number of bytes is not known."""
    set_token_accuracies: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Token accuracy of each named set."""
    set_bits_per_byte: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Bits per byte of each named set whose number of bytes is known."""


class StepPart(OpenEnum):
    """Part of the time of a step, measured on rank 0.

    Each second counts in only one part. The time that a collective waits for other ranks counts in the part of that
    collective.
    """

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
"""Parts of a step in which training waits for communication. In a pipeline, this includes waits for other stages."""
MOST_METRICS = 32
"""Maximum number of metrics that a worker may report under names that it chooses."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """Progress of the round's training, as the worker with rank 0 reports it.

    A round is a period in which a fixed set of replicas trains.
    """

    step: int
    """Number of steps that have finished since the run began."""
    steps: Annotated[Optional[int], Absent(0)]
    """Number of the run's last step, or None if it is unknown."""
    loss: float
    tokens_per_second: float
    step_seconds: float
    position: int
    """Number of samples consumed."""
    phase: str
    """Phase of the worker in words, from `heartbeat.WorkerPhase`: starting, restoring, training, checkpointing or
    evaluating."""
    at: float
    first_step_at: Annotated[Optional[float], Absent(0.0)] = None
    """Time in Unix seconds at which the first step of this round finished, or None before."""
    snapshot_step: Annotated[Optional[int], Absent(-1)] = None
    """Step of the newest snapshot whose shards are all copied to another replica, or None if there is none."""
    checkpoint_seconds: float = 0.0
    """Seconds that training has waited for snapshots and checkpoints in this round."""
    stalled_seconds: float = 0.0
    """Seconds that training has waited for data in this round."""
    mfu: Annotated[Optional[float], Absent(0.0)] = None
    """MFU: share of the devices' peak FLOPS that training uses, counting only the causal half of attention."""
    timeline: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Seconds that each part of this round's start took: start, group, build, restore, compile, first_step."""
    save_seconds: Annotated[Optional[float], Absent(0.0)] = None
    """Duration in seconds of the slowest snapshot of this round, or None before the first one."""
    restored_step: Annotated[Optional[int], Absent(-1)] = None
    restored_from: str = ""
    skipped: tuple[tuple[int, int], ...] = ()
    """Positions of the data that have been skipped so far."""
    interval: Optional[CheckpointInterval] = None
    """Interval between checkpoints, or None without durable storage."""
    waits_for: str = ""
    """Sentence that says why training waits for data, if their store is unavailable. Otherwise ""."""
    evaluated: Optional[Evaluated] = None
    """Result of the run's last evaluation, or None."""
    shares: tuple[int, ...] = ()
    """Number of sequences of each rank in a step, if they depend on the ranks' speed (`data.balance: Speed`)."""
    tokens: Optional[int] = None
    """Number of tokens trained on since the run began, or None if unknown. Tokens that were trained again count
    once."""
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Seconds of each `StepPart` in this round's steps, except the first. A script reports only the parts that it
    measures."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Metrics of this step by name (such as gradient_norm and learning_rate), at most MOST_METRICS."""
    mfu_full_attention: Annotated[Optional[float], Absent(0.0)] = None
    """MFU: share of the devices' peak FLOPS that training uses. All of attention is counted, as torchtitan does."""
    snapshots: Optional[SnapshotInterval] = None
    """Interval of snapshots in this round, or None before the round's second snapshot."""
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Values that the trainer chose for fields that spec.trainer does not set, by path below spec.trainer.

    For model.from and model.hf, the value is the model that the trainer read.
    """
    optimizer: str = ""
    """Class of the optimizer whose steps are counted, or "" if the worker reports its steps itself.

    If the agent counts steps, `Progress.step` is the number of optimizer steps since the process started. When a script
    continues from its own checkpoint, the count begins at 1 again, so the step of the whole run is unknown.
    """


@dataclasses.dataclass(frozen=True)
class Part:
    """One shard of a snapshot that has been uploaded to durable storage.

    A snapshot is a copy of the training state in node memory.
    """

    id: SnapshotId
    shard: int
    complete: bool = False
    """True if the snapshot is of the run's last step."""


@dataclasses.dataclass(frozen=True)
class Heartbeat:
    """Phase of one worker, and the seconds since its last progress.

    The message contains a duration instead of a time of day, because the clocks of machines may differ.
    """

    rank: int
    step: int
    """Number of finished steps."""
    phase: str
    """Phase of the worker, from `heartbeat.WorkerPhase`, or "" if the worker writes no heartbeat file."""
    still: float
    """Seconds since the worker last made progress."""
    busy: float = 0.0
    """Seconds in which the worker did not wait for other ranks, in this round's finished steps except the first."""
    stack: Optional[tuple[str, ...]] = None
    """Stack of the worker, collected when the coordinator reports that the round hangs, or None before."""
    calls: Optional[tuple[GroupCalls, ...]] = None
    """Collectives of the worker, which are collected with the stack, or None if its flight recorder did not answer."""


@dataclasses.dataclass(frozen=True)
class Hang:
    """Hang of a round, in which no rank makes progress.

    A round is a period in which a fixed set of replicas trains.
    """

    replica: str
    """Replica of the worker that the other workers wait for, or "" if no worker is behind."""
    rank: Annotated[Optional[int], Absent(-1)]
    """Rank of the worker that the other workers wait for, or None if no worker is behind."""
    step: int
    """Number of steps that the worker of rank `rank` has finished."""
    phase: str
    """Phase of the worker of rank `rank`."""
    others: str
    """Phase that most of the other ranks are in, or "" if there are no other ranks."""
    seconds: float
    """Seconds without progress of any rank when the hang was detected."""
    suspects: int = 1
    """Number of ranks that have made as little progress as rank `rank`."""
    stack: tuple[str, ...] = ()
    """Stack of the worker of rank `rank`, innermost frames first, truncated. The pod's log has the whole stack."""
    collective: Optional[HungCollective] = None
    """Collective that has not completed, or None if the ranks' flight recorders show no such collective."""


@dataclasses.dataclass(frozen=True)
class Straggler:
    """Rank for which the other ranks wait in every step.

    The fields contain the measurements from the moment at which the rank was first reported as a straggler.
    """

    replica: str
    rank: int
    seconds: float
    """Seconds that the rank's own work in a step takes."""
    others: float
    """Median of the seconds that the other ranks' own work in a step takes."""


@dataclasses.dataclass(frozen=True)
class Busy:
    """Summary over all ranks of the seconds in which a worker does not wait for other ranks (see `Heartbeat.busy`)."""

    coordinator: float
    """Seconds of rank 0."""
    median: float
    most: float


@dataclasses.dataclass(frozen=True)
class MemberState:
    """State of a member of the round. Each member sends it to the coordinator.

    A round is a period in which a fixed set of replicas trains.
    """

    replica: str
    instance: str
    round: int
    claim: str
    state: State
    """State of the member. It is never `idle` or `prepared`, because the round has begun."""
    step: Annotated[Optional[int], Absent(-1)] = None
    failure: Optional[Failure] = None
    notice: Annotated[Optional[float], Absent(0.0)] = None
    """Grace period in seconds of a SIGTERM that the replica has received, or None if it has received none."""
    leaving: tuple[str, ...] = ()
    """Members that have received a SIGTERM and must depart. Only the coordinator sets this.

    A departing member must know whether its neighbour departs too. If so, the member may have the only copy of the
    neighbour's state.
    """
    snapshot_step: Annotated[Optional[int], Absent(-1)] = None
    """Step of the newest snapshot of this round whose shards are all copied to another replica.

    Only the coordinator sets this field. Once it is set, members may delete the snapshots of older rounds.
    """
    durable_parts: tuple[Part, ...] = ()
    """Shards of this member that are in storage and whose checkpoint `LATEST` does not name yet.

    Once the shards of all members are in storage, the coordinator publishes the checkpoint.
    """
    heartbeats: tuple[Heartbeat, ...] = ()
    """Heartbeats of the running workers. The coordinator does not pass them on."""
    hung: bool = False
    """True if no rank makes progress. The coordinator sets this, and every member then collects the stacks of its
    workers."""
    next_call: Optional[int] = None
    """Number of the first call of should_checkpoint() at which this member's workers can stop, or None.

    The field is set during a drain of a user's own command (see `stopping`).
    """
    saved: Optional[tuple[int, ...]] = None
    """Steps of the newest snapshots that every worker of this member has saved completely.

    The field is None until the script on this member has finished.
    """
    ends_at: Optional[int] = None
    """Newest step that all members have saved completely.

    The state of this step must be in storage when the round ends.

    Only the coordinator sets this.
    """
    world_mismatch: bool = False
    """True if each worker of this member trains in a world of its own.

    This happens if the command starts a launcher such as torchrun.
    """
    gpu_fault: str = ""
    """Part of a sentence that describes a faulty GPU of this member, or "" if there is none."""
    silent: bool = False
    """True if the member has sent the coordinator no line for DOUBT_SECONDS. Only the coordinator sets this.

    The operator then tries to reach the member itself.
    """


@dataclasses.dataclass(frozen=True)
class Report:
    """Report of an agent about itself.

    The coordinator is the agent of rank 0. A round is a period in which a fixed set of replicas trains. A coordinator
    also reports the members, the progress and the failures of its round.
    """

    replica: str
    instance: str
    ready: bool
    """True if this agent can start workers at once, because it is prepared for a warm start."""
    round: int
    claim: str
    """Claim of the highest round that this agent has seen. A claim is the operator's decision to begin a round."""
    state: State
    """State of this agent. It is never `starting`, which is reported as `running`.

    A coordinator reports drained or succeeded only for the whole round: every member is in that state, and `LATEST`
    names the checkpoint that the state requires.
    """
    coordinator: bool = False
    members: Mapping[str, MemberState] = dataclasses.field(default_factory=dict)
    failures: tuple[Failure, ...] = ()
    """Failures of the present round, in the order in which they arrived."""
    progress: Optional[Progress] = None
    hang: Optional[Hang] = None
    stragglers: tuple[Straggler, ...] = ()
    storage: Optional[Storage] = None
    startup_error: str = ""
    """Sentence that says why this agent can never become ready, or ""."""
    notice: Annotated[Optional[float], Absent(0.0)] = None
    """Grace period in seconds of a SIGTERM that the replica has received, or None if it has received none."""
    warm_start_disabled_reason: str = ""
    """Reason why a user's own command has no warm start although one is requested, or "".

    A warm start forks the workers from a process that has imported the script's modules.
    """
    warm_start_skipped_modules: str = ""
    """Modules that each worker must import itself in spite of a warm start from a process with the script's modules.

    The text is "" if there are none. Otherwise it says why each of these modules was not imported in advance.
    """
    tracking: str = ""
    """Sentence that says why the run's tracking tool does not accept this replica's records, or "" if it does."""
    keeps_state: bool = False
    """True if the workers save snapshots, as the bundled trainer and scripts with `trainingjob.State` do."""
    busy: Optional[Busy] = None
    """Summary of the seconds in which ranks do not wait for others, or None.

    A coordinator sets this field if all workers of the round measure these seconds.
    """
    world_mismatch: str = ""
    """Part of a sentence that says how every worker of the round trains in a world of its own, or "".

    Only a coordinator sets this field.
    """
    takes_calls: bool = False
    """True if the operator may send requests on the connection of this stream.

    The requests are Prepare, Assign, Release, Drain and Save. The agent answers them between the lines of the stream.
    """
    gpu_fault: str = ""
    """Part of a sentence that describes a faulty GPU of this replica, or "" if there is none."""
    preflight_failed: bool = False
    """True if the preflight has found a faulty GPU. The replica then never becomes ready."""
