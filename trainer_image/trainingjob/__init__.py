"""The interface between a training script of your own and the TrainingJob that it runs in. All of it is optional.

Example::

    import trainingjob

    folder = trainingjob.checkpoint_dir()
    start = load(folder)                                     # yours: 0, or the step of the newest checkpoint
    for step in range(start, steps):
        loss = train(step)
        trainingjob.report(step=step + 1, steps=steps, loss=loss)
        if trainingjob.should_checkpoint() or (step + 1) % 500 == 0:
            save(folder, step + 1)

The package is on PYTHONPATH in every replica that runs a command of its own. It needs Python 3.9 or later, and no other
package. To install it where you write scripts, run `pip install concertina-sdk`. Tensors need torch. Object stores need
obstore (`pip install 'concertina-sdk[storage]'`), which the agent provides in the replicas.

Outside of a TrainingJob, the functions have no effect: `should_checkpoint()` is False, `world()` is one worker, and
`checkpoint_dir()` is a folder in the current folder. Importing the package opens no connection. The first call of
`report` or `should_checkpoint` connects to the agent.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Mapping, Optional, TypeVar
from urllib.parse import unquote, urlsplit

from trainingjob._connection import agent_channel, checkpoint_settings
from trainingjob._world import World, world

if TYPE_CHECKING:
    from concertina_state.holdings import ArrayShard
    from trainingjob._data import Data
    from trainingjob._state import State

__all__ = ["ArrayShard", "State", "World", "checkpoint_dir", "data", "report", "run", "should_checkpoint", "world"]

T = TypeVar("T")


def __getattr__(name: str) -> object:
    """Return `State` or `ArrayShard`, importing its module only on first use.

    Raises:
        AttributeError: The module has no such attribute.

    Importing the module takes a tenth of a second, which scripts without these names don't spend.
    """
    if name not in ("ArrayShard", "State"):
        raise AttributeError(f"module 'trainingjob' has no attribute {name!r}")
    if name == "ArrayShard":
        from concertina_state.holdings import ArrayShard

        return ArrayShard
    from trainingjob._state import State

    return State


def checkpoint_dir() -> Path:
    """Return the folder for the script's own checkpoints, and create the folder if it does not exist.

    With `spec.checkpoint`, this is the folder of `spec.checkpoint.uri`, on a volume that every replica mounts. Without
    `spec.checkpoint`, this is a folder in the replica's volume, which survives restarts of workers and containers but
    not the deletion of the pod. Outside of a job, the folder is `./checkpoints`.

    Returns:
        The path of an existing folder.

    Raises:
        ValueError: `spec.checkpoint.uri` is not a `file://` URI.
        OSError: The folder can't be created.
    """
    uri = checkpoint_settings().get("uri", "")
    if uri:
        parts = urlsplit(uri)
        if parts.scheme != "file":
            raise ValueError(
                f"spec.checkpoint.uri is {uri}, which is not a folder: use a file:// URI, or write to the "
                "store yourself"
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
    """Report the progress of the training run to the job.

    Call this function on every rank, after every step. The report of rank 0 becomes `status.progress`. The reports of
    other ranks only show that these ranks are alive. The call never waits. Outside of a job, the call does nothing.

    Args:
        step: Number of steps finished since the run began.
        steps: Number of steps in the whole run, or 0 if it is not known.
        loss: Loss of the last step, or None if it is not known.
        tokens_per_second: Throughput of all ranks together.
        samples: Number of samples consumed since the run began.
        phase: What the rank does now: `training`, `checkpointing`, `evaluating` or `compiling`. The time from a report
            of `evaluating` or `compiling` to the next report counts as evaluation or compilation.
        tokens: Number of tokens trained on since the run began, each counted once. The operator computes the
            job's cost per token from this number.
        metrics: Up to 32 numbers by name, as of this step, for example `gradient_norm` or `learning_rate`.
    """
    if channel := agent_channel():
        from trainingjob._channel import StepReport

        channel.report(StepReport(step, steps, loss, tokens_per_second, samples, phase, tokens, metrics or {}))


def data(
    uri: str,
    *,
    length: int,
    batch: int,
    seed: int = 0,
    groups: int = 16,
    rank: Optional[int] = None,
    size: Optional[int] = None,
    cache_mebibytes: int = 4096,
) -> Data:
    """Open training data that `concertina data build` has written, as an iterator over this rank's batches.

    Each `next` returns this rank's rows of one step: an int64 tensor of shape `[rows, length + 1]` on the CPU. The
    inputs are `rows[:, :-1]`, the targets `rows[:, 1:]`. If torch is not installed, the rows are a memoryview of that
    shape, which `numpy.asarray` takes without a copy.

    The n-th sequence of a run depends only on the data, `length`, `seed`, `groups` and n, not on the number of ranks or
    on failures. Each rank gets its part of the batch. If the batch does not divide evenly, some ranks get one row more.
    In that case, multiply the loss by `data.weight`, so that the mean over the ranks is the mean over the batch. If you
    pass the iterator to `State`, each sequence is consumed once, even if the number of ranks or `batch` changes.

    Args:
        uri: Folder or store (`file://`, `s3://`, `gs://`, `az://`) that holds the data.
        length: Tokens in a sequence.
        batch: Sequences in a step, of all ranks together.
        seed: Seed of the order in which sequences are consumed.
        groups: Number of groups into which the shards are divided. Each batch has the same number of sequences of each
            group, and each rank reads few groups. The value must divide `batch`. Use a multiple of the number of nodes.
        rank: Number of this process among the ranks that share a batch; by default, its rank in the job.
        size: Number of ranks that share a batch; by default, all ranks of the job. Pass a smaller number if several
            ranks need the same rows, for example with tensor parallelism.
        cache_mebibytes: Maximum size, in MiB, of the node's copies of data from a store.

    Returns:
        An endless iterator with the attributes `weight`, `samples`, `epoch_size` and `vocab_size`.

    Raises:
        concertina_state.errors.InvalidInput: The data are missing or damaged, or the batch can't be shared by the
            ranks.
    """
    from trainingjob._data import Data

    here = world()
    rank, size = here.rank if rank is None else rank, size or here.size
    return Data(uri, length, batch, seed, groups, rank, size, cache_mebibytes)


def run(main: Callable[[], T]) -> T:
    """Call a script's `main`, in each round of the job, in the same process.

    A round is a period in which a fixed set of replicas trains together. Without this function, a new process starts
    when a round ends. With this function, a process that survives the round leaves `main` by an exception that this
    package raises, closes torch's process groups, and calls `main` again in the next round, with the variables of that
    round (`RANK`, `WORLD_SIZE`, `MASTER_ADDR` and so on). The agent kills a process that does not leave `main` within a
    second, and starts a new one.

    Call this function once. Create everything that belongs to a round in `main`: `init_process_group`, the model,
    `State`, data and threads. The exception is not derived from `Exception`, so `except Exception` does not catch it.
    `finally` blocks run. Outside of a job, `main` is called once.

    A process starts anew in each round if torch is not installed or older than 2.15, or if it has a GPU.

    Args:
        main: A function without arguments (`functools.partial` binds them).

    Returns:
        The result of `main`, once the run is complete.

    Raises:
        RuntimeError: This function, or another function that communicates with the job, was called before.
    """
    path = os.environ.get("CONCERTINA_SOCKET")
    if not path or "RANK" not in os.environ:
        return main()
    from trainingjob import _rounds

    return _rounds.run(path, main)


def should_checkpoint() -> bool:
    """Return whether the script must save after this step because the workers are about to be stopped.

    All workers are stopped when a replica receives a termination notice or a new replica joins. Call this function on
    every rank, once after every step. The result is True on all ranks at the same call: the n-th call on each rank. All
    ranks therefore save the same step, and no step is lost.

    After the save, the script may exit. If the script continues instead, the next call of this function ends the
    process, because the save is finished by then.

    The call does not communicate with other ranks, so you can place it anywhere in the loop. It waits only when the
    workers are about to be stopped, for about one network round trip. Outside of a job, the result is False.

    Returns:
        True after the one step that must be saved.

    Raises:
        SystemExit: The previous call returned True.
    """
    channel = agent_channel()
    return channel is not None and channel.should_checkpoint()
