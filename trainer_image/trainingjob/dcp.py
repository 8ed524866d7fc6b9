"""torch.distributed.checkpoint (DCP): load checkpoints of this project by `dcp.load`, from a folder or an object store.

Example::

    import torch.distributed.checkpoint as dcp
    import trainingjob.dcp

    state = {"model": model.state_dict()}
    dcp.load(state, storage_reader=trainingjob.dcp.Reader("s3://bucket/run-1"))
    model.load_state_dict(state["model"])
"""

from __future__ import annotations

import dataclasses
import io
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import (
    DefaultSavePlanner,
    FileSystemWriter,
    LoadPlan,
    LoadPlanner,
    Metadata,
    SavePlan,
    StorageReader,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem, TensorWriteData, WriteItem, WriteItemType
from torch.futures import Future

from concertina_state.errors import InvalidInput
from concertina_state.format.read_plan import reads
from concertina_state.format.shardfile import Chunk, Header
from concertina_state.holdings import own_chunk
from concertina_state.tensors import DTYPES, execute
from trainingjob import _storage
from trainingjob._dcp_entries import Entry, StoredArray, Value, entries_of

if TYPE_CHECKING:
    from concertina_state.checkpoints.reader import StoredCheckpoint

__all__ = ["Reader", "convert"]

HEADER_THREADS = 8
"""Number of headers that are read at the same time."""
WRITE_THREADS = 4
"""Number of files that `convert` writes at the same time. Each needs memory for one tensor."""
Arrange = Callable[["StoredCheckpoint", Mapping[str, Entry]], Mapping[str, Entry]]
"""Function that receives a checkpoint and its entries by flat key, and returns the entries to write."""


@dataclasses.dataclass(frozen=True)
class _Contents:
    """Opened checkpoint: the headers of its shards, and everything that DCP can load from it."""

    checkpoint: StoredCheckpoint
    headers: Mapping[int, Header]
    entries: Mapping[str, Entry]
    """Arrays and values by flat key."""

    @staticmethod
    def of(checkpoint: StoredCheckpoint) -> _Contents:
        with ThreadPoolExecutor(HEADER_THREADS) as pool:
            headers = dict(enumerate(pool.map(lambda shard: shard.header, checkpoint.shards)))
        return _Contents(checkpoint, headers, entries_of(checkpoint, headers))

    @property
    def metadata(self) -> Metadata:
        """Names, dtypes and shapes of everything in the checkpoint, as DCP expects them.

        The metadata present each tensor as one piece. DCP therefore requests one box (rectangular part) of a tensor at
        a time, and `fill` finds the shards that contain the box.
        """
        return Metadata(
            {key: _metadata_of(entry) for key, entry in self.entries.items()},
            planner_data={key: entry.path for key, entry in self.entries.items()},
        )

    def fill(self, targets: Mapping[Chunk, Tensor]) -> None:
        """Read the requested parts of stored arrays into the tensors `targets`.

        Raises:
            InvalidInput: The checkpoint is damaged, or lacks a part of an array.
            StorageError: Storage can't be read.
        """
        plan = reads(self.headers, list(targets))
        plan.require(self.checkpoint.uri)
        execute(plan, dict(enumerate(self.checkpoint.shards)), targets)


class Reader(StorageReader):
    """Storage reader with which `dcp.load` loads a checkpoint of the bundled trainer or of `trainingjob.State`.

    The state dict may have any sharding, on any number of ranks. Each rank reads only the rows of the stored shards
    that contain its part, in whole blocks of 1 MiB, and compares these blocks with their checksums.

    The keys are those of `{"model": model.state_dict(), "optimizer": get_optimizer_state_dict(...)}` with
    `StateDictOptions(flatten_optimizer_state_dict=True)`.

    Args:
        uri: URI (s3://, gs://, az:// or file://) of a checkpoint or of a run's folder. In a run's folder, the reader
            loads the newest checkpoint, which the object LATEST names.

    Raises:
        concertina_state.errors.InvalidInput: In `dcp.load`: the checkpoint is damaged, or the state dict has a key that
            the checkpoint does not have.
    """

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._contents: _Contents | None = None

    @property
    def checkpoint_id(self) -> str:
        return self._uri

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" in str(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._uri = str(checkpoint_id)

    def read_metadata(self) -> Metadata:
        """Return the names, dtypes and shapes of everything in the checkpoint."""
        _storage.find_client()
        from concertina_state.checkpoints.reader import StoredCheckpoint, resolve
        from concertina_state.objects.retry import final

        self._contents = _Contents.of(StoredCheckpoint(final(lambda: resolve(self._uri))))
        return self._contents.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Do nothing: `read_metadata` has opened the checkpoint."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        assert self._contents is not None
        return dataclasses.replace(plan, storage_data=self._contents.checkpoint.uri)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all ranks read the same checkpoint.

        Raises:
            InvalidInput: A newer checkpoint was published while the ranks opened it, so they have opened different
                ones.
        """
        if len(uris := {plan.storage_data for plan in plans}) > 1:
            found = ", ".join(sorted(uris))
            raise InvalidInput(f"ranks found different checkpoints ({found}): load again, or name one.")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan requests into the tensors of the planner. Meanwhile, the checkpoint is not deleted.

        Raises:
            InvalidInput: The checkpoint is damaged, or lacks a part of a tensor.
            StorageError: Storage can't be read, or the checkpoint was deleted since the plan was made.
        """
        from concertina_state.checkpoints.reader import opened

        assert self._contents is not None
        with opened(self._contents.checkpoint.uri):
            requests: list[tuple[ReadItem, StoredArray]] = []
            for request in plan.items:
                entry = self._contents.entries[request.storage_index.fqn]
                if isinstance(entry, Value):
                    _give(entry.value, request, planner)
                else:
                    assert isinstance(entry, StoredArray)  # only `write` derives arrays
                    requests.append((request, entry))
            self._read(requests, planner, self._contents)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(
        self, requests: Sequence[tuple[ReadItem, StoredArray]], planner: LoadPlanner, contents: _Contents
    ) -> None:
        targets: dict[Chunk, list[tuple[ReadItem, Tensor]]] = {}
        for request, array in requests:
            target = planner.resolve_tensor(request).detach()
            targets.setdefault(_chunk(request, array), []).append((request, target))
        contents.fill({chunk: each[0][1] for chunk, each in targets.items()})
        for (_, first), *others in targets.values():
            for _, target in others:
                target.copy_(first)
        for each in targets.values():
            for request, target in each:
                planner.commit_tensor(request, target)


class _CopyPlanner(DefaultSavePlanner):
    """Planner that saves the contents of a checkpoint, and reads each tensor only when it is written."""

    def __init__(self, contents: _Contents, advance: Callable[[int], None]) -> None:
        super().__init__()
        self._contents, self._advance = contents, advance

    def create_local_plan(self) -> SavePlan:
        metadata = self._contents.metadata
        items = [_write_item(key, each) for key, each in metadata.state_dict_metadata.items()]
        self.plan = SavePlan(items, planner_data=metadata.planner_data)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        entry = self._contents.entries[index.fqn]
        if isinstance(entry, Value):
            return entry.value
        if isinstance(entry, StoredArray):
            return self._read(entry)
        return entry.compute([self._read(source) for source in entry.sources])

    def _read(self, array: StoredArray) -> Tensor:
        tensor = torch.empty(array.shape, dtype=DTYPES[array.dtype])
        self._contents.fill({own_chunk(array.name, array.dtype, array.shape): tensor})
        self._advance(tensor.nbytes)
        return tensor


def convert(uri: str, folder: str | os.PathLike[str], advance: Callable[[int], None] = lambda size: None) -> str:
    """Write a checkpoint as a folder that `dcp.load(checkpoint_id=folder)` and `dcp_to_torch_save` read.

    The keys are those of `Reader`. The folder has no checksums.

    Args:
        uri: URI of a checkpoint or of a run's folder. In a run's folder, the newest checkpoint is written, which the
            object LATEST names.
        folder: Empty or new folder on this machine.
        advance: Function that is called with the number of bytes just read.

    Returns:
        The URI of the checkpoint.

    Raises:
        concertina_state.errors.InvalidInput: The checkpoint is damaged, or its frozen weights are stored elsewhere, or
            the folder is not empty.
        concertina_state.objects.prefix.StorageError: Storage can't be read.
    """
    return write(uri, folder, lambda checkpoint, entries: entries, advance)


def write(uri: str, folder: str | os.PathLike[str], arrange: Arrange, advance: Callable[[int], None]) -> str:
    """Write the entries of a checkpoint that `arrange` selects, as a folder of DCP. See `convert`.

    Raises:
        InvalidInput: As in `convert`.
    """
    _storage.find_client()
    from concertina_state.checkpoints.reader import opened, resolve

    if os.path.exists(folder) and (not os.path.isdir(folder) or os.listdir(folder)):
        raise InvalidInput(f"{folder} is not empty: name a new folder.")
    with opened(resolve(uri)) as checkpoint, warnings.catch_warnings():
        if frozen := checkpoint.manifest.frozen:
            raise InvalidInput(
                f"{checkpoint.uri} has only the adapters of a model, whose other weights are in {frozen.uri}: export "
                "it as a Hugging Face model instead."
            )
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        contents = _Contents.of(checkpoint)
        arranged = dataclasses.replace(contents, entries=arrange(checkpoint, contents.entries))
        writer, planner = FileSystemWriter(folder, thread_count=WRITE_THREADS), _CopyPlanner(arranged, advance)
        dcp.save({}, storage_writer=writer, planner=planner, no_dist=True)
        return checkpoint.uri


def _write_item(key: str, entry: TensorStorageMetadata | BytesStorageMetadata) -> WriteItem:
    if isinstance(entry, BytesStorageMetadata):
        return WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)
    [whole] = entry.chunks
    data = TensorWriteData(whole, entry.properties, entry.size)
    return WriteItem(MetadataIndex(key, whole.offsets), WriteItemType.TENSOR, tensor_data=data)


