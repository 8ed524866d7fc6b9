"""Memory in use while operations run, by kind, and traffic of each group of ranks."""

from __future__ import annotations

import collections
import enum
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from concertina_trainer.model.experts import Experts
from concertina_trainer.parallel.async_tensor import IN_TURN
from concertina_trainer.parallel.expert import AllToAll


class MemoryKind(enum.StrEnum):
    """Kind of memory."""

    weights = "weights"
    """Weights of this rank, as the optimizer has them."""
    moments = "moments"
    gradients = "gradients"
    """Gradients, reduced or not."""
    gathered = "gathered"
    """Weights of layers that are being computed, whole or as tensor parallelism cuts them."""
    activations = "activations"
    routed = "routed"
    """Activations of the tokens that have arrived at distributed experts. Their number depends on the loads."""
    communication = "communication"
    """Buffers of FSDP's collectives."""
    temporary = "temporary"
    """Temporary tensors of backward passes and updates."""


class MemoryPhase(enum.StrEnum):
    """Phase of a step. Each has a peak of its own, since each grows with the number of layers in its own way."""

    forward = "forward"
    backward = "backward"
    update = "update"


Bytes = Mapping[MemoryKind, int]
_GATHERS = (torch.ops.c10d._allgather_base_.default,)
_REDUCES = (torch.ops.c10d._reduce_scatter_base_.default,)
_SPLIT = torch.ops.fsdp.split_with_sizes_copy.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default


