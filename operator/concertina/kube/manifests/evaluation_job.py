"""Manifest of the Kubernetes Job that evaluates a checkpoint (`spec.evaluationJob`). All functions are pure."""

from __future__ import annotations

from concertina.api.spec import EvaluationJob
from concertina.kube.manifests.names import JOB, JOB_UID, MANAGED_BY, labels, owner
from concertina.kube.resources import Raw
from concertina.plan.actions import CreateEvaluationJob
from concertina.plan.observed import JobView

CHECKPOINT_URI = "CONCERTINA_CHECKPOINT_URI"
CHECKPOINT_STEP = "CONCERTINA_CHECKPOINT_STEP"
EVALUATES = "concertina.dev/evaluates"
"""Label of the Job's pods with the name of the TrainingJob.

These pods don't have the label of the pods that train.
"""


def evaluation_job_manifest(job: JobView, spec: EvaluationJob, template: Raw, create: CreateEvaluationJob) -> Raw:
    """Return the manifest of the Kubernetes Job that evaluates a checkpoint.

    The Job gets the labels of the PodTemplate object (for example the label of a queue). The Job's pod gets the labels
    in the PodTemplate's field `template`. Labels by which the operator finds its own objects are left out. The
    restartPolicy is replaced if it is Always, which the API server sets in PodTemplates and a Job can't have.

    Args:
        job: The TrainingJob.
        spec: The field `spec.evaluationJob`.
        template: The PodTemplate.
        create: Name of the Job, and its checkpoint.
    """
    pod: Raw = template.get("template") or {}
    pod_spec: Raw = pod.get("spec") or {}
    metadata: Raw = pod.get("metadata") or {}
    variables = {CHECKPOINT_URI: create.uri, CHECKPOINT_STEP: str(create.step)}
    containers = {
        field: [_with_variables(container, variables) for container in pod_spec[field]]
        for field in ("initContainers", "containers")
        if pod_spec.get(field)
    }
    restart = pod_spec.get("restartPolicy")
    deadline = spec.active_deadline_seconds
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": create.name,
            "labels": {**_labels(template), **labels(job)},
            "ownerReferences": [owner(job)],
        },
        "spec": {
            "backoffLimit": spec.backoff_limit,
            **({} if deadline is None else {"activeDeadlineSeconds": deadline}),
            "template": {
                "metadata": {
                    "labels": {**_labels(pod), EVALUATES: job.name[:63].rstrip("-.")},
                    "annotations": metadata.get("annotations") or {},
                },
                "spec": {
                    **pod_spec,
                    **containers,
                    "restartPolicy": restart if restart == "OnFailure" else "Never",
                },
            },
        },
    }


def _labels(template: Raw) -> dict[str, str]:
    labels = (template.get("metadata") or {}).get("labels") or {}
    return {key: value for key, value in labels.items() if key not in {*MANAGED_BY, JOB, JOB_UID}}


def _with_variables(container: Raw, variables: dict[str, str]) -> Raw:
    others = [entry for entry in container.get("env") or () if entry.get("name") not in variables]
    return {**container, "env": [*({"name": name, "value": value} for name, value in variables.items()), *others]}
