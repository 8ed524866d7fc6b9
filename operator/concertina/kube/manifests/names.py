"""Names and labels of the objects that the operator creates.

The operator finds its objects again by these names and labels. All functions are pure.
"""

from __future__ import annotations

from concertina.api import API_VERSION, KIND
from concertina.kube.resources import Raw
from concertina.plan.observed import JobView

JOB = "concertina.dev/job"
JOB_UID = "concertina.dev/job-uid"
INDEX = "concertina.dev/replica-index"
ATTEMPT = "concertina.dev/attempt"
ROUND = "concertina.dev/round"
"""Label with the number of the torchrun rendezvous for which a pod was created.

The four constants above are labels too.
"""
MANAGED_BY = {"app.kubernetes.io/managed-by": "concertina"}
SELECTOR = "app.kubernetes.io/managed-by=concertina"
"""Label selector for all pods that the operator created."""
AVOIDS = "concertina.dev/avoids"
"""Annotation with the nodes on which the operator (and not the pod template) forbids the pod to run."""
TEMPLATE_HASH = "concertina.dev/template-hash"
"""Annotation with `JobView.template_hash` at the time when the pod was created."""
PORT_NAME = "concertina"
"""Name of the container port on which a pod's agent listens."""
METRICS_PORT_NAME = "agent-metrics"
"""Name of the container port on which an agent serves its metrics."""


def labels(job: JobView) -> dict[str, str]:
    """Return the labels of the objects that belong to a job."""
    return {**MANAGED_BY, JOB: job.name[:63].rstrip("-."), JOB_UID: job.uid}


def owner(job: JobView) -> Raw:
    """Return an owner reference from an object to its job. Foreground deletion of the job waits for the object.

    Decision "Foreground deletion waits for pods" gives the reason.
    """
    reference = {"apiVersion": API_VERSION, "kind": KIND, "name": job.name, "uid": job.uid}
    return {**reference, "controller": True, "blockOwnerDeletion": True}


def secret_name(job: JobView) -> str:
    """Return the name of the Secret with the job's certificates.

    The name contains a part of the job's uid. A new job with the name of a deleted job therefore does not use the
    deleted job's Secret.
    """
    return f"{job.name}-concertina-{job.uid[:8]}"
