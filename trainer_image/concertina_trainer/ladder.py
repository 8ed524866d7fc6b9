"""List of the settings that trade speed for memory, fastest first, and choice of the first that fits.

A setting is a MemoryChoice: the micro-batch size, the activations to recompute, and whether gathered weights are freed.
The module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from concertina_trainer.config.memory_choice import MemoryChoice
from concertina_trainer.config.memory_config import Activations, Resharding
from concertina_trainer.config.parallelism import ParallelismConfig
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.degrees import Degrees

USABLE = 0.92
"""Fraction of a GPU's memory that tensors can use.

The rest is for CUDA's context, the workspaces of NCCL and cuBLAS, and the allocator's fragmentation. The value was not
measured on a GPU.
"""
GIB = 1 << 30
BUSY_TOKENS = 8192
"""Number of tokens of a micro-batch from which on matrix products take longer than FSDP's collectives.

The forward pass takes 2 operations for each weight and token, and the all-gather takes 2 bytes for each weight. At 400
TFLOPS and 50 GB/s, both take the same time with 8000 tokens.
"""
LEAST_TOKENS = BUSY_TOKENS // 4
"""Number of tokens of a micro-batch below which a larger micro-batch is faster in spite of more recomputation.

The larger micro-batch is faster even if all its activations are recomputed.
"""
MOST_TOKENS = 4 * BUSY_TOKENS
"""Number of tokens of a micro-batch above which a larger micro-batch is no faster.

Kernels are already efficient at this size.
"""
MICROBATCHES_PER_STAGE = 4
"""Minimum number of microbatches per pipeline stage when the micro-batch size is chosen.

With 4, a fifth of the step is the pipeline's bubble.
"""


def usable_memory(device_bytes: int) -> float:
    """Return the number of bytes that tensors can use on a device with `device_bytes` bytes of memory.

    Different versions of the driver report sizes that differ by some MiB. The size is rounded down to whole GiB, so
    that the driver does not affect which settings are chosen.
    """
    return device_bytes // GIB * GIB * USABLE


def ladder(
    config: TrainerConfig, parallelism: ParallelismConfig, ranks: int, has_blocks: bool = True
) -> list[MemoryChoice]:
    """Return the settings to choose from for `ranks` ranks, the fastest first.

    A field that the configuration sets has the same value in all settings. Small micro-batches make training slow. The
    list therefore contains settings with recomputation of activations before settings with micro-batches below
    BUSY_TOKENS tokens. Settings that recompute all activations come before settings with micro-batches below
    LEAST_TOKENS tokens. `has_blocks` says whether the model has blocks whose activations can be recomputed.

    Raises:
        InvalidInput: When the number of ranks is not a multiple of the layout's block (`ParallelismConfig.block`).
    """
    sizes = _micro_batch_sizes(config, parallelism, ranks)
    activations = [config.memory.activations] if config.memory.activations else list(Activations)
    if not has_blocks:
        activations = [config.memory.resolved_activations]
    reshard = config.memory.resharding or (Resharding.never if parallelism.backward_in_halves else None)
    reshards = [reshard] if reshard else [Resharding.never, Resharding.always]
    tokens = config.model.sequence_length / parallelism.context
    busy = [size for size in sizes if size * tokens >= BUSY_TOKENS] or sizes[:1]
    smallest = [size for size in sizes if size * tokens >= LEAST_TOKENS] or sizes[:1]
    first, *others = activations
    rungs = [MemoryChoice(size, first, reshard) for size in (busy if others else sizes) for reshard in reshards]
    for activation in others:
        smaller = sizes if activation is activations[-1] else smallest
        rungs += [MemoryChoice(size, activation, reshards[-1]) for size in smaller if size <= busy[-1]]
    return rungs


def _micro_batch_sizes(config: TrainerConfig, parallelism: ParallelismConfig, ranks: int) -> list[int]:
    """Return the micro-batch sizes to choose from, the largest first. Each size is half of the previous one."""
    least = config.least_micro_batch_size
    if config.micro_batch_size is not None or config.bitwise:
        # Bitwise cuts the batch into the same microbatches in all worlds. The smallest size occupies the most ranks.
        return [config.micro_batch_size or least]
    degrees = Degrees.of(parallelism, ranks)
    share = math.ceil(config.global_batch_size / degrees.data)
    if degrees.pipeline > 1:
        share //= MICROBATCHES_PER_STAGE * degrees.pipeline
    size = max(1, min(share, MOST_TOKENS * parallelism.context // config.model.sequence_length))
    sizes = [size]
    while size > 1:
        size = math.ceil(size / 2)
        sizes.append(size)
    return sizes


def first_fitting(rungs: Sequence[MemoryChoice], limit: float, peak: Callable[[MemoryChoice], float]) -> MemoryChoice:
    """Return the first setting whose peak memory is at most `limit` bytes, or the last setting if none fits.

    Computing the peak of a setting takes seconds. This function therefore tries the first setting, and if that does not
    fit, it bisects the others. Bisection assumes that each setting has a lower peak than the one before, which is
    nearly always true. Even where this assumption is wrong, a higher limit never leads to a later setting.
    """
    if peak(rungs[0]) <= limit:
        return rungs[0]
    low, high = min(1, len(rungs) - 1), len(rungs) - 1
    while low < high:
        middle = (low + high) // 2
        if peak(rungs[middle]) <= limit:
            high = middle
        else:
            low = middle + 1
    return rungs[low]
