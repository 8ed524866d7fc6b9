"""Processes that run simulated nodes and their stand-in agents, and the orders that the benchmark sends them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

from control_plane_agent import beat_rarely
from control_plane_node import Identities, SimulatedNode

from concertina.kube import access
from concertina.kube.client import Client
from concertina_agent.net import tls
from concertina_agent.runtime.nursery import TaskGroup
from concertina_protocol import connection as lines
from concertina_protocol import decode
from concertina_protocol.connection import small_tls_buffers
from concertina_protocol.descriptors import raise_limit

NODES_AT_ONCE = 16
LOOK_SECONDS = 0.02


@dataclass(frozen=True)
class KillPod:
    name: str


@dataclass(frozen=True)
class KillNode:
    name: str


@dataclass(frozen=True)
class LongestStandstill:
    """Order to a process of simulated nodes: return the longest time for which its event loop was blocked.

    The time counts since the previous order of this kind.
    """


Order = KillPod | KillNode | LongestStandstill | None
"""Order from the benchmark to a process. None ends the process.

The answer to a kill is its Unix time in seconds, or None if the process does not have that pod or node.
"""


@dataclass(frozen=True)
class Host:
    pid: int
    pipe: Pipe

    def ask(self, order: Order) -> float | None:
        self.pipe.send(order)
        answer: float | None = self.pipe.recv()
        return answer


@dataclass(frozen=True)
class Hosts:
    each: tuple[Host, ...]

    def kill(self, order: KillPod | KillNode) -> float:
        """Kill a pod or node, and return the Unix time in seconds.

        Raises:
            LookupError: When the pod or node does not run.
        """
        for host in self.each:
            if (at := host.ask(order)) is not None:
                return at
        raise LookupError(f"{order} runs nowhere")

    def longest_standstill(self) -> float:
        """Return the longest time in seconds for which the event loop of a process was blocked.

        Delays of this length may be caused by the simulated agents and not by the operator.
        """
        return max(host.ask(LongestStandstill()) or 0.0 for host in self.each)


@contextlib.contextmanager
def running(processes: int, nodes: int, kubeconfig: Path, network: str, logs: Path) -> Iterator[Hosts]:
    """Run the nodes node-0, node-1 and so on in the given number of processes. Yield when all of them are Ready.

    `network` is the first two numbers of the pods' IPv4 addresses. The third number is that of the node.
    """
    spawn = multiprocessing.get_context("spawn")
    hosts, started = [], []
    for part in range(processes):
        ours, theirs = spawn.Pipe()
        mine = {f"node-{node}": f"{network}.{node + 1}" for node in range(part, nodes, processes)}
        log = logs / f"nodes-{part}.log"
        process = spawn.Process(target=_serve, args=(mine, kubeconfig, log, theirs), daemon=True)
        process.start()
        started.append(process)
        assert process.pid is not None
        hosts.append(Host(process.pid, ours))
    try:
        for host in hosts:
            host.pipe.recv()  # The process's nodes have joined.
        yield Hosts(tuple(hosts))
    finally:
        for host in hosts:
            with contextlib.suppress(OSError):  # The process has ended.
                host.pipe.send(None)
        for process in started:
            process.join(10)
            process.kill()


def _serve(networks: dict[str, str], kubeconfig: Path, log: Path, pipe: Pipe) -> None:
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 1)
    os.dup2(1, 2)
    raise_limit()
    gc.disable()  # With thousands of agents, a full garbage collection would block the process for a second.
    beat_rarely()
    # The agents of a job share a context, because creating one takes 10 ms.
    for context in (tls.server_context, tls.client_context):
        setattr(tls, context.__name__, functools.cache(context))
    setattr(lines, "decode", functools.lru_cache(64)(decode))  # noqa: B010 - a Prepare names all to all, who are on machines of their own
    with small_tls_buffers():
        asyncio.run(_live(networks, kubeconfig, pipe))
    os._exit(0)  # Exit without closing thousands of connections.


async def _live(networks: dict[str, str], kubeconfig: Path, pipe: Pipe) -> None:
    tasks = TaskGroup()
    async with Client(await access.load(str(kubeconfig)), give_up_after=60.0) as client:
        with tempfile.TemporaryDirectory() as folder:
            identities = Identities(client, Path(folder))
            nodes = {
                name: SimulatedNode(name, network, client, identities, tasks) for name, network in networks.items()
            }
            some = asyncio.Semaphore(NODES_AT_ONCE)

            async def join(node: SimulatedNode) -> None:
                async with some:
                    await node.join()

            await asyncio.gather(*map(join, nodes.values()))
            pipe.send("joined")
            loop = LoopWatch()
            tasks.start("watch the loop", loop.run())
            while (order := await _receive(pipe)) is not None:
                pipe.send(loop.take() if isinstance(order, LongestStandstill) else await _obey(nodes, order))


class LoopWatch:
    def __init__(self) -> None:
        self._longest = 0.0

    async def run(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(LOOK_SECONDS)
            self._longest = max(self._longest, time.monotonic() - before - LOOK_SECONDS)

    def take(self) -> float:
        longest, self._longest = self._longest, 0.0
        return longest


async def _obey(nodes: dict[str, SimulatedNode], order: KillPod | KillNode) -> float | None:
    if isinstance(order, KillNode):
        return await nodes[order.name].power_off() if order.name in nodes else None
    for node in nodes.values():
        if (at := await node.kill(order.name)) is not None:
            return at
    return None


async def _receive(pipe: Pipe) -> Order:
    """Return the next order. Return None if there is no benchmark process any more."""
    loop = asyncio.get_running_loop()
    arrived = asyncio.Event()
    loop.add_reader(pipe.fileno(), arrived.set)
    try:
        await arrived.wait()
        order: Order = pipe.recv()
        return order
    except EOFError:
        return None
    finally:
        loop.remove_reader(pipe.fileno())
