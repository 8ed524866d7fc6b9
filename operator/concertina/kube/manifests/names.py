"""The names of what the operator makes, and by which it finds that again. Pure."""

from __future__ import annotations

from concertina.api import API_VERSION, KIND
from concertina.kube.resources import Raw
from concertina.plan.observed import JobView

JOB = "concertina.dev/job"
JOB_UID = "concertina.dev/job-uid"
INDEX = "concertina.dev/replica-index"
ATTEMPT = "concertina.dev/attempt"
ROUND = "concertina.dev/round"
"""Labels. The last one: which rendezvous of torchrun a pod was made for."""
MANAGED_BY = {"app.kubernetes.io/managed-by": "concertina"}
SELECTOR = "app.kubernetes.io/managed-by=concertina"
"""Of all pods that this operator made."""
AVOIDS = "concertina.dev/avoids"
"""Annotation: the nodes that the pod must not run on, by a rule of ours (not of the template)."""
TEMPLATE_HASH = "concertina.dev/template-hash"
"""Annotation: `JobView.template_hash` when the pod was made."""
PORT_NAME = "concertina"
"""Of the container port that says where a pod's agent listens."""
METRICS_PORT_NAME = "agent-metrics"
"""Of that at which it serves its metrics."""


def labels(job: JobView) -> dict[str, str]:
    return {**MANAGED_BY, JOB: job.name[:63].rstrip("-."), JOB_UID: job.uid}


def owner(job: JobView) -> Raw:
    """Of what goes before it in a foreground deletion (decision "Foreground deletion waits for pods")."""
    of = {"apiVersion": API_VERSION, "kind": KIND, "name": job.name, "uid": job.uid}
    return {**of, "controller": True, "blockOwnerDeletion": True}


def secret_name(job: JobView) -> str:
    """Of the job's identity. With a part of the uid: a job created again under its name can't find the old one's."""
    return f"{job.name}-concertina-{job.uid[:8]}"
