"""Rules of the API that concern several fields, each for the API server (in CEL) and for the operator (in Python).

The API server evaluates the CEL expression `cel`. `holds` is the same check in Python, for manifests that were stored
with an older CRD (decision "Each validation rule is defined in one place"). Rules about changes (they compare `self`
with `oldSelf`) exist only in CEL. Rules for fields of spec.trainer are in concertina_trainer.config.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

from concertina.api import TRAINER, launchers
from concertina.api.spec import Container, Gang, JobSpec, Launcher, Tracking, TrackingBackend
from concertina_trainer import layouts


@dataclasses.dataclass(frozen=True)
class SpecRule:
    at: str
    """Path of the object to which the rule applies; '' for the TrainingJob."""
    cel: str
    message: str
    field: str | None = None
    """Path, relative to `at`, of the field that the error message names."""
    holds: Callable[[JobSpec], bool] | None = None
    says: Callable[[JobSpec], str] | None = None
    """Function that returns a more precise message than CEL can, for example with the nearest valid value."""

    def validation(self) -> dict[str, Any]:
        """Return the rule as an entry of x-kubernetes-validations in the CRD."""
        entry = {"rule": self.cel, "message": self.message}
        if self.field:
            entry["fieldPath"] = self.field
        return entry

    def refusal(self, spec: JobSpec) -> str:
        """Return the error message for a spec that violates the rule."""
        return self.says(spec) if self.says else self.message

    @property
    def path(self) -> str:
        """Path of the field that the rule's error message names."""
        return (self.at + (self.field or "")).lstrip(".")


STORED = "^((s3|gs|az)://[a-z0-9][a-z0-9._-]+(/.*)?|file:///.+)$"
"""Pattern for checkpoint URIs. RE2 and Python interpret it in the same way."""
WHERE_STORED = "must be s3://bucket/folder, gs://bucket/folder, az://container/folder or file:///folder"


def _one_trainer(spec: JobSpec) -> bool:
    return [container.name for container in spec.template.spec.containers].count("trainer") == 1


def _no_command(spec: JobSpec) -> bool:
    containers = [container for container in spec.template.spec.containers if container.name == "trainer"]
    return not any(container.command or container.args for container in containers)


def _command(spec: JobSpec) -> bool:
    return all(container.command for container in spec.template.spec.containers if container.name == "trainer")


def _stored(uri: str) -> bool:
    return not uri or re.search(STORED, uri) is not None


DOTS = "(^|/)([.]|%2[eE]){1,2}(/|$)"
"""Pattern for path components . and .., which hide the folder that a path really names."""
NO_DOTS = "has . or .. as a part of its path: write the path without them"


def _no_dots(*uris: str) -> bool:
    return not any(re.search(DOTS, uri) for uri in uris)


FILES = "^file:///.+$"


def _has_place(tracking: Tracking) -> bool:
    return tracking.backend is TrackingBackend.WANDB or tracking.uri is not None


def _is_folder(tracking: Tracking) -> bool:
    if tracking.backend is not TrackingBackend.TENSORBOARD or tracking.uri is None:
        return True
    return re.search(FILES, tracking.uri) is not None


INIT_CONTAINER = "concertina-agent"
VOLUMES = ("concertina", "concertina-identity", "concertina-shm")
MOUNTS = ("/concertina/", "/etc/concertina/")
VARIABLES = (
    "CONCERTINA_JOB", "CONCERTINA_UID", "CONCERTINA_PORT", "CONCERTINA_WORKERS", "CONCERTINA_GRACE_SECONDS",
    "CONCERTINA_IMAGE", "CONCERTINA_TRAINER", "CONCERTINA_CHECKPOINT", "CONCERTINA_REPLICA", "CONCERTINA_POD_IP",
    "CONCERTINA_NODE", "CONCERTINA_WARM_START", "CONCERTINA_TRACKING", "CONCERTINA_METRICS", "CONCERTINA_METRICS_TOKEN",
    "CONCERTINA_SPEC", "CONCERTINA_LEAST_RANKS", "CONCERTINA_PARALLELISM", "CONCERTINA_PREFLIGHT",
    "CONCERTINA_STEP_DETECTION",
)  # fmt: skip
PREFIX = "concertina.dev/"
"""Prefix of labels and annotations that the operator sets on pods. The constants above name its other additions."""


