"""The pod that a job would become, tried before the job is applied: what is wrong with its template is told at once."""

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
"""Which one it will be the operator knows; the API server does not look."""


async def try_pod(client: Client, namespace: str, name: str, job: Raw) -> None:
    """Raises UserError where no operator could make the pod, and what applying the job itself would."""
    view = job_view(await client.apply(TRAINING_JOBS, namespace, name, job, dry_run=True))
    if view.spec is None:
        return  # the operator will say how
    torchrun = view.spec.launcher is Launcher.TORCHRUN
    create = CreatePod(
        0, 0,
        snapshot_memory=snapshot_memory.room(view.spec),
        rendezvous=Rendezvous("localhost:29400", 1, sizes.least(view.spec)) if torchrun else None,
    )  # fmt: skip
    pod = pod_manifest(view, view.spec, create, ANY_AGENT)
    pod["metadata"]["generateName"] = pod["metadata"].pop("name") + "-"  # that of a job applied again is taken
    try:
        await client.create(PODS, namespace, pod, strict=True, dry_run=True)
    except ApiError as error:
        # Quotas, policies and permissions may treat the operator otherwise than whoever calls this (decision
        # "concertina run tries a pod first").
        if error.message.startswith("Pod "):
            raise UserError(f"the pods of this job would be refused. The API server says: {error.message}") from error
