"""Test of a pod's GPUs before its replica becomes ready: arithmetic, memory and copies between GPUs.

    python -m concertina_state.preflight REPORT DEVICE       DEVICE is `cuda` for all GPUs, or `cpu,cpu` in tests

The process writes a `PreflightReport` as JSON into the file REPORT and exits, so that no process of the pod keeps a
context on the GPUs. The agent starts this process (`concertina_agent.workers.preflight`).

All values are small integers, so every correct result is exact in every type and in every order of additions. Only a
wrong result, or an error that names the hardware, is a fault. A time also depends on other things than the GPU's
health, for example on the temperature and on the processor. A slow GPU therefore only causes a warning.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

DEADLINE_SECONDS = 10.0
"""Maximum seconds for the initialization of the GPUs, and for the test after that."""
SUM = 64
"""Sum of the products of each row of `a` and each column of `b`, before their factors."""
HARDWARE = ("uncorrectable", "ECC", "hardware", "NVLink")
"""Texts in CUDA errors that indicate faulty hardware. Other errors may be caused by the driver or by torch."""
ROUNDS = 3
"""Number of timed rounds of multiplications, of which the fastest counts."""


@dataclasses.dataclass(frozen=True)
class Extent:
    """Sizes and limits of the test of each device."""

    size: int
    """Rows and columns of the matrices."""
    repeats: int
    """Number of multiplications in a timed round."""
    memory_share: float
    """Share of the free memory that is tested."""
    block_bytes: int
    """Size of a block of memory, and of a copy to a neighbor."""
    most_bytes: int
    """Maximum number of bytes of memory that are tested."""
    slow_arithmetic: float
    """Share of the median speed of the pod's devices of the same model below which a device counts as slow."""


GPU = Extent(8192, 12, 0.5, block_bytes=256 << 20, most_bytes=64 << 30, slow_arithmetic=0.5)
CPU = Extent(128, 2, 0.5, block_bytes=1 << 20, most_bytes=8 << 20, slow_arithmetic=0.0)
"""Extent of tests on CPUs. Speeds are not compared, because the processes of a machine share the machine's cores."""


@dataclasses.dataclass
class DeviceResult:
    """Result of one device."""

    faults: list[str] = dataclasses.field(default_factory=list)
    """Parts of sentences that say what is wrong with the device."""
    notes: list[str] = dataclasses.field(default_factory=list)
    """Parts of sentences about omitted tests, and about errors that do not name the hardware."""
    teraflops: float = 0.0
    """Measured speed of multiplications of float16 matrices, in 10^12 operations a second."""
    memory_bytes: int = 0
    """Number of bytes of memory that were tested."""
    copy_gigabytes: float = 0.0
    """Measured speed of a copy to the next device, in 10^9 bytes a second. It depends on the route of the copy."""
    seconds: float = 0.0


@dataclasses.dataclass
class PreflightReport:
    """Result of a preflight, which the agent reads."""

    faults: list[str] = dataclasses.field(default_factory=list)
    """Parts of sentences that name devices with wrong results, wrong memory or a hardware error."""
    warnings: list[str] = dataclasses.field(default_factory=list)
    """Parts of sentences that name devices that are slow, or could not be tested completely."""
    skipped: str = ""
    """Reason why the test was not made, or not completely, or ""."""
    seconds: float = 0.0
    """Seconds that the test took, without the import of torch."""
    devices: dict[str, DeviceResult] = dataclasses.field(default_factory=dict)
    """Result of each device, keyed by the device's name."""


