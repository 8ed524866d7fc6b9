"""Time until a new operator is connected to the coordinators of all jobs.

`python benchmarks/failover.py [JOBS ...] [--json FILE]`

Each job has one coordinator with the job's certificates. Processes serve the coordinators with the real protocol over
real mTLS. The operator's side is its own code (`concertina.agents`), in a process without any state, as after a
SIGKILL. The benchmark prints the seconds until half, 99 % and all of the coordinators are connected, and the processor
seconds for that. It also prints the longest time for which the operator's event loop was blocked.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import multiprocessing
import ssl
import tempfile
import time
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import report

import concertina_protocol as protocol
from concertina.agents.authority import Authority
from concertina.agents.connections import AgentConnections
from concertina_protocol.connection import Connection

MASTER, CREATED = b"benchmark-master-key" * 2, 1_700_000_000.0
SERVERS = 2
"""Number of processes that run the coordinators. They share the machine's processors with the operator's side."""


def uid(job: int) -> str:
    return f"job-{job}"


def told(job: int) -> protocol.Report:
    return protocol.Report("a-0-0", "i", True, 1, "c", protocol.State.RUNNING, coordinator=True)


async def _coordinator(job: int, folder: Path) -> int:
    """Start the server of one coordinator, and return its port."""
    for name, content in Authority(MASTER, uid(job), CREATED).secret_data().items():
        (folder / name).write_bytes(base64.b64decode(content))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version, context.verify_mode = ssl.TLSVersion.TLSv1_3, ssl.CERT_REQUIRED
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    context.load_verify_locations(folder / "ca.crt")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = Connection(reader, writer)
        try:
            if isinstance(await wire.receive(), protocol.Watch):
                while True:
                    await wire.send(told(job))
                    await asyncio.sleep(protocol.BEAT_SECONDS)
        except (OSError, asyncio.CancelledError):  # The other end is gone, or the benchmark has ended.
            pass
        finally:
            wire.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context, backlog=1024)
    port: int = server.sockets[0].getsockname()[1]
    return port


def serve(jobs: range, pipe: Pipe) -> None:
    """Run one server process. It sends the ports of its coordinators, and ends when it receives a message."""

    async def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            pipe.send([await _coordinator(job, Path(folder)) for job in jobs])
        await asyncio.to_thread(pipe.recv)

    asyncio.run(run())


async def _hear(ports: list[int]) -> dict[str, float]:
    heard: set[str] = set()
    at: list[float] = []
    begun, used = time.monotonic(), time.process_time()
    all_heard = asyncio.Event()
    longest = 0.0

    async def loop_is_free() -> None:
        nonlocal longest
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            longest = max(longest, time.monotonic() - before - 0.01)

    def changed(job: str, at_once: bool) -> None:
        if job not in heard and connections.views(job)["a-0-0"].connected:
            heard.add(job)
            at.append(time.monotonic() - begun)
            if len(heard) == len(ports):
                all_heard.set()

    connections = AgentConnections(changed)

    async def job(number: int, port: int) -> None:
        """Connect to the coordinator of job `number`, as the operator does when it first sees a job."""
        await connections.open(uid(number), CREATED, MASTER)
        connections.watch(uid(number), {"a-0-0": f"127.0.0.1:{port}"})

    free = asyncio.create_task(loop_is_free())
    await asyncio.gather(*(job(number, port) for number, port in enumerate(ports)))
    await asyncio.wait_for(all_heard.wait(), 300)
    free.cancel()
    used = time.process_time() - used
    connections.close()
    return {
        "half of the coordinators are heard": at[len(at) // 2],
        "99 %": at[len(at) * 99 // 100],
        "all": at[-1],
        "processor time of the operator": used,
        "longest standstill of its event loop": longest,
    }


def play(jobs: int) -> dict[str, float]:
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for part in range(SERVERS):
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=serve, args=(range(part, jobs, SERVERS), theirs), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    try:
        ports = [0] * jobs
        for part, pipe in enumerate(pipes):
            ports[part::SERVERS] = pipe.recv()
        return asyncio.run(_hear(ports))
    finally:
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.send("end")
            process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("jobs", type=int, nargs="*", default=[100, 1000])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    samples: dict[str, list[float]] = {}
    for jobs in options.jobs:
        for _ in range(options.runs):
            for what, seconds in play(jobs).items():
                samples.setdefault(f"{jobs} jobs: {what}", []).append(seconds)
    report.show("A new operator, until it hears the coordinators of all jobs", samples)
    report.write(options.json, "failover", samples)


if __name__ == "__main__":
    main()
