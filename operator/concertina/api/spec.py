"""The spec of a TrainingJob. Rules that concern several fields are in `rules`."""

from __future__ import annotations

import enum
import functools
import itertools
import json
import math
import operator
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    ConfigDict,
    Field,
    JsonValue,
    PrivateAttr,
    SerializationInfo,
    SerializeAsAny,
    model_serializer,
)

from concertina.api import TRAINER
from concertina.api.model import Model, Verbatim
from concertina.api.quantity_fields import amounts_of
from concertina_trainer.config.checkpoint_config import CheckpointConfig
from concertina_trainer.config.parallelism import ParallelismConfig
from concertina_trainer.config.trainer import TrainerConfig

GPU_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu")
"""Resources for which `workersPerReplica: Auto` starts one worker per unit."""

TEMPLATE_KUBERNETES = "1.36"
"""Kubernetes version whose pod fields `spec.template` has. `make pod-template` generates their schema."""
MOST_REPLICAS, MOST_STANDBY_REPLICAS = 1024, 16
"""Largest numbers of replicas and of standby replicas.

benchmarks/control_plane.py has shown that the operator works at these sizes, with simulated agents (decision "1024
replicas at most").
"""

Labels = Annotated[dict[str, Annotated[str, Field(max_length=63)]], Field(max_length=256)]
Annotations = Annotated[dict[str, Annotated[str, Field(max_length=262144)]], Field(max_length=256)]
Argument = Annotated[str, Field(max_length=131072)]


def keyed(field: str) -> dict[str, JsonValue]:
    """Return schema keys for a list in which the value of `field` identifies an entry, as in Kubernetes' pod schema."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [field]}


def template_outdated(server_version: tuple[int, int]) -> str:
    """Return a warning for users if the API server's Kubernetes version is newer than the known pod fields.

    The result is empty otherwise. concertina knows the fields of a pod template as of one Kubernetes version.
    """
    if server_version <= tuple(map(int, TEMPLATE_KUBERNETES.split("."))):
        return ""
    return (
        f"spec.template has the fields of Kubernetes {TEMPLATE_KUBERNETES}, and the API server is "
        f"{server_version[0]}.{server_version[1]}. It refuses a newer field of a pod, or drops it if the client "
        "does not ask for strict validation. To use newer fields, upgrade concertina"
    )


class EnvVar(Verbatim):
    """An environment variable of a container."""

    name: str = Field(min_length=1, max_length=1024, description="Name of the variable.")
    value: str | None = Field(
        default=None, max_length=131072, description="Value of the variable. Put numbers in quotes."
    )


class Named(Verbatim):
    """An entry of a list whose entries have names: an init container, a volume."""

    name: str = Field(min_length=1, max_length=63, description="Its name.")


class VolumeMount(Verbatim):
    """Mount of a volume in a container."""

    mount_path: str = Field(alias="mountPath", min_length=1, max_length=1024, description="Path in the container.")


class Container(Verbatim):
    """A container; the one named 'trainer' is where the workers run."""

    name: str = Field(min_length=1, max_length=63, description="The workers run in the container named 'trainer'.")
    image: str | None = Field(default=None, max_length=1024, description="Container image.")
    command: tuple[Argument, ...] = Field(
        default=(),
        max_length=256,
        description="Command of one worker in container 'trainer', such as python train.py, without torchrun or "
        "another launcher (see spec.launcher). Absent: the bundled trainer.",
    )
    args: tuple[Argument, ...] = Field(default=(), max_length=256, description="Arguments to the command.")
    env: tuple[EnvVar, ...] = Field(
        default=(), max_length=1024, description="Environment variables.", json_schema_extra=keyed("name")
    )
    volume_mounts: tuple[VolumeMount, ...] = Field(
        default=(),
        alias="volumeMounts",
        max_length=256,
        description="Path at which the container mounts volumes.",
        json_schema_extra=keyed("mountPath"),
    )


class PodSpec(Verbatim):
    """Specification of the pods; its fields are those of a pod's spec."""

    containers: tuple[Container, ...] = Field(
        min_length=1,
        max_length=32,
        description="Containers of each pod; one must be named 'trainer'.",
        json_schema_extra=keyed("name"),
    )
    init_containers: tuple[Named, ...] = Field(
        default=(),
        alias="initContainers",
        max_length=32,
        description="Containers that run to completion before the other containers start, or sidecars.",
        json_schema_extra=keyed("name"),
    )
    volumes: tuple[Named, ...] = Field(
        default=(), max_length=256, description="Volumes of the pods.", json_schema_extra=keyed("name")
    )
    restart_policy: str | None = Field(
        default=None,
        alias="restartPolicy",
        max_length=63,
        description="OnFailure or Never. Default: OnFailure, or Never with launcher Torchrun.",
    )