def _trainers(spec: JobSpec) -> list[Container]:
    return [container for container in spec.template.spec.containers if container.name == TRAINER]


def _no_mount_of_ours(spec: JobSpec) -> bool:
    mounts = [mount.mount_path for container in _trainers(spec) for mount in container.volume_mounts]
    return not any(f"{path}/".startswith(MOUNTS) for path in mounts)


def _no_variable_of_ours(spec: JobSpec) -> bool:
    return not any(variable.name in VARIABLES for container in _trainers(spec) for variable in container.env)


def _no_key_of_ours(spec: JobSpec) -> bool:
    metadata = spec.template.metadata
    return not any(key.startswith(PREFIX) for key in (*(metadata.labels or ()), *(metadata.annotations or ())))


def _while_suspended(field: str, *, optional: bool, with_suspend: bool = False) -> SpecRule:
    """Return a rule that a field may change only while the job is suspended.

    The field is part of every pod, and all replicas of a round must agree on its value.

    The rule can miss a change in a part of the pod template without a schema: CEL compares values and the number of
    fields, but not field names. The operator treats such a change as if the job had been suspended for the change
    (decision "Pods carry a hash of their spec").

    Args:
        field: Path of the field in the spec.
        optional: Whether the field may be absent.
        with_suspend: Whether the field may also change in the same write that suspends the job (decision "The write
            that suspends may change the template").
    """
    is_unchanged = f"self.{field} == oldSelf.{field}"
    if optional:
        is_unchanged = f"has(self.{field}) == has(oldSelf.{field}) && (!has(self.{field}) || {is_unchanged})"
    suspended, when = ("oldSelf.suspend", "first, change it")
    if with_suspend:
        suspended, when = ("oldSelf.suspend || self.suspend", "and change it, in one write or in two")
    return SpecRule(
        at=".spec",
        field=f".{field}",
        cel=f"{suspended} || {is_unchanged}",
        message=f"{field} changes only while the job is suspended: set spec.suspend to true {when}, "
        "then set spec.suspend to false",
    )


def _of_layout(rule: layouts.LayoutRule) -> SpecRule:
    """Return a rule that makes sure that spec.parallelism fits the configuration of the bundled trainer.

    A job without spec.parallelism satisfies most of these rules.
    """

    def holds(spec: JobSpec) -> bool:
        return spec.trainer is None or rule.holds(spec.trainer, spec.parallelism)

    def says(spec: JobSpec) -> str:
        return rule.message if spec.trainer is None else layouts.refusal(rule, spec.trainer, spec.parallelism)

    without = "" if rule.without_parallelism else "!has(self.parallelism) || "
    cel = f"!has(self.trainer) || {without}({rule.cel})"
    return SpecRule(at=".spec", field=f".{rule.field}", cel=cel, message=rule.message, holds=holds, says=says)


def _no_launcher(cel: str, starts_one: Callable[[tuple[str, ...]], bool]) -> SpecRule:
    """Return a rule that refuses a command that runs a launcher, because each replica would train separately.

    `starts_one` returns whether a command runs a launcher.
    """

    def holds(spec: JobSpec) -> bool:
        first = spec.template.spec.containers[0]
        if spec.launcher is not Launcher.AGENT or first.name != TRAINER or not first.command:
            return True
        return not starts_one((*first.command, *first.args))

    return SpecRule(
        at=".spec",
        field=".template.spec.containers",
        cel=cel,
        message="the command starts a launcher (torchrun, deepspeed, mpirun, accelerate launch with several processes, "
        f"...), so each replica would train alone: {launchers.REMEDY}",
        holds=holds,
    )


