"""Preflight of real GPUs, with planted faults, and the flight recorder of NCCL at a hang."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from builders import hung_collective
from builders.programs import SEARCH_PATH
from builders.train import gpus
from builders.wrong_results import Wrong
from concertina_state import preflight
from concertina_state.preflight import GPU, DeviceResult

pytestmark = pytest.mark.gpu
aten = torch.ops.aten


def test_healthy_gpus_pass_the_preflight_in_time(folder: Path, record_property: Any) -> None:
    gpus.need(1)
    path = folder / "report"
    command = [sys.executable, "-m", "concertina_state.preflight", str(path), "cuda"]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(SEARCH_PATH)}, check=True, timeout=120)
    report = json.loads(path.read_text())
    assert (report["faults"], report["skipped"]) == ([], "")
    record_property("preflight without the import of torch, s", round(report["seconds"], 2))
    for number, result in enumerate(report["devices"].values()):
        assert result["notes"] == []
        assert result["memory_bytes"] > 0
        record_property(f"GPU {number}, float16, Tflop/s", round(result["teraflops"], 1))
        record_property(f"GPU {number}, memory tested, GiB", round(result["memory_bytes"] / 2**30, 1))
        record_property(f"GPU {number}, copy to the next GPU, GB/s", round(result["copy_gigabytes"], 1))


@pytest.mark.parametrize(
    ("operation", "said"),
    [(aten.mm.default, "product wrongly"), (aten.bitwise_xor.Scalar_out, "wrongly"), (aten.copy_.default, "wrongly")],
    ids=["arithmetic", "memory", "copies"],
)
def test_a_planted_wrong_result_is_noticed(operation: Any, said: str) -> None:
    gpus.need(1)
    device, result = torch.device("cuda", 0), DeviceResult()
    with Wrong(operation):
        preflight.multiply(device, GPU, result)
        preflight.check_memory(device, GPU, math.inf, result)
        preflight.copy(device, device, GPU, result)
    assert any(said in fault for fault in result.faults)


def test_ranks_that_hang_in_nccl_list_their_collectives(folder: Path) -> None:
    gpus.need(2)
    hung_collective.check(*hung_collective.listed("nccl", folder / "store", lambda rank: gpus.variables(rank, 2)))