class TemplateMetadata(Verbatim):
    """Labels and annotations of the pods."""

    labels: Labels | None = Field(default=None, description="Labels of the pods.")
    annotations: Annotations | None = Field(default=None, description="Annotations of the pods.")


class PodTemplate(Verbatim):
    """Template of the job's pods: a PodTemplateSpec."""

    metadata: TemplateMetadata = Field(default=TemplateMetadata(), description="Labels and annotations of the pods.")
    spec: PodSpec = Field(description="Specification of the pods; its fields are those of a pod's spec.")

    @property
    def trainer(self) -> Container:
        """The container in which the workers run."""
        return next(container for container in self.spec.containers if container.name == TRAINER)


class PackedTemplate(PodTemplate):
    """A template as compact JSON, decoded only when it is read.

    As objects, it would take up to 30 times as much memory.
    """

    _json: bytes = PrivateAttr()

    @classmethod
    def of(cls, template: PodTemplate) -> PackedTemplate:
        packed = cls.model_construct()
        packed.__dict__.clear()  # remove the defaults, so that __getattr__ returns each field
        packed._json = json.dumps(template.manifest(), separators=(",", ":")).encode()
        return packed

    if not TYPE_CHECKING:  # otherwise mypy would accept any attribute name

        def __getattr__(self, name: str) -> Any:
            if name in PodTemplate.model_fields:
                return getattr(_decoded(self._json), name)
            return super().__getattr__(name)

    def manifest(self) -> dict[str, Any]:
        manifest: dict[str, Any] = json.loads(self._json)
        return manifest

    @model_serializer
    def _dumped(self, info: SerializationInfo) -> dict[str, Any]:
        dumped: dict[str, Any] = _decoded(self._json).model_dump(
            mode=info.mode,
            by_alias=info.by_alias,
            exclude_unset=info.exclude_unset,
            exclude_defaults=info.exclude_defaults,
        )
        return dumped


@functools.lru_cache(4)
def _decoded(template: bytes) -> PodTemplate:
    """Return the decoded template. The result is cached, because a planning pass reads the template many times."""
    return PodTemplate.model_validate_json(template, strict=True)


class ScaleUp(Model):
    """Growth of a running job by replicas that become ready."""

    stabilization_window_seconds: int = Field(
        default=30,
        ge=0,
        le=86400,
        description="Stabilization window for scale-up, in seconds. Waiting replicas join together once no new "
        "replica has become ready for this long. Raise it if nodes arrive one by one.",
    )


class PreemptionReaction(enum.StrEnum):
    """Ways in which an elastic job reacts if Kueue preempts it."""

    SHRINK = "Shrink"
    SUSPEND = "Suspend"


class Elastic(Model):
    """Smallest size to which the job may shrink, and how it grows back to full size."""

    min_replicas: int | None = Field(
        default=None,
        ge=1,
        le=MOST_REPLICAS,
        description="Smallest number of replicas with which training continues. With fewer, the job waits for "
        "replacements. Default: spec.replicas.",
    )
    scale_up: ScaleUp = Field(default=ScaleUp(), description="How replicas that become ready join a running job.")
    standby_replicas: int = Field(
        default=0,
        ge=0,
        le=MOST_STANDBY_REPLICAS,
        description="Standby replicas, in addition to spec.replicas. A standby replica takes the place of a lost "
        "replica at once. It needs resources and quota like any other replica.",
    )
    on_preemption: PreemptionReaction = Field(
        default=PreemptionReaction.SHRINK,
        description="Response when Kueue preempts the job. Shrink releases as many replicas as the other job needs, "
        "down to minReplicas, without losing a step. The job grows again when the queue has quota. "
        "Suspend saves the job and releases all replicas.",
    )


