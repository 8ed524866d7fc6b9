"""The status of a TrainingJob. Times are RFC 3339 strings in manifests and Unix seconds in Python."""

from __future__ import annotations

import datetime
import enum
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from concertina.api.accounting import (
    MOST_INCIDENTS,
    Cost,
    Count,
    Goodput,
    Incident,
    Name,
    Seconds,
    Timestamp,
)
from concertina.api.internal import Internal, with_packed
from concertina.api.loss_history import MOST_CHARACTERS as MOST_OF_HISTORY
from concertina.api.model import StatusModel
from concertina.api.restarts import LISTED_RESTARTS, AvoidedNode, LastFailure, Restarts, packed_restarts
from concertina.api.world import LISTED_MEMBERS, World, packed_members

MOST_DAMAGED = 16


class RequestState(enum.StrEnum):
    PENDING = "Pending"
    DONE = "Done"
    REFUSED = "Refused"


class ConditionType(enum.StrEnum):
    """Types of the conditions that this version of the operator writes. A status may contain others."""

    READY = "Ready"
    RECONCILING = "Reconciling"
    RUNNING = "Running"
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"
    STALLED = "Stalled"
    DEGRADED = "Degraded"
    TEMPLATE_OUTDATED = "TemplateOutdated"
    """The API server supports pod fields that spec.template lacks.

    The condition is removed when that is no longer so.
    """
    RECONCILE_ERROR = "ReconcileError"
    """A pass over the job raised an exception. The condition is true until a pass succeeds."""


ENDED = (ConditionType.COMPLETE, ConditionType.FAILED)
"""Conditions with which a job has ended and will not run again."""
ACTION_NEEDED = (ConditionType.STALLED, ConditionType.DEGRADED)
"""Conditions that say that a person must act. With Stalled, nothing continues; with Degraded, training continues."""


def rfc3339(seconds: float) -> str:
    """Return a time in Unix seconds as RFC 3339 text, as in Kubernetes. Fractions have six digits."""
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return moment.isoformat(timespec="microseconds" if moment.microsecond else "seconds").replace("+00:00", "Z")


AT_REST = {
    "Waiting": "waiting_seconds", "Queued": "waiting_seconds", "Suspended": "suspended_seconds",
    "Stalled": "stalled_seconds",
}  # fmt: skip
"""Class of the time that a job spends in a phase in which nothing changes, by phase."""


def unix_seconds(timestamp: str) -> float:
    """Return the Unix time, in seconds, of an RFC 3339 timestamp."""
    return datetime.datetime.fromisoformat(timestamp).timestamp()


class BestCheckpointMark(StatusModel):
    """The checkpoint with the lowest evaluation loss in the job's folder."""

    step: Count = Field(description="Its step.")
    loss: float = Field(description="Its evaluation loss.")
    uri: Annotated[str, Field(max_length=2048)] = Field(description="Its folder.")


class EvaluationJobState(enum.StrEnum):
    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class EvaluationJobMark(StatusModel):
    """Job of spec.evaluationJob for one checkpoint."""

    name: Name = Field(description="Name of the Job.")
    step: Count = Field(description="Step of the checkpoint.")
    round: Count = Field(default=0, description="The round that wrote the checkpoint.")
    uri: Annotated[str, Field(max_length=2048)] = Field(description="Folder of the checkpoint.")
    state: EvaluationJobState = Field(description="Pending (not created yet), Running, Succeeded or Failed.")
    message: Annotated[str, Field(max_length=1024)] = Field(default="", description="Why it failed.")


TOKEN_ACCURACY = "Share of its tokens that the model predicts correctly. Absent: the loss is not a loss of tokens."
BITS_PER_BYTE = "Loss in bits per byte of text. Absent: the bytes of the text are not known."


