"""What an agent says of itself, asked from within its pod, which has a certificate of the job's."""

from __future__ import annotations

from concertina.api import TRAINER
from concertina.kube.client import Client
from concertina.kube.execute import execute
from concertina.kube.resources import Raw
from concertina.terminal.cluster_connection import UserError
from concertina_protocol import Report, decode


def agent_command(pod: Raw) -> list[str]:
    """How `concertina-agent` is called in it. Raises UserError where there is no agent (launcher: Torchrun)."""
    trainer = next(each for each in pod["spec"]["containers"] if each["name"] == TRAINER)
    command = list(trainer.get("command") or ())[:2]
    if len(command) < 2 or not command[1].endswith("agent.pyz"):
        raise UserError(f"{pod['metadata']['name']} has no agent: jobs of launcher Torchrun have none")
    return command


async def report_of(client: Client, namespace: str, pod: Raw) -> Report | None:
    """Raises ApiError or ProtocolError."""
    text = await execute(client, namespace, pod["metadata"]["name"], TRAINER, [*agent_command(pod), "report"])
    answer = decode(text.encode())
    return answer if isinstance(answer, Report) else None
