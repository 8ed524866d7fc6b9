"""Choice of memory settings, such as the micro-batch size, for fields that the job's spec does not set.

A run that resumes uses the settings that are saved with its state. A new run uses the fastest settings with which
training fits into the devices' memory. A job that resumes the run of another job, perhaps on other devices, is refused
if the saved settings do not fit.

The settings determine the order in which numbers are added, so they are the same on all ranks and in all rounds of a
run (decision "The first worker chooses what fits"). The choice assumes the smallest number of ranks that the job
allows, because each rank then has the largest part of the state.

A round is a period in which a fixed set of replicas trains.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from concertina_state.errors import DoesNotFit, InvalidInput
from concertina_trainer.config.memory_choice import RESHARD, MemoryChoice, absent
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.data.read.sequence_reader import Reader
from concertina_trainer.ladder import GIB
from concertina_trainer.layouts import frees_weights
from concertina_trainer.model.own import OwnSpec
from concertina_trainer.parallel.group import DistContext, of_first_rank
from concertina_trainer.state.restore import Recorded

DEVICE_BYTES = "CONCERTINA_DEVICE_BYTES"
"""Environment variable with the bytes of a device's memory that a worker may use. Default: the device's memory."""
LEAST_RANKS = "CONCERTINA_LEAST_RANKS"
"""Environment variable with the number of ranks of the smallest world that the job allows."""
PLANNING_SECONDS = 300.0
"""Maximum seconds for the planning process.

To plan a custom model, the process runs the whole model, which can take some minutes.
"""
_POLL_SECONDS = 0.5


@dataclasses.dataclass(frozen=True)
class Fitted:
    """Configuration of a round, in which all fields of MemoryChoice have values.

    A round is a period in which a fixed set of replicas trains.
    """

    config: TrainerConfig
    chosen: dict[str, str]
    """Chosen values of the fields that the job does not set, keyed by the field's path."""
    note: str = ""
    """Line for the log about the choice, or an empty string."""


def fitted(
    config: TrainerConfig,
    own: OwnSpec | None,
    reader: Reader,
    saved: Recorded,
    world: DistContext,
    check: Callable[[], None],
) -> Fitted:
    """Return the configuration of the round, which is the same on all ranks.

    Args:
        config: Configuration of the job.
        own: Custom model, or None for the decoder.
        reader: Reader of the data.
        saved: Facts that were saved with the state from which the round continues.
        world: This rank's position in the round.
        check: Function that raises an error if the round is over.

    Raises:
        DoesNotFit: When no settings let a new run fit into the memory of the smallest device. Also when the run of
            another job does not fit with its saved settings.
        InvalidInput: When the value of an environment variable is invalid.
    """
    default = _default(saved.config or config, own, world)
    is_same_job = saved.config is not None and not saved.of_another_job
    if is_same_job or not (device_bytes := least_memory(world)):
        return Fitted(default.filled(config), default.chosen(config))
    planned = config if saved.config is None else default.filled(config)
    # The model is known by now. With `from`, the planning process would not apply the rules on its sizes.
    described = planned.model_copy(update={"model": planned.model.model_copy(update={"from_": None})})
    request = {
        "trainer": described.model_dump(mode="json", by_alias=True, exclude_none=True),
        "data": own
        and {"vocab_size": reader.vocab_size, "fields": [dataclasses.asdict(field) for field in reader.fields]},
        "parallelism": world.parallelism.model_dump(mode="json", by_alias=True, exclude_none=True),
        "size": least_ranks(world),
        "deviceBytes": device_bytes,
    }
    answer = of_first_rank(world, _planned(request, check) if world.rank == 0 else None)
    if isinstance(answer, str):
        origin = "for a CPU" if saved.config is None else "of the job that saved the state"
        note = (
            f"the memory of this model can't be planned, so the trainer uses the settings {origin}: {default}. {answer}"
        )
        return Fitted(default.filled(config), default.chosen(config), note)
    choice = MemoryChoice.parsed(answer["choice"])
    room, ranks = f"{device_bytes / GIB:.1f} GiB", request["size"]
    if answer["peak"] > device_bytes:
        used = MemoryChoice.of(choice.filled(planned), frees_weights=False)
        raise DoesNotFit(
            f"this model needs {answer['peak'] / GIB:.1f} GiB on a device with {used}, but the smallest device "
            f"has {room}, with {ranks} ranks. {_advice(answer['remedies'])}"
        )
    peak = f"the planned peak is {answer['peak'] / GIB:.1f} GiB"
    note = f"settings for {ranks} ranks, whose smallest device has {room}: {choice}; {peak}"
    made = default if saved.config is not None else choice
    return Fitted(choice.filled(planned), made.chosen(config), note if absent(planned) else "")


def _advice(remedies: list[str]) -> str:
    if not remedies:
        return "Use larger devices or a smaller model."
    return f"Any of these changes makes the model fit: {'; '.join(remedies)}."


def _default(config: TrainerConfig, own: OwnSpec | None, world: DistContext) -> MemoryChoice:
    weights = None
    if own is not None and RESHARD in absent(config):
        weights = sum(parameter.numel() for parameter in own.module().parameters())
    return MemoryChoice.of(config, frees_weights(config, world.parallelism, weights))


def least_ranks(world: DistContext) -> int:
    """Return the smallest number of ranks with which the job may train."""
    return min(world.size, int(os.environ.get(LEAST_RANKS) or world.size))


def least_memory(world: DistContext) -> int:
    """Return the memory in bytes of the smallest device of all ranks, by an all-reduce, or 0 if it is not known.

    Raises:
        InvalidInput: When the environment variable DEVICE_BYTES is not a number of bytes.
    """
    text = os.environ.get(DEVICE_BYTES) or "0"
    if not (text.isascii() and text.isdigit()):
        raise InvalidInput(f"{DEVICE_BYTES} is {text!r}: set it to a number of bytes, such as {40 * GIB}.")
    size = int(text)
    if not size and world.device.type == "cuda":
        size = torch.cuda.get_device_properties(world.device).total_memory
    sizes = torch.tensor([size], dtype=torch.int64, device=world.device)
    dist.all_reduce(sizes, dist.ReduceOp.MIN)
    return int(sizes.item())


def _planned(request: dict[str, Any], check: Callable[[], None]) -> dict[str, Any] | str:
    """Return the answer of a planning process to `request`, or a sentence about why there is no answer.

    Planning needs a process of its own, because a fake process group can't exist beside this worker's real one.
    """
    command = [sys.executable, "-m", "concertina_trainer.planning"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    deadline, text = time.monotonic() + PLANNING_SECONDS, json.dumps(request) + "\n"
    try:
        while True:
            check()
            try:
                output, errors = process.communicate(text, timeout=_POLL_SECONDS)
                break
            except subprocess.TimeoutExpired:
                text = ""  # communicate takes its input once
                if time.monotonic() > deadline:
                    return f"Planning took more than {PLANNING_SECONDS:.0f} s."
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        return (errors.strip().splitlines() or [f"The planning process ended with exit code {process.returncode}."])[
            -1
        ][:500]
    answer: dict[str, Any] = json.loads(output)
    return answer