class Parallelism(ParallelismConfig):
    """Division of the work over ranks.

    Ranks work together in blocks of equal size, so the job's number of ranks is a multiple of that size.
    """

    model_config = ConfigDict(extra="forbid")


NodeLabel = Annotated[
    str,
    Field(
        min_length=1,
        max_length=317,
        pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
    ),
]


class Topology(Model):
    """Node labels that define which nodes are near each other in the network."""

    labels: tuple[NodeLabel, ...] = Field(
        min_length=1,
        max_length=8,
        description="Node labels from the widest domain to the narrowest, for example topology.kubernetes.io/zone, "
        "the label of an NVLink domain, and kubernetes.io/hostname. Nodes are in the same domain of a "
        "label if their values of that label and of all labels before it are the same.",
    )


class Gang(enum.StrEnum):
    """Mechanisms of gang scheduling: all pods that a job needs get nodes together, or no pod gets a node."""

    AUTO = "Auto"
    POD_GROUP = "PodGroup"
    """Kubernetes' own PodGroup (scheduling.k8s.io)."""
    VOLCANO = "Volcano"
    COSCHEDULING = "Coscheduling"
    KAI = "KAI"


class TopologyMode(enum.StrEnum):
    """Ways in which a placement is requested: as a requirement or as a preference."""

    REQUIRED = "Required"
    PREFERRED = "Preferred"


class SchedulingTopology(Model):
    """Domain of nodes that all replicas of the job share."""

    key: NodeLabel = Field(
        description="Node label, such as topology.kubernetes.io/zone. Nodes with the same value are in the same domain."
    )
    mode: TopologyMode = Field(
        default=TopologyMode.PREFERRED,
        description="Preferred: the scheduler places the replicas in one domain if it can. Required: a replica that "
        "does not fit into the domain of the other replicas stays pending, even while the job grows.",
    )


class Scheduling(Model):
    """Scheduling of the job's pods (docs/scheduling.md)."""

    gang: Gang | None = Field(
        default=None,
        description="Mechanism that schedules elastic.minReplicas pods together or not at all. Auto: that of the "
        "template's scheduler, if the API server serves its API. Other values: the job is Stalled if the API server "
        "does not serve the API. Absent: pods are scheduled one by one.",
    )
    queue: str | None = Field(
        default=None,
        min_length=1,
        max_length=63,
        pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$",
        description="Queue of Volcano or KAI that the pods belong to. Default: the scheduler's default queue. "
        "Kueue's queue is the job's label kueue.x-k8s.io/queue-name.",
    )
    topology: SchedulingTopology | None = Field(
        default=None,
        description="Topology domain that all replicas share. Absent: replicas prefer different nodes, or different "
        "domains of spec.topology, which orders ranks.",
    )


class Checkpoint(CheckpointConfig):
    """Location and frequency of durable checkpoints."""

    model_config = ConfigDict(extra="forbid")

    secret_name: str | None = Field(
        default=None,
        min_length=1,
        max_length=253,
        description="Secret of this namespace with AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and "
        "AWS_ENDPOINT_URL, or GOOGLE_SERVICE_ACCOUNT_KEY, or AZURE_STORAGE_ACCOUNT_NAME and "
        "AZURE_STORAGE_ACCOUNT_KEY. They become environment variables of the container 'trainer'.",
    )
    take_over: str = Field(
        default="",
        max_length=64,
        description="Uid of the job that owns the folder at uri. This job becomes the owner instead. Set it if the "
        "other job is in another namespace or still exists. Without it, a job takes over only the "
        "folder of a deleted job in its own namespace.",
    )


class Reaction(enum.StrEnum):
    """Ways in which the operator reacts to a problem that does not end a worker."""

    REPLACE = "Replace"
    REPORT = "Report"


