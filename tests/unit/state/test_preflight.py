"""Preflight of GPUs, on tensors of the CPU: the same code, with planted wrong results and slow devices."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from builders.programs import SEARCH_PATH
from builders.wrong_results import Wrong
from concertina_state import preflight
from concertina_state.preflight import CPU, DeviceResult

DEVICE = torch.device("cpu")
aten = torch.ops.aten


def faults_of(test: Callable[[DeviceResult], None]) -> list[str]:
    result = DeviceResult()
    test(result)
    return result.faults


TESTS: dict[str, Callable[[DeviceResult], None]] = {
    "arithmetic": lambda result: preflight.multiply(DEVICE, CPU, result),
    "memory": lambda result: preflight.check_memory(DEVICE, CPU, math.inf, result),
    "copies": lambda result: preflight.copy(DEVICE, DEVICE, CPU, result),
}


@pytest.mark.parametrize("name", TESTS)
def test_a_healthy_device_has_no_fault(name: str) -> None:
    assert faults_of(TESTS[name]) == []


@pytest.mark.parametrize(
    ("name", "operation", "said"),
    [
        ("arithmetic", aten.mm.default, "computes 1 of 16384 elements of a product wrongly (float32)"),
        ("memory", aten.bitwise_xor.Scalar_out, "returns 1 of 262144 words of memory block 0 wrongly"),
        ("copies", aten.copy_.default, "sends 1 of 262144 words to device cpu wrongly"),
    ],
)
def test_a_planted_wrong_result_is_noticed(name: str, operation: Any, said: str) -> None:
    with Wrong(operation):
        faults = faults_of(TESTS[name])
    assert said in faults


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32])
def test_the_known_product_is_exact_in_each_type(kind: torch.dtype) -> None:
    rows, columns, left, right = preflight.factors(512, DEVICE)
    assert int((left * right).sum()) == preflight.SUM
    assert int((left * right).cumsum(0).abs().max()) <= preflight.SUM + 1
    expected = preflight.SUM * rows[:, None] * columns[None, :]
    assert torch.equal(expected.to(kind).long(), expected), "every element can be represented"
    assert not (expected == 0).any()


def test_the_memory_that_is_tested_is_bounded_by_a_share_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "free_bytes", lambda device: 5 * CPU.block_bytes)
    result = DeviceResult()
    TESTS["memory"](result)
    assert result.memory_bytes == 2 * CPU.block_bytes


def test_errors_of_the_hardware_are_faults_and_others_are_not() -> None:
    def fail(text: str) -> None:
        raise RuntimeError(text)

    result = DeviceResult()
    preflight.noted(result, "memory", lambda: fail("CUDA error: uncorrectable ECC error encountered\nmore"))
    preflight.noted(result, "arithmetic", lambda: fail("CUDA error: no kernel image is available for execution"))
    assert result.faults == ["fails in the test of memory: CUDA error: uncorrectable ECC error encountered"]
    assert len(result.notes) == 1


@pytest.mark.parametrize(
    "error",
    [
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: unspecified launch failure",
        "CUDA error: no kernel image is available for execution",
    ],
)
def test_an_error_that_does_not_name_the_hardware_is_only_noted(error: str) -> None:
    def fail() -> None:
        raise RuntimeError(error)

    result = DeviceResult()
    preflight.noted(result, "arithmetic", fail)
    assert (result.faults, result.notes) == ([], [f"arithmetic could not be tested: {error}"])


H100, MIG, L4 = ("H100", 80 << 30), ("H100", 10 << 30), ("L4", 24 << 30)


@pytest.mark.parametrize(
    ("models", "speeds", "said"),
    [
        (
            (H100,) * 4,
            (600.0, 610.0, 250.0, 605.0),
            ["c multiplies at 250 Tflop/s, and the other GPUs of its model at 602"],
        ),
        ((H100,) * 2, (600.0, 200.0), ["b multiplies at 200 Tflop/s, and the other GPUs of its model at 600"]),
        ((H100,) * 3, (600.0, 400.0, 500.0), []),
        ((L4, H100), (60.0, 290.0), []),
        ((MIG, H100), (60.0, 290.0), []),
        ((H100,), (600.0,), []),
        ((H100,) * 2, (0.0, 600.0), []),
    ],
)
def test_a_slow_device_is_named_beside_others_of_its_model(
    models: tuple[tuple[str, int], ...], speeds: tuple[float, ...], said: list[str]
) -> None:
    assert list(preflight.slow("abcd", models, speeds, 0.5)) == said


def test_slow_devices_and_unequal_copies_are_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of GPUs with a bridge of NVLink send at 270 GB/s within the pair, and at 14 GB/s to another pair."""
    speeds, copies = iter((600.0, 600.0, 600.0, 100.0)), iter((270.0, 14.0, 270.0, 14.0))

    def multiply(device: torch.device, extent: Any, result: DeviceResult) -> None:
        result.teraflops = next(speeds)

    def copy(source: torch.device, target: torch.device, extent: Any, result: DeviceResult) -> None:
        result.copy_gigabytes = next(copies)

    monkeypatch.setattr(preflight, "multiply", multiply)
    monkeypatch.setattr(preflight, "copy", copy)
    extent = dataclasses.replace(CPU, slow_arithmetic=0.5)
    report = preflight.run([DEVICE] * 4, extent, time.monotonic() + 60.0)
    assert report.faults == []
    assert [re.sub("#[0-3]", "#", warning) for warning in report.warnings] == [
        "device cpu # multiplies at 100 Tflop/s, and the other GPUs of its model at 600"
    ]


@pytest.fixture
def release() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_a_device_that_does_not_finish_is_slow_only_beside_one_that_does(
    release: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, calls, stuck = preflight.multiply, itertools.count(), {0}

    def multiply(device: torch.device, extent: Any, result: DeviceResult) -> None:
        if next(calls) in stuck:
            release.wait()
        whole(device, extent, result)

    monkeypatch.setattr(preflight, "multiply", multiply)
    report = preflight.run([DEVICE, DEVICE], CPU, time.monotonic() + 2.0)
    (late,) = report.warnings
    assert re.fullmatch(r"device cpu #[01] has not finished its test after 10 s \(the others took .* s\)", late)
    assert (report.faults, report.skipped) == ([], "")
    stuck |= {2, 3}
    report = preflight.run([DEVICE, DEVICE], CPU, time.monotonic() + 0.1)
    assert (report.faults, report.skipped) == ([], "no GPU finished the test within 10 s")


def run(folder: Path, *arguments: str, **environment: str) -> dict[str, Any]:
    path = folder / "report"
    command = [sys.executable, "-m", "concertina_state.preflight", str(path), *arguments]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(SEARCH_PATH), **environment}, check=True, timeout=120)
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def test_the_process_writes_its_report_and_ends(tmp_path: Path) -> None:
    report = run(tmp_path, "cpu,cpu")
    assert (report["faults"], report["skipped"]) == ([], "")
    assert [result["memory_bytes"] for result in report["devices"].values()] == [CPU.most_bytes] * 2
    assert all(result["copy_gigabytes"] > 0 for result in report["devices"].values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_where_torch_can_not_use_a_gpu_it_says_so(tmp_path: Path) -> None:
    assert run(tmp_path, "cuda")["skipped"] == "torch can't use the GPUs"


def test_where_there_is_no_torch_it_says_so(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'torch' else find(name, *rest)\n"
    )
    assert run(tmp_path, "cuda", PYTHONPATH=f"{tmp_path}:{SEARCH_PATH}")["skipped"] == "torch is not installed"
