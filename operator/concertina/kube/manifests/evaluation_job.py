"""Manifest of a Job of `spec.evaluationJob`. All functions are pure."""

from __future__ import annotations

from concertina.api.spec import EvaluationJob
from concertina.kube.manifests.names import MANAGED_BY, labels, owner
from concertina.kube.resources import Raw
from concertina.plan.actions import CreateEvaluationJob
from concertina.plan.observed import JobView

CHECKPOINT_URI = "CONCERTINA_CHECKPOINT_URI"
CHECKPOINT_STEP = "CONCERTINA_CHECKPOINT_STEP"
EVALUATES = "concertina.dev/evaluates"
"""Label of the pods with the name of the TrainingJob. They don't have the label of the pods that train."""


def evaluation_job_manifest(job: JobView, spec: EvaluationJob, template: Raw, create: CreateEvaluationJob) -> Raw:
    """Return the manifest of the Job for a checkpoint.

    The pod has the labels of its template, but not those by which the operator finds the pods that train. `template` is
    the PodTemplate. The API server sets restartPolicy Always in a PodTemplate, which a Job can't have.
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
    own = {key: value for key, value in (metadata.get("labels") or {}).items() if key not in MANAGED_BY}
    deadline = spec.active_deadline_seconds
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": create.name, "labels": labels(job), "ownerReferences": [owner(job)]},
        "spec": {
            "backoffLimit": spec.backoff_limit,
            **({} if deadline is None else {"activeDeadlineSeconds": deadline}),
            "template": {
                "metadata": {
                    "labels": {**own, EVALUATES: job.name[:63].rstrip("-.")},
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


def _with_variables(container: Raw, variables: dict[str, str]) -> Raw:
    others = [entry for entry in container.get("env") or () if entry.get("name") not in variables]
    return {**container, "env": [*({"name": name, "value": value} for name, value in variables.items()), *others]}
