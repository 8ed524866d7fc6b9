"""Other libraries for the comparison in `data.py`. Each runs in a separate process.

Each library uses the format and the settings that its documentation recommends for local disks. A sweep determines the
fastest variant, which is then measured. The libraries are not dependencies of this project. They are installed once
into a separate folder (see `install`).
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FOLDER = Path(__file__).parents[1] / "build" / "data-peers"
PACKAGES = (
    *("grain==0.2.18", "litdata==0.2.76", "mosaicml-streaming==0.13.0", "torchdata==0.11.0", "webdataset==1.0.2"),
    "ray==2.60.0",
)
NEEDS = (
    *("array-record", "etils", "zipp", "importlib_resources", "absl-py", "cloudpickle", "lightning-utilities"),
    *("filelock", "fsspec", "requests", "tifffile", "xxhash", "zstd", "brotli", "python-snappy", "orjson", "protobuf"),
    *("boto3", "botocore", "s3transfer", "jmespath", "cramjam", "python-dateutil", "six", "urllib3", "portpicker"),
    *("catalogue", "idna", "certifi", "charset-normalizer", "psutil", "jaxtyping", "braceexpand"),
    *("msgpack", "jsonschema", "jsonschema-specifications", "referencing", "rpds-py", "attrs", "pandas", "pytz"),
    *("tzdata", "click", "packaging", "pyyaml", "typing-extensions"),
)
CHUNK_BYTES = 64 * 2**20
"""Size in bytes of the chunks of litdata and the shards of mosaicml-streaming.

It equals the size of concertina's shards.
"""
Batches = Iterable[Any]


def install() -> Path:
    """Return the folder with the other libraries and their dependencies, except torch and numpy.

    Install them on first use.
    """
    if not (FOLDER / "complete").exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable]
        subprocess.run([*command, "--target", str(FOLDER), "--no-deps", *PACKAGES, *NEEDS], check=True)
        (FOLDER / "complete").touch()
    return FOLDER


@dataclass(frozen=True)
class Rows:
    """All items of the data in storage order, from memory maps of the shards.

    An item is `run` consecutive sequences.
    """

    folder: Path
    length: int
    run: int = 1

    @functools.cached_property
    def files(self) -> list[NDArray[np.uint16]]:
        """Array `[items, run, length + 1]` of each shard.

        The last token of a sequence is the first token of the next one.
        """
        rows = []
        for file in sorted(self.folder.glob("*.bin")):
            tokens = np.asarray(np.memmap(file, "<u2", mode="r"))
            windows = np.lib.stride_tricks.sliding_window_view(tokens, self.length + 1)[:: self.length]
            rows.append(windows[: len(windows) // self.run * self.run].reshape(-1, self.run, self.length + 1))
        return rows

    def __len__(self) -> int:
        return sum(map(len, self.files))

    def __getitem__(self, index: int) -> NDArray[np.uint16]:
        shard, inside = divmod(int(index), len(self.files[0]))
        return self.files[shard][inside]

    def __iter__(self) -> Iterator[NDArray[np.uint16]]:
        for file in self.files:
            yield from file


def consume(batches: Batches, length: int, most_seconds: float) -> tuple[float, int]:
    """Return the seconds and the number of tokens after the first batch, until the epoch or the time limit ends.

    Each batch is an int64 array `[batch, length + 1]`, the form that models read, or is converted to one.
    """
    tokens, started = 0, 0.0
    for batch in batches:
        array = np.asarray(batch).astype(np.int64, copy=False).reshape(-1, length + 1)
        if started:
            tokens += len(array) * length
            if time.perf_counter() - started > most_seconds:
                break
        else:
            started = time.perf_counter()
    return time.perf_counter() - started, tokens


Way = Callable[[Path, int, int], Batches]
"""Function that returns the batches of the data in a folder, for a sequence length and a batch size."""


def memory_map(threads: int = 0, workers: int = 0, run: int = 1) -> Way:
    """Return a variant of grain that reads concertina's shards directly."""

    def read(folder: Path, length: int, batch: int) -> Batches:
        import grain

        data = grain.MapDataset.source(Rows(folder, length, run)).shuffle(seed=1).batch(batch // run)
        return _grain(data, threads, workers)

    return read


def array_record(threads: int) -> Way:
    """Return a variant of grain that reads its recommended format, with one record per sequence."""

    def read(folder: Path, length: int, batch: int) -> Batches:
        import grain
        from array_record.python.array_record_module import ArrayRecordWriter
        from grain.sources import ArrayRecordDataSource

        file = folder.parent / "grain.array_record"
        if not file.exists():
            writer = ArrayRecordWriter(str(file), "group_size:1")
            for row in Rows(folder, length):
                writer.write(row.tobytes())
            writer.close()
        data = grain.MapDataset.source(ArrayRecordDataSource(str(file))).shuffle(seed=1)
        return _grain(data.map(lambda row: np.frombuffer(row, "<u2")).batch(batch), threads, 0)

    return read


def _grain(data: Any, threads: int, workers: int) -> Batches:
    import grain

    dataset = data.to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=16 if threads else 0))
    if workers:
        from absl import flags

        flags.FLAGS(sys.argv[:1])  # Its workers get them as arguments.
        dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
    return dataset


