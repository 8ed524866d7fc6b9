"""Worker that prints how often the host would wait for a GPU in each step, although it runs on a CPU.

With PLANTED=1, each step has one more such wait, in the backward pass.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from concertina_trainer import worker
from concertina_trainer.training.progress_report import Reporter

aten = torch.ops.aten
OPERATIONS = {
    aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.bincount, aten._unique2,
    aten.unique_dim, aten.unique_consecutive,
}  # fmt: skip
"""Operations whose result, or the shape of whose result, the host reads. `.item()`, `if` and `int()` are the first."""
INDEXING = {aten.index, aten.index_put_, aten.index_put, aten._index_put_impl_}
"""Operations with which the host reads how many elements a bool index selects."""
CALLS = {Tensor.tolist, Tensor.cpu, Tensor.numpy, Tensor.__array__}
"""Methods that copy to the host, and that do nothing for a tensor that is there already."""


class HostWaits:
    """Counter for the thread that enters it, and for the backward passes that this thread starts.

    A copy by `.to` is not counted, because its target says nothing on a CPU.
    """

    def __init__(self) -> None:
        self.count = 0
        self._modes = _Operations(self), _Calls(self)

    def __enter__(self) -> HostWaits:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*raised)


class _Operations(TorchDispatchMode):
    def __init__(self, waits: HostWaits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(type_, DTensor) for type_ in types):
            return NotImplemented  # it is dispatched again as operations on local tensors
        kwargs, operation = kwargs or {}, func.overloadpacket
        indices = args[1] if operation in INDEXING else ()
        selects = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)
        repeats = func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
        self._waits.count += operation in OPERATIONS or selects or repeats
        return func(*args, **kwargs)


class _Calls(TorchFunctionMode):
    def __init__(self, waits: HostWaits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._waits.count += func in CALLS
        return func(*args, **(kwargs or {}))


def main():
    waits, train, step = HostWaits(), worker.train, Reporter.step

    def counted(run, *others):
        if os.environ.get("PLANTED"):
            parameter = next(iter(run.optimizer._sharded.values()))
            parameter.register_post_accumulate_grad_hook(lambda tensor: tensor.grad.sum().item())
        with waits:
            return train(run, *others)

    def reported(self, info):
        step(self, info)
        print(f"after step {info.step} waits: {waits.count}", flush=True)
        waits.count = 0

    worker.train, Reporter.step = counted, reported
    worker.main()