class EvaluationSetMark(StatusModel):
    """Figures of one set of the last evaluation."""

    name: Annotated[str, Field(max_length=32)] = Field(description="Name of the set in trainer.evaluation.sets.")
    loss: float | None = Field(default=None, description="Mean loss of its tokens. Absent: it is not finite.")
    token_accuracy: float | None = Field(default=None, description=TOKEN_ACCURACY)
    bits_per_byte: float | None = Field(default=None, description=BITS_PER_BYTE)


class EvaluationMark(StatusModel):
    """Loss of the last evaluation, on documents that are not used for training."""

    step: Count = Field(description="Steps after which it was measured.")
    loss: float | None = Field(
        default=None, description="Mean loss of its tokens; with several sets, of those of the first one."
    )
    perplexity: float | None = Field(
        default=None, description="exp(loss). Absent: the loss of a model of your own is not a loss of tokens."
    )
    token_accuracy: float | None = Field(default=None, description=TOKEN_ACCURACY)
    bits_per_byte: float | None = Field(default=None, description=BITS_PER_BYTE)
    sets: tuple[EvaluationSetMark, ...] = Field(
        default=(), max_length=8, description="Figures of each set in trainer.evaluation.sets."
    )
    best_step: Count | None = Field(default=None, description="Step with the lowest loss so far.")
    best_loss: float | None = Field(default=None, description="The lowest loss so far.")
    without_improvement: Count = Field(
        default=0,
        description="Evaluations in a row that are no improvement, as trainer.evaluation.stopping counts them.",
    )
    stop_reason: Annotated[str, Field(max_length=1024)] = Field(
        default="", description="Why training stopped early. Absent: it did not."
    )


class JobProgress(StatusModel):
    """Progress of the training run, such as the last step and its loss."""

    step: Count = Field(description="Steps finished since the run began, or the count that `optimizer` describes.")
    optimizer: Annotated[str, Field(max_length=64)] | None = Field(
        default=None,
        description="Class of the optimizer whose steps `step` counts since the workers last started, because the "
        "script reports no steps. The step of the run is then unknown: after a restart, `step` begins at 1 again. "
        "Absent: the script or the trainer reports its steps.",
    )
    steps: Count | None = Field(default=None, description="Steps of the whole run, if known.")
    percent: float | None = Field(default=None, ge=0, le=100, description="Share of steps that are finished.")
    eta_seconds: Seconds | None = Field(
        default=None, description="Seconds until the end of the run at the current speed."
    )
    loss: float | None = Field(default=None, description="Mean loss of the last step's tokens.")
    step_seconds: Seconds | None = Field(default=None, description="Duration of the last step.")
    tokens: Count | None = Field(default=None, description="Tokens trained on since the run began, each counted once.")
    tokens_per_second: Seconds | None = Field(default=None, description="Tokens trained on per second, all workers.")
    mfu: float | None = Field(
        default=None,
        description="Share of the devices' peak arithmetic throughput that training uses, with causal attention "
        "counted.",
    )
    mfu_full_attention: float | None = Field(
        default=None, description="The same share with all of attention counted, as torchtitan reports it."
    )
    evaluation: EvaluationMark | None = Field(
        default=None, description="The last evaluation, if trainer.evaluation is set."
    )
    at: Timestamp = Field(description="When this was so.")


class SnapshotMark(StatusModel):
    """The newest snapshot in the memory of pods. Each part of the snapshot has a copy in another pod."""

    step: Count = Field(description="Its step.")
    at: Timestamp = Field(description="When the operator saw that it was complete.")


class CheckpointMark(StatusModel):
    """The newest checkpoint in durable storage that can be loaded."""

    step: Count = Field(description="Its step.")
    round: Count = Field(default=0, description="The round that wrote it.")
    complete: bool = Field(default=False, description="Whether it is the checkpoint of the run's last step.")
    uri: Annotated[str, Field(max_length=2048)] = Field(description="Its folder.")
    at: Timestamp = Field(description="When it became durable.")


