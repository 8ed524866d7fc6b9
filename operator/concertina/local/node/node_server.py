"""HTTPS endpoint of a node, which the API server uses for container logs and for exec by websocket."""

import json
import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from aiohttp import web

from concertina.local.node.node import NodeConfig
from concertina.local.node.pods.node_pod import Pod
from concertina.local.node.runtime import container_logs
from concertina.local.node.runtime.container import RunningContainer

EXEC_PROTOCOL = "v4.channel.k8s.io"
_EXEC_SECONDS = 60.0  # to give up
FindPod = Callable[[str, str], Pod | None]  # namespace, name


async def serve(config: NodeConfig, find: FindPod) -> web.AppRunner:
    """Start the HTTPS endpoint on the node's address. It accepts only the client certificate of the API server."""
    app = web.Application()
    app.router.add_get("/containerLogs/{namespace}/{pod}/{container}", lambda request: _logs(request, find))
    app.router.add_get("/exec/{namespace}/{pod}/{container}", lambda request: _execute(request, find))
    app.router.add_get("/healthz", _healthz)
    app.router.add_route("*", "/{other:.*}", _not_here)
    runner = web.AppRunner(app, access_log=None, handle_signals=False)
    await runner.setup()
    pki = Path(config.pki)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(pki / "ca.crt"))
    tls.load_cert_chain(pki / f"node-{config.name}.crt", pki / f"node-{config.name}.key")
    tls.verify_mode = ssl.CERT_REQUIRED
    await web.TCPSite(runner, config.address, config.port, ssl_context=tls).start()
    return runner


async def _healthz(_: web.Request) -> web.Response:
    return web.Response(text="ok")


async def _not_here(request: web.Request) -> web.Response:
    endpoint = request.match_info["other"].partition("/")[0]
    return web.Response(status=501, text=f"the nodes of the local cluster do not have {endpoint}, only logs\n")


async def _execute(request: web.Request, find: FindPod) -> web.StreamResponse:
    """Run a command in a container.

    As a kubelet does, send the output on channel 1 and then the result on channel 3.
    """
    pod = find(request.match_info["namespace"], request.match_info["pod"])
    container = pod.container(request.match_info["container"]) if pod else None
    if container is None or container.running is None or container.running.exit.done():
        return web.Response(status=404, text="no such container runs on this node\n")
    if request.headers.get("Upgrade", "").lower() != "websocket":
        return web.Response(status=501, text="the nodes of the local cluster take commands by websocket only\n")
    channel = web.WebSocketResponse(protocols=(EXEC_PROTOCOL,))
    await channel.prepare(request)
    code, output = await container.execute(request.query.getall("command"), _EXEC_SECONDS)
    await channel.send_bytes(b"\x01" + output.encode())
    causes = [{"reason": "ExitCode", "message": str(code)}]
    failed = {"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": causes}}
    await channel.send_bytes(b"\x03" + json.dumps(failed if code else {"status": "Success"}).encode())
    await channel.close()
    return channel


async def _logs(request: web.Request, find: FindPod) -> web.StreamResponse:
    pod = find(request.match_info["namespace"], request.match_info["pod"])
    container = pod.container(request.match_info["container"]) if pod else None
    if container is None:
        return web.Response(status=404, text="no such container on this node\n")
    query = request.query
    previous = query.get("previous") == "true"
    path = container.log_path(previous)
    if not path.exists():
        which = "previous terminated container" if previous else "container"
        state = container.state.state.get("waiting", {})
        why = f" is waiting to start: {state.get('reason', '')}" if state and not previous else " has no output"
        return web.Response(status=400, text=f'{which} "{container.name}" in pod "{request.match_info["pod"]}"{why}\n')
    return await _send(request, container, path)


async def _send(request: web.Request, container: RunningContainer, path: Path) -> web.StreamResponse:
    query = request.query
    with_time = query.get("timestamps") == "true"
    tail = int(query["tailLines"]) if "tailLines" in query else None
    since = (
        query.get("sinceTime", "").replace("Z", ".000000Z")
        if "." not in query.get("sinceTime", "")
        else query["sinceTime"]
    )
    if "sinceSeconds" in query:
        moment = datetime.now(UTC) - timedelta(seconds=int(query["sinceSeconds"]))
        since = moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
    offset = path.stat().st_size  # noqa: ASYNC240 (a local file)
    data = b"".join(container_logs.lines(path, tail, since, with_time))
    if "limitBytes" in query:
        data = data[: int(query["limitBytes"])]
    response = web.StreamResponse(headers={"Content-Type": "text/plain"})
    await response.prepare(request)
    await response.write(data)
    if query.get("follow") == "true" and container.log and container.log.path == path:
        async for chunk in container_logs.follow(container.log, offset, with_time):
            await response.write(chunk)
    await response.write_eof()
    return response
