"""Reaction of an agent to the death of a parent of its workers. It prints one line for each observation.

python parents.py FOLDER SCENARIO
"""

import asyncio
import functools
import math
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from concertina_agent.core import events as e
from concertina_agent.files.files_driver import FilesDriver
from concertina_agent.runtime.nursery import TaskGroup
from concertina_agent.settings import AgentSettings
from concertina_agent.workers import workers
from concertina_agent.workers.child_processes import Reaper
from concertina_agent.workers.workers import ForkTarget, Process, StartError, WorkerParent
from concertina_agent.workers.workers_driver import WorkersDriver

DIES_HAVING_ANSWERED = """
import json, os, signal, socket, sys
control = socket.socket(fileno=int(sys.argv[1]))
control.send(json.dumps({"warm": True}).encode())
socket.recv_fds(control, 1 << 18, 8)
waits, closed = os.pipe()
pid = os.fork()
if not pid:
    control.close()
    os.setsid()
    os.close(closed)
    signal.pause()
os.close(closed)
os.read(waits, 1)
control.send(json.dumps({"pid": pid}).encode())
os.kill(os.getpid(), signal.SIGKILL)
"""


async def dies_having_answered(folder: Path) -> None:
    """Kill a parent that has answered. The agent is busy meanwhile, and learns of both at once."""
    reaper = Reaper()
    reaper.start()
    parent = WorkerParent("nothing", reaper)
    parent.begin(lambda control: ([sys.executable, "-c", DIES_HAVING_ANSWERED, str(control)], os.environ))
    await asyncio.shield(parent.warm)
    (pid,) = children()
    asking = asyncio.ensure_future(parent.fork({}))
    await asyncio.sleep(0)
    stand_still_until_it_ends(pid)
    process = await asking
    assert isinstance(process, Process)
    try:
        code = await asyncio.wait_for(asyncio.shield(process.ended), 20)
        print(signal.Signals(-code).name, parent.idle)
    except TimeoutError:
        print("never ends")
    finally:
        process.send_signal(signal.SIGKILL)


async def followed(folder: Path, *, spoilt: Callable[[], None]) -> None:
    """Kill the bundled trainer's parent, and keep its successors from becoming warm."""
    workers.AGAIN_SECONDS = (0.01, 0.01)
    (folder / "little").mkdir()
    (folder / "little" / "preload.py").write_text(PRELOAD)
    settings = AgentSettings(
        uid="uid", replica="replica", pod_ip="127.0.0.1", port=1, workers=1, volume=folder, identity=folder, grace=1.0,
        checkpoints=False, environment=os.environ, package="little",
    )  # fmt: skip
    told: asyncio.Queue[e.Event] = asyncio.Queue()
    driver = WorkersDriver(settings, FilesDriver(folder), "", told.put_nowait, TaskGroup(), lambda now: math.inf)
    driver.start()
    print(await warm(told))
    spoilt()
    first = driver.parent.warm
    os.kill(*children(), signal.SIGKILL)
    while driver.parent.warm is first:
        await asyncio.sleep(0.001)
    try:
        process = await driver.parent.run(ForkTarget("little.preload:work"), os.environ)
        print("exit code", await process.ended)
    except StartError as error:
        print(error)
        print(await warm(told))
    await driver.stop()


PRELOAD = """
import os, signal, sys
for spoilt in ("once", "for good"):
    if os.path.exists(spoilt):
        os.path.exists("once") and os.unlink("once")
        os.kill(os.getpid(), signal.SIGKILL)

def work():
    return 7
"""


async def warm(told: asyncio.Queue[e.Event]) -> e.Warm:
    """Wait until the next time that a parent is reported to be warm."""
    while not isinstance(event := await told.get(), e.Warm):
        pass
    return event


def cant_start() -> None:
    sys.executable = "/nowhere/python3"


def stand_still_until_it_ends(pid: int) -> None:
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


SCENARIOS: dict[str, Callable[[Path], Awaitable[None]]] = {
    "dies having answered": dies_having_answered,
    "once": functools.partial(followed, spoilt=Path("once").touch),
    "for good": functools.partial(followed, spoilt=Path("for good").touch),
    "can't start": functools.partial(followed, spoilt=cant_start),
}


async def main(folder: Path, scenario: str) -> None:
    os.chdir(folder)
    await SCENARIOS[scenario](folder)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
