"""Start a command as an agent would: plainly, then plainly while its imports are recorded, then twice warm.

    python started.py FOLDER {"preload": [MODULE...], "memory": BYTES, "seconds": NUMBER} COMMAND...

The command's output is passed on, and each run ends with a line on both streams. `memory` is the container's memory,
and `seconds` the time limit of imports. Further lines say why a run was plain, and what each worker imports by itself.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

from concertina_agent.settings import HOOK, AgentSettings
from concertina_agent.workers import warm_program, warm_start
from concertina_agent.workers.child_processes import Reaper
from concertina_agent.workers.warm_start import WarmStart
from concertina_agent.workers.workers import Process, start_command


def end(way: str, code: object) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        stream.write(f"END {way} {code}\n")
        stream.flush()


async def ended(process: Process, reaper: Reaper, way: str) -> None:
    code = await process.ended
    await process.last_lines()
    process.send_signal(9)  # Processes that the command has left in the background.
    for pid in reaper.strays():
        os.kill(pid, 9)
    await process.gone()
    end(way, code)


async def main(folder: Path, preload: tuple[str, ...], command: tuple[str, ...]) -> None:
    reaper = Reaper()
    reaper.start()
    environment = {name: value for name, value in os.environ.items() if name not in ("PWD", "SHLVL", "_")}
    environment["PYTHONPATH"] = f"{HOOK}:{environment['PYTHONPATH']}"
    worker = {"PYTHONUNBUFFERED": "1", **environment, "RANK": "0"}
    if worker["PYTHONUNBUFFERED"] == "no":
        worker["PYTHONUNBUFFERED"] = environment["PYTHONUNBUFFERED"] = ""
    settings = AgentSettings(
        uid="uid", replica="replica", pod_ip="127.0.0.1", port=1, workers=1, volume=folder, identity=folder, grace=1.0,
        checkpoints=False, environment=environment, command=command, warm_start=True, preload=preload,
    )  # fmt: skip
    await ended(start_command(command, worker, reaper), reaper, "plain")
    warm = WarmStart(settings, reaper)
    warm.begin()
    await warm.settled()
    for way in ("first", "warm", "again"):
        process = await warm.start(worker, record=True, prefix="")
        while not isinstance(process, Process):
            await warm.settled()
            process = await warm.start(worker, record=True, prefix="")
        await ended(process, reaper, way)
        warm.look()
        for program in warm._programs.values():
            await program.settled()
        if way != "first" and warm.why:
            end("why", warm.why)
    if warm.warm_start_skipped_modules:
        end("anew", warm.warm_start_skipped_modules)
    warm.stop()


if __name__ == "__main__":
    told = json.loads(sys.argv[2])
    if "memory" in told:
        warm_start.container_memory = lambda: told["memory"]
    warm_program.WARM_SECONDS = told.get("seconds", warm_program.WARM_SECONDS)
    asyncio.run(main(Path(sys.argv[1]), tuple(told["preload"]), tuple(sys.argv[3:])))
