"""Runner of a script of this package.

It joins the ranks, records what the script computes and what its state holds, and stops where the test kills the
script.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import random
import signal
import sys
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy.random

BATCH = 12
"""Number of items in a step, over all ranks."""
MOST_LOST = 5
"""Maximum number of commits that may be lost if every possible one is saved: the micro-batches of an accumulation."""


class Run:
    """Run of a script: its rank, its part of a batch, and the record of what it has computed."""

    def __init__(self, steps: int, asks_before: int, stops_after: int) -> None:
        """Initialize the run.

        Args:
            asks_before: Commit, counted from 1, before which the run waits until the test has told the agents' stand-in
                to end the world; 0 for none.
            stops_after: Number of commits after which the run waits to be killed; 0 for never.
        """
        self.steps = steps
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.objects: dict[str, Any] = {}
        """All objects that are given to State."""
        self.restarted = Path("checkpoints").exists() or os.environ.get("CONCERTINA_ROUND", "1") != "1"
        """Whether this is not the first run, for scripts that change between two runs."""
        self._asks_before, self._stops_after, self._commits = asks_before, stops_after, 0
        self._records = os.open(f"records-{self.rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    # --- for scripts ------------------------------------------------------------------------------------------------

    def share(self, count: int = BATCH) -> range:
        """Return this rank's part of a number of items."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def mean(self, losses: Any) -> Any:
        """Return the mean over the items of all ranks, if gradients are averaged over ranks."""
        return losses.sum() / BATCH * self.size

    def total(self, number: Any) -> float:
        """Return the mean of a number over all ranks."""
        import torch
        import torch.distributed as dist

        summed = torch.as_tensor(number, dtype=torch.float64).detach().clone()
        if self.size > 1:
            dist.all_reduce(summed)
        return summed.item() / self.size

    def record(self, step: int, **values: Any) -> None:
        """Record values of a step that are the same on all ranks."""
        self._write("step", (step, {f"step.{name}": value for name, value in values.items()}))

    def record_own(self, step: int, **values: Any) -> None:
        """Record values of a step that each rank has for itself."""
        self._write("step", (step, {f"own.{name}": value for name, value in values.items()}))

    def consumed(self, step: int, items: Sequence[int]) -> None:
        """Record the ids of the items that this rank trained on in a step."""
        self._write("step", (step, {"items": list(map(int, items))}))

    def finished(self, **values: Any) -> None:
        """Record final values that are equal on all ranks, such as the evaluation loss."""
        self._write("end", {f"end.{name}": value for name, value in values.items()})

    def finished_own(self, **values: Any) -> None:
        """Record final values of this rank."""
        self._write("end", {f"own.{name}": value for name, value in values.items()})

    # --- for the harness --------------------------------------------------------------------------------------------

    def restored(self, step: int) -> None:
        # Asking a StatefulDataLoader for its position begins a pass, before the script has set the epoch.
        began = {name for name, value in self.objects.items() if type(value).__name__ != "StatefulDataLoader"}
        self._write("restored", (step, self.held(began)))

    def before_commit(self, step: int) -> None:
        """Record what is committed, if a run that is killed may be restored to it."""
        assert self.objects
        last, count = self._stops_after or self._asks_before + MOST_LOST, self._commits + 1
        if last - 2 * MOST_LOST < count <= last:
            self._write("commit", (int(step), self.held()))
        if count == self._asks_before:
            Path(f"asks-{self.rank}").touch()
            while not Path("asked").exists():
                time.sleep(0.002)

    def after_commit(self, state: Any) -> None:
        self._commits += 1
        if self._commits == self._stops_after:
            if state._saver.saving is not None:
                state._saver.saving.finish()
            Path(f"stops-{self.rank}").touch()
            signal.pause()

    def held(self, of: Container[str] | None = None) -> dict[str, Any]:
        """Return the content of the objects of State, or of those with these names, and the random numbers.

        Their names are the same in any world.
        """
        holds = {"random": dict(_flat(_random_states(), ""))}
        names = _parameter_names(self.objects)
        for name, value in self.objects.items():
            if of is None or name in of:
                holds[name] = dict(_held(value, names, self.objects))
        return {f"{name}.{key}": value for name, held in holds.items() for key, value in held.items()}

    def ends(self) -> None:
        self._write("end", {f"end.{name}": value for name, value in self.held().items()})

    def _write(self, kind: str, content: Any) -> None:
        data = pickle.dumps((kind, _plain(content)))
        os.write(self._records, len(data).to_bytes(8, "little") + data)


def _plain(value: Any) -> Any:
    """Return arrays as numpy's, because the test that reads them imports neither torch nor JAX."""
    if (torch := sys.modules.get("torch")) and isinstance(value, torch.Tensor):
        return _array(value)
    if (jax := sys.modules.get("jax")) and isinstance(value, jax.Array):
        key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
        return numpy.asarray(jax.random.key_data(value) if key else value)
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value)) if type(value) in (list, tuple) else tuple(map(_plain, value))
    return value


def _array(tensor: Any) -> Any:
    import torch
    from torch.distributed.tensor import DTensor

    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    if torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor):
        return {name: _array(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0]}
    if tensor.is_meta or tensor.layout != torch.strided or type(tensor).__name__ == "Opaque":
        return f"{type(tensor).__name__} {tensor.layout} {tensor.device}"
    tensor = tensor.detach().as_subclass(torch.Tensor).cpu()
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    if tensor.dtype.is_floating_point and tensor.dtype not in (torch.float16, torch.float32, torch.float64):
        return {"dtype": str(tensor.dtype), "values": tensor.to(torch.float32).numpy()}
    return tensor.resolve_conj().resolve_neg().numpy().copy()


