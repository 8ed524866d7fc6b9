"""What a training script of your own can say to, and hear from, the TrainingJob that it runs in. All of it is optional.

    import trainingjob

    folder = trainingjob.checkpoint_dir()
    start = load(folder)                                     # yours: 0, or the step of the newest checkpoint
    for step in range(start, steps):
        loss = train(step)
        trainingjob.report(step=step + 1, steps=steps, loss=loss)
        if trainingjob.should_checkpoint() or (step + 1) % 500 == 0:
            save(folder, step + 1)

It is there in every replica whose command is your own: on PYTHONPATH, for Python 3.9+, with `concertina_protocol`
beside it and nothing else but the standard library; `State` takes Python 3.10, `data` torch, too. Outside of a
TrainingJob nothing happens: `should_checkpoint()` is False, `world()` is one worker, `checkpoint_dir()` a folder in
the current one. Importing it does nothing at all; the first call of `report` or `should_checkpoint` connects.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Mapping, Optional
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from concertina_state.holdings import ArrayShard
    from trainingjob._channel import Channel, Tracing
    from trainingjob._data import Data
    from trainingjob._state import State

__all__ = ["ArrayShard", "State", "World", "checkpoint_dir", "data", "report", "should_checkpoint", "world"]


def __getattr__(name: str) -> object:
    """Not before it is asked for: it takes a newer Python, and a tenth of a second."""
    if name not in ("ArrayShard", "State"):
        raise AttributeError(f"module 'trainingjob' has no attribute {name!r}")
    if sys.version_info < (3, 10):
        raise ImportError(f"trainingjob.{name} needs Python 3.10 or newer")
    if name == "ArrayShard":
        from concertina_state.holdings import ArrayShard

        return ArrayShard
    from trainingjob._state import State

    return State


@dataclasses.dataclass(frozen=True)
class World:
    """Who this process is among the workers of the job. A worker keeps its world as long as it lives."""

    rank: int = 0
    size: int = 1
    """Workers in all."""
    local_rank: int = 0
    local_size: int = 1
    """Workers in this replica."""
    replica: int = 0
    """Place of this replica among those that take part, from 0."""
    replicas: int = 1
    round: int = 0
    """Grows whenever the world changes; 0 outside of a job."""


def world() -> World:
    """From the environment, so it costs nothing; under plain torchrun it is torchrun's."""

    def number(name: str, default: int) -> int:
        return int(os.environ.get(name) or default)

    return World(
        rank=number("RANK", 0),
        size=number("WORLD_SIZE", 1),
        local_rank=number("LOCAL_RANK", 0),
        local_size=number("LOCAL_WORLD_SIZE", 1),
        replica=number("GROUP_RANK", 0),
        replicas=number("GROUP_WORLD_SIZE", 1),
        round=number("CONCERTINA_ROUND", 0),
    )


def checkpoint_dir() -> Path:
    """Where checkpoints belong; it exists.

    The folder of spec.checkpoint.uri, which must be a file:// URI then, on a volume that every replica mounts. Without
    spec.checkpoint: a folder of the replica itself, which survives its workers and containers, but not its pod. Outside
    of a job: ./checkpoints. Raises ValueError where the URI names no folder, OSError where it can't be made."""
    uri = (json.loads(os.environ.get("CONCERTINA_CHECKPOINT") or "null") or {}).get("uri", "")
    if uri:
        parts = urlsplit(uri)
        if parts.scheme != "file":
            raise ValueError(
                f"spec.checkpoint.uri is {uri}, which is no folder: use a file:// URI, or write there yourself"
            )
        folder = Path(unquote(parts.path))
    elif "CONCERTINA_UID" in os.environ:
        folder = Path(os.environ.get("CONCERTINA_VOLUME") or "/concertina", "checkpoints")
    else:
        folder = Path("checkpoints")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def report(
    *,
    step: int,
    steps: int = 0,
    loss: Optional[float] = None,
    tokens_per_second: float = 0.0,
    samples: int = 0,
    phase: str = "training",
    tokens: Optional[int] = None,
    metrics: Optional[Mapping[str, float]] = None,
) -> None:
    """Say that `step` steps are finished since the run began, of `steps` in all (0: not known).

    From rank 0 it becomes status.progress, from the others a sign of life; call it on every rank, after every step. It
    never waits. `samples`: consumed since the run began; `tokens`: trained on since then, each counted once: what a
    token costs follows from it. `phase`: training, checkpointing, evaluating or compiling; the time from a report of
    evaluating or compiling to the next one counts as that. `metrics`: up to 32 numbers by name, as of this step:
    gradient_norm, learning_rate, loss_scale or what you like."""
    if channel := connection():
        from trainingjob._channel import Reported

        channel.report(Reported(step, steps, loss, tokens_per_second, samples, phase, tokens, metrics or {}))


def data(
    uri: str,
    *,
    length: int,
    batch: int,
    seed: int = 0,
    rank: Optional[int] = None,
    size: Optional[int] = None,
    cache_mebibytes: int = 4096,
) -> Data:
    """An iterator over what `concertina data build` has written to this folder or store: each `next` is this rank's
    rows of a step, int64 [rows, length + 1] on the CPU (inputs, and shifted by one what is predicted).

    `batch`: sequences of a step, of all ranks together. The n-th sequence of a run is a function of the data, `length`,
    `seed` and n: of no world, no failure. Each rank has its part of the batch; where it doesn't divide, some have one
    row more, and `loss * data.weight` has the true mean as its mean over the ranks. Give it to `State`, and what was
    consumed is consumed once, in any world, also with another `batch`. `rank`, `size`: of the ranks that share a batch
    out, where that is not the whole world (tensor parallelism). `cache_mebibytes`: most that the node keeps of what a
    store gives. Raises concertina_state.errors.BadInput with a sentence."""
    if sys.version_info < (3, 10):
        raise ImportError("trainingjob.data needs Python 3.10 or newer")
    from trainingjob._data import Data

    here = world()
    return Data(uri, length, batch, seed, here.rank if rank is None else rank, size or here.size, cache_mebibytes)


def should_checkpoint() -> bool:
    """Whether this is the step after which the job has to be saved, because this world is about to end: a replica was
    given notice, or one joins. Call it on every rank, once after every step.

    It becomes True on all ranks at the same call (their first, second, ... of this world), so all save the same step,
    and none is lost. Once saved, the script may exit; if it goes on, its next call of should_checkpoint() ends the
    process (SystemExit), as the save is known to be finished then. It talks to no other rank, so it may stand anywhere
    in the loop; only when the world is about to end does it wait, for about a round trip in the network."""
    channel = connection()
    return channel is not None and channel.should_checkpoint()


def connection() -> Optional[Channel]:
    """To the agent; None outside of a job."""
    path, rank = os.environ.get("CONCERTINA_SOCKET"), os.environ.get("RANK")
    if not path or rank is None:
        return None
    from trainingjob import _channel  # not before it is needed: it takes tens of milliseconds

    return _channel.connected(path, int(rank), _traces)


def _traces(rank: int) -> Tracing:
    """Needs a newer Python, as `State` does."""
    from concertina_state.step_trace import Traces

    return Traces(rank)
