"""Settings that trade speed for memory, from the fastest to the smallest, and the first of them that fits. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from concertina_trainer.config.memory_choice import MemoryChoice
from concertina_trainer.config.memory_config import Activations, Resharding
from concertina_trainer.config.parallelism import ParallelismConfig
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.degrees import Degrees

USABLE = 0.92
"""Share of a GPU's memory that tensors can use. The rest is for CUDA's context, the workspaces of NCCL and cuBLAS, and
the allocator's waste. Not measured on a GPU."""
GIB = 1 << 30
BUSY_TOKENS = 8192
"""Tokens of a micro-batch from which on a rank's products take longer than FSDP's collectives.

The forward pass of a weight takes 2 operations per token, and its gathering 2 bytes. At 400 TFLOPS and 50 GB/s, both
take the same time with 8000 tokens.
"""
LEAST_TOKENS = BUSY_TOKENS // 4
"""Tokens of a micro-batch below which it is faster to compute a larger one and recompute all of its activations."""
MOST_TOKENS = 4 * BUSY_TOKENS
"""Tokens of a micro-batch from which on a larger one gains nothing: the overhead of kernels is small by then."""
MICROBATCHES_PER_STAGE = 4
"""Microbatches of a pipeline, per stage, that a larger micro-batch leaves: the bubble is a fifth of the step then."""


def usable_memory(device_bytes: int) -> float:
    """Return the bytes that tensors can use on a device.

    Drivers of different versions report sizes that differ by some MiB. The size is rounded down to whole GiB, so that
    the choice does not depend on the driver.
    """
    return device_bytes // GIB * GIB * USABLE


def ladder(
    config: TrainerConfig, parallelism: ParallelismConfig, ranks: int, has_blocks: bool = True
) -> list[MemoryChoice]:
    """Return the settings to choose from for a world of `ranks`, the fastest first.

    A field that the configuration sets has only this value. More activations are recomputed before a micro-batch
    becomes so small that it is slower: below BUSY_TOKENS if all are kept, and below LEAST_TOKENS otherwise.
    `has_blocks` says whether the model has blocks to recompute.

    Raises:
        InvalidInput: When the world is no whole number of blocks of the layout.
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
    """Return the sizes to choose from, the largest first, each half of the previous one."""
    least = config.least_micro_batch_size
    if config.micro_batch_size is not None or config.bitwise:
        # Bitwise cuts the batch alike in all worlds, so the smallest size leaves most ranks something to do.
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
    """Return the first setting whose peak is within the limit, or the last one.

    Peaks fall along the ladder, or nearly so, and measuring one takes seconds. So the first setting is tried, and then
    the others by bisection. A higher limit never yields a later setting, whatever the peaks are.
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
