"""Memory that tensors use while operations run, by kind, and the bytes that each process group communicates."""

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

from concertina_trainer.model import muon
from concertina_trainer.model.experts import Experts
from concertina_trainer.parallel.async_tensor import IN_TURN
from concertina_trainer.parallel.expert import AllToAll


class MemoryKind(enum.StrEnum):
    """Use of a tensor's memory."""

    weights = "weights"
    """This rank's shards of the weights."""
    moments = "moments"
    gradients = "gradients"
    """Gradients, before and after their reduction over ranks."""
    gathered = "gathered"
    """Gathered weights of the layers that are being computed.

    Without tensor parallelism, these are whole weights. With it, they are this rank's parts of the weights.
    """
    activations = "activations"
    routed = "routed"
    """Activations of the tokens that this rank has received for its experts (expert parallelism).

    The number of these tokens depends on the router's choices.
    """
    communication = "communication"
    """Buffers of FSDP's all-gathers and reduce-scatters."""
    temporary = "temporary"
    """Temporary tensors of the backward pass and of the optimizer's update."""


class MemoryPhase(enum.StrEnum):
    """Phase of a step.

    Each phase has its own peak, because the peaks grow with the number of layers in different ways.
    """

    forward = "forward"
    backward = "backward"
    update = "update"


Bytes = Mapping[MemoryKind, int]
_GATHERS = (torch.ops.c10d._allgather_base_.default,)
_REDUCES = (torch.ops.c10d._reduce_scatter_base_.default,)
_SPLIT = torch.ops.fsdp.split_with_sizes_copy.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default


class Ledger(TorchDispatchMode):
    """Record of the memory, in bytes, of all storages of tensors that are created while it is active."""

    def __init__(self, mode: FakeTensorMode | None, offloaded: bool = False) -> None:
        """Count the tensors of the fake mode `mode`, or real tensors if `mode` is None.

        For each operation, DTensor runs a trial at the global size, on fake tensors of another mode. The ledger does
        not count these tensors. If `offloaded` is True, the state is in host memory, and the optimizer updates it
        there.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode, self._offloaded = mode, offloaded
        self.now: dict[MemoryKind, int] = dict.fromkeys(MemoryKind, 0)
        """Bytes in use on the device, keyed by kind."""
        self._on_host: dict[MemoryKind, int] = dict.fromkeys(MemoryKind, 0)
        self.peaks: dict[MemoryPhase, dict[MemoryKind, int]] = {}
        """Bytes by kind at the peak of each phase, on the device."""
        self.host: dict[MemoryKind, int] = dict.fromkeys(MemoryKind, 0)
        """Bytes by kind at the peak in host memory."""
        self.sent: collections.Counter[tuple[str, str]] = collections.Counter()
        """Bytes that collectives communicate, keyed by the name of the process group and the name of the operation.

        An all-gather or a reduce-scatter counts the size of the whole tensor, not of one rank's part.
        """
        self._known: dict[int, tuple[int, MemoryKind, dict[MemoryKind, int]]] = {}
        """Size and kind of each storage, and the totals that include it, keyed by the storage's address."""
        self._temporary: set[int] = set()
        self._backward = False
        self._routing = False
        self.updating = False
        self._orthogonalizing = False

    def mark(self, kind: MemoryKind, tensors: Sequence[Tensor]) -> None:
        """Count the memory of these tensors as `kind`, even if they were created while the ledger was not active."""
        for tensor in tensors:
            self._note(tensor, kind, marked=True)

    def mark_state(self, kind: MemoryKind, tensors: Sequence[Tensor]) -> None:
        """Set the kind of tensors that are weights, reduced gradients or moments.

        Offloaded ones count in host memory.
        """
        for tensor in tensors:
            self._note(tensor, kind, marked=True, totals=self._on_host if self._offloaded else self.now)

    def fresh(self) -> None:
        """Clear the peaks and the communicated bytes, before a new measurement."""
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
        # Waiting for a collective copies the tensor if it is fake, but not if it is real.
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
        """Count the temporary tensors that remain at the end of a backward pass as gradients.

        Tensors that a backward pass leaves behind are gradients that wait for their reduction over ranks.
        """
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
                on_host = self._offloaded and self.updating and not self._orthogonalizing
                totals = self._on_host if on_host else self.now
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
        """Return a context in which activations of tokens from other ranks count as `routed` (see MemoryKind).

        With expert parallelism, a rank receives the tokens that the routers of other ranks send to its experts.
        """
        original = AllToAll.__call__

        def call(way: AllToAll, rows: Tensor, counts: Tensor, experts: Experts, keys: Tensor | None) -> Tensor:
            self._routing = True
            try:
                back = original(way, rows, counts, experts, keys)
            finally:
                self._routing = False
            if not self._backward:
                self.mark(MemoryKind.activations, [back])  # of this rank's own tokens
            return back

        with mock.patch.object(AllToAll, "__call__", call):
            yield

    @contextmanager
    def orthogonalizing(self) -> Iterator[None]:
        """Return a context in which tensors that Muon gathers and orthogonalizes count as device memory.

        If the state is offloaded, the rest of the update is in host memory.
        """
        original = muon.direction

        def call(update: Tensor, parameter: Tensor) -> Tensor:
            self._orthogonalizing = True
            try:
                return original(update, parameter)
            finally:
                self._orthogonalizing = False

        with mock.patch.object(muon, "direction", call):
            yield

    @contextmanager
    def resizing(self) -> Iterator[None]:
        """Return a context in which a resized storage counts with its new size.

        FSDP frees gathered weights by resizing their storages to 0, which a dispatch mode does not see.
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
