"""What an agent makes of a parent of processes that dies. It says what it has seen, a line each.

python parents.py FOLDER SCENARIO
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from concertina_agent.workers.processes import Reaper
from concertina_agent.workers.workers import Parent, Process

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


async def dies_having_answered(folder: Path, reaper: Reaper) -> None:
    """The agent is at something else meanwhile, and hears of both at once."""
    parent = Parent("nothing", reaper)
    parent.begin(lambda control: ([sys.executable, "-c", DIES_HAVING_ANSWERED, str(control)], os.environ))
    await asyncio.shield(parent.warm)
    asking = asyncio.ensure_future(parent.fork({}))
    await asyncio.sleep(0)
    stand_still_until_it_ends(*children())
    process = await asking
    assert isinstance(process, Process)
    try:
        code = await asyncio.wait_for(asyncio.shield(process.ended), 20)
        print(signal.Signals(-code).name, parent.idle)
    except TimeoutError:
        print("never ends")
    finally:
        process.send_signal(signal.SIGKILL)


def stand_still_until_it_ends(pid: int) -> None:
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


SCENARIOS: dict[str, Callable] = {"dies having answered": dies_having_answered}


async def main(folder: Path, scenario: str) -> None:
    reaper = Reaper()
    reaper.start()
    await SCENARIOS[scenario](folder, reaper)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
