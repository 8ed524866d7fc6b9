"""Dry run of a job and of one of its pods, to find errors in the pod template before the job is applied."""

from __future__ import annotations

from concertina.api.spec import Launcher
from concertina.kube.client import Client
from concertina.kube.errors import ApiError
from concertina.kube.manifests.agent_container import PodSettings
from concertina.kube.manifests.pod import pod_manifest
from concertina.kube.parse.views import job_view
from concertina.kube.resources import PODS, TRAINING_JOBS, Raw
from concertina.plan.actions import CreatePod, Rendezvous
from concertina.plan.facts import sizes
from concertina.plan.state import snapshot_memory
from concertina.terminal.cluster_connection import UserError

ANY_AGENT = PodSettings("concertina/agent")
"""Operator settings with which the dry run creates the pod's manifest.

Only the operator knows the real agent image, which a dry run does not check.
"""


async def try_pod(client: Client, namespace: str, name: str, job: Raw) -> None:
    """Check that the API server would accept the job and one of its pods.

    Raises:
        UserError: When the API server finds an error in the pod itself. Refusals that may apply only to the caller, and
            not to the operator, are ignored.
        ApiError: When the API server would refuse the job.
    """
    view = job_view(await client.apply(TRAINING_JOBS, namespace, name, job, dry_run=True))
    if view.spec is None:
        return  # The operator will report what is invalid.
    torchrun = view.spec.launcher is Launcher.TORCHRUN
    create = CreatePod(
        0, 0,
        snapshot_memory=snapshot_memory.room(view.spec),
        rendezvous=Rendezvous("localhost:29400", 1, sizes.least(view.spec)) if torchrun else None,
    )  # fmt: skip
    pod = pod_manifest(view, view.spec, create, ANY_AGENT)
    pod["metadata"]["generateName"] = (
        pod["metadata"].pop("name") + "-"
    )  # Pods of this name exist if the job was applied before.
    try:
        await client.create(PODS, namespace, pod, strict=True, dry_run=True)
    except ApiError as error:
        # Quotas, policies and permissions may differ between the operator and the caller (decision "concertina run
        # tries a pod first").
        if error.message.startswith("Pod "):
            raise UserError(f"the pods of this job would be refused. The API server says: {error.message}") from error