class TrackingBackend(enum.StrEnum):
    MLFLOW = "MLflow"
    WANDB = "WandB"
    TENSORBOARD = "TensorBoard"


class Tracking(Model):
    """Tracking of the run in an external tool: one run of the tool, through all rounds and restarts."""

    backend: TrackingBackend = Field(
        description="Tracking tool. The image of container 'trainer' must contain its Python package: "
        "mlflow-skinny, wandb or tensorboard.",
    )
    uri: str | None = Field(
        default=None,
        min_length=1,
        max_length=1024,
        description="MLflow: the tracking URI, such as http://mlflow:5000. WandB: the URL of your own server, or "
        "file:///folder for runs that you upload later; default: wandb.ai. TensorBoard: file:///folder, "
        "on a volume that all replicas mount.",
    )
    experiment: str | None = Field(
        default=None,
        min_length=1,
        max_length=250,
        description="MLflow: the experiment. WandB: the project, or team/project. TensorBoard: a folder. Default: "
        "the namespace.",
    )
    run_name: str | None = Field(
        default=None, min_length=1, max_length=120, description="Name of the run. Default: the name of the job."
    )
    every_steps: int = Field(
        default=1,
        ge=1,
        le=1000000,
        description="Number of steps between two records of metrics. The metrics of the last step are always recorded.",
    )
    secret_name: str | None = Field(
        default=None,
        min_length=1,
        max_length=253,
        description="Secret of this namespace with MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and "
        "MLFLOW_TRACKING_PASSWORD, or WANDB_API_KEY. They become environment variables of the container 'trainer'.",
    )
    tags: Annotated[dict[str, Annotated[str, Field(max_length=500)]], Field(max_length=32)] = Field(
        default={}, description="Tags of the run."
    )


class FailurePolicy(Model):
    """Which failures end the job, and what the operator does about problems."""

    max_restarts: int = Field(
        default=10,
        ge=0,
        le=1000,
        description="Number of failures within windowSeconds after which training still continues. One more failure "
        "fails the job.",
    )
    window_seconds: int = Field(
        default=3600, ge=1, le=31536000, description="Seconds for which a failure counts against maxRestarts."
    )
    on_hang: Reaction = Field(
        default=Reaction.REPLACE,
        description="Response when no worker makes progress. In both cases, the stacks of all workers are logged "
        "first. Replace restarts the workers and replaces the pod for which the others wait. Report "
        "only reports the hang.",
    )
    hang_timeout_seconds: int | None = Field(
        default=None,
        ge=1,
        le=31536000,
        description="Seconds without progress of any worker after which the job counts as hung. Set it if the "
        "duration of steps varies much. Default: 20 times the usual duration of a step, but at least 60.",
    )
    on_straggler: Reaction = Field(
        default=Reaction.REPORT,
        description="Response when a worker takes twice as long for each step as the other workers. Report names "
        "the worker in the status. Replace also moves its pod to another node, without losing a step.",
    )
    on_hardware_fault: Reaction = Field(
        default=Reaction.REPLACE,
        description="Response when the driver of a GPU reports a hardware error, or a node has a condition for a fault "
        "(see the chart's faultConditions). Report names the replica in the status. Replace also moves its pod to "
        "another node, without losing a step if the workers still run.",
    )
    gpu_preflight: bool = Field(
        default=True,
        description="Whether each pod with GPUs tests them before its replica becomes ready. The test takes at most "
        "20 s. A replica whose GPUs return wrong results or report hardware errors is replaced on another node. Slow "
        "GPUs are only named in the log.",
    )
    avoid_node_seconds: int = Field(
        default=900,
        ge=0,
        le=31536000,
        description="Seconds for which new pods avoid a node on which the job failed repeatedly. The time doubles "
        "with each repetition. 0: nodes are never avoided.",
    )


class Launcher(enum.StrEnum):
    AGENT = "Agent"
    TORCHRUN = "Torchrun"


class CleanPodPolicy(enum.StrEnum):
    RUNNING = "Running"
    ALL = "All"
    NONE = "None"


