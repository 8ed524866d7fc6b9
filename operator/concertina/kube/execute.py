"""Run a command in a running container, through a websocket to the `exec` subresource of the pod."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aiohttp import WSMsgType

from concertina.kube.client import Client
from concertina.kube.errors import ApiError, status_object
from concertina.kube.resources import PODS

_PROTOCOL = "v4.channel.k8s.io"
_OUTPUT, _STATUS = (1, 2), 3
MOST_OUTPUT = 16 * 1024 * 1024


class CommandFailed(ApiError):
    """Error: a command in a container failed. The message contains the command's output."""


async def execute(
    client: Client,
    namespace: str,
    pod: str,
    container: str,
    command: Sequence[str],
    seconds: float = 30.0,
    most: int = MOST_OUTPUT,
) -> str:
    """Run a command in a container, and return its output.

    Args:
        client: Client of the API server.
        namespace: Namespace of the pod.
        pod: Name of the pod.
        container: Name of the container.
        command: Command with its arguments.
        seconds: Time limit for the command in seconds.
        most: Largest size of the output in bytes.

    Raises:
        CommandFailed: When the command fails, does not end in time, or prints more than `most` bytes.
        ApiError: When the API server can't run the command.
    """
    params = [("container", container), ("stdout", "true"), ("stderr", "true")]
    params += [("command", word) for word in command]
    output, status = bytearray(), bytearray()
    try:
        async with (
            asyncio.timeout(seconds),
            client.websocket(PODS.path(namespace, pod, "exec"), params, _PROTOCOL) as ws,
        ):
            async for message in ws:
                if message.type is not WSMsgType.BINARY or not message.data:
                    continue
                channel, data = message.data[0], message.data[1:]
                output += data if channel in _OUTPUT else b""
                status += data if channel == _STATUS else b""
                if len(output) + len(status) > most:
                    raise CommandFailed(0, "TooLong", f"a command in pod {pod} prints more than {most} bytes")
    except TimeoutError:
        raise CommandFailed(0, "Timeout", f"a command in pod {pod} did not end within {seconds:g} s") from None
    text = output.decode("utf-8", "replace").strip()
    if why := outcome(bytes(status), text):
        raise CommandFailed(0, "CommandFailed", f"a command in pod {pod} failed: {why}")
    return text


def outcome(status: bytes, text: str) -> str:
    """Return the reason why a command in a container failed; empty if it succeeded.

    Args:
        status: `Status` object that ends the stream, as JSON. It contains the exit code of the command.
        text: Output of the command.
    """
    result = status_object(status)
    if result.get("status") == "Success":
        return ""
    return text or str(result.get("message") or "it ended without a word")
