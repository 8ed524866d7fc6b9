"""Headless Chromium, driven by its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import shutil
import tempfile
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from builders.until import until_async

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
OPTIONS = ("--headless=new", "--disable-gpu", "--no-first-run", "--remote-debugging-port=0", "--hide-scrollbars")


def program() -> str:
    """Return the path of Chromium, or an empty string if there is none."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), "")


class Tab:
    """One page, with its requests and its errors since it was opened."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.loads = 0
        self.requests: list[str] = []
        self.complaints: list[str] = []
        """Messages on the console: refusals of the page's content security policy, and errors."""

    async def hear(self) -> None:
        async for message in self._socket:
            message_fields = message.json()
            params = message_fields.get("params", {})
            match message_fields.get("method"):
                case None:
                    self._answers.pop(message_fields["id"]).set_result(
                        message_fields.get("result") or {"error": message_fields.get("error")}
                    )
                case "Page.loadEventFired":
                    self.loads += 1
                case "Network.requestWillBeSent":
                    self.requests.append(params["request"]["url"])
                case "Log.entryAdded":
                    self.complaints.append(params["entry"]["text"])
                case "Runtime.exceptionThrown":
                    self.complaints.append(str(params["exceptionDetails"]))

    async def call(self, method: str, **params: object) -> dict[str, Any]:
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        return await self._answers[number]

    async def open(self, url: str) -> None:
        """Open a page and wait until it is loaded."""
        loads = self.loads
        self.requests.clear()
        self.complaints.clear()
        await self.call("Page.navigate", url=url)
        await until_async(lambda: self.loads > loads, f"{url} in the browser")

    async def evaluate(self, script: str) -> Any:
        answer = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        return answer["result"].get("value")

    async def picture(self, width: int, dark: bool = False) -> bytes:
        """Return a PNG picture of the whole page at that width."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 600
        )
        shot = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])


@asynccontextmanager
async def tab() -> AsyncIterator[Tab]:
    """Yield a tab in a browser of its own."""
    root = ["--no-sandbox"] if os.geteuid() == 0 else []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [program(), *OPTIONS, *root, f"--user-data-dir={folder}", "about:blank"]
        port = Path(folder) / "DevToolsActivePort"
        browser = await asyncio.create_subprocess_exec(*command, stdout=DEVNULL, stderr=DEVNULL)
        try:
            await until_async(lambda: port.exists() and port.read_text().count("\n"), "the browser's port")
            address = f"http://127.0.0.1:{port.read_text().split()[0]}"
            async with aiohttp.ClientSession() as session:
                async with session.put(f"{address}/json/new") as answer:
                    target = (await answer.json())["webSocketDebuggerUrl"]
                async with session.ws_connect(target, max_msg_size=0) as socket:
                    opened = Tab(socket)
                    hearing = asyncio.create_task(opened.hear())
                    for domain in ("Page", "Network", "Log", "Runtime"):
                        await opened.call(f"{domain}.enable")
                    yield opened
                    hearing.cancel()
        finally:
            browser.terminate()
            await browser.wait()
