"""What a machine offers to GPU checks, and which checks cannot run on it."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from builders.gpu.checks import Check

ROOT = Path(__file__).resolve().parents[3]
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
PACKAGES = ROOT / "out" / "gpu-packages" / VERSION
"""Folder in which `make test-gpu-packages` puts packages for this Python, to be carried to a machine without a
network."""
TITAN = ROOT / "out" / "torchtitan" / VERSION
"""Folder with torchtitan for this Python. `benchmarks/trainer.py` adds it to the path of torchtitan's process alone."""
SEARCH_PATH = ROOT / "tests/gpu/older_torch", ROOT / "operator", ROOT / "trainer_image", ROOT / "tests", PACKAGES
PROBE_SECONDS = 120


@dataclasses.dataclass(frozen=True)
class Card:
    name: str
    memory_gib: float
    capability: tuple[int, int]
    """Compute capability."""


@dataclasses.dataclass(frozen=True)
class Machine:
    python: str
    torch: str | None = None
    """Version, or None without torch."""
    cuda: str | None = None
    nccl: str | None = None
    driver: str | None = None
    cards: tuple[Card, ...] = ()
    features: frozenset[str] = frozenset()
    missing_packages: frozenset[str] = frozenset()
    added_names: tuple[str, ...] = ()
    """Names that tests/gpu/older_torch has added to torch."""
    fault: str | None = None
    """Reason why the properties of torch and CUDA are unknown."""


def environment() -> dict[str, str]:
    """Return the environment of a check: the checkout's sources and the carried packages precede the interpreter's."""
    paths = [*map(str, SEARCH_PATH), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "OMP_NUM_THREADS": "1",  # tests/conftest.py sets it too, but pytest does not read it here.
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }


def probe(checks: Iterable[Check], environment: Mapping[str, str]) -> Machine:
    """Ask the interpreter in a process of its own."""
    packages = sorted({package for check in checks for package in check.packages})
    command = [sys.executable, "-m", "builders.gpu.probe", *packages]
    python, driver = sys.version.split()[0], _driver()
    variables = {**environment, "PYTHONPATH": os.pathsep.join([environment["PYTHONPATH"], str(TITAN)])}
    try:
        asked = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        return Machine(python, driver=driver, fault=f"torch and CUDA did not answer within {PROBE_SECONDS} s")
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or [f"exit status {asked.returncode}"])[-1]
        return Machine(python, driver=driver, fault=f"torch cannot be used: {last}")
    answer = json.loads(asked.stdout.splitlines()[-1])
    return Machine(
        python,
        answer.get("torch"),
        answer.get("cuda"),
        answer.get("nccl"),
        driver,
        tuple(Card(**card | {"capability": tuple(card["capability"])}) for card in answer.get("cards", ())),
        frozenset(answer.get("features", ())),
        frozenset(answer["missing_packages"]),
        tuple(answer["added_names"]),
    )


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        return None
    return asked.stdout.splitlines()[0].strip() if asked.returncode == 0 and asked.stdout.strip() else None


def why_not_runnable(check: Check, machine: Machine) -> str | None:
    """Return what the check needs and the machine lacks, or None."""
    if machine.fault:
        return machine.fault
    if machine.torch is None:
        return "this Python has no torch: name one that has, as in `PYTHON=python3 make test-gpu`"
    if not machine.cards:
        return f"no CUDA device: torch {machine.torch} finds none on this machine"
    if missing := [package for package in check.packages if package in machine.missing_packages]:
        return f"this Python has no {', '.join(missing)}: see `make test-gpu-packages` in docs/gpu-checks.md"
    if missing := [feature for feature in check.torch_features if feature not in machine.features]:
        return f"not runnable on this torch: {machine.torch} has no {', '.join(missing)}"
    if len(machine.cards) < check.gpus:
        return f"needs {check.gpus} GPUs, and this machine has {len(machine.cards)}"
    if (memory := min(card.memory_gib for card in machine.cards)) < check.memory_gib:
        return f"needs {check.memory_gib:g} GiB of GPU memory, and this GPU has {memory:.0f} GiB"
    if (capability := min(card.capability for card in machine.cards)) < check.capability:
        return f"needs compute capability {dotted(check.capability)}, and this GPU has {dotted(capability)}"
    return None


def dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
