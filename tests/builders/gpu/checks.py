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
"""Modules for the comparison with torchtitan. `make test-gpu-packages TITAN=1` provides them."""
MOST_SECONDS = 150
"""Largest limit of a check, so that a run of ten minutes reaches at least three."""
LAYOUT = "tests/gpu/test_layouts.py::test_gradients_are_those_of_one_gpu"
COMPILED = "tests/gpu/test_compiled.py"
RECOVERY = "tests/gpu/test_recovery.py::test_three_replicas_on_one_gpu_recover"
SCRIPTS = "tests/gpu/test_scripts.py"
WAITING = "tests/gpu/test_async_tensor.py::test_gradients_are_those_of_groups_that_wait"
OFFLOAD = "tests/gpu/test_offload.py::test_so_is_one_of_two_gpus"
ACTIVATIONS = "Keep", "KeepProducts"
PIPELINES = ("pipelines of given microbatches",)
MESH_DIMENSIONS = ("DataParallelMeshDims, as torchtitan 0.3.0 needs",)


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
    capability: tuple[int, int] = (0, 0)
    """Compute capability that the check needs."""


def _tests(
    name: str, shows: str, *names: str, limit_seconds: int, torch_features: tuple[str, ...] = (), gpus: int = 1
) -> Check:
    packages = ("pytest", *TRAINER_PACKAGES)
    return Check(name, shows, Kind.TESTS, names, limit_seconds, packages, torch_features, gpus)


def _benchmark(
    name: str,
    shows: str,
    *command: str,
    limit_seconds: int,
    packages: tuple[str, ...] = (),
    memory_gib: float = 0.0,
    torch_features: tuple[str, ...] = (),
    capability: tuple[int, int] = (0, 0),
) -> Check:
    modules = (*TRAINER_PACKAGES, *packages)
    return Check(
        name, shows, Kind.BENCHMARK, command, limit_seconds, modules, torch_features, 1, memory_gib, capability
    )


def _beside_torchtitan(name: str, shows: str, activations: str, blocks: int) -> Check:
    return _benchmark(
        name,
        shows,
        *("benchmarks/trainer.py", "--model", "1B", "--activations", activations, "--blocks", str(blocks)),
        *("--only", "concertina", "torchtitan"),
        limit_seconds=150,
        packages=("cryptography", *TITAN_PACKAGES),
        memory_gib=64,
        torch_features=MESH_DIMENSIONS,
    )