def _held(value: Any, names: Mapping[int, str], objects: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    torch = sys.modules.get("torch")
    if torch and isinstance(value, torch.distributed.fsdp.FullyShardedDataParallel):
        yield from _flat(_whole_state(value), "")
    elif torch and isinstance(value, torch.optim.Optimizer) and (module := _flattened(objects)) is not None:
        yield from _flat(_whole_state(module, value), "")
    elif torch and isinstance(value, torch.nn.Module):
        yield from ((_plain_name(name), tensor) for name, tensor in value.named_parameters())
        yield from ((f"{_plain_name(name)} (buffer)", tensor) for name, tensor in value.named_buffers())
    elif torch and isinstance(value, torch.optim.Optimizer):
        yield from _held_by_optimizer(value, names)
    elif isinstance(value, Mapping):
        yield from _flat(value, "")
    else:
        yield from _flat(value.state_dict(), "")


def _flattened(objects: Mapping[str, Any]) -> Any:
    """Return the module of FSDP1 among these objects, whose parameters have no names and shapes of their own."""
    kind = sys.modules["torch"].distributed.fsdp.FullyShardedDataParallel
    return next((each for each in objects.values() if isinstance(each, kind)), None)


def _whole_state(module: Any, optimizer: Any = None) -> Any:
    from torch.distributed.checkpoint import state_dict

    options = state_dict.StateDictOptions(full_state_dict=True)
    if optimizer is None:
        return state_dict.get_model_state_dict(module, options=options)
    return state_dict.get_optimizer_state_dict(module, optimizer, options=options)


def _held_by_optimizer(optimizer: Any, names: Mapping[int, str]) -> Iterator[tuple[str, Any]]:
    import torch

    for number, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for index, parameter in enumerate(group["params"]):
            name = names.get(id(parameter), f"{number}.{index}")
            yield from _flat(options, f"options of {name}")
            yield from _flat(optimizer.state.get(parameter, {}), f"state of {name}")
    for key, value in optimizer.state.items():
        if not isinstance(key, torch.Tensor):
            yield from _flat(value, f"state of {key}")


def _parameter_names(objects: Mapping[str, Any]) -> dict[int, str]:
    torch = sys.modules.get("torch")
    return {
        id(parameter): f"{name}.{_plain_name(full)}"
        for name, module in objects.items()
        if torch and isinstance(module, torch.nn.Module)
        for full, parameter in module.named_parameters()
    }


def _plain_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in ("module", "_orig_mod"))


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    from trainingjob import ArrayShard

    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _flat(each, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)) and not all(isinstance(each, (int, float)) for each in value):
        for index, each in enumerate(value):
            yield from _flat(each, f"{path}.{index}")
    elif isinstance(value, ArrayShard):
        yield path, {"part": value.array, "offsets": tuple(value.offsets), "shape": tuple(value.shape)}
    elif isinstance(value, memoryview):
        yield path, value.tolist()
    else:
        yield path, value


def _random_states() -> dict[str, Any]:
    torch = sys.modules.get("torch")
    return {
        "python": random.getstate()[1],
        "numpy": numpy.random.get_state()[1],
        "torch": torch.get_rng_state() if torch else None,
    }


@contextlib.contextmanager
def _watched(run: Run) -> Iterator[None]:
    """Make State record what it was given, and the content at each commit and restore."""
    from trainingjob._state import State

    add, commit, restore = State.add, State.commit, State.restore

    def watched_add(self: State, **objects: Any) -> None:
        run.objects.update(objects)
        add(self, **objects)

    def watched_commit(self: State, step: int, durable: bool = False) -> None:
        run.before_commit(step)
        commit(self, step, durable)
        run.after_commit(self)

    def watched_restore(self: State, default: int = 0) -> int:
        step = restore(self, default)
        run.restored(step)
        return step

    State.add, State.commit, State.restore = watched_add, watched_commit, watched_restore  # type: ignore[method-assign]
    yield


def _seed(run: Run) -> None:
    """Seed the generators.

    A restarted run uses other seeds: its random numbers must come from the saved state.
    """
    seed = 1000 * run.restarted + run.rank
    random.seed(seed)
    numpy.random.seed(seed)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)


def main() -> None:
    """Run the script that `LOOP` names, in a process forked by the test."""
    os.chdir(os.environ["LOOP_FOLDER"])
    sys.path += filter(None, [os.environ["LOOP_PATH"]])
    run = Run(*(int(os.environ[name]) for name in ("LOOP_STEPS", "LOOP_ASKS_BEFORE", "LOOP_STOPS_AFTER")))
    module, _, name = os.environ["LOOP"].partition(":")
    script: Callable[[Run], None] = getattr(importlib.import_module(module), name)
    if run.size > 1 and "torch" in sys.modules:
        import torch.distributed as dist

        dist.init_process_group(
            "gloo", init_method=f"file://{os.environ['LOOP_STORE']}", rank=run.rank, world_size=run.size
        )
    _seed(run)
    with _watched(run):
        script(run)
    run.ends()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
