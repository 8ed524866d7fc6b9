"""Contents of a checkpoint under the names of torch.distributed.checkpoint (DCP).

A state dict of DCP is a tree of dicts. DCP joins the keys on the way to a value with dots, and calls the result a flat
key. This module maps each array and value of a checkpoint to a path in such a tree, as if a script had saved

    {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(..., flatten_optimizer_state_dict=True), ...}

In this form, the state of an optimizer has the keys `state.<parameter>.<moment>` and
`param_groups.<parameter>.<option>`, which do not depend on how the optimizer divides its parameters into groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Tuple, Union

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from concertina_state.errors import InvalidInput
from concertina_state.format.shardfile import Chunk, Header
from trainingjob import _values
from trainingjob._objects import ARRAY

if TYPE_CHECKING:
    from concertina_state.checkpoints.reader import StoredCheckpoint

Path = Tuple[Union[str, int], ...]
"""Keys and indices that lead to a value in a state dict."""
PER_RANK = ("random", "loaders")
"""Objects of a `State` that differ between ranks. DCP has no place for them."""
OPTIMIZER = "optimizer"
"""First part of the names of moments in checkpoints of the bundled trainer: `optimizer.<moment>.<weight>`."""
RANK = "rank-"
"""Prefix of the names under which a `State` saves arrays and values of a single rank."""


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """Array that the shards of the checkpoint contain."""

    path: Path
    name: str
    """Name in the shards."""
    dtype: str
    """Name of the dtype in safetensors."""
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Value:
    """Small value in memory, which may be a tensor."""

    path: Path
    value: Any


@dataclasses.dataclass(frozen=True)
class DerivedArray:
    """Array that is computed from stored arrays when it is written."""

    path: Path
    sources: tuple[StoredArray, ...]
    compute: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    """Function that returns the array. It receives the arrays of `sources`."""
    dtype: str
    shape: tuple[int, ...]


Entry = Union[StoredArray, DerivedArray, Value]


def entries_of(stored: StoredCheckpoint, headers: Mapping[int, Header]) -> dict[str, Entry]:
    """Return everything that DCP can load from a checkpoint, by flat key.

    Raises:
        InvalidInput: The checkpoint is damaged, or was saved by neither the bundled trainer nor `trainingjob.State`.
        StorageError: Storage can't be read.
    """
    chunks = {name: each.chunk for header in headers.values() for name, each in header.chunks.items()}
    if headers[0].trainer:
        entries = _of_trainer(chunks.values(), stored.id.step)
    elif f"{RANK}0" in chunks:
        entries = _of_state(chunks.values(), _values_of_rank_0(stored))
    else:
        raise InvalidInput(f"{stored.uri} was saved by neither the bundled trainer nor trainingjob.State.")
    by_key: dict[str, Entry] = {}
    for entry in entries:
        key = ".".join(map(str, entry.path))
        if key in by_key:
            raise InvalidInput(f"{stored.uri} has two entries with the name {key}, and DCP can have only one.")
        by_key[key] = entry
    return by_key


# --- the bundled trainer --------------------------------------------------------------------------------------------


def _of_trainer(chunks: Iterable[Chunk], step: int) -> Iterator[Entry]:
    trained: dict[str, None] = {}
    for chunk in chunks:
        section, _, rest = chunk.name.partition(".")
        if section != OPTIMIZER:
            yield _stored(chunk, (section, rest))
            continue
        moment, _, weight = rest.partition(".")
        yield _stored(chunk, (OPTIMIZER, f"state.{weight}.{moment}"))
        trained[weight] = None
    for weight in trained:
        yield Value((OPTIMIZER, f"state.{weight}.step"), torch.tensor(float(step)))


# --- trainingjob.State ----------------------------------------------------------------------------------------------


def _values_of_rank_0(stored: StoredCheckpoint) -> Mapping[str, Any]:
    """Return the values that rank 0 has saved, keyed by the name of the object.

    DCP, too, loads values that are not sharded from rank 0's file.
    """
    shard = stored.open(0)
    chunk = shard.header.chunks[f"{RANK}0"]
    [text] = shard.read([(chunk.begin, chunk.begin + chunk.chunk.size)])
    values: Mapping[str, Any] = _values.decode(bytes(text))
    return values


def _of_state(chunks: Iterable[Chunk], values: Mapping[str, Any]) -> Iterator[Entry]:
    by_object: dict[str, dict[str, Chunk]] = {name: {} for name in values}
    for chunk in chunks:
        name = chunk.name
        if name.startswith(RANK):
            rank, _, name = name.partition(".")
            if rank != f"{RANK}0" or not name:
                continue
        name, _, rest = name.partition(".")
        by_object.setdefault(name, {})[rest] = chunk
    for name, own_chunks in by_object.items():
        if name in PER_RANK:
            continue
        of_object = values.get(name)
        if isinstance(of_object, dict) and of_object.keys() >= {"kind", "groups", "names"}:
            yield from _of_optimizer(name, own_chunks, of_object)
        else:
            yield from _of_object(name, own_chunks, of_object)


def _of_object(name: str, chunks: Mapping[str, Chunk], values: Any) -> Iterator[Entry]:
    """Yield the entries of a module, a dict, or an object with a state dict."""
    left = dict(chunks)
    flat, paths = flatten_state_dict({name: _with_arrays(values, "", left)})
    for key, value in flat.items():
        if not _holds_array(value):
            yield Value(paths[key], value)
        elif isinstance(value, _Array):
            yield _stored(value.stored, paths[key])
    for rest, chunk in left.items():
        yield _stored(chunk, (name, rest))


class _Array(torch.Tensor):
    """Placeholder of a stored array in a tree, which DCP treats as a tensor."""

    stored: Chunk


def _with_arrays(tree: Any, path: str, chunks: dict[str, Chunk]) -> Any:
    """Return a tree of values, in which a placeholder replaces each array of a dict.

    A placeholder refers to the array's chunk, which is removed from `chunks`.
    """
    if isinstance(tree, str) and tree == ARRAY and path in chunks:
        array = torch.empty(0, device="meta").as_subclass(_Array)
        array.stored = chunks.pop(path)
        return array
    kind = type(tree)
    prefix = f"{path}/" if path else ""
    if kind is dict:
        return {key: _with_arrays(value, f"{prefix}{key}", chunks) for key, value in tree.items()}
    if kind in (list, tuple):
        return kind(_with_arrays(value, f"{prefix}{number}", chunks) for number, value in enumerate(tree))
    return tree


def _holds_array(value: Any) -> bool:
    """Return whether a value is a placeholder, or a tuple that contains one. DCP saves such a tuple as one value."""
    return isinstance(value, _Array) or (isinstance(value, (list, tuple)) and any(map(_holds_array, value)))


def _of_optimizer(name: str, chunks: Mapping[str, Chunk], values: Mapping[str, Any]) -> Iterator[Entry]:
    """Yield the moments and options of an optimizer, named after the parameters of the module that they belong to."""
    parameters = [parameter for group in values["names"] for parameter in group]
    in_modules = "moments" in values  # not with FSDP1, whose names are those of the one module
    short = dict(zip(parameters, _within_module(parameters) if in_modules else parameters))
    for rest, chunk in chunks.items():
        parameter, moment = _split(rest, short)
        yield _stored(chunk, (name, f"state.{short[parameter]}.{moment}"))
    for index, state in values["others"].items():
        parameter = index if isinstance(index, str) else parameters[index]
        for key, value in state.items():
            yield Value((name, f"state.{short[parameter]}.{key}"), value)
    for group, options in zip(values["names"], values["groups"]):
        for parameter in group:
            for option, value in options.items():
                yield Value((name, f"param_groups.{short[parameter]}.{option}"), value)


def _within_module(parameters: Sequence[str]) -> list[str]:
    """Return the parameters' names without the module's name in front, if all parameters belong to the same module."""
    modules = {parameter.partition(".")[0] for parameter in parameters}
    if len(modules) != 1 or modules.pop().isdecimal():  # of no module: named by group and position
        return list(parameters)
    return [parameter.partition(".")[2] for parameter in parameters]


def _split(name: str, parameters: Mapping[str, str]) -> tuple[str, str]:
    """Split the name of an optimizer moment into the name of its parameter and the name of the moment's kind.

    Raises:
        InvalidInput: The optimizer has no such parameter.
    """
    end = len(name)
    while (end := name.rfind(".", 0, end)) > 0:
        if name[:end] in parameters:
            return name[:end], name[end + 1 :]
    raise InvalidInput(f"the checkpoint has {name} in an optimizer without this parameter: it is damaged.")


def _stored(chunk: Chunk, path: Path) -> StoredArray:
    return StoredArray(path, chunk.name, chunk.dtype, chunk.global_shape)
