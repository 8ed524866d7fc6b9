"""Faults that the drill injects by creating a Kubernetes object: a webhook or a NetworkPolicy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from concertina.api.parse import parse_stored
from concertina.drill.faults.by_command import PREFIX, ByCommand
from concertina.drill.target import DrillTarget, Injection, ProgressSource
from concertina.kube.client import Client
from concertina.kube.errors import ApiError, WebhookFailed
from concertina.kube.manifests.names import JOB_UID
from concertina.kube.resources import NETWORK_POLICIES, PODS, WEBHOOKS, Raw, Resource
from concertina.terminal.cluster_connection import UserError

HOOK = "drill.concertina.dev"
IN_FORCE = 30.0
"""Time limit in seconds for the API server to begin to call a new webhook."""
SETTLING, LOOK = 10.0, 10.0
"""Seconds for the nodes to apply a NetworkPolicy, and seconds in which a reachable agent sends a new report."""

BY_COMMAND = ByCommand(
    "OPERATOR_CUT", "OPERATOR_REJOIN", "cut the operator {operator} off from all agents", sight=ProgressSource.LOGS
)


@asynccontextmanager
async def refuse_pods(target: DrillTarget) -> AsyncIterator[Injection]:
    """Delete one of the job's pods without a grace period, while a failing webhook prevents new pods of the job.

    Raises:
        UserError: When the job could not continue without that pod.
    """
    job = await target.job()
    min_replicas, member_count = parse_stored(job)[0].min_replicas, len((await target.status()).world.members)
    if member_count <= min_replicas:
        raise UserError(
            f"{target.name} continues with {min_replicas} replicas or more, and has {member_count}, so it would "
            "wait for the pod that can't be created. Lower spec.elastic.minReplicas to run this drill."
        )
    async with _temporary_object(target, WEBHOOKS, _webhook(target, job)):
        member = await target.victim()
        await _wait_until_applied(target, member.replica)
        at = time.time()
        await target.client.delete(PODS, target.namespace, member.replica, uid=member.uid, grace=0)
        yield Injection(
            at, f"deleted {member.replica} of {member.node} without grace while a webhook that new pods need fails"
        )


def part_operator(target: DrillTarget) -> AbstractAsyncContextManager[Injection]:
    """Block the network between the operator and all agents.

    If the environment sets commands for this fault, they are used. Otherwise a NetworkPolicy is used.
    """
    return (BY_COMMAND if BY_COMMAND.given else _part_by_policy)(target)


@asynccontextmanager
async def _part_by_policy(target: DrillTarget) -> AsyncIterator[Injection]:
    """Block the network between the operator and all agents, by a NetworkPolicy.

    The policy admits only traffic from the job's own pods.

    Raises:
        UserError: When the cluster does not enforce the policy.
    """
    at = time.time()
    async with _temporary_object(target, NETWORK_POLICIES, _policy(target, await target.job())):
        await asyncio.sleep(SETTLING)
        earlier_progress = (await target.status()).progress
        await asyncio.sleep(LOOK)
        later_progress = (await target.status()).progress
        if earlier_progress and later_progress and later_progress.at != earlier_progress.at:
            raise UserError(
                "The operator still reaches the job's agents in spite of a NetworkPolicy: this cluster does not "
                "enforce NetworkPolicies, or not on open connections, or another policy allows the traffic. Set "
                f"{PREFIX}{BY_COMMAND.inject} and {PREFIX}{BY_COMMAND.revert} to commands that cut the operator "
                "off."
            )
        yield Injection(at, "cut the operator off from all agents by a NetworkPolicy", ProgressSource.LOGS)


@asynccontextmanager
async def _temporary_object(target: DrillTarget, resource: Resource, body: Raw) -> AsyncIterator[None]:
    """Create an object, and delete it when the block ends.

    An existing object is overwritten, because an earlier drill that was killed may not have deleted it.

    Raises:
        asyncio.CancelledError: When the drill is cancelled while the object is being created.
    """
    name = body["metadata"]["name"]
    try:
        await target.client.apply(resource, target.namespace, name, body)
    except asyncio.CancelledError:  # The API server may have created the object anyway.
        await _remove(target, resource, name)
        raise
    try:
        yield
    finally:
        await _remove(target, resource, name)


async def _remove(target: DrillTarget, resource: Resource, name: str) -> None:
    """Delete the object of a drill.

    Raises:
        UserError: When the object can't be deleted.
    """
    try:
        await target.client.delete(resource, target.namespace, name)
    except ApiError as error:
        raise UserError(
            f"could not delete {resource.plural} {name}, so run `kubectl delete {resource.plural} {name}` "
            f"yourself: {error}"
        ) from error


def _webhook(target: DrillTarget, job: Raw) -> Raw:
    """Return the configuration of a webhook that refuses new pods of this job.

    Its service does not exist, so every call fails.
    """
    uid = job["metadata"]["uid"]
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"]}
    hook = {
        "name": HOOK,
        "clientConfig": {"service": {"namespace": target.namespace, "name": f"concertina-drill-{uid}"}},
        "rules": [rule],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": target.namespace}},
        "objectSelector": {"matchLabels": {JOB_UID: uid}},
        "failurePolicy": "Fail",
        "timeoutSeconds": 1,
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": f"concertina-drill-{uid}"},
        "webhooks": [hook],
    }


def _policy(target: DrillTarget, job: Raw) -> Raw:
    uid = job["metadata"]["uid"]
    pods = {"matchLabels": {JOB_UID: uid}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": f"concertina-drill-{uid}", "namespace": target.namespace},
        "spec": {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": pods}]}]},
    }


async def _wait_until_applied(target: DrillTarget, replica: str) -> None:
    """Wait until the API server calls the drill's webhook, and therefore refuses a pod like that of `replica`.

    Raises:
        UserError: When the API server does not call the webhook in time.
        WebhookFailed: When a different webhook fails.
    """
    pod = await target.client.get(PODS, target.namespace, replica)
    metadata = {key: pod["metadata"][key] for key in ("labels", "annotations") if key in pod["metadata"]}
    copy = {**pod, "metadata": {"generateName": f"{target.name}-", **metadata}}
    deadline = time.monotonic() + IN_FORCE
    async with Client(target.client.access, give_up_after=0.0) as client:
        while time.monotonic() < deadline:
            try:
                await client.create(PODS, target.namespace, copy, dry_run=True)
            except WebhookFailed as error:
                if HOOK in error.message:
                    return
                raise
            await asyncio.sleep(0.2)
    raise UserError(f"The API server has not called the drill's webhook within {IN_FORCE:g} s.")
