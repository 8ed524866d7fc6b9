"""Tensors of a shard: copying into the shard's file, and reading from shards. Requires torch."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from mmap import mmap

import torch
from torch import Tensor

from concertina_state import filling
from concertina_state.filling import Place, ShardReader
from concertina_state.format.read_plan import Box, ReadItem, ReadPlan
from concertina_state.format.shardfile import Chunk, Layout
from concertina_state.live import Arrival
from concertina_state.pinned import pin

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "I64": torch.int64, "BF16": torch.bfloat16, "F16": torch.float16,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Views(list[Tensor]):
    """List of tensors that are views of parts of a file.

    This is a subclass of list, because `pin` needs a weak reference, which list itself does not support.
    """


class Tensors:
    """Contents of a shard: the tensors, and the position of each tensor in the file.

    A GPU copies its tensors into pinned memory on a separate stream, while the caller continues. A copy into pageable
    memory would block the host, and be four times slower (decision "GPU snapshots are copied on a separate stream").
    """

    def __init__(self, layout: Layout, tensors: Sequence[Tensor]) -> None:
        """Record the tensors of a shard. The order of `tensors` is that of the chunks in `layout`."""
        self.layout, self.tensors = layout, tensors
        self._devices = sorted({tensor.device for tensor in tensors if tensor.is_cuda}, key=str)
        self._places = {
            device: [index for index, tensor in enumerate(tensors) if tensor.is_cuda and tensor.device == device]
            for device in self._devices
        }
        self._host = [index for index, tensor in enumerate(tensors) if not tensor.is_cuda]
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._copied: dict[torch.device, torch.cuda.Event] = {}

    def views(self, file: mmap) -> Views:
        """Return a view of the bytes of each tensor in the mapped file.

        If tensors are on a GPU, the file's memory is pinned, so that the GPU can copy into it.
        """
        whole = torch.frombuffer(file, dtype=torch.uint8)
        views = Views(
            whole[begin : begin + chunk.size].view(DTYPES[chunk.dtype]).view(chunk.shape)
            for chunk, begin in zip(self.layout.chunks, self.layout.begins)
        )
        if self._devices:
            pin(whole, views)
        return views

    @torch.no_grad()
    def copy_to(self, views: Views) -> Arrival:
        """Copy the present contents of the tensors into the views, or start the copies on devices."""
        events = [self._begin(device, views) for device in self._devices]
        self._copy(views, self._host)
        return lambda: max((_seconds(begin, end) for begin, end in events), default=0.0)

    def _copy(self, views: Views, indices: Sequence[int]) -> None:
        """Copy several tensors in one call.

        For hundreds of small tensors, a loop in Python would take longer than the copies.
        """
        if indices:
            into, tensors = [views[index] for index in indices], [self.tensors[index] for index in indices]
            torch._foreach_copy_(into, tensors, non_blocking=True)  # non_blocking affects devices only

    def _begin(self, device: torch.device, views: Views) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        begin, end = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
        with torch.cuda.stream(stream):
            begin.record()
            self._copy(views, self._places[device])
            end.record()
        self._copied[device] = end
        return begin, end

    def before_change(self) -> None:
        """Make devices finish copying the tensors before they execute later work, which may change the tensors.

        Only the devices wait. This method returns at once.
        """
        for device, end in self._copied.items():
            torch.cuda.current_stream(device).wait_event(end)


def _seconds(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1000


def execute(plan: ReadPlan, shards: Mapping[int, ShardReader], tensors: Mapping[Chunk, Tensor]) -> None:
    """Read the chunks of `plan` from `shards` into `tensors`. Each tensor has the shape of its chunk."""
    filling.execute(plan, shards, lambda item: _place_for(item, tensors[item.target]))


@torch.no_grad()
def _place_for(item: ReadItem, whole: Tensor) -> Place:
    dtype, target = DTYPES[item.dtype], whole[item.box.within(Box.of(item.target))]
    if item.rows == item.box and target.dtype == dtype and target.is_cpu and target.is_contiguous():
        return memory(target), None
    source = torch.empty(item.rows.shape, dtype=dtype, pin_memory=target.is_cuda)
    part = source[item.box.within(item.rows)]

    @torch.no_grad()
    def take() -> None:
        target.copy_(part)

    return memory(source), take


def memory(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, without a copy.

    numpy is not used, because an image with torch may lack numpy.
    """
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")
