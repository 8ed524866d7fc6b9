"""Output of containers: lines with their time of arrival, stored in one file for each start, as by the kubelet."""

import asyncio
import datetime
import os
from collections.abc import AsyncIterator
from pathlib import Path

_CHUNK = 65536


def timestamp() -> str:
    """Return the current time as in container logs: RFC 3339 in UTC with microseconds."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


class LogWriter:
    """Reads a container's output from a pipe and appends it to a file. Each line has the form TIME SPACE TEXT."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (closed with the pipe)
        self._rest = b""
        self._changed = asyncio.Event()
        self.done = asyncio.Event()  # the last process that could write is gone

    def attach(self) -> int:
        """Create a pipe and start to read it. Return its write end, which is for the container."""
        read, write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(read, False)
        asyncio.get_running_loop().add_reader(read, self._read, read)
        return write

    def _read(self, descriptor: int) -> None:
        try:
            data = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data or len(self._rest) > _CHUNK:
            lines, self._rest = lines + ([self._rest] if self._rest else []), b""
        if lines:
            stamp = timestamp().encode() + b" "
            self._file.write(b"".join(stamp + line + b"\n" for line in lines))
        if not data:
            asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)
            self._file.close()
            self.done.set()
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self) -> None:
        """Wait until more output has been written to the file, or until the output has ended."""
        if not self.done.is_set():
            await self._changed.wait()


def lines(path: Path, tail: int | None = None, since: str = "", with_time: bool = False) -> list[bytes]:
    """Return lines of a log file, with or without their times.

    Args:
        path: Path of the log file.
        tail: Number of lines to return, from the end of the log; None for all lines.
        since: Time of the earliest line to return; empty for no limit.
        with_time: Whether each line begins with its time.
    """
    selected = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    if since:
        selected = [line for line in selected if line.partition(b" ")[0] >= since.encode()]
    if tail is not None:
        selected = selected[-tail:] if tail > 0 else []
    return selected if with_time else [line.partition(b" ")[2] for line in selected]


async def follow(writer: LogWriter, offset: int, with_time: bool) -> AsyncIterator[bytes]:
    """Yield the text that is appended to a log file after `offset`, until the container's output ends."""
    with open(writer.path, "rb") as file:  # noqa: ASYNC230 (a local file)
        file.seek(offset)
        while True:
            ended = writer.done.is_set()
            data = file.read()
            if data:
                chunk = data.splitlines(keepends=True)
                yield data if with_time else b"".join(line.partition(b" ")[2] for line in chunk)
            elif ended:
                return
            else:
                await writer.wait()