def _metadata_of(entry: Entry) -> TensorStorageMetadata | BytesStorageMetadata:
    if not isinstance(entry, Value):
        return _tensor_metadata(DTYPES[entry.dtype], entry.shape)
    if isinstance(entry.value, torch.Tensor):
        return _tensor_metadata(entry.value.dtype, entry.value.shape)
    return BytesStorageMetadata()


def _tensor_metadata(dtype: torch.dtype, shape: Sequence[int]) -> TensorStorageMetadata:
    size = torch.Size(shape)
    whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, [whole])


def _chunk(request: ReadItem, array: StoredArray) -> Chunk:
    """Return the part of a stored array that DCP requests."""
    return Chunk(array.name, array.dtype, tuple(request.storage_offsets), tuple(request.lengths), array.shape)


def _give(value: object, request: ReadItem, planner: LoadPlanner) -> None:
    """Pass a value that is already in memory to DCP's planner."""
    if request.type is LoadItemType.BYTE_IO:
        content = io.BytesIO()
        torch.save(value, content)
        content.seek(0)
        planner.load_bytes(request, content)
        return
    assert isinstance(value, torch.Tensor)
    target = planner.resolve_tensor(request).detach()
    slices = tuple(slice(begin, begin + count) for begin, count in zip(request.storage_offsets, request.lengths))
    target.copy_(value[slices])
    planner.commit_tensor(request, target)
