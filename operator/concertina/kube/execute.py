"""A command in a running container, by the API server's `exec` over a websocket."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aiohttp import WSMsgType

from concertina.kube.client import Client
from concertina.kube.errors import ApiError, status_object
from concertina.kube.resources import PODS

_PROTOCOL = "v4.channel.k8s.io"
_OUTPUT, _STATUS = (1, 2), 3
_MOST = 4 << 20
"""Bytes that are taken from a command, which may be anybody's."""


class CommandFailed(ApiError):
    """The command ended badly; the message is its output."""


async def execute(
    client: Client, namespace: str, pod: str, container: str, command: Sequence[str], seconds: float = 30.0
) -> str:
    """What the command prints. Raises CommandFailed, or ApiError where it could not be run at all."""
    params = [("container", container), ("stdout", "true"), ("stderr", "true")]
    params += [("command", word) for word in command]
    output, status = b"", b""
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
                if len(output) > _MOST:
                    raise CommandFailed(0, "TooMuch", f"a command in pod {pod} printed more than {_MOST >> 20} MiB")
                status += data if channel == _STATUS else b""
    except TimeoutError:
        raise CommandFailed(0, "Timeout", f"a command in pod {pod} did not end within {seconds:g} s") from None
    text = output.decode("utf-8", "replace").strip()
    if why := outcome(status, text):
        raise CommandFailed(0, "CommandFailed", f"a command in pod {pod} failed: {why}")
    return text


def outcome(status: bytes, text: str) -> str:
    """Why a command failed that has printed `text`, by the `Status` object at its end; nothing where it did not."""
    found = status_object(status)
    if found.get("status") == "Success":
        return ""
    return text or str(found.get("message") or "it ended without a word")
