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
    """Return schema keys for a list whose entries are identified by a field, as in Kubernetes' own pod schema."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [field]}


def template_outdated(server_version: tuple[int, int]) -> str:
    """Return a warning for users if the API server is newer than the template's fields; empty otherwise."""
    if server_version <= tuple(map(int, TEMPLATE_KUBERNETES.split("."))):
        return ""
    return (
        f"spec.template has the fields of Kubernetes {TEMPLATE_KUBERNETES}, and the API server is "
        f"{server_version[0]}.{server_version[1]}. It refuses a newer field of a pod, or drops it if the client does "
        "not ask for strict validation. Upgrade concertina to use newer fields"
    )


class EnvVar(Verbatim):
    """An environment variable."""

    name: str = Field(min_length=1, max_length=1024, description="Name of the variable.")
    value: str | None = Field(default=None, max_length=131072, description="Its value; numbers stand in quotes.")


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
        description="In 'trainer': the command of one worker, such as python train.py, without torchrun or another "
        "launcher (see spec.launcher). Absent: the bundled trainer.",
    )
    args: tuple[Argument, ...] = Field(default=(), max_length=256, description="Arguments to the command.")
    env: tuple[EnvVar, ...] = Field(
        default=(), max_length=1024, description="Environment variables.", json_schema_extra=keyed("name")
    )
    volume_mounts: tuple[VolumeMount, ...] = Field(
        default=(),
        alias="volumeMounts",
        max_length=256,
        description="Where the container sees volumes.",
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
        description="Containers that end, or are sidecars that have started, before the others start.",
        json_schema_extra=keyed("name"),
    )
    volumes: tuple[Named, ...] = Field(
        default=(), max_length=256, description="Volumes of the pods.", json_schema_extra=keyed("name")
    )
    restart_policy: str | None = Field(
        default=None,
        alias="restartPolicy",
        max_length=63,
        description="OnFailure or Never. Absent: OnFailure, and Never with launcher Torchrun.",
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
    """Return the decoded template. The result is cached, because a pass reads its job's template many times."""
    return PodTemplate.model_validate_json(template, strict=True)


class ScaleUp(Model):
    """Growth of a running job by replicas that become ready."""

    stabilization_window_seconds: int = Field(
        default=30,
        ge=0,
        le=86400,
        description="How many seconds no further replica must have become ready before those that wait join, all at "
        "once. Raise it where nodes come one by one.",
    )


class PreemptionReaction(enum.StrEnum):
    """What an elastic job does if Kueue preempts it."""

    SHRINK = "Shrink"
    SUSPEND = "Suspend"


class Elastic(Model):
    """How far the job may shrink, and how it grows back to full size."""

    min_replicas: int | None = Field(
        default=None,
        ge=1,
        le=MOST_REPLICAS,
        description="Fewest replicas that training continues with; below that it waits for replacements. Absent: as "
        "many as spec.replicas.",
    )
    scale_up: ScaleUp = Field(default=ScaleUp(), description="How replicas that become ready join a running job.")
    standby_replicas: int = Field(
        default=0,
        ge=0,
        le=MOST_STANDBY_REPLICAS,
        description="Replicas beyond spec.replicas that stand by, so that one takes a lost replica's place at once. "
        "They need room and quota like any other.",
    )
    on_preemption: PreemptionReaction = Field(
        default=PreemptionReaction.SHRINK,
        description="Response when Kueue preempts the job for another one. Shrink gives up as many replicas as the "
        "other job needs, down to minReplicas, without losing a step, and grows back when the queue has quota again. "
        "Suspend saves the job and gives up all of them.",
    )


class Parallelism(ParallelismConfig):
    """Division of the work over ranks.

    Ranks only work together in blocks, so the job's number of ranks is a multiple of the block's size.
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
    """Which nodes are near each other."""

    labels: tuple[NodeLabel, ...] = Field(
        min_length=1,
        max_length=8,
        description="Labels of nodes, the widest domain first: topology.kubernetes.io/zone, one of an NVLink domain, "
        "kubernetes.io/hostname. Nodes with the same values of the first ones are within one such domain.",
    )


class Gang(enum.StrEnum):
    """Mechanism by which all pods that a job needs get nodes together, or none does."""

    AUTO = "Auto"
    POD_GROUP = "PodGroup"
    """Kubernetes' own PodGroup (scheduling.k8s.io)."""
    VOLCANO = "Volcano"
    COSCHEDULING = "Coscheduling"
    KAI = "KAI"


class TopologyMode(enum.StrEnum):
    """Whether a placement is required or only preferred."""

    REQUIRED = "Required"
    PREFERRED = "Preferred"


class SchedulingTopology(Model):
    """Domain of nodes that all replicas of the job share."""

    key: NodeLabel = Field(
        description="Label of nodes, such as topology.kubernetes.io/zone. Nodes with the same value are one domain."
    )
    mode: TopologyMode = Field(
        default=TopologyMode.PREFERRED,
        description="Preferred: the scheduler places the replicas in one domain if it can. Required: a replica that "
        "does not fit into the domain of the others stays pending, also when the job grows.",
    )


class Scheduling(Model):
    """Scheduling of the job's pods (docs/scheduling.md)."""

    gang: Gang | None = Field(
        default=None,
        description="Mechanism that gives nodes to elastic.minReplicas pods together or to none. Auto: that of the "
        "template's scheduler, if the API server serves it. If it does not serve another one, the job is Stalled. "
        "Absent: pods are scheduled one by one.",
    )
    queue: str | None = Field(
        default=None,
        min_length=1,
        max_length=63,
        pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$",
        description="Queue of Volcano or KAI that the pods are charged to. Absent: the scheduler's default queue. "
        "Kueue's queue is the job's label kueue.x-k8s.io/queue-name.",
    )
    topology: SchedulingTopology | None = Field(
        default=None,
        description="Domain that all replicas share. Absent: replicas prefer different nodes, or the domains of "
        "spec.topology, which orders ranks.",
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
        description="Uid of the job that owns the folder at uri, whose place this job takes. Needed where that job is "
        "of another namespace, or lives. Without it a job takes the place of one of its namespace that is gone.",
    )


class Reaction(enum.StrEnum):
    """What the operator does about a problem that does not end a worker."""

    REPLACE = "Replace"
    REPORT = "Report"


class TrackingBackend(enum.StrEnum):
    MLFLOW = "MLflow"
    WANDB = "WandB"
    TENSORBOARD = "TensorBoard"


class Tracking(Model):
    """Tracking of the run in an external tool: one run of the tool, through all rounds and restarts."""

    backend: TrackingBackend = Field(
        description="The tool; the image of the container 'trainer' must hold its Python package: mlflow-skinny, wandb "
        "or tensorboard.",
    )
    uri: str | None = Field(
        default=None,
        min_length=1,
        max_length=1024,
        description="MLflow: the tracking URI, such as http://mlflow:5000. WandB: a server of your own, or "
        "file:///folder for runs to upload later; absent: wandb.ai. TensorBoard: file:///folder, on a volume that all "
        "replicas mount.",
    )
    experiment: str | None = Field(
        default=None,
        min_length=1,
        max_length=250,
        description="MLflow's experiment; W&B's project, or team/project; with TensorBoard a folder. Absent: the "
        "namespace.",
    )
    run_name: str | None = Field(
        default=None, min_length=1, max_length=120, description="Name of the run. Absent: the job's."
    )
    every_steps: int = Field(
        default=1, ge=1, le=1000000, description="Metrics are told of every so many steps, and of the last one."
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
        description="Failures within windowSeconds after which training continues; one more fails the job.",
    )
    window_seconds: int = Field(
        default=3600, ge=1, le=31536000, description="How many seconds a failure counts against maxRestarts."
    )
    on_hang: Reaction = Field(
        default=Reaction.REPLACE,
        description="Response when no worker makes progress, after all stacks were logged. Replace "
        "restarts the workers, with a new pod for the one that the others wait for; Report only says so.",
    )
    hang_timeout_seconds: int | None = Field(
        default=None,
        ge=1,
        le=31536000,
        description="Seconds without a move of any worker that count as a hang; set it where steps differ much in "
        "length. Absent: 20 times the usual step, but at least 60.",
    )
    on_straggler: Reaction = Field(
        default=Reaction.REPORT,
        description="Response when a worker takes twice as long for each step as the others. Report names it in "
        "the status; Replace also moves its pod to another node, without losing a step.",
    )
    avoid_node_seconds: int = Field(
        default=900,
        ge=0,
        le=31536000,
        description="How many seconds new pods keep off a node on which the job failed repeatedly, twice as long "
        "each further time. 0 avoids no node.",
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
        description="Price of one replica for each hour that it has a node: a decimal number in quotes."
    )
    spot_per_replica_hour: Amount | None = Field(
        default=None,
        description="The same on a node whose labels say spot or preemptible (Karpenter's, EKS', GKE's and AKS' own). "
        "Absent: as on any other.",
    )
    currency: str = Field(default="USD", max_length=3, pattern=r"^[A-Z]{3}$", description="Three letters (ISO 4217).")

    @property
    def replica_hour(self) -> float:
        return float(self.per_replica_hour)

    @property
    def spot_replica_hour(self) -> float:
        return float(self.spot_per_replica_hour or self.per_replica_hour)


ModuleName = Annotated[
    str, Field(min_length=1, max_length=255, pattern=r"^[A-Za-z_][A-Za-z0-9_]*([.][A-Za-z_][A-Za-z0-9_]*)*$")
]


class WarmStart(Model):
    """Restart of a custom command without new imports."""

    enabled: bool = Field(
        default=True,
        description="Whether a script starts in a fork of a process that has imported already what it needs. The "
        "command can be any launch line, whose Python processes read PYTHONPATH and import site. Otherwise the script "
        "starts without a warm start, and an event says why.",
    )
    preload: tuple[ModuleName, ...] = Field(
        default=(),
        max_length=64,
        description="Modules to import before the first start, such as torch, if the command is only Python that runs "
        "a file, a module or code. The script's own imports are learned from its first run.",
    )


class StepDetection(Model):
    """Count of the steps of a custom command that does not report them."""

    enabled: bool = Field(
        default=True,
        description="Whether the optimizer steps of a script that uses PyTorch are counted by PyTorch's hook for all "
        "optimizers. The script's own reports (trainingjob) have precedence. Without it, the steps of a script that "
        "does not report are unknown.",
    )


class Metrics(Model):
    """Metrics that the job's pods expose to Prometheus."""

    enabled: bool = Field(
        default=True,
        description="Whether pods serve metrics, where the operator was installed so. Pods that are there stay as they "
        "are.",
    )
    per_rank: bool = Field(
        default=False,
        description="Whether each worker has metrics of its own, not only its pod: so many times more series. Pods "
        "that are there stay as they are.",
    )


class JobSpec(Model):
    """A training job that continues when replicas are lost, and grows back when replicas return."""

    replicas: int = Field(
        default=1,
        ge=1,
        le=MOST_REPLICAS,
        description="Replicas (pods) wanted, and the most that there are. To stop a job, set suspend.",
    )
    elastic: Elastic | None = Field(
        default=None,
        description="How far the job may shrink when replicas are lost, and how it grows back. Absent: it runs with "
        "all replicas or waits.",
    )
    template: SerializeAsAny[PodTemplate] = Field(
        description="Template of the pods, with a container named 'trainer'. It changes only while the job is "
        "suspended."
    )
    workers_per_replica: Annotated[int, Field(ge=1, le=1024)] | Literal["Auto"] = Field(
        default="Auto",
        description="Training processes in each pod: a number, or Auto for one for each GPU that the container "
        "'trainer' is limited to or gets by DRA, and one without GPUs.",
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
        description="Model, data and training of the bundled trainer. Absent: the container 'trainer' has a "
        "command of its own.",
    )
    checkpoint: Checkpoint | None = Field(
        default=None,
        description="Where and how often checkpoints go to durable storage. Absent: the state is in the memory of "
        "the nodes only, and is lost with the job.",
    )
    tracking: Tracking | None = Field(
        default=None,
        description="Where metrics, parameters, rounds, failures and checkpoints of the run are told of. Absent: "
        "nowhere but in the status.",
    )
    failure_policy: FailurePolicy = Field(
        default=FailurePolicy(), description="Response to failures, and when the job fails."
    )
    price: Price | None = Field(default=None, description="Price of a replica. Absent: the status shows no cost.")
    suspend: bool = Field(
        default=False,
        description="True stops after the current step, saves and removes the pods; false continues from there.",
    )
    active_deadline_seconds: int | None = Field(
        default=None,
        ge=1,
        le=315360000,
        description="Seconds from its start after which the job fails, running or not; time suspended does not "
        "count. Absent: there is no deadline.",
    )
    ttl_seconds_after_finished: int | None = Field(
        default=None,
        ge=0,
        le=315360000,
        description="Seconds after its end when the job is deleted. Absent: it stays.",
    )
    clean_pod_policy: CleanPodPolicy = Field(
        default=CleanPodPolicy.RUNNING,
        description="Which pods go when the job has ended: Running ends those that run and keeps the others for "
        "their logs, All deletes every pod, None leaves all as they are.",
    )
    launcher: Launcher = Field(
        default=Launcher.AGENT,
        description="Program that starts the workers. Agent starts the command once per worker, with RANK, WORLD_SIZE "
        "and the other variables of torchrun set; the command must not start torchrun or another launcher. Torchrun is "
        "for a command that is torchrun itself (docs/launchers.md).",
    )
    warm_start: WarmStart = Field(
        default=WarmStart(),
        description="How a command of your own, under launcher Agent, starts again without new imports. The bundled "
        "trainer always does.",
    )
    step_detection: StepDetection = Field(
        default=StepDetection(),
        description="How the steps of a command of your own, under launcher Agent, are known if it does not report "
        "them (docs/scripts.md).",
    )
    parallelism: Parallelism = Field(
        default=Parallelism(),
        description="How many workers share a layer, a sequence, the layers and a copy of the state. The job runs at "
        "sizes that are a whole number of such blocks (docs/parallelism.md).",
    )

    topology: Topology | None = Field(
        default=None,
        description="For jobs with parallelism: ranks are ordered so that tensor groups, then context groups, then "
        "pipelines and blocks stay within the innermost domain of nodes. Absent: within zones and nodes.",
    )
    scheduling: Scheduling = Field(
        default=Scheduling(),
        description="How the job's pods get their nodes: together or one by one, and in which domain. It changes only "
        "while the job is suspended (docs/scheduling.md).",
    )
    managed_by: str | None = Field(
        default=None,
        max_length=63,
        pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[-A-Za-z0-9_./]+$",
        description="Controller that runs the job, such as kueue.x-k8s.io/multikueue. concertina's operator leaves a "
        "job of another controller alone. It never changes. Absent: concertina.dev/operator.",
    )
    metrics: Metrics = Field(
        default=Metrics(), description="Metrics that the job's pods expose (docs/metrics.md), under launcher agent."
    )

    @property
    def min_replicas(self) -> int:
        """Smallest number of replicas with which training continues.

        A job that is not elastic needs all its replicas.
        """
        return (self.elastic and self.elastic.min_replicas) or self.replicas

    @property
    def standby_replicas(self) -> int:
        """Number of replicas that the spec asks for beyond a full round."""
        return self.elastic.standby_replicas if self.elastic else 0

    def packed(self) -> JobSpec:
        """Return a copy whose template is stored as compact JSON."""
        return self.model_copy(update={"template": PackedTemplate.of(self.template)})

    @property
    def bundled(self) -> bool:
        """Whether the job runs the bundled trainer instead of the user's command."""
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
    def replica_step(self) -> int:
        """Number of which each valid number of replicas is a multiple."""
        return self._replicas_of(self.parallelism.block)

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Sizes of the parallel groups in replicas: tensor, context, pipeline, expert-sharing group and block.

        A size is included only if it is larger than one and larger than the previous size. If the ranks of a group end
        within a replica, the size is the smallest number of replicas that is a whole number of such groups.
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
