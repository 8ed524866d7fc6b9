"""Runs of a script in forks of a process that has imported torch, because each import takes 2 s of processor time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from subprocess import CompletedProcess

from torch.distributed import TCPStore

from builders.train.node import Parent


def run(parent: Parent, folder: Path, world: int, script: Path, *arguments: str) -> CompletedProcess[str]:
    """Run a script in a folder to its end, in ranks like those of torchrun.

    When a rank fails, the others are killed. The exit code is that of the first rank that fails.
    """
    store = TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
    environment = {
        "FORKED_FOLDER": str(folder),
        "FORKED_COMMAND": json.dumps([str(script), *arguments]),
        "HOME": str(folder),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if world > 1:
        environment |= {
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
    with (folder / "stdout").open("w+") as output, (folder / "stderr").open("w+") as errors:
        pids = []
        for rank in range(world):
            of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if world > 1 else {}
            pids.append(parent.fork("forked:main", {**environment, **of_rank}, output.fileno(), errors=errors.fileno()))
        code = _wait(parent, pids)
        output.seek(0)
        errors.seek(0)
        return CompletedProcess([str(script), *arguments], code, output.read(), errors.read())


def _wait(parent: Parent, pids: list[int]) -> int:
    running, failed = set(pids), 0
    while running:
        ended = {pid: code for pid in running if (code := parent.codes.pop(pid, None)) is not None}
        running -= ended.keys()
        if not failed and (failed := next(filter(None, ended.values()), 0)):
            for pid in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if running and not ended:
            parent.hear()
    return failed
