"""Names and labels of the objects that the operator creates, by which it finds them again. Pure."""

from __future__ import annotations

from concertina.api import API_VERSION, KIND
from concertina.kube.resources import Raw
from concertina.plan.observed import JobView

JOB = "concertina.dev/job"
JOB_UID = "concertina.dev/job-uid"
INDEX = "concertina.dev/replica-index"
ATTEMPT = "concertina.dev/attempt"
ROUND = "concertina.dev/round"
"""The five constants above are labels. ROUND is the rendezvous of torchrun that a pod was created for."""
MANAGED_BY = {"app.kubernetes.io/managed-by": "concertina"}
SELECTOR = "app.kubernetes.io/managed-by=concertina"
"""Selector of all pods that the operator created."""
AVOIDS = "concertina.dev/avoids"
"""Annotation: the nodes that the pod must not run on, by a requirement of the operator (not of the template)."""
TEMPLATE_HASH = "concertina.dev/template-hash"
"""Annotation: `JobView.template_hash` when the pod was created."""
PORT_NAME = "concertina"
"""Name of the container port at which a pod's agent listens."""
METRICS_PORT_NAME = "agent-metrics"
"""Name of the container port at which an agent serves its metrics."""


def labels(job: JobView) -> dict[str, str]:
    """Return the labels of a job's objects."""
    return {**MANAGED_BY, JOB: job.name[:63].rstrip("-."), JOB_UID: job.uid}


def owner(job: JobView) -> Raw:
    """Return an owner reference that makes a foreground deletion of the job wait for the object.

    See the decision "Foreground deletion waits for pods".
    """
    reference = {"apiVersion": API_VERSION, "kind": KIND, "name": job.name, "uid": job.uid}
    return {**reference, "controller": True, "blockOwnerDeletion": True}


def secret_name(job: JobView) -> str:
    """Return the name of the Secret with the job's identity.

    The name contains a part of the uid, so a job that is created again under its name does not find the old job's
    Secret.
    """
    return f"{job.name}-concertina-{job.uid[:8]}"
