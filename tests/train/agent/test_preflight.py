"""Preflight of an agent, with tensors of the CPU in the place of GPUs: before it, the replica is not ready."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from builders.programs import PROGRAMS, SEARCH_PATH
from builders.train.replicas import Job, running

WRONG = """
import importlib.abc, importlib.machinery, sys

class Patching(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            matmul = module.Tensor.__matmul__
            def wrong(a, b):
                product = matmul(a, b)
                product[3, 4] += 1
                return product
            module.Tensor.__matmul__ = wrong
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Patching())
"""
SCRIPT = ["--", sys.executable, str(PROGRAMS / "stuck.py")]
COMMON = {"CONCERTINA_STEP_DETECTION": "false"}


def logged(log: str, event: str) -> list[dict]:
    lines = (line for line in log.splitlines() if f'"event":"{event}"' in line)
    return [json.loads(line[line.index("{") :]) for line in lines]


def test_a_replica_is_ready_after_its_preflight_which_an_agent_without_gpus_skips(folder: Path) -> None:
    async def body() -> None:
        async with running(folder / "a", 1, SCRIPT, CONCERTINA_PREFLIGHT="cpu,cpu", **COMMON) as job:
            report = await job.until(job[0], lambda r: r.ready, "it did not become ready")
            assert report.gpu_fault == ""
            (outcome,) = logged(job[0].log(), "preflight")
            assert (outcome["fault"], outcome["warnings"], outcome["skipped"]) == ("", "", "")
        async with running(folder / "b", 1, SCRIPT, CONCERTINA_PREFLIGHT="false", **COMMON) as job:
            await job.until(job[0], lambda r: r.ready, "it did not become ready")
            assert logged(job[0].log(), "preflight") == []
            assert [line["why"] for line in logged(job[0].log(), "preflight_skipped")] == [
                "failurePolicy.gpuPreflight is false"
            ]

    asyncio.run(body())


def test_a_wrong_product_is_reported_and_the_replica_does_not_become_ready_not_even_after_a_restart(
    folder: Path,
) -> None:
    fault = folder / "planted"
    fault.mkdir()
    (fault / "sitecustomize.py").write_text(WRONG)

    async def body() -> None:
        planted = {"CONCERTINA_PREFLIGHT": "cpu,cpu", "PYTHONPATH": f"{fault}:{SEARCH_PATH}", **COMMON}
        job = Job(folder, 1, SCRIPT, **planted)
        try:
            job[0].start()
            report = await job.until(job[0], lambda r: r.gpu_fault, "the fault was not noticed")
            assert "device cpu #0 computes 1 of 16384 elements of a product wrongly (float32)" in report.gpu_fault
            assert not report.ready
            (fault / "sitecustomize.py").unlink()
            job[0].restart(SCRIPT)
            report = await job.until(job[0], lambda r: r.gpu_fault, "the report of the first preflight is lost")
            assert not report.ready
        finally:
            await job.stop()

    asyncio.run(body())
