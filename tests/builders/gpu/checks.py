"""The GPU checks, in the order of their worth: `make test-gpu` runs them from the top until its deadline.

To add a check, add a row to CHECKS. `tests/unit/repository/test_gpu_checks.py` makes sure that every test in tests/gpu
belongs to exactly one row.
"""

from __future__ import annotations

import dataclasses
import enum

TRAINER_PACKAGES = ("numpy", "obstore", "pydantic")
"""Modules that the trainer imports beside torch."""
TITAN_PACKAGES = ("torchtitan", "torchdata", "datasets", "tokenizers")
"""Modules for the comparison with torchtitan, which `make test-gpu-packages` does not provide."""
LAYOUT = "tests/gpu/test_layouts.py::test_gradients_are_those_of_one_gpu"
OFFLOAD = "tests/gpu/test_offload.py::test_so_is_one_of_two_gpus"
PIPELINES = ("pipelines of given microbatches",)


class Kind(enum.Enum):
    TESTS = "tests"
    """Tests for pytest. Figures are what a test passes to pytest's `record_property`."""
    BENCHMARK = "benchmark"
    """A program that takes `--json FILE` and writes FILE with `report.write` of benchmarks/report.py."""


@dataclasses.dataclass(frozen=True)
class Check:
    name: str
    shows: str
    kind: Kind
    arguments: tuple[str, ...]
    """Names of tests, or a program and its arguments; paths are relative to the checkout."""
    limit_seconds: int
    """The check has failed if it takes longer."""
    packages: tuple[str, ...] = ()
    """Modules that the check imports beside torch."""
    torch_features: tuple[str, ...] = ()
    """Names from TORCH_FEATURES of probe.py that the check needs."""
    gpus: int = 1
    memory_gib: float = 0.0
    """GPU memory that the check needs."""


def _tests(
    name: str, shows: str, *names: str, limit_seconds: int, torch_features: tuple[str, ...] = (), gpus: int = 1
) -> Check:
    packages = ("pytest", *TRAINER_PACKAGES)
    return Check(name, shows, Kind.TESTS, names, limit_seconds, packages, torch_features, gpus)


def _benchmark(
    name: str, shows: str, *command: str, limit_seconds: int, packages: tuple[str, ...] = (), memory_gib: float = 0.0
) -> Check:
    modules = (*TRAINER_PACKAGES, *packages)
    return Check(name, shows, Kind.BENCHMARK, command, limit_seconds, modules, memory_gib=memory_gib)


