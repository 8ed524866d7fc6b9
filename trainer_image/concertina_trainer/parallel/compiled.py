"""Compilation of the decoder's blocks by torch.compile.

Each block is compiled as one graph, for tensors of one shape. Blocks with the same source code and the same kinds of
inputs share the compiled code. FSDP gathers a block's weights before the compiled code runs and frees them after it.

A process that stays for another round keeps its compiled code, with one exception. Under tensor or context parallelism,
the code names the process groups of the round. The process then drops this code, and compiles the blocks again with the
help of torch's cache on disk (see `forgotten_with`).

A round is a period in which a fixed set of replicas trains.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch._dynamo
from torch._dynamo.utils import calculate_time_spent, counters

from concertina_trainer.config.trainer import Compile, TrainerConfig, compile_obstacle
from concertina_trainer.model.attention import COMPILER_OPTIONS
from concertina_trainer.model.decoder import Block, Decoder
from concertina_trainer.model.experts import MixtureOfExperts
from concertina_trainer.parallel.group import DistContext

BACKEND: Mapping[str, Any] = {"backend": "inductor", "options": COMPILER_OPTIONS}
"""Arguments of torch.compile."""
VARIANTS = 64
"""Maximum number of graphs of one function. Each kind of layer has a graph with and one without gradients.

torch raises an error beyond the maximum. Its default is 8.
"""


def choose(config: TrainerConfig, cuda: bool) -> Compile:
    """Return what to compile: the job's setting, or by default the blocks, on a GPU and if they can be compiled.

    On a CPU, the default is no compilation: compilation takes minutes, and the faster code does not save as much time.
    """
    if config.compile is not None:
        return config.compile
    return Compile.blocks if cuda and not compile_obstacle(config) else Compile.never


def compile_blocks(model: Decoder) -> None:
    """Compile the model's blocks when they are called first.

    Call this function after tensor parallelism has split the weights. Hooks of a block, such as FSDP's, run outside of
    compiled code, because `forward` is compiled, and not the call of the module.
    """
    torch._dynamo.config.recompile_limit = VARIANTS
    for block in model.blocks.values():
        assert isinstance(block, Block)
        # The rows of an expert are as many as its tokens, and FSDP's hooks of the experts run within the block. So a
        # block with experts is compiled up to its feed-forward.
        method = "attended" if isinstance(block.feed_forward, MixtureOfExperts) else "forward"
        code = torch.compile(getattr(block, method), fullgraph=True, dynamic=False, **BACKEND)
        setattr(block, method, code)


@contextlib.contextmanager
def forgotten_with(world: DistContext) -> Iterator[None]:
    """Context manager that drops compiled code when it exits, if the code names process groups of the round `world`."""
    try:
        yield
    finally:
        if world.meshes.tensor or world.meshes.context:
            torch._dynamo.reset()


def graphs() -> int:
    """Return the number of graphs that this process has compiled so far."""
    return counters["stats"]["unique_graphs"]


def seconds() -> float:
    """Return the seconds that this process has spent on compilation so far."""
    return calculate_time_spent()["total_wall_time"]


def preload() -> None:
    """Import the compiler in the parent process that workers are forked from, if the job's blocks are compiled."""
    trainer = json.loads(os.environ.get("CONCERTINA_TRAINER") or "{}")
    if trainer.get("compile") == Compile.blocks or ("compile" not in trainer and torch.cuda.is_available()):
        importlib.import_module("torch._inductor.compile_fx")