def litdata(workers: int, run: int = 1) -> Way:
    def read(folder: Path, length: int, batch: int) -> Batches:
        import torch
        from litdata import StreamingDataLoader, StreamingDataset, TokensLoader
        from litdata.streaming.writer import BinaryWriter

        out = folder.parent / "litdata"
        if not out.exists():
            out.mkdir()
            rows = CHUNK_BYTES // (2 * length + 2)
            loader = TokensLoader(block_size=length + 1)
            writer = BinaryWriter(str(out), chunk_size=(length + 1) * rows, item_loader=loader)
            for index, row in enumerate(Rows(folder, length)):
                writer.add_item(index, torch.from_numpy(row[0].view("<i2").copy()))
            writer.done()
            writer.merge(1)
        loader = TokensLoader(block_size=(length + 1) * run)
        data = StreamingDataset(str(out), item_loader=loader, shuffle=True, seed=1)
        return StreamingDataLoader(data, batch_size=batch // run, num_workers=workers)

    return read


def mosaic(workers: int, run: int = 1) -> Way:
    def read(folder: Path, length: int, batch: int) -> Batches:
        _without_torchvision()
        from streaming import MDSWriter, StreamingDataLoader, StreamingDataset

        out = folder.parent / f"mds-{run}"
        if not out.exists():
            columns = {"tokens": f"ndarray:uint16:{run},{length + 1}"}
            with MDSWriter(out=str(out), columns=columns, size_limit=CHUNK_BYTES) as writer:
                for row in Rows(folder, length, run):
                    writer.write({"tokens": row})
        size = batch // run
        data = StreamingDataset(local=str(out), shuffle=True, shuffle_seed=1, batch_size=size)
        loader = StreamingDataLoader(data, batch_size=size, num_workers=workers)
        return (sample["tokens"] for sample in loader)

    return read


def stateful(workers: int, run: int = 1) -> Way:
    """Return a variant of StatefulDataLoader that reads concertina's shards directly."""

    def read(folder: Path, length: int, batch: int) -> Batches:
        import torch
        from torchdata.stateful_dataloader import StatefulDataLoader

        stack = lambda items: torch.from_numpy(np.stack(items))  # noqa: E731
        rows = Rows(folder, length, run)
        return StatefulDataLoader(rows, batch // run, shuffle=True, num_workers=workers, collate_fn=stack)

    return read


def webdataset(workers: int, run: int = 1) -> Way:
    """Return a variant of WebDataset, whose archives have CHUNK_BYTES and a member of raw tokens for each item.

    The archives are shuffled, and then items within a buffer of 1000, as its documentation advises.
    """

    def read(folder: Path, length: int, batch: int) -> Batches:
        import webdataset as wds

        out = folder.parent / f"webdataset-{run}"
        if not out.exists():
            out.mkdir()
            with wds.ShardWriter(f"{out}/%06d.tar", maxsize=CHUNK_BYTES, maxcount=10**9, verbose=0) as writer:
                for index, row in enumerate(Rows(folder, length, run)):
                    writer.write({"__key__": f"{index:09}", "bin": row.tobytes()})
        files = sorted(map(str, out.glob("*.tar")))
        decode = lambda sample: np.frombuffer(sample["bin"], "<u2")  # noqa: E731
        data = wds.WebDataset(files, shardshuffle=len(files), seed=1, empty_check=False).shuffle(1000).map(decode)
        stacked = data.batched(batch // run, collation_fn=np.stack)
        return wds.WebLoader(stacked, batch_size=None, num_workers=workers)

    return read


def ray_data(run: int = 1) -> Way:
    """Return a variant of Ray Data, which reads Parquet files and shuffles within a local buffer."""

    def read(folder: Path, length: int, batch: int) -> Batches:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
        import ray

        out = folder.parent / f"parquet-{run}"
        if not out.exists():
            out.mkdir()
            for index, rows in enumerate(Rows(folder, length, run).files):
                flat = arrow.array(np.ascontiguousarray(rows).reshape(-1))
                table = arrow.table({"tokens": arrow.FixedSizeListArray.from_arrays(flat, run * (length + 1))})
                parquet.write_table(table, out / f"{index:06}.parquet", row_group_size=1024, compression="none")
        ray.init(logging_level="error", log_to_driver=False, include_dashboard=False)
        ray.data.DataContext.get_current().enable_progress_bars = False
        data = ray.data.read_parquet(str(out), shuffle="files")
        tables = data.iter_batches(
            batch_size=batch // run, batch_format="pyarrow", local_shuffle_buffer_size=1000, prefetch_batches=4
        )
        for table in tables:
            yield table["tokens"].combine_chunks().flatten().to_numpy()

    return read


def _without_torchvision() -> None:
    """Replace torchvision by an empty module. mosaicml-streaming imports it, but needs it only for images."""
    import transformers  # noqa: F401 - before it can see that torchvision is none

    class Anything(types.ModuleType):
        __path__ = ()  # type: ignore[assignment]  # nobody changes it

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

    for name in ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional"):
        sys.modules[name] = Anything(name)


IN_RUNS = "runs of 8"
"""Name of the variants in which eight consecutive sequences are one item.

They are shuffled together, which is cheaper.
"""
WAYS: dict[str, dict[str, Way]] = {
    "grain": {
        "ArrayRecord, 4 threads": array_record(threads=4),
        "memory map, no threads": memory_map(),
        "memory map, 2 threads": memory_map(threads=2),
        "memory map, 2 workers": memory_map(workers=2),
        IN_RUNS: memory_map(run=8),
    },
    "litdata": {**{f"{count} workers": litdata(count) for count in (0, 1, 2)}, IN_RUNS: litdata(0, run=8)},
    "mosaicml-streaming": {**{f"{count} workers": mosaic(count) for count in (0, 1, 2)}, IN_RUNS: mosaic(0, run=8)},
    "WebDataset": {**{f"{count} workers": webdataset(count) for count in (0, 1, 2)}, IN_RUNS: webdataset(0, run=8)},
    "Ray Data": {"Parquet": ray_data(), IN_RUNS: ray_data(run=8)},
    "StatefulDataLoader": {**{f"{count} workers": stateful(count) for count in (0, 1, 2)}, IN_RUNS: stateful(0, run=8)},
}


def measure(name: str, way: str, folder: Path, length: int, batch: int, most_seconds: float) -> float:
    """Return the speed in Mtok/s, measured in a separate process.

    Raises:
        RuntimeError: When the library could not run. The message contains its output.
    """
    path = f"{install()}:{Path(__file__).parent}"
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    main = "import data_peers; data_peers.main()"  # The peers' workers import the functions that they are sent.
    command = [sys.executable, "-W", "ignore", "-c", main, name, way, folder, length, batch, most_seconds]
    done = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{name}, {way}: {done.stderr.strip()[-300:]}")
    seconds, tokens = json.loads(done.stdout.strip().splitlines()[-1])
    return float(tokens / seconds / 1e6)


def main() -> None:
    name, way, folder, length, batch, most_seconds = sys.argv[1:]
    batches = WAYS[name][way](Path(folder), int(length), int(batch))
    print(json.dumps(consume(batches, int(length), float(most_seconds))))
    sys.stdout.flush()
    os._exit(0)  # Some peers leave threads behind.