RULES: tuple[SpecRule, ...] = (
    SpecRule(
        at="",
        cel="size(self.metadata.name) <= 50",
        message="metadata.name is longer than 50 characters: pods are named after the job; choose a shorter name",
    ),
    SpecRule(
        at=".spec",
        field=".elastic.minReplicas",
        cel="!has(self.elastic) || !has(self.elastic.minReplicas) || self.elastic.minReplicas <= self.replicas",
        message="elastic.minReplicas is larger than replicas: lower it, or raise replicas",
        holds=lambda spec: spec.min_replicas <= spec.replicas,
    ),
    SpecRule(
        at=".spec",
        field=".template.spec.containers",
        cel="self.template.spec.containers.exists_one(c, c.name == 'trainer')",
        message="no container is named trainer: name the container of the workers trainer",
        holds=_one_trainer,
    ),
    SpecRule(
        at=".spec",
        field=".trainer",
        cel="!has(self.trainer) || self.template.spec.containers.all(c, c.name != 'trainer' || "
        "(!has(c.command) || size(c.command) == 0) && (!has(c.args) || size(c.args) == 0))",
        message="trainer configures the bundled trainer, but the container trainer has its own command: remove "
        "either spec.trainer, or command and args of the container",
        holds=lambda spec: not spec.bundled or _no_command(spec),
    ),
    SpecRule(
        at=".spec",
        field=".template.spec.containers",
        cel="has(self.trainer) || self.template.spec.containers.all(c, c.name != 'trainer' || "
        "has(c.command) && size(c.command) > 0)",
        message="the container trainer has no command: set the command that each worker runs (the entrypoint of "
        "the image is not used), or configure the bundled trainer in spec.trainer",
        holds=lambda spec: spec.bundled or _command(spec),
    ),
    SpecRule(
        at=".spec",
        field=".launcher",
        cel="self.launcher != 'Torchrun' || !has(self.trainer)",
        message="the bundled trainer runs only under launcher Agent: remove launcher, or set a command that is "
        "torchrun",
        holds=lambda spec: spec.launcher is not Launcher.TORCHRUN or not spec.bundled,
    ),
    SpecRule(
        at=".spec",
        field=".launcher",
        cel="self.launcher != 'Torchrun' || !has(self.elastic) || !has(self.parallelism) || "
        "self.parallelism.tensor * self.parallelism.pipeline * self.parallelism.context == 1 && "
        "(has(self.parallelism.shard) ? self.parallelism.shard : self.parallelism.expert) == 1",
        message="torchrun does not know blocks of ranks, so it may choose a size that parallelism does not "
        "allow: remove elastic or launcher",
        holds=lambda spec: (
            spec.launcher is not Launcher.TORCHRUN or spec.elastic is None or spec.parallelism.block == 1
        ),
    ),
    _no_launcher(launchers.cel_in_words(), launchers.in_words),
    *(
        _no_launcher(launchers.cel_in_text(text), functools.partial(launchers.in_text, expression=text))
        for text in launchers.TEXTS
    ),
    *(_of_layout(rule) for rule in layouts.RULES),
    SpecRule(
        at=".spec",
        field=".parallelism.asyncTensor",
        cel="!has(self.trainer) || !has(self.parallelism) || !self.parallelism.asyncTensor || "
        "type(self.workersPerReplica) != int || self.workersPerReplica % self.parallelism.tensor == 0",
        message="asyncTensor needs tensor groups within a replica, where GPUs can read each other's memory: "
        "choose a parallelism.tensor that divides workersPerReplica",
        holds=lambda spec: (
            not spec.bundled or not spec.parallelism.async_tensor or spec.workers % spec.parallelism.tensor == 0
        ),
    ),
    SpecRule(
        at=".spec",
        field=".warmStart.preload",
        cel="!has(self.warmStart) || !has(self.warmStart.preload) || size(self.warmStart.preload) == 0 || "
        "!has(self.trainer) && self.launcher != 'Torchrun'",
        message="warmStart.preload applies only to your own command under launcher Agent: remove it, or remove "
        "spec.trainer and launcher",
        holds=lambda spec: not spec.warm_start.preload or (not spec.bundled and spec.launcher is not Launcher.TORCHRUN),
    ),
    SpecRule(
        at=".spec.checkpoint.uri",
        cel=f"self.matches('{STORED}')",
        message=WHERE_STORED,
        holds=lambda spec: spec.checkpoint is None or _stored(spec.checkpoint.uri),
    ),
    SpecRule(
        at=".spec.checkpoint.resumeFrom",
        cel=f"size(self) == 0 || self.matches('{STORED}')",
        message=WHERE_STORED,
        holds=lambda spec: spec.checkpoint is None or _stored(spec.checkpoint.resume_from),
    ),
    SpecRule(
        at=".spec.checkpoint.initFrom",
        cel=f"size(self) == 0 || self.matches('{STORED}')",
        message=WHERE_STORED,
        holds=lambda spec: spec.checkpoint is None or _stored(spec.checkpoint.init_from),
    ),
    SpecRule(
        at=".spec.checkpoint",
        field=".initFrom",
        cel="size(self.resumeFrom) == 0 || size(self.initFrom) == 0",
        message="resumeFrom continues from the whole state, and initFrom starts a new run with the weights "
        "only: remove one of them",
        holds=lambda spec: not (spec.checkpoint and spec.checkpoint.resume_from and spec.checkpoint.init_from),
    ),
    *(
        SpecRule(
            at=f".spec.checkpoint.{name}",
            cel=f"!self.matches('{DOTS}')",
            message=NO_DOTS,
            holds=holds,
        )
        for name, holds in {
            "uri": lambda spec: spec.checkpoint is None or _no_dots(spec.checkpoint.uri),
            "resumeFrom": lambda spec: spec.checkpoint is None or _no_dots(spec.checkpoint.resume_from),
            "initFrom": lambda spec: spec.checkpoint is None or _no_dots(spec.checkpoint.init_from),
        }.items()
    ),
    SpecRule(
        at=".spec.trainer.data",
        cel=f"(!has(self.uri) || !self.uri.matches('{DOTS}')) && "
        f"(!has(self.mixture) || self.mixture.all(m, !m.uri.matches('{DOTS}')))",
        message=f"a uri {NO_DOTS}",
        holds=lambda spec: spec.trainer is None or _no_dots(*(source.uri for source in spec.trainer.data.sources)),
    ),
    SpecRule(
        at=".spec",
        cel="!has(self.checkpoint) || !has(self.checkpoint.keepBest) || !self.checkpoint.keepBest || "
        "(has(self.trainer) && has(self.trainer.evaluation))",
        message="checkpoint.keepBest needs losses to compare: set trainer.evaluation, or remove keepBest",
        holds=lambda spec: (
            spec.checkpoint is None
            or not spec.checkpoint.keep_best
            or (spec.trainer is not None and spec.trainer.evaluation is not None)
        ),
    ),
    SpecRule(
        at=".spec",
        cel="!has(self.evaluationJob) || has(self.checkpoint)",
        message="evaluationJob needs durable checkpoints: set checkpoint, or remove evaluationJob",
        holds=lambda spec: spec.evaluation_job is None or spec.checkpoint is not None,
    ),
    SpecRule(
        at=".spec.trainer.evaluation",
        cel=f"!has(self.sets) || self.sets.all(s, !s.uri.matches('{DOTS}'))",
        message=f"a uri {NO_DOTS}",
        holds=lambda spec: (
            spec.trainer is None
            or spec.trainer.evaluation is None
            or _no_dots(*(one.uri for one in spec.trainer.evaluation.sets))
        ),
    ),
    SpecRule(
        at=".spec.template.spec.initContainers",
        cel=f"self.all(c, c.name != '{INIT_CONTAINER}')",
        message=f"{INIT_CONTAINER} is the operator's own init container: give yours another name",
        holds=lambda spec: all(container.name != INIT_CONTAINER for container in spec.template.spec.init_containers),
    ),
    SpecRule(
        at=".spec.template.spec.volumes",
        cel=f"self.all(v, !(v.name in {list(VOLUMES)}))",
        message=f"{', '.join(VOLUMES)} are the operator's own volumes: give yours another name",
        holds=lambda spec: all(volume.name not in VOLUMES for volume in spec.template.spec.volumes),
    ),
    SpecRule(
        at=".spec.template.spec.restartPolicy",
        cel="self in ['OnFailure', 'Never']",
        message="must be OnFailure or Never: with Always, Kubernetes would restart workers that have completed",
        holds=lambda spec: spec.template.spec.restart_policy in (None, "OnFailure", "Never"),
    ),
    SpecRule(
        at=".spec.template.spec.containers",
        cel=f"self.all(c, c.name != '{TRAINER}' || !has(c.volumeMounts) || c.volumeMounts.all(m, "
        + " && ".join(f"!(m.mountPath + '/').startsWith('{path}')" for path in MOUNTS)
        + "))",
        message="the operator mounts volumes of its own at /concertina and /etc/concertina: choose another mountPath",
        holds=_no_mount_of_ours,
    ),
    SpecRule(
        at=".spec.template.spec.containers",
        cel=f"self.all(c, c.name != '{TRAINER}' || !has(c.env) || c.env.all(e, !(e.name in {list(VARIABLES)})))",
        message=f"{', '.join(VARIABLES)} are set by the operator: remove them from env",
        holds=_no_variable_of_ours,
    ),
    SpecRule(
        at=".spec.template.metadata",
        cel=" && ".join(
            f"(!has(self.{keys}) || self.{keys}.all(key, !key.startsWith('{PREFIX}')))"
            for keys in ("labels", "annotations")
        ),
        message=f"labels and annotations that begin with {PREFIX} are the operator's own: remove them",
        holds=_no_key_of_ours,
    ),
    SpecRule(
        at=".spec",
        field=".tracking",
        cel="!has(self.tracking) || self.launcher != 'Torchrun'",
        message="tracking needs the agent, and launcher Torchrun has none: remove tracking or launcher",
        holds=lambda spec: spec.tracking is None or spec.launcher is not Launcher.TORCHRUN,
    ),
    SpecRule(
        at=".spec.tracking",
        field=".uri",
        cel="!(self.backend in ['MLflow', 'TensorBoard']) || has(self.uri)",
        message="MLflow and TensorBoard need a uri: http://server:port, or file:///folder",
        holds=lambda spec: spec.tracking is None or _has_place(spec.tracking),
    ),
    SpecRule(
        at=".spec.tracking",
        field=".uri",
        cel=f"self.backend != 'TensorBoard' || !has(self.uri) || self.uri.matches('{FILES}')",
        message="TensorBoard writes files: uri must be file:///folder, on a volume that all replicas mount",
        holds=lambda spec: spec.tracking is None or _is_folder(spec.tracking),
    ),
    SpecRule(
        at=".spec.scheduling",
        field=".queue",
        cel="!has(self.queue) || has(self.gang) && self.gang in ['Auto', 'Volcano', 'KAI']",
        message="queue is one of Volcano or KAI: set gang to Volcano, KAI or Auto, or remove queue (Kueue's is the "
        "job's label kueue.x-k8s.io/queue-name)",
        holds=lambda spec: spec.scheduling.queue is None or spec.scheduling.gang in (Gang.AUTO, Gang.VOLCANO, Gang.KAI),
    ),
    SpecRule(
        at=".spec",
        field=".managedBy",
        cel="has(self.managedBy) == has(oldSelf.managedBy) && "
        "(!has(self.managedBy) || self.managedBy == oldSelf.managedBy)",
        message="managedBy can't be changed: delete the job and create it again",
    ),
    _while_suspended("template", optional=False, with_suspend=True),
    _while_suspended("trainer", optional=True),
    _while_suspended("checkpoint", optional=True),
    _while_suspended("tracking", optional=True),
    _while_suspended("workersPerReplica", optional=False),
    _while_suspended("launcher", optional=False),
    _while_suspended("warmStart", optional=True),
    _while_suspended("stepDetection", optional=True),
    _while_suspended("parallelism", optional=True),
    _while_suspended("scheduling", optional=True),
)


def broken(spec: JobSpec) -> tuple[SpecRule, ...]:
    """Return the rules that a spec violates."""
    return tuple(rule for rule in RULES if rule.holds is not None and not rule.holds(spec))
