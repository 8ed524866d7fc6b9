"""Output of the processes that an agent starts.

Each line is copied to the agent's own stdout or stderr. The last lines are kept for reports.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import re
import sys
from collections.abc import Iterator

from concertina_protocol.waiting import within

KEEP_LINES = 50
MAX_KEPT = 2000
"""Maximum number of characters of a line that are kept."""
NOISE = re.compile(
    rb"nanobind: | - leaked (instance|type|function) | - \.\.\. skipped remainder|See https://nanobind\."
)
"""Lines that nanobind, a library of triton, prints when a Python process ends after an error.

nanobind prints more such lines than a Tail keeps, so that they would displace the error itself.
"""
MAX_WAITING = 1 << 20
"""Maximum bytes that wait for a slow reader of the agent's output. Beyond this, the printing process has to wait."""


class Sink:
    """The agent's stdout or stderr.

    Writing never blocks: data that the stream does not accept at once are written later.
    """

    def __init__(self, fd: int) -> None:
        self._fd = _reopened(fd)
        self._waiting = bytearray()
        self._paused: list[Tail] = []

    def write(self, data: bytes, source: Tail) -> None:
        self._waiting += data
        self._flush()
        if len(self._waiting) > MAX_WAITING:
            source.pause()
            self._paused.append(source)

    def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                del self._waiting[: os.write(self._fd, self._waiting)]
        except BlockingIOError:
            loop.add_writer(self._fd, self._flush)
            return
        except OSError:
            self._waiting.clear()
        with contextlib.suppress(OSError, ValueError):
            loop.remove_writer(self._fd)
        for source in self._paused:
            source.resume()
        self._paused.clear()


class Tail:
    """Reader of the output of one process. It copies the output, and remembers the last lines."""

    def __init__(self, streams: dict[int, int]) -> None:
        self._streams = streams
        """Number of the output stream (1: stdout, 2: stderr) of each pipe, keyed by the pipe's read end."""
        self._partial = dict.fromkeys(streams, b"")
        self._lines: collections.deque[bytes] = collections.deque(maxlen=KEEP_LINES)
        self._prefix = b""
        self._closed = asyncio.Event()
        self.started = False
        self.last_error = ""
        """Last line of stderr that is not blank."""

    def start(self, prefix: str) -> None:
        """Begin to read the output, and copy each line to the agent's output with `prefix` before it."""
        self.started = True
        self._prefix = prefix.encode()
        for fd in self._streams:
            os.set_blocking(fd, False)
        self.resume()

    def start_anew(self, prefix: str) -> None:
        """Drop the stored lines of an earlier round, and copy further lines with the new `prefix`."""
        self._prefix, self.last_error = prefix.encode(), ""
        self._lines.clear()

    def last(self) -> tuple[str, ...]:
        return tuple(line[:MAX_KEPT].decode(errors="replace") for line in self._lines)

    async def closed(self, timeout: float) -> None:
        """Wait until all processes have closed the write ends of the pipes, but at most `timeout` seconds."""
        with contextlib.suppress(asyncio.TimeoutError):
            await within(timeout, self._closed.wait())

    def pause(self) -> None:
        for fd in self._streams:
            asyncio.get_running_loop().remove_reader(fd)

    def resume(self) -> None:
        for fd in self._streams:
            asyncio.get_running_loop().add_reader(fd, self._read, fd)

    def _read(self, fd: int) -> None:
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end(fd)
            return
        *lines, rest = (self._partial[fd] + data).split(b"\n")
        if len(rest) > 1 << 16:
            lines, rest = [*lines, rest], b""
        self._partial[fd] = rest
        self._handle_lines(fd, lines)

    def _handle_lines(self, fd: int, lines: list[bytes]) -> None:
        meaningful = [line for line in lines if not NOISE.match(line)]
        self._lines.extend(meaningful)
        if self._streams[fd] == 2 and (not_blank := [line for line in meaningful if line.strip()]):
            self.last_error = not_blank[-1][:MAX_KEPT].decode(errors="replace")
        if lines:
            _sink(self._streams[fd]).write(b"".join(self._prefix + line + b"\n" for line in lines), self)

    def _end(self, fd: int) -> None:
        asyncio.get_running_loop().remove_reader(fd)
        if self._partial[fd]:
            self._handle_lines(fd, [self._partial[fd]])
        os.close(fd)
        del self._streams[fd], self._partial[fd]
        if not self._streams:
            self._closed.set()


@contextlib.contextmanager
def pipes() -> Iterator[tuple[int, int, Tail]]:
    """Yield write ends of pipes for a child's stdout and stderr, and the Tail that reads them after its `start`.

    After the `with` block, the write ends are closed in this process.
    """
    (out_read, out), (err_read, err) = os.pipe(), os.pipe()
    tail = Tail({out_read: 1, err_read: 2})
    try:
        yield out, err, tail
    finally:
        for fd in (out, err) if tail.started else (out, err, out_read, err_read):
            os.close(fd)


_SINKS: dict[int, Sink] = {}


def _sink(fd: int) -> Sink:
    if fd not in _SINKS:
        _SINKS[fd] = Sink(fd)
    return _SINKS[fd]


def _reopened(fd: int) -> int:
    """Return a new descriptor of the same pipe or file, with an open file description of its own.

    The agent can make this description non-blocking without an effect on other processes that have the file open.
    """
    (sys.stdout if fd == 1 else sys.stderr).flush()
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)
    except OSError:
        return os.dup(fd)