class Ledger(TorchDispatchMode):
    """Ledger of all tensors that are made while it is active. Sizes are those of storages, in bytes."""

    def __init__(self, mode: FakeTensorMode | None, offloaded: bool = False) -> None:
        """Count tensors of a fake mode, or real ones if `mode` is None.

        DTensor tries each operation at its global size, on fake tensors of a mode of its own, which are not counted. If
        `offloaded`, the state is in host memory, and updated there.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode, self._offloaded = mode, offloaded
        self.now: dict[MemoryKind, int] = dict.fromkeys(MemoryKind, 0)
        """Bytes in use on the device."""
        self._on_host: dict[MemoryKind, int] = dict.fromkeys(MemoryKind, 0)
        self.peaks: dict[MemoryPhase, dict[MemoryKind, int]] = {}
        """Peaks on the device."""
        self.host: dict[MemoryKind, int] = dict.fromkeys(MemoryKind, 0)
        """Peak in host memory."""
        self.sent: collections.Counter[tuple[str, str]] = collections.Counter()
        """Bytes by the name of the group and of the operation: the total that is gathered or reduced, or sent."""
        self._known: dict[int, tuple[int, MemoryKind, dict[MemoryKind, int]]] = {}
        """Size and kind of a storage, and the dictionary that it is counted in."""
        self._temporary: set[int] = set()
        self._backward = False
        self._routing = False
        self.updating = False

    def mark(self, kind: MemoryKind, tensors: Sequence[Tensor]) -> None:
        """Set the kind of these tensors, wherever they come from."""
        for tensor in tensors:
            self._note(tensor, kind, marked=True)

    def mark_state(self, kind: MemoryKind, tensors: Sequence[Tensor]) -> None:
        """Set the kind of weights, reduced gradients, or moments."""
        for tensor in tensors:
            self._note(tensor, kind, marked=True, totals=self._on_host if self._offloaded else self.now)

    def fresh(self) -> None:
        """Start new peaks and traffic from zero."""
        self.peaks.clear()
        self.sent.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(type_, DTensor) for type_ in types):
            return NotImplemented  # it is dispatched again as operations on local tensors
        kwargs = kwargs or {}
        if (in_turn := IN_TURN.get(func)) is not None:
            with self:
                return in_turn(*args, **kwargs)
        # With fake tensors, waiting makes a copy, which it does not with real ones.
        result = args[0] if func is _WAIT and self._mode is not None else func(*args, **kwargs)
        self._turn()
        if func in collective_ops and func not in sync_ops:
            size = CollectiveOp.get_comm_tensor_size(func, result, args, kwargs)
            group = CollectiveOp.get_process_group(func, args)
            self.sent[group.group_name, func.overloadpacket.__name__] += size
        forward_kind = MemoryKind.routed if self._routing else MemoryKind.activations
        kind = MemoryKind.temporary if self._backward or self.updating else forward_kind
        # The loss computes its gradients in the forward pass; they are activations until the backward pass scales them.
        becomes_gradient = self._backward and func is torch.ops.aten.mul_.Tensor
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._note(leaf, kind, marked=becomes_gradient)
        if func in _GATHERS:
            self._note(args[0], MemoryKind.communication, marked=True)
        elif func in _REDUCES:
            self._note(args[1], MemoryKind.communication, marked=True)
            self._note(args[0], MemoryKind.gradients, marked=True)
        elif func is _SPLIT:
            self.mark(MemoryKind.gathered, kwargs["out"])
        phase = MemoryPhase.update if self.updating else MemoryPhase.backward if self._backward else MemoryPhase.forward
        peak = self.peaks.get(phase)
        if peak is None or sum(self.now.values()) > sum(peak.values()):
            self.peaks[phase] = dict(self.now)
        if sum(self._on_host.values()) > sum(self.host.values()):
            self.host = dict(self._on_host)
        return result

    def _turn(self) -> None:
        """Count what a backward pass leaves as gradients that wait to be reduced."""
        backward = torch._C._current_graph_task_id() != -1
        if self._backward and not backward:
            for key in self._temporary:
                self._move(key, MemoryKind.gradients)
            self._temporary.clear()
        self._backward = backward

    def _note(
        self, tensor: Tensor, kind: MemoryKind, marked: bool = False, totals: dict[MemoryKind, int] | None = None
    ) -> None:
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        if isinstance(tensor, AsyncCollectiveTensor):
            tensor = tensor.elem
        mode = tensor.fake_mode if isinstance(tensor, FakeTensor) else None
        if mode is not self._mode or tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            weakref.finalize(storage, self._gone, key)
            if totals is None:
                totals = self._on_host if self._offloaded and self.updating else self.now
        else:
            old_size, old_kind, old_totals = self._known[key]
            old_totals[old_kind] -= old_size
            kind = kind if marked else old_kind
            totals = old_totals if totals is None else totals
        self._known[key] = size, kind, totals
        totals[kind] += size
        if kind is MemoryKind.temporary:
            self._temporary.add(key)
        else:
            self._temporary.discard(key)

    def _move(self, key: int, kind: MemoryKind) -> None:
        size, old_kind, totals = self._known[key]
        totals[old_kind] -= size
        totals[kind] += size
        self._known[key] = size, kind, totals

    def _gone(self, key: int) -> None:
        size, kind, totals = self._known.pop(key)
        totals[kind] -= size
        self._temporary.discard(key)

    @contextmanager
    def routing(self) -> Iterator[None]:
        """Count tensors that are made while tokens are routed separately."""
        original = AllToAll.__call__

        def call(way: AllToAll, rows: Tensor, counts: Tensor, experts: Experts) -> Tensor:
            self._routing = True
            try:
                back = original(way, rows, counts, experts)
            finally:
                self._routing = False
            if not self._backward:
                self.mark(MemoryKind.activations, [back])  # of this rank's own tokens
            return back

        with mock.patch.object(AllToAll, "__call__", call):
            yield

    @contextmanager
    def resizing(self) -> Iterator[None]:
        """Note storages that are resized.

        FSDP frees weights by making their storages empty, which is no operation that dispatches.
        """
        original = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> None:
            original(storage, size)
            if (entry := self._known.get(storage._cdata)) is not None:
                old_size, kind, totals = entry
                totals[kind] += size - old_size
                self._known[storage._cdata] = size, kind, totals

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]