class SnapshotEvery(StatusModel):
    """Interval of snapshots in steps, and the share of the training time that they take."""

    steps: Count = Field(description="Steps between the last two snapshots. A failure loses at most this many steps.")
    overhead: float = Field(description="Share of the training time that snapshots take.")


class SampleRange(StatusModel):
    """Samples that were skipped, by their position in the order of the run."""

    begin: Count = Field(description="The first of them.")
    end: Count = Field(description="The one after the last.")


class RollbackMark(StatusModel):
    """The last rollback of training to an earlier step. States beyond `step` are not used again."""

    round: Count = Field(description="The round that was rolled back.")
    step: Count = Field(description="Training continued from a state of this step or an earlier one.")
    reason: Annotated[str, Field(max_length=128)] = Field(
        description="LossSpike, LossNotFinite, SilentCorruption or Damaged."
    )
    message: Annotated[str, Field(max_length=1024)] = Field(default="", description="Why, in a sentence.")
    at: Timestamp = Field(description="When.")


class DamagedCheckpoint(StatusModel):
    """A checkpoint whose stored bytes differ from the bytes that were written. It is not used."""

    uri: Annotated[str, Field(max_length=2048)] = Field(description="Its folder.")
    step: Count = Field(description="Its step.")
    previous_step: Count = Field(description="Training continued from a checkpoint of this step or an earlier one.")
    at: Timestamp = Field(description="When the damage was found.")


class CheckpointEvery(StatusModel):
    """Frequency of checkpoints, and the frequency that would lose the least time (Young's and Daly's estimate)."""

    seconds: Seconds = Field(
        description="Time between checkpoints. 0: checkpoints depend on the number of steps alone."
    )
    suggested_seconds: Seconds = Field(
        description="Time between checkpoints that would lose the least time, from measurements. everySeconds: Auto "
        "uses it."
    )
    save_seconds: Seconds = Field(default=0.0, description="Longest time that training waited for a save.")
    failure_seconds: Seconds = Field(
        default=0.0, description="Mean time between failures. The estimate assumes that the next failure happens now."
    )


class CheckpointRequest(StatusModel):
    """A checkpoint that was requested with the annotation concertina.dev/checkpoint-create."""

    id: Annotated[str, Field(max_length=63)] = Field(description="The annotation's value.")
    step: Count = Field(description="A durable checkpoint of this step or a later one fulfils it.")
    state: RequestState = Field(description="State of the request.")
    message: Annotated[str, Field(max_length=1024)] = Field(default="", description="Why, in a sentence.")
    at: Timestamp = Field(description="When it was first seen.")


class StragglerMark(StatusModel):
    """A rank for which the other ranks wait in every step."""

    rank: Count = Field(description="Its rank in the current round.")
    replica: Name = Field(description="Its replica.")
    node: Name = Field(default="", description="Its node.")
    seconds: Seconds = Field(description="Duration of its own work in a step, without waiting for others.")
    others_seconds: Seconds = Field(description="Median of this duration over the other ranks.")
    since: Timestamp = Field(description="When it was named.")


class SettingMark(StatusModel):
    """Value that the trainer chose for a field that the spec does not set, or the model that it read for a field."""

    field: Annotated[str, Field(max_length=253)] = Field(description="Path of the field below spec.trainer.")
    value: Annotated[str, Field(max_length=1024)] = Field(description="Its value.")


class ShareMark(StatusModel):
    """Share of each step's batch that a replica computes, if shares follow its speed."""

    replica: Name = Field(description="Its name.")
    node: Name = Field(default="", description="Its node.")
    sequences: Count = Field(description="Number of the batch's sequences.")
    factor: float = Field(ge=0, description="This number divided by an even share.")


