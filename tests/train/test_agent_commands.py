"""Agents running a command of one's own: real processes, TLS and sockets; the test speaks as the operator."""

import asyncio
import os
import sys

import pytest
from concertina_agent import protocol as p
from replicas import UID, running


def script(text: str) -> list[str]:
    return ["--", sys.executable, "-c", text]


SLEEPS = script("import time; print('up', flush=True); time.sleep(600)")


def gone(pid: int) -> bool:
    return not os.path.exists(f"/proc/{pid}")


def run(body) -> None:
    asyncio.run(body())


def test_three_replicas_succeed_with_torchruns_variables(folder):
    names = "RANK LOCAL_RANK WORLD_SIZE GROUP_RANK MASTER_ADDR OMPI_COMM_WORLD_SIZE SLURM_PROCID TORCHELASTIC_RUN_ID"
    text = f"import os; print('VARS', *(os.environ[n] for n in {names.split()!r}), flush=True)"

    async def body():
        async with running(folder, 3, script(text), workers=2) as job:
            await job.begin(1, job[0], job[1], job[2])
            report = await job.until(job[0], lambda r: r.state == "succeeded", "never succeeded")
            assert {m.state for m in report.members.values()} == {"succeeded"}
            ip = job[0].address.partition(":")[0]
            printed = [line for replica in job.replicas.values() for line in replica.log().splitlines() if "VARS" in line]
            assert sorted(printed) == [f"[rank {n}] VARS {n} {n % 2} 6 {n // 2} {ip} 6 {n} {UID}" for n in range(6)]

    run(body)
