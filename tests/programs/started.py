"""Starts a command as an agent would: plainly, then warm from a parent that has imported nothing, then twice from one
that has imported what the first run did. What it prints comes out here; each run ends with a line on both streams.

    python started.py FOLDER {"preload": [MODULE...], "memory": BYTES, "seconds": NUMBER} COMMAND...

`memory` is what the container is to have, `seconds` how long imports may take. What each worker imports modules by
itself is said in a line of its own at the end.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

from concertina_agent.settings import AgentSettings
from concertina_agent.workers import warm_start as module
from concertina_agent.workers.child_processes import Reaper
from concertina_agent.workers.warm_start import WarmProcess
from concertina_agent.workers.workers import Process, start_command


def end(way: str, code: object) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        stream.write(f"END {way} {code}\n")
        stream.flush()


async def main(folder: Path, preload: tuple[str, ...], command: tuple[str, ...]) -> None:
    reaper = Reaper()
    reaper.start()
    environment = {name: value for name, value in os.environ.items() if name not in ("PWD", "SHLVL", "_")}
    worker = {"PYTHONUNBUFFERED": "1", **environment, "RANK": "0"}
    if worker["PYTHONUNBUFFERED"] == "no":
        worker["PYTHONUNBUFFERED"] = environment["PYTHONUNBUFFERED"] = ""
    settings = AgentSettings(
        uid="uid", replica="replica", pod_ip="127.0.0.1", port=1, workers=1, volume=folder, identity=folder, grace=1.0,
        checkpoints=False, environment=environment, command=command, warm_start=True, preload=preload,
    )  # fmt: skip
    process = start_command(command, worker, reaper)
    code = await process.ended
    await process.last_lines()
    end("plain", code)
    warm = WarmProcess(settings, reaper)
    warm.begin()
    await warm.settled()
    for way in ("warm", "learned", "again"):
        forked = await warm.start(worker, record=True, prefix="")
        if not isinstance(forked, Process):
            return end(way, forked)
        code = await forked.ended
        await forked.last_lines()
        end(way, code)
        if warm.why_plain:
            end("plainly", warm.why_plain)
        if way == "warm":
            warm._renew()
            await warm.settled()
    if warm.warm_start_skipped_modules:
        end("anew", warm.warm_start_skipped_modules)
    warm.stop()
    return None


if __name__ == "__main__":
    told = json.loads(sys.argv[2])
    if "memory" in told:
        module.container_memory = lambda: told["memory"]
    module.WARM_SECONDS = told.get("seconds", module.WARM_SECONDS)
    asyncio.run(main(Path(sys.argv[1]), tuple(told["preload"]), tuple(sys.argv[3:])))