class Condition(StatusModel):
    """One aspect of the job's state: Ready, Reconciling, Running, Suspended, Complete, Failed, Stalled or Degraded.

    Other controllers may add conditions of other types.
    """

    type: Annotated[str, Field(max_length=63)] = Field(description="Which aspect.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it is so.")
    reason: Annotated[str, Field(max_length=128)] = Field(description="Why, in one word.")
    message: Annotated[str, Field(max_length=32768)] = Field(default="", description="Why, and what to do.")
    last_transition_time: Timestamp = Field(description="When status last changed.")
    observed_generation: Count | None = Field(
        default=None, description="Generation of the spec that the condition describes."
    )


class StandbyReplicas(StatusModel):
    """Standby replicas of the job: replicas that are ready to replace a member."""

    ready: Count = Field(default=0, description="Standby replicas that can join at once.")
    names: tuple[Name, ...] = Field(
        default=(), max_length=1000, description="Names of all standby replicas, whether ready or not."
    )


class QueueStatus(StatusModel):
    """Kueue quota that the job has and requests."""

    name: Name = Field(description="Name of the LocalQueue.")
    cluster_queue: Annotated[str, Field(max_length=253)] = Field(
        default="", description="Name of the ClusterQueue that admitted the job."
    )
    workload: Annotated[str, Field(max_length=253)] = Field(
        default="", description="Name of the admitted Workload. Empty: no Workload of the job is admitted."
    )
    replicas: Count = Field(default=0, description="Replicas for which the job has quota.")
    reason: Annotated[str, Field(max_length=64)] = Field(
        default="", description="Why the job has fewer replicas than spec.replicas, in one word."
    )
    message: Annotated[str, Field(max_length=1024)] = Field(default="", description="The same as a sentence.")


class GangMark(StatusModel):
    """Mechanism that was chosen for the job to give all its pods their nodes together."""

    mechanism: Annotated[str, Field(max_length=32)] = Field(
        default="", description="PodGroup, Volcano, Coscheduling or KAI. Absent: pods are scheduled one by one."
    )
    api_version: Annotated[str, Field(max_length=64)] = Field(
        default="", description="API of the pod group. Absent: the operator has made no pod group."
    )
    pod_group: Name = Field(default="", description="Name of the pod group of the pods.")
    min_count: Count = Field(
        default=0, description="Number of pods that are scheduled together. Later pods are scheduled one by one."
    )
    message: Annotated[str, Field(max_length=1024)] = Field(default="", description="Why this mechanism is used.")