def factors(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the vectors of the test: the factors of rows and columns, and the terms of each sum.

    The products of the terms add up to SUM, and the sum of any neighboring products is small.
    """
    import torch

    steps = torch.arange(size, device=device)
    values = torch.tensor([1, -2, 2, -1], device=device)
    rows, columns = values[steps % 4], values[(steps // 3) % 4]
    left = values[steps % 2 * 3]
    right = torch.where(steps < SUM, left, torch.ones_like(left))
    return rows, columns, left, right


def multiply(device: torch.device, extent: Extent, result: DeviceResult) -> None:
    """Multiply matrices with a known product, in float16 and float32, and measure the speed in float16."""
    import torch

    rows, columns, left, right = factors(extent.size, device)
    expected = SUM * rows[:, None] * columns[None, :]
    for kind in (torch.float32, torch.float16):
        a, b = (rows[:, None] * left[None, :]).to(kind), (right[:, None] * columns[None, :]).to(kind)
        product = a @ b
        wrong = int((product != expected.to(kind)).count_nonzero())
        if wrong:
            name = str(kind).rpartition(".")[2]
            result.faults.append(f"computes {wrong} of {product.numel()} elements of a product wrongly ({name})")
    seconds = min(timed(device, extent.repeats, lambda: a @ b) for _ in range(ROUNDS))
    result.teraflops = 2 * extent.size**3 * extent.repeats / seconds / 1e12


def timed(device: torch.device, repeats: int, work: Callable[[], object]) -> float:
    """Return the seconds that a device takes for `repeats` calls of `work`. A GPU measures the time itself."""
    import torch

    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(repeats):
            work()
        return time.perf_counter() - begin
    with torch.cuda.device(device):
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begun.record()
        for _ in range(repeats):
            work()
        ended.record()
        ended.synchronize()
    return float(begun.elapsed_time(ended)) / 1e3


def check_memory(device: torch.device, extent: Extent, until: float, result: DeviceResult) -> None:
    """Write patterns into a share of the free memory, and read them back.

    All blocks are written before the first one is read, so that a write to a wrong address is noticed too. `until` is
    the time (time.monotonic) at which no further block is allocated.

    Raises:
        RuntimeError: If the device reports an error other than a lack of memory.
    """
    import torch

    most = min(extent.most_bytes, int(extent.memory_share * free_bytes(device)))
    addresses = torch.arange(extent.block_bytes // 4, dtype=torch.int32, device=device)
    blocks: list[torch.Tensor] = []
    try:
        while (len(blocks) + 1) * extent.block_bytes <= most and time.monotonic() < until:
            blocks.append(torch.empty_like(addresses))
    except RuntimeError as error:  # another process may have taken the memory
        if not _is_out_of_memory(error):
            raise
        result.notes.append("less memory was free than the driver said")
    for flip in (0x55555555, 0x2AAAAAAA):
        for number, block in enumerate(blocks):
            torch.bitwise_xor(addresses, flip ^ number, out=block)
        for number, block in enumerate(blocks):
            if wrong := int((block.bitwise_xor_(flip ^ number) != addresses).count_nonzero()):
                result.faults.append(f"returns {wrong} of {block.numel()} words of memory block {number} wrongly")
                return
    result.memory_bytes = len(blocks) * extent.block_bytes


def copy(source: torch.device, target: torch.device, extent: Extent, result: DeviceResult) -> None:
    """Copy a pattern to the next device, compare it there, and measure the speed."""
    import torch

    sent = torch.arange(extent.block_bytes // 4, dtype=torch.int32, device=source)
    received = torch.zeros(sent.shape, dtype=sent.dtype, device=target)
    received.copy_(sent)
    synchronized(source)
    begin = synchronized(target)
    received.copy_(sent)
    synchronized(source)
    seconds = synchronized(target) - begin
    expected = torch.arange(extent.block_bytes // 4, dtype=torch.int32, device=target)
    wrong = int((received != expected).count_nonzero())
    if wrong:
        result.faults.append(f"sends {wrong} of {sent.numel()} words to {label(target)} wrongly")
    result.copy_gigabytes = extent.block_bytes / max(seconds, 1e-9) / 1e9


def synchronized(device: torch.device) -> float:
    """Wait until the device has finished its work, and return the present time in seconds."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def free_bytes(device: torch.device) -> int:
    import torch

    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 1 << 40


def label(device: torch.device) -> str:
    """Return a name of the device, such as `GPU 3 (NVIDIA H100, GPU-...)`."""
    import torch

    if device.type != "cuda":
        return f"device {device}"
    properties = torch.cuda.get_device_properties(device)
    return f"GPU {device.index} ({properties.name}, GPU-{getattr(properties, 'uuid', 'unknown')})"


def model(device: torch.device) -> tuple[str, int]:
    """Return the name and the memory in bytes of a device. Devices are compared only if both values are equal."""
    import torch

    if device.type != "cuda":
        return device.type, 0
    properties = torch.cuda.get_device_properties(device)
    return properties.name, properties.total_memory


def _is_out_of_memory(error: RuntimeError) -> bool:
    return "out of memory" in str(error)


def noted(result: DeviceResult, what: str, test: Callable[[], None]) -> None:
    """Run a part of the test. An error counts as a fault only if it names the hardware."""
    try:
        test()
    except RuntimeError as error:
        text = str(error).partition("\n")[0][:200]
        if any(sign in text for sign in HARDWARE):
            result.faults.append(f"fails in the test of {what}: {text}")
        else:
            result.notes.append(f"{what} could not be tested: {text}")


def run(devices: Sequence[torch.device], extent: Extent, until: float) -> PreflightReport:
    """Test the devices at the same time, and then the copies between them, until the time `until` (time.monotonic)."""
    begin = time.monotonic()
    names = [f"{label(device)}{f' #{number}' if device.type == 'cpu' else ''}" for number, device in enumerate(devices)]
    results = [DeviceResult() for _ in devices]

    def test(number: int) -> None:
        device, result = devices[number], results[number]
        noted(result, "arithmetic", lambda: multiply(device, extent, result))
        noted(result, "memory", lambda: check_memory(device, extent, begin + (until - begin) / 2, result))
        result.seconds = time.monotonic() - begin

    def test_copies() -> None:
        for number, device in enumerate(devices):
            target, result = devices[(number + 1) % len(devices)], results[number]
            noted(result, "copies", lambda d=device, t=target, r=result: copy(d, t, extent, r))  # type: ignore[misc]

    unfinished = in_threads([lambda n=number: test(n) for number in range(len(devices))], until)  # type: ignore[misc]
    report = PreflightReport(devices=dict(zip(names, results)))
    if not unfinished and len(devices) > 1 and in_threads([test_copies], until):
        report.skipped = f"copies between GPUs did not end within {DEADLINE_SECONDS:g} s"
    report.faults = [f"{name} {fault}" for name, result in zip(names, results) for fault in result.faults]
    if len(unfinished) == len(devices):
        report.skipped = f"no GPU finished the test within {DEADLINE_SECONDS:g} s"
    report.warnings = [
        *late(names, results, unfinished),
        *slow(names, [model(d) for d in devices], [r.teraflops for r in results], extent.slow_arithmetic),
        *(f"{name}: {note}" for name, result in zip(names, results) for note in result.notes),
    ]
    report.seconds = time.monotonic() - begin
    return report


def in_threads(tests: Sequence[Callable[[], None]], until: float) -> list[int]:
    """Run tests in parallel, and return the numbers of the tests that have not ended at the time `until`."""
    threads = [threading.Thread(target=test, daemon=True) for test in tests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return [number for number, thread in enumerate(threads) if thread.is_alive()]


def late(names: Sequence[str], results: Sequence[DeviceResult], unfinished: Sequence[int]) -> Iterator[str]:
    """Yield part of a sentence about each device that has not finished although other devices have."""
    finished = [result.seconds for number, result in enumerate(results) if number not in unfinished]
    for number in unfinished if finished else ():
        others = f"the others took {statistics.median(finished):.1f} s"
        yield f"{names[number]} has not finished its test after {DEADLINE_SECONDS:g} s ({others})"


def slow(
    names: Sequence[str], models: Sequence[tuple[str, int]], teraflops: Sequence[float], share: float
) -> Iterator[str]:
    """Yield part of a sentence about each device that is much slower than the median of devices of the same model."""
    for name, model, speed in zip(names, models, teraflops):
        known = [other for of_model, other in zip(models, teraflops) if of_model == model and other > 0]
        median = statistics.median(known) if len(known) > 2 else max(known, default=0.0)
        if 0 < speed < share * median:
            yield f"{name} multiplies at {speed:.3g} Tflop/s, and the other GPUs of its model at {median:.3g}"


def devices_of(argument: str) -> list[torch.device]:
    """Return the devices that the argument names, with an initialized context on each GPU."""
    import torch

    if argument != "cuda":
        return [torch.device(name) for name in argument.split(",")]
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_tf32 = False
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    for device in devices:
        torch.zeros(1, device=device)
    return devices


def preflight(argument: str) -> PreflightReport:
    """Test the devices that the argument names, or return the reason why they can't be tested."""
    if importlib.util.find_spec("torch") is None:
        return PreflightReport(skipped="torch is not installed")
    import torch

    begin = time.monotonic()
    if argument == "cuda" and not torch.cuda.is_available():
        return PreflightReport(skipped="torch can't use the GPUs")
    found: list[list[torch.device]] = []
    errors: list[str] = []

    def initialize() -> None:
        try:
            found.append(devices_of(argument))
        except RuntimeError as error:
            errors.append(str(error).partition("\n")[0][:200])

    if in_threads([initialize], begin + DEADLINE_SECONDS):
        return PreflightReport(skipped=f"the GPUs were not initialized within {DEADLINE_SECONDS:g} s")
    if errors:
        return PreflightReport(skipped=f"the GPUs can't be initialized: {errors[0]}")
    return run(found[0], CPU if argument.startswith("cpu") else GPU, time.monotonic() + DEADLINE_SECONDS)


def main(arguments: Sequence[str]) -> None:
    path, argument = arguments
    report: Mapping[str, Any] = dataclasses.asdict(preflight(argument))
    with open(f"{path}.part", "w") as file:
        json.dump(report, file)
    os.replace(f"{path}.part", path)
    sys.stdout.flush()
    os._exit(0)  # a thread may hang in the driver


if __name__ == "__main__":
    main(sys.argv[1:])
