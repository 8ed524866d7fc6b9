"""HTTP server that answers as an API server might, without authentication."""

from __future__ import annotations

import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from aiohttp import web

from concertina.kube.resources import Raw

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


def kubeconfig(server: str, **cluster: str) -> str:
    named = {"name": "c", "context": {"cluster": "c", "user": "c"}}
    clusters, users = [{"name": "c", "cluster": {"server": server, **cluster}}], [{"name": "c", "user": {}}]
    return json.dumps({"current-context": "c", "contexts": [named], "clusters": clusters, "users": users})


@contextlib.asynccontextmanager
async def api_server(
    folder: Path, answer: Answer, as_proxy: bool = False, ssl_context: ssl.SSLContext | None = None
) -> AsyncIterator[Path]:
    """Serve an API server, and yield its kubeconfig.

    `answer` answers each request. With `as_proxy`, the server is a proxy for an API server that only the proxy reaches.
    """
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=ssl_context).start()
    try:
        host, port = runner.addresses[0][:2]
        address = f"http{'s' if ssl_context else ''}://{host}:{port}"
        written = kubeconfig("http://kube.invalid", **{"proxy-url": address}) if as_proxy else kubeconfig(address)
        (folder / "config").write_text(written)
        yield folder / "config"
    finally:
        await runner.cleanup()


def group(name: str, version: str) -> Raw:
    """Return an API group as discovery lists it."""
    names = {"groupVersion": f"{name}/{version}", "version": version}
    return {"name": name, "versions": [names], "preferredVersion": names}


def kind(plural: str, name: str, namespaced: bool) -> Raw:
    """Return a resource as discovery lists it."""
    names = {"name": plural, "singularName": name.lower(), "kind": name}
    return {**names, "namespaced": namespaced, "verbs": ["list", "watch"]}


def no_success(code: int, message: str) -> web.Response:
    """Return a Status object of a failure, with its message, as the API server sends it."""
    return web.json_response({"kind": "Status", "code": code, "message": message}, status=code)
