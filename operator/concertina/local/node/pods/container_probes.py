"""Probes of containers (exec, httpGet and tcpSocket) for readiness, liveness and startup."""

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from typing import Any

import aiohttp

from concertina.local.node.runtime.container import RunningContainer

Object = dict[str, Any]
Warn = Callable[[str, str], None]  # reason, message


async def watch(
    container: RunningContainer, address: str, grace: float, changed: Callable[[], None], warn: Warn
) -> None:
    """Probe a running container (startup, readiness, liveness) until the container ends.

    The function sets `started` and `ready` of the container. It stops the container if the startup or liveness probe
    fails.
    """
    startup = container.spec.get("startupProbe")
    if startup:
        await _first_delay(startup)
        if not await _settle(startup, container, address, wanted=True, warn=warn, kind="Startup"):
            await container.stop(grace)
            return
        container.state.started = True
        container.state.ready = "readinessProbe" not in container.spec
        changed()
    async with asyncio.TaskGroup() as group:
        if "readinessProbe" in container.spec:
            group.create_task(_readiness(container, address, changed, warn))
        if "livenessProbe" in container.spec:
            group.create_task(_liveness(container, address, grace, warn))


async def _readiness(container: RunningContainer, address: str, changed: Callable[[], None], warn: Warn) -> None:
    await _first_delay(container.spec["readinessProbe"])
    while True:
        target = not container.state.ready
        flipped = await _settle(
            container.spec["readinessProbe"], container, address, wanted=target, warn=warn, kind="Readiness"
        )
        if flipped:
            container.state.ready = target
            changed()
        await asyncio.sleep(_period(container.spec["readinessProbe"]))


async def _liveness(container: RunningContainer, address: str, grace: float, warn: Warn) -> None:
    await _first_delay(container.spec["livenessProbe"])
    if await _settle(container.spec["livenessProbe"], container, address, wanted=False, warn=warn, kind="Liveness"):
        warn("Killing", f"Container {container.name} failed liveness probe, will be restarted")
        await container.stop(grace)


async def _first_delay(probe: Object) -> None:
    await asyncio.sleep(probe.get("initialDelaySeconds", 0))


async def _settle(
    probe: Object, container: RunningContainer, address: str, *, wanted: bool, warn: Warn, kind: str
) -> bool:
    """Probe a container until the result `wanted` has occurred several times in a row, and return True.

    The thresholds in the probe's spec determine the number of times. If a startup probe fails too often before it
    succeeds, the result is False.

    Args:
        probe: Probe from the pod's spec.
        container: Container to probe.
        address: IP address of the pod.
        wanted: Result to wait for: True for success, False for failure.
        warn: Function that creates a warning event.
        kind: Kind of the probe, for messages.
    """
    needed = probe.get("successThreshold", 1) if wanted else probe.get("failureThreshold", 3)
    allowed = probe.get("failureThreshold", 3)
    in_row = failures = 0
    while in_row < needed:
        error = await _probe(probe, container, address)
        if error:
            warn("Unhealthy", f"{kind} probe failed: {error}")
        failures = failures + 1 if error else 0
        if kind == "Startup" and failures >= allowed:
            return False
        in_row = in_row + 1 if (error is None) == wanted else 0
        if in_row < needed:
            await asyncio.sleep(_period(probe))
    return True


def _period(probe: Object) -> float:
    return float(probe.get("periodSeconds", 10))


async def _probe(probe: Object, container: RunningContainer, address: str) -> str | None:
    """Probe once. Return None if the probe succeeds, or the reason of the failure."""
    timeout = float(probe.get("timeoutSeconds", 1))
    if "exec" in probe:
        code, output = await container.execute(probe["exec"]["command"], timeout)
        return None if code == 0 else f"exit code {code}: {output.strip()[-500:]}"
    try:
        async with asyncio.timeout(timeout):
            if "httpGet" in probe:
                return await _http(probe["httpGet"], container, address)
            if "tcpSocket" in probe:
                return await _tcp(probe["tcpSocket"], container, address)
    except TimeoutError:
        return f"no answer within {timeout:g} s"
    except (OSError, aiohttp.ClientError) as error:
        return str(error) or type(error).__name__
    return "this kind of probe is not known to the local cluster"


async def _http(action: Object, container: RunningContainer, address: str) -> str | None:
    scheme = action.get("scheme", "HTTP").lower()
    host = action.get("host") or address
    url = f"{scheme}://{host}:{_port(action['port'], container)}/{action.get('path', '/').lstrip('/')}"
    headers = {header["name"]: header["value"] for header in action.get("httpHeaders") or []}
    # A kubelet does not verify the certificate either, because it has no CA for it.
    tls = ssl._create_unverified_context() if scheme == "https" else True
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.get(url, ssl=tls, allow_redirects=False) as response,
    ):
        return None if 200 <= response.status < 400 else f"HTTP probe failed with statuscode: {response.status}"


async def _tcp(action: Object, container: RunningContainer, address: str) -> str | None:
    _, writer = await asyncio.open_connection(action.get("host") or address, _port(action["port"], container))
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return None


def _port(port: int | str, container: RunningContainer) -> int:
    if isinstance(port, int):
        return port
    matching_ports = [
        declared["containerPort"] for declared in container.spec.get("ports") or [] if declared.get("name") == port
    ]
    return int(matching_ports[0]) if matching_ports else int(port)
