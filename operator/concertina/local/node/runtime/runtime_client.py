"""Client with which the kubelet requests processes from the runtime, and waits for the processes to end."""

import asyncio
import contextlib
import os
import signal
import socket

from concertina.local.node.runtime.runtime_process import Execution, Launch, receive_event, send_request


class LaunchFailed(Exception):
    """Error: a process could not be started. The message gives the reason."""


class Running:
    """Process that the runtime has started.

    Its attributes are its pid in the node's pid namespace, and its exit code, once it has ended.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.pid: asyncio.Future[int] = loop.create_future()
        self.exit: asyncio.Future[int] = loop.create_future()

    def signal(self, number: int) -> None:
        """Send a signal to the process, unless it has ended."""
        if self.pid.done() and not self.exit.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid.result(), number)


class RuntimeClient:
    """Client for requests to the runtime. Call listen() once inside the event loop."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._running: dict[str, Running] = {}

    def listen(self) -> None:
        asyncio.get_running_loop().add_reader(self._link, self._receive)

    async def start(self, request: Launch | Execution, output: int) -> Running:
        """Start a process whose output goes to the descriptor `output`. This method closes `output`.

        If this coroutine is cancelled and the process starts anyway, the process is killed.

        Raises:
            LaunchFailed: When the process cannot be started.
            asyncio.CancelledError: When the start is cancelled.
        """
        running = self._running[request.id] = Running()
        send_request(self._link, request, output)
        os.close(output)
        try:
            await asyncio.shield(running.pid)
        except asyncio.CancelledError:
            running.pid.add_done_callback(lambda pid: None if pid.exception() else running.signal(signal.SIGKILL))
            raise
        return running

    def _receive(self) -> None:
        event = receive_event(self._link)
        if event is None:
            asyncio.get_running_loop().stop()
        elif event.kind == "started":
            self._running[event.id].pid.set_result(event.value)
        elif event.kind == "failed":
            self._running.pop(event.id).pid.set_exception(LaunchFailed(event.text))
        else:
            self._running.pop(event.id).exit.set_result(_exit_code(event.value))


def _exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code