CHECKS = (
    _benchmark(
        "beside-torchtitan",
        "a compiled step of 1B beside torchtitan's: tokens a second, MFU by both conventions, bytes a weight",
        *("benchmarks/trainer.py", "--model", "1B", "--blocks", "5", "--only", "concertina", "torchtitan"),
        limit_seconds=150,
        packages=("cryptography", *TITAN_PACKAGES),
        memory_gib=64,
    ),
    _tests(
        "recovery",
        "three replicas on one GPU recover from the loss of one",
        "tests/gpu/test_recovery.py",
        limit_seconds=150,
    ),
    _benchmark(
        "throughput",
        "tokens a second (eager and compiled), MFU, memory and the cost of a snapshot, model of 0.3B",
        *("benchmarks/gpu.py", "--model", "0.3B", "--runs", "5"),
        limit_seconds=150,
        memory_gib=48,
    ),
    _benchmark(
        "document-attention",
        "attention within documents by FlexAttention and by torch's variable-length attention",
        "benchmarks/attention.py",
        limit_seconds=120,
        memory_gib=24,
    ),
    _tests(
        "trainer",
        "a killed run resumes from its snapshot; the host waits for the GPU once a step, and once a layer with experts",
        "tests/gpu/test_trainer.py",
        limit_seconds=180,
    ),
    _tests(
        "in-process",
        "a worker whose peer is killed goes on in its process with another NCCL group, and then with another rank",
        "tests/gpu/test_in_process.py",
        limit_seconds=150,
    ),
    _tests(
        "health",
        "the preflight passes healthy GPUs and notices planted faults; ranks that hang in NCCL name the collective",
        "tests/gpu/test_health.py",
        limit_seconds=120,
    ),
    _tests(
        "compiled",
        "compiled blocks have the gradients of eager ones, and are not compiled again across a round",
        "tests/gpu/test_compiled.py",
        limit_seconds=300,
    ),
    _tests(
        "precisions",
        "float8 multiplies the numbers of a CPU, and runs in float8 and float16 have the losses of bfloat16",
        "tests/gpu/test_precisions.py",
        limit_seconds=150,
    ),
    _tests(
        "snapshots",
        "a snapshot is copied beside the GPU's work, and is whole",
        "tests/gpu/test_snapshots.py",
        limit_seconds=90,
    ),
    _tests(
        "scripts",
        "scripts with trainingjob.State resume in other worlds, and to the bit",
        "tests/gpu/test_scripts.py",
        limit_seconds=180,
    ),
    _tests(
        "scripts-devices",
        "scripts with tensors on CPU and GPU, and with SyncBatchNorm, resume in other worlds",
        "tests/gpu/test_loops.py",
        limit_seconds=180,
    ),
    _tests(
        "bitwise",
        "`determinism: Bitwise` gives the same bits in any world and after a kill",
        "tests/gpu/test_bits.py",
        limit_seconds=120,
    ),
    _tests(
        "layouts",
        "layouts of two ranks have the gradients of one GPU",
        *(f"{LAYOUT}[{layout}]" for layout in ("fsdp", "copies", "tensor", "context", "experts")),
        limit_seconds=180,
    ),
    _tests(
        "pipelines",
        "pipelines have the gradients of one GPU",
        *(f"{LAYOUT}[{layout}]" for layout in ("pipeline", "interleaved", "zero bubble", "pipeline x tensor x fsdp")),
        limit_seconds=180,
        torch_features=PIPELINES,
    ),
    _tests(
        "experts",
        "grouped products have the results of a loop",
        "tests/gpu/test_experts.py",
        limit_seconds=60,
    ),
    _tests(
        "offload",
        "a run with its state in host memory is killed and resumes with and without offloading",
        "tests/gpu/test_offload.py::test_a_run_is_offloaded_killed_and_goes_on_with_and_without",
        limit_seconds=120,
    ),
    _benchmark(
        "commits",
        "what State.commit adds to a step",
        *("benchmarks/measuring.py", "--only", "commits, GPU", "--blocks", "20"),
        limit_seconds=120,
        packages=("cryptography",),
        memory_gib=8,
    ),
    _tests(
        "layouts-changed",
        "a run that is killed in one layout resumes in another",
        "tests/gpu/test_layouts.py::test_killed_in_one_layout_it_goes_on_in_another",
        limit_seconds=150,
        torch_features=PIPELINES,
    ),
    _tests(
        "layouts-combined",
        "layouts of four and eight ranks have the gradients of one GPU",
        *(f"{LAYOUT}[{layout}]" for layout in ("hsdp", "fsdp x tensor", "experts x fsdp", "context x tensor x fsdp")),
        limit_seconds=240,
    ),
    _tests(
        "offload-layouts",
        "runs of two ranks with their state in host memory are killed and resume",
        *(f"{OFFLOAD}[{layout}]" for layout in ("fsdp", "copies, which are restored by each other", "tensor")),
        limit_seconds=240,
    ),
    _tests(
        "offload-pipeline",
        "a pipeline with its state in host memory is killed and resumes",
        f"{OFFLOAD}[a pipeline of tied embeddings]",
        limit_seconds=120,
        torch_features=PIPELINES,
    ),
    _benchmark(
        "throughput-0.7B",
        "the figures of `throughput`, model of 0.7B",
        *("benchmarks/gpu.py", "--model", "0.7B", "--runs", "5"),
        limit_seconds=240,
        memory_gib=48,
    ),
    _tests(
        "async-tensor",
        "tensor groups that send while they multiply have the gradients of groups that wait",
        "tests/gpu/test_async_tensor.py",
        limit_seconds=180,
        gpus=2,
    ),
    _tests(
        "overlap",
        "most of what FSDP sends is hidden by computation",
        "tests/gpu/test_overlap.py",
        limit_seconds=180,
        gpus=2,
    ),
)
