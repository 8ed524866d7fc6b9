"""The peers of `data.py`, one a process: they write the same tokens in their own form, and read them shuffled.

They are no dependencies of this project: they are installed once into a folder of their own (see `install`).
`python benchmarks/data_peers.py NAME FOLDER LENGTH BATCH` prints the seconds and tokens of a pass as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parents[1] / "build" / "data-peers"
PACKAGES = ("grain==0.2.18", "litdata==0.2.76", "mosaicml-streaming==0.13.0", "torchdata==0.11.0")
NEEDS = (
    *("array-record", "etils", "zipp", "importlib_resources", "absl-py", "cloudpickle", "lightning-utilities"),
    *("filelock", "fsspec", "requests", "tifffile", "xxhash", "zstd", "brotli", "python-snappy", "orjson", "protobuf"),
    *("boto3", "botocore", "s3transfer", "jmespath", "cramjam", "python-dateutil", "six", "urllib3", "portpicker"),
    *("catalogue", "idna", "certifi", "charset-normalizer", "psutil", "jaxtyping"),
)


MOST_SECONDS = 15.0


def install() -> Path:
    """The folder with the peers and what they need but torch and numpy; made on first use."""
    if not (FOLDER / "complete").exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable]
        subprocess.run([*command, "--target", str(FOLDER), "--no-deps", *PACKAGES, *NEEDS], check=True)
        (FOLDER / "complete").touch()
    return FOLDER


def rows(folder: Path, length: int) -> Iterator[bytes]:
    """Every sequence of the built data, in the order of the disk."""
    for file in sorted(folder.glob("*.bin")):
        tokens = np.fromfile(file, "<u2")
        for begin in range(0, len(tokens) - length, length):
            yield tokens[begin : begin + length + 1].tobytes()


def consume(batches: Iterable[Any], length: int) -> tuple[float, int]:
    """Seconds and tokens, from the second batch on, for a while; each batch becomes int64, which models read."""
    tokens, started = 0, 0.0
    for batch in batches:
        array = np.asarray(batch).astype(np.int64)
        if started:
            tokens += array.size // (length + 1) * length
            if time.perf_counter() - started > MOST_SECONDS:
                break
        else:
            started = time.perf_counter()
    return time.perf_counter() - started, tokens


def grain(folder: Path, length: int, batch: int) -> tuple[float, int]:
    import grain
    from array_record.python.array_record_module import ArrayRecordWriter
    from grain.sources import ArrayRecordDataSource

    file = str(folder.parent / "grain.array_record")
    writer = ArrayRecordWriter(file, "group_size:1")
    for row in rows(folder, length):
        writer.write(row)
    writer.close()
    data = grain.MapDataset.source(ArrayRecordDataSource(file)).shuffle(seed=1)
    parsed = data.map(lambda row: np.frombuffer(row, "<u2")).batch(batch)
    return consume(parsed.to_iter_dataset(grain.ReadOptions(num_threads=4, prefetch_buffer_size=64)), length)


def litdata(folder: Path, length: int, batch: int) -> tuple[float, int]:
    import torch
    from litdata import StreamingDataset, TokensLoader
    from litdata.streaming.writer import BinaryWriter

    out = folder.parent / "litdata"
    out.mkdir(exist_ok=True)
    loader = TokensLoader(block_size=length + 1)
    writer = BinaryWriter(str(out), chunk_size=(length + 1) * (64 * 2**20 // (2 * length + 2)), item_loader=loader)
    for index, row in enumerate(rows(folder, length)):
        writer.add_item(index, torch.frombuffer(bytearray(row), dtype=torch.int16))
    writer.done()
    writer.merge(1)
    data = StreamingDataset(str(out), item_loader=TokensLoader(block_size=length + 1), shuffle=True, seed=1)
    return consume(batched(iter(data), batch), length)


def mosaic(folder: Path, length: int, batch: int) -> tuple[float, int]:
    _without_torchvision()
    from streaming import MDSWriter, StreamingDataset

    out = str(folder.parent / "mds")
    with MDSWriter(out=out, columns={"tokens": "bytes"}, size_limit=2**26) as writer:
        for row in rows(folder, length):
            writer.write({"tokens": row})
    data = StreamingDataset(local=out, shuffle=True, shuffle_seed=1, batch_size=batch)
    return consume(batched((np.frombuffer(item["tokens"], "<u2") for item in data), batch), length)


def stateful(folder: Path, length: int, batch: int) -> tuple[float, int]:
    from torch.utils.data import Dataset
    from torchdata.stateful_dataloader import StatefulDataLoader

    files = [np.memmap(file, "<u2", mode="r") for file in sorted(folder.glob("*.bin"))]
    places = [(file, row * length) for file in files for row in range((len(file) - 1) // length)]

    class Rows(Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return len(places)

        def __getitem__(self, index: int) -> Any:
            file, begin = places[index]
            return file[begin : begin + length + 1]

    loader = StatefulDataLoader(Rows(), batch_size=batch, shuffle=True, collate_fn=np.stack)
    return consume(loader, length)


def batched(items: Iterator[Any], size: int) -> Iterator[Any]:
    while True:
        some = [item for _, item in zip(range(size), items, strict=False)]
        if len(some) < size:
            return
        yield np.stack([np.asarray(item) for item in some])


def _without_torchvision() -> None:
    """mosaicml-streaming imports it at its top, for images alone."""
    import transformers  # noqa: F401 - before it can see that torchvision is none

    class Anything(types.ModuleType):
        __path__ = ()

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

    for name in ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional"):
        sys.modules[name] = Anything(name)


PEERS: dict[str, Callable[[Path, int, int], tuple[float, int]]] = {
    "grain": grain,
    "litdata": litdata,
    "mosaicml-streaming": mosaic,
    "StatefulDataLoader": stateful,
}


def measure(name: str, folder: Path, length: int, batch: int) -> Any:
    """In a process of its own: {"seconds", "tokens"}; {"error"} where it could not run."""
    environment = {**os.environ, "PYTHONPATH": str(install()), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", __file__, name, str(folder), str(length), str(batch)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    lines = done.stdout.strip().splitlines()
    return json.loads(lines[-1]) if done.returncode == 0 and lines else {"error": done.stderr.strip()[-300:]}


def main() -> None:
    name, folder, length, batch = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    seconds, tokens = PEERS[name](folder, length, batch)
    print(json.dumps({"seconds": seconds, "tokens": tokens}))
    sys.stdout.flush()
    os._exit(0)  # some leave threads behind


if __name__ == "__main__":
    main()
