"""Opening of a data set: its folder or store, its manifest, and its shards, which are opened before they are needed."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

from concertina_data.data_manifest import NAME, DataManifest, parse
from concertina_data.places import CacheSettings, DataPlace, InPlace, OnWait
from concertina_data.threads import Threads
from concertina_state.errors import InvalidInput

FETCH_THREADS = 4
"""Number of shards that a worker fetches and verifies at the same time.

Further requests to one store would not increase the speed, and all workers share the cores.
"""
T = TypeVar("T")


def open_place(uri: str, cache: CacheSettings) -> DataPlace:
    """Open the folder or the store that holds a data set.

    Args:
        uri: A path, or a URI of `file://`, `s3://`, `gs://` or `az://`.
        cache: Settings of the folder with copies of stored files. They have no effect on a data set in a folder.

    Raises:
        InvalidInput: When the data set does not exist, or the settings for the store can't be used.
        StorageError: When the store can't be reached.
    """
    if uri.partition("://")[0] == "file" or "://" not in uri:
        return InPlace(uri)
    from concertina_data.cache import Stored  # needs obstore

    return Stored(uri, cache)


def read_manifest(place: DataPlace, on_wait: OnWait = lambda reason, seconds: None) -> DataManifest:
    """Read the manifest of a data set.

    Raises:
        InvalidInput: When there is no manifest, or it can't be parsed.
        StorageError: When the store can't be reached.
    """
    text = place.get(NAME, on_wait)
    if text is None:
        raise InvalidInput(f"{place.uri} has no {NAME}: build the data there, or correct the URI of the data.")
    return parse(text, place.uri)


class OpenShards(Generic[T]):
    """Cache of open shards for one thread. It calls the function `open_one` to open shards before they are needed.

    `open_one` must not refer to the owner of this object. Otherwise the owner is part of a reference cycle, and its
    threads, file mappings and connections stay until Python's garbage collector finds the cycle. In a process with many
    objects, that takes long.
    """

    def __init__(
        self, sizes: Sequence[int], most_bytes: int, open_one: Callable[[int], T], threads: Threads, most_shards: int
    ) -> None:
        """Prepare to open shards. The constructor opens none.

        Args:
            sizes: Size of each shard in bytes.
            most_bytes: Limit on the total size of the open shards. A single shard that is larger is opened
                nevertheless.
            open_one: Function that opens the shard with a given index.
            threads: Threads that call `open_one`.
            most_shards: Limit on the number of open shards.
        """
        self._most_shards = most_shards
        self._sizes, self._most, self._open_one, self._threads = sizes, most_bytes, open_one, threads
        self._open: OrderedDict[int, Future[T]] = OrderedDict()
        self._ready: dict[int, T] = {}
        """Results of futures of `_open` that `get` has returned.

        Reading a result from this table is faster, because a future takes a lock at each call.
        """
        self._bytes = 0

    def get(self, index: int) -> T:
        """Return the shard number `index`, after waiting until it is open.

        If opening the shard fails, this method raises the error, and the next call tries again.

        Raises:
            InvalidInput: When this process was forked after the shards had been opened.
        """
        if index in self._ready:
            self._open.move_to_end(index)
            return self._ready[index]
        self._threads.check()  # a forked process may have unfinished futures of its parent
        future = self._opening(index)
        if future.done() and future.exception() is not None:  # it failed before it was needed, perhaps long ago
            self._drop(index)
            future = self._opening(index)
        try:
            self._ready[index] = future.result()
        except BaseException:
            self._drop(index)
            raise
        return self._ready[index]

    def _drop(self, index: int) -> None:
        del self._open[index]
        self._bytes -= self._sizes[index]

    def expect(self, indexes: Iterable[int]) -> None:
        """Begin to open the shards `indexes` in advance, in this order, up to the size limit of the cache."""
        room = self._most
        for index in indexes:
            room -= self._sizes[index]
            if room < 0:
                return
            self._opening(index)

    def _opening(self, index: int) -> Future[T]:
        if index in self._open:
            self._open.move_to_end(index)
            return self._open[index]
        self._bytes += self._sizes[index]
        while self._open and (self._bytes > self._most or len(self._open) >= self._most_shards):
            oldest, _ = self._open.popitem(last=False)
            self._ready.pop(oldest, None)
            self._bytes -= self._sizes[oldest]
        self._open[index] = self._threads.submit(functools.partial(self._open_one, index))
        return self._open[index]