Amount = Annotated[str, Field(max_length=16, pattern=r"^[0-9]{1,7}([.][0-9]{1,6})?$")]
"""Amount of money as text, because a JSON number would be rounded to a binary fraction."""


class Price(Model):
    """Price of a replica, for status.cost and for the cost of each incident."""

    per_replica_hour: Amount = Field(
        description="Price of one replica per hour on a node, as a decimal number in quotes."
    )
    spot_per_replica_hour: Amount | None = Field(
        default=None,
        description="Price on a node whose labels say spot or preemptible (labels of Karpenter, EKS, GKE and AKS). "
        "Default: the price on any other node.",
    )
    currency: str = Field(default="USD", max_length=3, pattern=r"^[A-Z]{3}$", description="Three letters (ISO 4217).")

    @property
    def replica_hour(self) -> float:
        return float(self.per_replica_hour)

    @property
    def spot_replica_hour(self) -> float:
        return float(self.spot_per_replica_hour or self.per_replica_hour)


class EvaluationJob(Model):
    """A Kubernetes Job that the operator creates for each checkpoint, for example to evaluate the model."""

    pod_template: str = Field(
        min_length=1,
        max_length=253,
        pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$",
        description="PodTemplate (core/v1) of this namespace, from which the Job's pod is made. Its containers get the "
        "variables CONCERTINA_CHECKPOINT_URI and CONCERTINA_CHECKPOINT_STEP.",
    )
    max_running: int = Field(
        default=1,
        ge=1,
        le=8,
        description="Largest number of Jobs that run at the same time. If more checkpoints are waiting, only the "
        "newest one gets a Job.",
    )
    keep: int = Field(default=3, ge=1, le=16, description="Number of the newest ended Jobs that are not deleted.")
    backoff_limit: int = Field(default=0, ge=0, le=16, description="Number of times that the pod of a Job is replaced.")
    active_deadline_seconds: int | None = Field(
        default=None, ge=1, le=31536000, description="Seconds after which a Job fails. Absent: no deadline."
    )


ModuleName = Annotated[
    str, Field(min_length=1, max_length=255, pattern=r"^[A-Za-z_][A-Za-z0-9_]*([.][A-Za-z_][A-Za-z0-9_]*)*$")
]


class WarmStart(Model):
    """Restart of a custom command without importing its modules again."""

    enabled: bool = Field(
        default=True,
        description="Whether a script starts in a fork of a process that has already imported its modules. The "
        "command can be any command line whose Python processes read PYTHONPATH and import site. "
        "Otherwise, the script starts without a warm start, and an event gives the reason.",
    )
    preload: tuple[ModuleName, ...] = Field(
        default=(),
        max_length=64,
        description="Modules to import before the first start, such as torch. It applies if the command is only "
        "Python with a file, a module or code to run. The modules that the script itself imports are "
        "found during its first run.",
    )


class StepDetection(Model):
    """Counting of the steps of a custom command that does not report them."""

    enabled: bool = Field(
        default=True,
        description="Whether PyTorch's hook for all optimizers counts the optimizer steps of a script. Steps that "
        "the script itself reports (trainingjob) have precedence. If false, the steps of a script that "
        "does not report are unknown.",
    )


class Metrics(Model):
    """Metrics that the job's pods expose to Prometheus."""

    enabled: bool = Field(
        default=True,
        description="Whether pods serve metrics, if the operator's chart enables them. Existing pods do not change.",
    )
    per_rank: bool = Field(
        default=False,
        description="Whether each worker has its own metrics, in addition to those of its pod. The number of series "
        "grows with the number of workers. Existing pods do not change.",
    )