class JobStatus(StatusModel):
    """Last observed state of the job. Ready's reason is the word in the column Status of `kubectl get`."""

    observed_generation: Count | None = Field(
        default=None, description="Generation of the spec that the status describes."
    )
    conditions: tuple[Condition, ...] = Field(
        default=(),
        max_length=32,
        description="Ready, Reconciling, Running, Suspended, Complete, Failed, Stalled and Degraded. Conditions of "
        "other controllers stay unchanged.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    start_time: Timestamp | None = Field(
        default=None, description="When the operator first saw the job without spec.suspend."
    )
    completion_time: Timestamp | None = Field(default=None, description="When the job completed or failed.")
    replicas: Count = Field(
        default=0,
        description="Pods of the job that are not finished, without standby replicas (for the scale subresource).",
    )
    selector: Annotated[str, Field(max_length=512)] | None = Field(
        default=None, description="Label selector of the job's pods (for the scale subresource)."
    )
    master_key: Annotated[str, Field(max_length=63)] = Field(
        default="", description="Id of the operator's master key that the job's certificates come from."
    )
    world: World = Field(default=World(), description="The current round and its members.")
    standby_replicas: StandbyReplicas = Field(default=StandbyReplicas(), description="Replicas that stand by.")
    gang: GangMark | None = Field(
        default=None, description="How pods get their nodes together. Absent: spec.scheduling.gang is not set."
    )
    progress: JobProgress | None = Field(default=None, description="How far the run is.")
    history: Annotated[str, Field(max_length=MOST_OF_HISTORY)] | None = Field(
        default=None,
        description="Loss and number of replicas over time, 60 points at most, packed: `concertina status` draws them.",
    )
    last_snapshot: SnapshotMark | None = Field(default=None, description="Newest snapshot that is complete on peers.")
    last_checkpoint: CheckpointMark | None = Field(default=None, description="Newest durable checkpoint.")
    best_checkpoint: BestCheckpointMark | None = Field(
        default=None,
        description="Checkpoint with the lowest evaluation loss. Absent: checkpoint.keepBest is not set, or no step "
        "with a checkpoint was evaluated yet.",
    )
    evaluation_jobs: tuple[EvaluationJobMark, ...] = Field(
        default=(), max_length=64, description="Jobs of spec.evaluationJob, the oldest first."
    )
    damaged_checkpoints: Annotated[tuple[DamagedCheckpoint, ...], Field(max_length=MOST_DAMAGED)] | None = Field(
        default=None,
        description="Damaged checkpoints, which are skipped as checkpoint.onDamage says. The list has the newest "
        "ones. Absent: no checkpoint was damaged.",
    )
    rollback: RollbackMark | None = Field(
        default=None, description="The last rollback of training to an earlier state."
    )
    skipped: tuple[SampleRange, ...] = Field(
        default=(), max_length=32, description="Samples that were skipped as trainer.anomalies says."
    )
    snapshot_interval: SnapshotEvery | None = Field(
        default=None, description="How often snapshots are taken, and what they cost."
    )
    checkpoint_interval: CheckpointEvery | None = Field(
        default=None, description="Time between checkpoints, and the time that would lose the least training."
    )
    checkpoint_request: CheckpointRequest | None = Field(
        default=None, description="The last checkpoint that you requested, and the state of the request."
    )
    restarts: Restarts = Field(default=Restarts(), description="Failures of the job's replicas.")
    last_failure: LastFailure | None = Field(
        default=None, description="The last failure that ended a round. Absent: there was none."
    )
    avoided_nodes: tuple[AvoidedNode, ...] = Field(
        default=(), max_length=32, description="Nodes on which this job failed repeatedly."
    )
    stragglers: tuple[StragglerMark, ...] = Field(
        default=(), max_length=16, description="Ranks for which the other ranks wait in every step."
    )
    settings: tuple[SettingMark, ...] = Field(
        default=(),
        max_length=16,
        description="Values that the trainer chose for fields that spec.trainer does not set. The run keeps them. For "
        "model.from and model.hf, the value is the model that the trainer read.",
    )
    batch_assignment: tuple[ShareMark, ...] = Field(
        default=(),
        max_length=16,
        description="Share of each batch that replicas compute with trainer.data.balance Speed, smallest share first.",
    )
    warm_start_disabled_reason: Annotated[str, Field(max_length=1024)] | None = Field(
        default=None,
        description="Reason why the workers start without a warm start although spec.warmStart requests one. "
        "Absent: the workers start warm, or the operator does not know yet.",
    )
    warm_start_skipped_modules: Annotated[str, Field(max_length=1024)] | None = Field(
        default=None,
        description="Modules that each worker imports itself in spite of the warm start, and the reasons: for "
        "example, a module of spec.warmStart.preload can't be imported. Absent: each worker imports "
        "only the script's own modules, or the operator does not know yet.",
    )
    world_mismatch: Annotated[str, Field(max_length=1024)] | None = Field(
        default=None,
        description="Description of a wrong WORLD_SIZE that the agents see: the command starts a launcher, such as "
        "torchrun, that sets its own WORLD_SIZE, so each replica trains alone. Absent: the replicas "
        "train together, or the operator does not know yet.",
    )
    tracking: Annotated[str, Field(max_length=1024)] | None = Field(
        default=None,
        description="Reason why the tracker of spec.tracking accepts no records, as the coordinator reports it. The "
        "records stay on the node until the tracker accepts them. Absent: the tracker accepts records, "
        "or the operator does not know yet.",
    )
    queue: QueueStatus | None = Field(
        default=None, description="Quota of Kueue that the job has. Absent: no queue of Kueue limits the job."
    )
    nodes_not_watched: Annotated[str, Field(max_length=1024)] | None = Field(
        default=None,
        description="Features that the job lacks because its operator may not read nodes. Absent: the operator may "
        "read nodes.",
    )
    rounds: Count = Field(default=0, description="Rounds that were committed.")
    steps_replayed: Count = Field(default=0, description="Steps that were trained again after failures.")
    goodput: Goodput = Field(default=Goodput(), description="Time since the job's creation, by class.")
    incidents: tuple[Incident, ...] = Field(
        default=(),
        max_length=MOST_INCIDENTS,
        description="The last interruptions of training and the cost of each one, newest last.",
    )
    cost: Cost | None = Field(default=None, description="Cost of the job. Absent: spec.price sets no price.")
    internal: Internal = Field(
        default=Internal(), description="State that the operator keeps for itself. Do not rely on it."
    )

    @model_validator(mode="before")
    @classmethod
    def _unpacked(cls, raw: Any) -> Any:
        return with_packed(raw) if isinstance(raw, Mapping) else raw

    def manifest(self) -> dict[str, Any]:
        """Return the manifest for the API server. Long lists are packed, and empty fields are left out.

        Two fields are always present for other readers: `restarts.total`, because kubectl shows it in a column, and the
        messages of conditions, because Kubernetes requires them.
        """
        manifest = super(JobStatus, self._listed()).manifest()
        manifest.setdefault("restarts", {}).setdefault("total", 0)
        for condition in manifest.get("conditions", ()):
            condition.setdefault("message", "")
        return manifest

    def _listed(self) -> JobStatus:
        members, recent = self.world.members, self.restarts.recent
        outer: dict[str, Any] = {}
        packed: dict[str, str] = {}
        if members:
            packed["members"] = packed_members(members)
        if len(members) > LISTED_MEMBERS:
            outer["world"] = self.world.model_copy(update={"members": ()})
        if len(recent) > LISTED_RESTARTS:
            outer["restarts"] = self.restarts.model_copy(update={"recent": recent[-LISTED_RESTARTS:]})
            packed["restarts"] = packed_restarts(recent[:-LISTED_RESTARTS])
        if not packed:
            return self
        return self.model_copy(update={**outer, "internal": self.internal.model_copy(update=packed)})

    def condition(self, type: str) -> Condition | None:
        """Return the condition of a type; None if the status has no such condition."""
        for condition in self.conditions:
            if condition.type == type:
                return condition
        return None

    def true_condition(self, type: ConditionType) -> Condition | None:
        """Return the condition of a type if its status is True; None otherwise."""
        condition = self.condition(type)
        return condition if condition is not None and condition.status == "True" else None

    def is_true(self, type: ConditionType) -> bool:
        """Return whether the condition of a type has the status True."""
        return self.true_condition(type) is not None

    def counted_until(self, now: float) -> JobStatus:
        """Return the status with the time that a job at rest has spent until the Unix time `now`.

        A job at rest has no running workers. The operator updates the time in such a job's status only when something
        else changes, to save requests for each waiting job.
        """
        bucket, counted = AT_REST.get(self.phase), self.goodput.at
        if bucket is None or counted is None:
            return self
        seconds = max(0.0, now - unix_seconds(counted))
        return self.model_copy(update={"goodput": self.goodput.with_more(bucket, seconds)})

    @property
    def trouble(self) -> Condition | None:
        """Condition that says why the job needs a person to act; None if no action is needed."""
        return next(filter(None, map(self.true_condition, ACTION_NEEDED)), None)

    @property
    def phase(self) -> str:
        """The job's phase, as in the column Status of kubectl; empty if no operator has processed the job."""
        ready = self.condition(ConditionType.READY)
        return ready.reason if ready else ""
