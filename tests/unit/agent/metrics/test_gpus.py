"""GPUs, with a small library in the place of NVML that is built here; NVIDIA's own library was not run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from builders.programs import SEARCH_PATH
from builders.until import until
from concertina_agent.metrics import families as f
from concertina_agent.metrics import gpu_faults
from concertina_agent.metrics.gpus import Gpus
from concertina_agent.metrics.nvml import GpuIdentity, Nvml, NvmlError, Reading

GPU = GpuIdentity(0, "GPU-0", "nvidia0", "H100")
SOURCE = Path(__file__).with_name("nvml.c")
COMPILER = shutil.which("cc")
FIRST, SECOND = (
    ("0", "GPU-0", "nvidia4", 'H100 "80"', "node-7"),
    ("1", "GPU-1", "nvidia5", 'H100 "80"', "node-7"),
)
LOOKS = """
import sys, time
from concertina_agent.metrics.gpus import Gpus
gpus = Gpus("node-7", sys.argv[1])
gpus.start()
while not list(gpus.samples(time.monotonic())):
    time.sleep(0.01)
print(len(list(gpus.samples(time.monotonic()))), flush=True)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if COMPILER is None:
        pytest.skip("there is no C compiler, which the stand-in for NVML is built by")
    built = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", str(built), str(SOURCE)], check=True, timeout=120)
    return built


def test_each_gpu_is_told_of_with_dcgms_labels(library: Path) -> None:
    faults: list[str] = []
    gpus = Gpus("node-7", str(library), faults.append)
    gpus.start()

    def seen() -> dict[tuple[object, ...], float]:
        return {(each.family, *each.labels): each.value for each in gpus.samples(time.monotonic())}  # type: ignore[misc]

    found = until(lambda: seen() if any(key[0] is f.GPU_XID for key in seen()) else {}, "an XID", seen)
    assert found.pop((f.GPU_SAMPLE_AGE,)) < 60
    assert found == {
        (f.GPU_UTILIZATION, *FIRST): 0.87,
        (f.GPU_XID, *FIRST, "79"): 1,
        **{
            (family, *gpu): value
            for gpu in (FIRST, SECOND)
            for family, value in {
                f.GPU_MEMORY_USED: 60 << 30,
                f.GPU_MEMORY_TOTAL: 80 << 30,
                f.GPU_SM_CLOCK: 1.98e9,
                f.GPU_MEMORY_CLOCK: 2.619e9,
                f.GPU_TEMPERATURE: 61,
                f.GPU_POWER: 412.5,
            }.items()
        },
        **{(f.GPU_ECC, *gpu, "corrected"): 5 for gpu in (FIRST, SECOND)},
        **{(f.GPU_ECC, *gpu, "uncorrected"): 1 for gpu in (FIRST, SECOND)},
    }
    # The thread reports the fault after it has counted the XID.
    until(lambda: faults, "a fault")
    assert faults == ['GPU 0 (H100 "80", GPU-0) reports XID 79 (the GPU has fallen off the bus)']


def test_what_was_seen_long_ago_is_not_told_of_but_its_age_is(library: Path) -> None:
    gpus = Gpus("node-7", str(library))
    gpus.start()
    until(lambda: list(gpus.samples(time.monotonic())), "a look")
    later = {each.family: each.value for each in gpus.samples(time.monotonic() + 3600)}
    assert later[f.GPU_SAMPLE_AGE] >= 3600  # type: ignore[operator]
    assert later.keys() <= {f.GPU_SAMPLE_AGE, f.GPU_XID}


def test_a_driver_that_hangs_keeps_no_process_from_ending(library: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": SEARCH_PATH, "NVML_HANGS": "1"}
    command = [sys.executable, "-c", LOOKS, str(library)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) > 10


def test_no_library_and_one_without_a_driver_are_said(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NvmlError, match="can't be loaded"):
        Nvml("libnothing-of-the-kind.so.1")
    monkeypatch.setenv("NVML_BROKEN", "1")
    with pytest.raises(NvmlError, match="nvmlInit_v2 returned the error code 9"):
        Nvml(str(library))


@pytest.mark.parametrize("xid", [13, 31, 43, 45])
def test_an_xid_that_a_program_causes_is_none(xid: int) -> None:
    assert gpu_faults.of_xid(GPU, xid) == ""


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (1, 3, "GPU 0 (H100, GPU-0) has had 2 uncorrected memory errors since the replica started"),
        (1, 1, ""),
        (None, 1, ""),
        (1, None, ""),
    ],
)
def test_new_uncorrected_errors_are_a_fault(before: int | None, now: int | None, said: str) -> None:
    """Errors from before the replica started may be of memory that the driver has replaced since."""
    assert gpu_faults.of_errors(GPU, before, now) == said


def test_errors_count_from_the_first_reading_that_has_them() -> None:
    faults: list[str] = []
    gpus = Gpus("", on_fault=faults.append)
    for errors in (None, 5, 5, 7):
        gpus._look_for_errors(((GPU, Reading(None, None, None, None, None, None, None, None, errors)),))
    assert faults == ["GPU 0 (H100, GPU-0) has had 2 uncorrected memory errors since the replica started"]