class JobSpec(Model):
    """A training job that continues when replicas are lost, and grows back when replicas return."""

    replicas: int = Field(
        default=1,
        ge=1,
        le=MOST_REPLICAS,
        description="Desired number of replicas (pods), which is also the maximum. To stop a job, set suspend.",
    )
    elastic: Elastic | None = Field(
        default=None,
        description="Smallest size to which the job may shrink when replicas are lost, and how it grows again. "
        "Absent: the job waits until it has all replicas.",
    )
    template: SerializeAsAny[PodTemplate] = Field(
        description="Template of the pods, with a container named 'trainer'. You can change it only while the job "
        "is suspended."
    )
    workers_per_replica: Annotated[int, Field(ge=1, le=1024)] | Literal["Auto"] = Field(
        default="Auto",
        description="Number of training processes in each pod, or Auto. Auto means one for each GPU in the limits "
        "or the ResourceClaims of container 'trainer', or one if it has no GPU.",
        json_schema_extra={
            "x-kubernetes-int-or-string": True,
            "x-kubernetes-validations": [
                {
                    "rule": "type(self) == int ? self >= 1 && self <= 1024 : self == 'Auto'",
                    "message": "must be Auto or a number from 1 to 1024",
                }
            ],
        },
    )
    trainer: TrainerConfig | None = Field(
        default=None,
        description="Model, data and training of the bundled trainer. Absent: container 'trainer' has its own command.",
    )
    checkpoint: Checkpoint | None = Field(
        default=None,
        description="Location and frequency of checkpoints in durable storage. Absent: the state is only in the "
        "memory of the nodes, and is lost with the job.",
    )
    evaluation_job: EvaluationJob | None = Field(
        default=None,
        description="Job to create for each durable checkpoint. Its result does not affect training. Absent: none.",
    )
    tracking: Tracking | None = Field(
        default=None,
        description="Tracker (MLflow, WandB or TensorBoard) that records metrics, parameters, rounds, failures and "
        "checkpoints of the run. Absent: no tracker.",
    )
    failure_policy: FailurePolicy = Field(
        default=FailurePolicy(), description="Response to failures, and the limit at which the job fails."
    )
    price: Price | None = Field(default=None, description="Price of a replica. Absent: the status shows no cost.")
    suspend: bool = Field(
        default=False,
        description="If true, the job stops after the current step, saves its state and removes its pods. If set to "
        "false again, it continues from there.",
    )
    active_deadline_seconds: int | None = Field(
        default=None,
        ge=1,
        le=315360000,
        description="Seconds after its start at which the job fails, whether it runs or not. Time in suspension "
        "does not count. Absent: no deadline.",
    )
    ttl_seconds_after_finished: int | None = Field(
        default=None,
        ge=0,
        le=315360000,
        description="Seconds after its end at which the job is deleted, but not before its evaluationJobs have ended. "
        "Absent: the job is not deleted.",
    )
    clean_pod_policy: CleanPodPolicy = Field(
        default=CleanPodPolicy.RUNNING,
        description="Pods to delete when the job has ended. Running deletes the pods that still run and keeps the "
        "others for their logs. All deletes every pod. None deletes no pod.",
    )
    launcher: Launcher = Field(
        default=Launcher.AGENT,
        description="Program that starts the workers. Agent starts the command once per worker, with RANK, "
        "WORLD_SIZE and the other variables of torchrun set; the command must not start torchrun or "
        "another launcher. Use Torchrun if the command itself is torchrun (docs/launchers.md).",
    )
    warm_start: WarmStart = Field(
        default=WarmStart(),
        description="Warm start of your own command under launcher Agent, so that a restart needs no new imports. "
        "The bundled trainer always starts warm.",
    )
    step_detection: StepDetection = Field(
        default=StepDetection(),
        description="How the steps of your own command are counted under launcher Agent if the script does not "
        "report them (docs/scripts.md).",
    )
    parallelism: Parallelism = Field(
        default=Parallelism(),
        description="Number of workers that share a layer, a sequence, the layers of the model, and a copy of the "
        "state. The number of workers of the job is always a multiple of their product "
        "(docs/parallelism.md).",
    )

    topology: Topology | None = Field(
        default=None,
        description="Topology for jobs with parallelism. Ranks are ordered so that tensor groups, then context "
        "groups, then pipelines and blocks stay within the innermost domain of nodes. Default: zones "
        "and nodes.",
    )
    scheduling: Scheduling = Field(
        default=Scheduling(),
        description="Whether the job's pods are scheduled together or one by one, and in which domain. You can "
        "change it only while the job is suspended (docs/scheduling.md).",
    )
    managed_by: str | None = Field(
        default=None,
        max_length=63,
        pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[-A-Za-z0-9_./]+$",
        description="Controller that runs the job, such as kueue.x-k8s.io/multikueue. concertina's operator leaves "
        "a job of another controller alone. You can't change it. Default: concertina.dev/operator.",
    )
    metrics: Metrics = Field(
        default=Metrics(), description="Metrics that the job's pods expose (docs/metrics.md), under launcher Agent."
    )

    @property
    def min_replicas(self) -> int:
        """Smallest number of replicas with which training continues.

        A job that is not elastic needs all its replicas.
        """
        return (self.elastic and self.elastic.min_replicas) or self.replicas

    @property
    def standby_replicas(self) -> int:
        """Number of standby replicas: replicas that the spec requests beyond the members of a full round."""
        return self.elastic.standby_replicas if self.elastic else 0

    def packed(self) -> JobSpec:
        """Return a copy of the spec whose pod template is stored as compact JSON, to save memory."""
        return self.model_copy(update={"template": PackedTemplate.of(self.template)})

    @property
    def bundled(self) -> bool:
        """True if the job runs the bundled trainer instead of the user's command."""
        return self.trainer is not None

    @property
    def workers(self) -> int:
        """Number of training processes in each replica."""
        if self.workers_per_replica != "Auto":
            return self.workers_per_replica
        return self.limited_gpus or 1

    @property
    def limited_gpus(self) -> int:
        """Number of GPUs in the resource limits of the container `trainer`.

        GPUs from resource claims are in `api.claims`.
        """
        return _gpus(self.template.trainer)

    @property
    def requests_devices(self) -> bool:
        """True if a pod requests a device, by an extended resource or a resource claim."""
        fields = self.template.trainer.model_extra or {}
        amounts = {**amounts_of(fields, "requests"), **amounts_of(fields, "limits")}
        resource_claims = (self.template.spec.model_extra or {}).get("resourceClaims")
        return bool(resource_claims) or any("/" in name and str(amount) != "0" for name, amount in amounts.items())

    @property
    def replica_step(self) -> int:
        """Number by which each valid number of replicas must be divisible, because of the parallel layout."""
        return self._replicas_of(self.parallelism.block)

    @property
    def most_replicas(self) -> int:
        """Largest valid number of replicas up to `spec.replicas`; 0 if the parallel layout needs more replicas."""
        return self.replicas - self.replicas % self.replica_step

    @property
    def least_replicas(self) -> int:
        """Smallest valid number of replicas: `minReplicas`, rounded up as the parallel layout requires.

        The layout divides replicas into blocks of equal size, and only whole blocks can train. The result is at most
        `most_replicas`.
        """
        floor = min(self.min_replicas, self.most_replicas)
        return min(self.most_replicas, -(-floor // self.replica_step) * self.replica_step)

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Number of replicas in each kind of parallel group: tensor, context, pipeline, expert-sharing group and block.

        The sizes are in ascending order, without duplicates and without sizes of one replica. If a group ends within a
        replica, its size is the smallest number of replicas that holds a whole number of groups. The operator uses the
        sizes to keep the replicas of a group near each other in the network.
        """
        degrees = self.parallelism
        inner = (degrees.tensor, degrees.context, degrees.pipeline, degrees.expert_shards)
        ranks = (*itertools.accumulate(inner, operator.mul), degrees.block)
        return tuple(sorted({self._replicas_of(count) for count in ranks} - {1}))

    def _replicas_of(self, ranks: int) -> int:
        """Return the smallest number of replicas whose number of ranks is a multiple of `ranks`."""
        return math.lcm(ranks, self.workers) // self.workers if ranks > 1 else 1


def _gpus(container: Container) -> int:
    """Return the number of GPUs in a container's limits. Requests of GPUs can't differ from limits."""
    fields = container.model_extra or {}
    amounts = {**amounts_of(fields, "requests"), **amounts_of(fields, "limits")}
    return sum(int(text) for name in GPU_RESOURCES if _COUNT.fullmatch(text := str(amounts.get(name))))


_COUNT = re.compile("[0-9]{1,9}")