CHECKS = (
    _beside_torchtitan(
        "beside-torchtitan",
        "a compiled step of 1B beside torchtitan's: tokens a second, MFU by both conventions, bytes a weight",
        "Keep",
        blocks=5,
    ),
    _tests(
        "recovery",
        "three replicas on one GPU recover from the loss of one, with new processes and with survivors",
        *(f"{RECOVERY}[{case}]" for case in ("new processes", "survivors")),
        limit_seconds=150,
    ),
    _benchmark(
        "throughput",
        "tokens a second (eager and compiled), MFU, HFU, memory beside the plan and the cost of a snapshot, 0.3B",
        *("benchmarks/gpu.py", "--model", "0.3B", "--runs", "5"),
        limit_seconds=150,
        memory_gib=48,
    ),
    _benchmark(
        "float8",
        "tokens a second, MFU, HFU and memory of 1B in bfloat16 and in float8",
        *("benchmarks/gpu.py", "--model", "1B", "--precision", "BFloat16", "Float8", "--speed-only", "--runs", "3"),
        limit_seconds=150,
        memory_gib=64,
        capability=(9, 0),
    ),
    _tests(
        "precisions",
        "float8 multiplies the numbers of a CPU, and runs in float8 and float16 have the losses of bfloat16",
        "tests/gpu/test_precisions.py",
        limit_seconds=150,
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
        limit_seconds=150,
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
        "compiled blocks have the gradients of eager ones",
        f"{COMPILED}::test_compiled_gradients_are_those_of_eager_blocks",
        limit_seconds=150,
    ),
    _tests(
        "compiled-rounds",
        "compiled blocks are not compiled again across a round, and new processes take them from the cache",
        f"{COMPILED}::test_only_new_processes_compile_after_a_kill_and_from_the_cache",
        limit_seconds=150,
    ),
    _tests(
        "recovery-compiled",
        "three replicas on one GPU recover with compiled blocks, which survivors do not compile again",
        *(f"{RECOVERY}[{case}]" for case in ("new processes, compiled", "survivors, compiled")),
        limit_seconds=150,
    ),
    _tests(
        "recovery-copies",
        "survivors of whole copies of the model do not compile again",
        f"{RECOVERY}[survivors, compiled, copies]",
        limit_seconds=120,
    ),
    _tests(
        "shrink",
        "seconds until survivors of a lost rank reduce again: by new groups, and by torch's shrink_group",
        "tests/gpu/test_shrink.py",
        limit_seconds=90,
    ),
    _benchmark(
        "throughput-largest",
        "tokens a second, MFU, HFU and memory beside the plan of the largest model that fits by the plan",
        *("benchmarks/gpu.py", "--model", "largest", "--runs", "2"),
        limit_seconds=150,
        memory_gib=20,
    ),
    _tests(
        "snapshots",
        "a snapshot is copied beside the GPU's work, and is whole",
        "tests/gpu/test_snapshots.py",
        limit_seconds=90,
    ),
    _tests(
        "scripts",
        "scripts with trainingjob.State and DDP resume in other worlds, and without DDP to the bit",
        f"{SCRIPTS}::test_two_then_one_then_two_train_as_one[ddp]",
        f"{SCRIPTS}::test_random_numbers_and_what_the_forward_changes_go_on_to_the_bit",
        limit_seconds=150,
    ),
    _tests(
        "scripts-fsdp2",
        "scripts with trainingjob.State and FSDP2 resume in other worlds",
        f"{SCRIPTS}::test_two_then_one_then_two_train_as_one[fsdp2]",
        limit_seconds=120,
    ),
    _tests(
        "scripts-devices",
        "scripts with tensors on CPU and GPU, and with SyncBatchNorm, resume in other worlds",
        "tests/gpu/test_loops.py",
        limit_seconds=150,
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
        limit_seconds=150,
    ),
    _tests(
        "pipelines",
        "pipelines have the gradients of one GPU",
        *(f"{LAYOUT}[{layout}]" for layout in ("pipeline", "interleaved", "zero bubble", "pipeline x tensor x fsdp")),
        limit_seconds=150,
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
        limit_seconds=150,
    ),
    _tests(
        "offload-layouts",
        "runs of two ranks with their state in host memory are killed and resume",
        *(f"{OFFLOAD}[{layout}]" for layout in ("fsdp", "copies, which are restored by each other", "tensor")),
        limit_seconds=150,
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
        "the figures of `throughput`, 0.7B",
        *("benchmarks/gpu.py", "--model", "0.7B", "--runs", "5"),
        limit_seconds=150,
        memory_gib=48,
    ),
    _beside_torchtitan(
        "beside-torchtitan-products",
        "the figures of `beside-torchtitan` with selective activation checkpointing",
        "KeepProducts",
        blocks=3,
    ),
    _beside_torchtitan(
        "beside-torchtitan-recompute",
        "the figures of `beside-torchtitan` with all activations recomputed",
        "Recompute",
        blocks=3,
    ),
    _tests(
        "async-tensor",
        "tensor groups that send while they multiply have the gradients of groups that wait, in bfloat16",
        *(f"{WAITING}[{activations}-BFloat16-{rows} sequences]" for activations in ACTIVATIONS for rows in (2, 16)),
        limit_seconds=150,
        gpus=2,
    ),
    _tests(
        "async-tensor-float32",
        "tensor groups that send while they multiply have the gradients of groups that wait, in float32",
        *(f"{WAITING}[{activations}-Float32-{rows} sequences]" for activations in ACTIVATIONS for rows in (2, 16)),
        limit_seconds=150,
        gpus=2,
    ),
    _tests(
        "overlap",
        "most of what FSDP sends is hidden by computation",
        "tests/gpu/test_overlap.py",
        limit_seconds=150,
        gpus=2,
    ),
)
