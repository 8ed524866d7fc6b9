"""Request of an agent's report, by a command in the agent's pod, which has a certificate of the job."""

from __future__ import annotations

from concertina.api import TRAINER
from concertina.kube.client import Client
from concertina.kube.execute import execute
from concertina.kube.resources import Raw
from concertina.terminal.cluster_connection import UserError
from concertina_protocol import Report, decode


def agent_command(pod: Raw) -> list[str]:
    """Return the command that runs `concertina-agent` in the pod's trainer container.

    Raises:
        UserError: When the pod has no agent (launcher: Torchrun).
    """
    trainer = next(container for container in pod["spec"]["containers"] if container["name"] == TRAINER)
    command = list(trainer.get("command") or ())[:2]
    if len(command) < 2 or not command[1].endswith("agent.pyz"):
        raise UserError(f"{pod['metadata']['name']} has no agent: jobs of launcher Torchrun have none")
    return command


async def report_of(client: Client, namespace: str, pod: Raw) -> Report | None:
    """Return the report of the pod's agent; None if the agent answers with a message of another kind.

    Raises:
        ApiError: When the command can't be run in the pod.
        ProtocolError: When the answer can't be decoded.
    """
    text = await execute(client, namespace, pod["metadata"]["name"], TRAINER, [*agent_command(pod), "report"])
    answer = decode(text.encode())
    return answer if isinstance(answer, Report) else None
