"""`trainingjob.State`: a script's state in node memory, with copies on other nodes and in durable storage.

`_restore` finds a saved state and restores the script's objects. `_save` takes snapshots. A state is saved right after
an optimizer step (see `_save_points`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from concertina_protocol import RestoreSource
from concertina_protocol.worker_channel import KeepsState
from concertina_state.errors import InvalidInput
from trainingjob import _restore
from trainingjob._contents import Contents
from trainingjob._counted import SampleCounter
from trainingjob._ranks import Gather
from trainingjob._refusals import faults_reported
from trainingjob._save import OwnShard, Saver
from trainingjob._session import open_session, ranks_of
from trainingjob._world import world


class State:
    """The state of a training script, saved in node memory, with copies on other nodes and in durable storage.

    Give all objects to one State, call `restore` once before the loop, and `commit` after each step, on all ranks. A
    State saves modules, optimizers, dicts of arrays, and each object with `state_dict` and `load_state_dict`. A State
    also saves the random numbers of Python, numpy and torch.

    Example::

        state = trainingjob.State(model=model, optimizer=optimizer, scheduler=scheduler)
        for step in range(state.restore(default=0), steps):
            train(step)
            state.commit(step, durable=step == steps - 1)

    Args:
        folder: Folder for snapshots outside of a job. Within a job, the folder is not used.
        overhead: Share of the training time that snapshots may take.
        gather: Function by which several processes agree if they do not use torch.distributed. The function takes the
            bytes of a rank and returns a list of the bytes of all ranks, in order of the ranks
            (`MPI.COMM_WORLD.allgather`, `trainingjob.jax.gather`).
        **objects: The objects to save, by name.

    Raises:
        concertina_state.errors.InvalidInput: An object has no state or can't be saved (this error is a TypeError too),
            the process has a State already, another process saves to the folder, or the ranks can't agree.
    """

    def __init__(
        self, *, folder: str = "checkpoints", overhead: float = 0.01, gather: Gather | None = None, **objects: Any
    ) -> None:
        own_world = world()
        with faults_reported():
            _check_only()
            ranks = ranks_of(own_world, gather)
        self._contents = Contents(own_world, ranks)
        self.add(**objects)
        with faults_reported():
            self._session = open_session(own_world, ranks, Path(folder))
        self._contents.sample_counters = [value for value in objects.values() if isinstance(value, SampleCounter)]
        self._shard = OwnShard(self._session, self._contents)
        self._saver = Saver(self._session, self._contents, self._shard, overhead)
        self._peeked: _restore.RestorePoint | None = None
        self._reading = contextlib.ExitStack()
        """Exit stack. Until it is closed, the checkpoint in storage that rank 0 reads is not deleted."""
        self._session.agent.send(KeepsState(self._session.world.rank))
        self._session.agent.count_samples_by(self._count_samples)
        global _only
        _only = weakref.ref(self)

    def add(self, **objects: Any) -> None:
        """Add objects to the state before it is restored.

        Call this method before `restore`, for objects that a framework creates only after it knows the step to continue
        from. Pass an optimizer together with the modules that it trains.

        Args:
            **objects: The objects to save, by name.

        Raises:
            concertina_state.errors.InvalidInput: An object has no state or can't be saved, or its name is reserved.
        """
        with faults_reported():
            self._contents.add(objects)

    def batches(self, loader: Any) -> Iterator[Any]:
        """Return an iterator over one pass of a data loader. The position in the pass is saved with the state.

        After `restore`, the first call for a loader continues the saved pass, in the same order. This also works with a
        `DistributedSampler` if the number of ranks has changed. Use the loaders in the same order in each run.

        Args:
            loader: A `torch.utils.data.DataLoader` with a sampler and a batch size.

        Returns:
            An iterator over the batches of the loader.

        Raises:
            concertina_state.errors.InvalidInput: The loader has no sampler, the length of its data differs from the
                saved one, or its sampler is at another epoch than the saved state.
        """
        with faults_reported():
            return self._contents.batches(loader)

    def peek(self, name: str) -> Any:
        """Return the saved state of one object, before the script creates that object. Call this method on all ranks.

        The next call of `restore` restores the saved state from which this method has read.

        Args:
            name: Name of the object.

        Returns:
            What the object's `state_dict()` returned on this rank in the newest saved state, or None if nothing was
            saved.

        Raises:
            concertina_state.errors.InvalidInput: The saved state belongs to another job, or was not saved by a State.
            concertina_state.errors.RestoreFailed: The saved state can't be read.
        """
        with faults_reported(), contextlib.ExitStack() as on_error:
            on_error.enter_context(self._reading)
            self._peeked = _restore.find_newest(self._session, self._reading)
            values = {} if self._peeked is None else _restore.values_for(self._session, self._peeked)
            on_error.pop_all()  # `restore` reads on
            return values.get(name)

    def restore(self, default: int = 0) -> int:
        """Restore all objects from the newest saved state. Call this method once before the loop, on all ranks.

        The state comes from the memory of this rank's node, from the memory of another node, or from
        `spec.checkpoint.uri`. The number of ranks, and the way in which they divide tensors, may have changed since the
        state was saved.

        Args:
            default: Value to return if nothing was saved.

        Returns:
            The step to continue with: the number of finished steps.

        Raises:
            concertina_state.errors.InvalidInput: The saved state is of other objects, shapes or dtypes.
            concertina_state.errors.RestoreFailed: The saved state can't be read.
        """
        with faults_reported(), self._reading:
            source, self._peeked = self._peeked or _restore.find_newest(self._session, self._reading), None
            if source is None:
                self._session.agent.report_restored(default, RestoreSource.FRESH)
                return default
            restored = _restore.fill(self._session, self._contents, self._shard, source)
        _restore.end_restore(self._session, self._contents, source)
        self._saver.start_point = source.start_point(restored.metadata)
        self._session.agent.report_restored(source.step, source.place)
        with faults_reported():
            # Memory for the first snapshot is allocated while the script computes its step.
            self._shard.update(self._contents.arrays(), self._contents.buffers(), restored.values)
            in_memory = source.place is RestoreSource.MEMORY
            if in_memory and self._session.checkpoint and restored.metadata.waited_for:
                self._saver.save_again(restored.metadata, restored.layout)
        return source.step

    def commit(self, step: int, durable: bool = False) -> None:
        """Record that a step is finished, and save the state if a snapshot is due.

        Call this method on all ranks, after every step or micro-batch.

        Snapshots are taken as often as `overhead` allows, and only right after an optimizer step. Within a gradient
        accumulation, a snapshot would lose the gradients accumulated so far. A State without a torch optimizer can be
        saved at each commit. If the workers are about to be stopped, the first commit after an optimizer step saves the
        state and ends the process.

        Args:
            step: Number of the finished step, counted from 0.
            durable: Whether to wait until this step is complete in node memory, and to make it a checkpoint in durable
                storage. If another upload is still running, the next saved step becomes the checkpoint instead. Pass
                the same value on all ranks, and True for the last step of the script. Within a gradient accumulation,
                the next optimizer step becomes durable instead.

        Raises:
            SystemExit: The workers are about to be stopped, and the state has been saved.
            concertina_state.errors.InvalidInput: An array can't be saved, an array that should be the same on all ranks
                differs, or all optimizers that make steps are missing in the State.
        """
        self._saver.commit(step, durable)

    def _count_samples(self) -> int:
        return self._contents.samples

    def _close(self) -> None:
        """Finish the snapshots of this state, and stop counting the steps of its optimizers."""
        self._reading.close()
        self._shard.close()
        if self._contents.save_points is not None:
            self._contents.save_points.close()


_only: weakref.ref[State] | None = None
"""The State of this process."""


def end_round() -> None:
    """Close the `State` of the present round. A process calls this when it leaves a round of `trainingjob.run`.

    The script may then create another `State` in the next round.
    """
    global _only
    state = _only() if _only is not None else None
    _only = None
    if state is not None:
        state._close()


def _check_only() -> None:
    """Refuse a second State in this process, because both would write to the same files.

    Raises:
        InvalidInput: This process already has a State.
    """
    if _only is not None and _only() is not None:
        raise InvalidInput(
            "this process already has a State, and two would overwrite each other's files: give all "
            "objects to one State, with State(...) or State.add(...)."
        )
