"""Tokens a second of the data layer, from disk and from S3, beside its peers; the cost of its order; and its stall.

    python benchmarks/data.py [--mebibytes 512] [--runs 3] [--json FILE] [--without-peers]

All read the same tokens (two bytes each), shuffled, in sequences of 2048, and give int64. Rows:
- gather: numpy alone copies the same sequences, in the same order, from memory: the limit;
- concertina, local: from files that were just written, each checked; cold S3: from SeaweedFS into an empty cache;
- raw store: the same objects by plain GETs, as many at once; grain, litdata, mosaicml-streaming and torchdata's
  StatefulDataLoader from disk, in forms of their own (installed into a folder of its own on first use).
Order: seconds and memory to find 4096 positions among 8 million shards, in a fresh process. Stall: part of the time
that training at a rate waits for data.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import data_peers
import numpy as np
import report
from rich.console import Console

from concertina.local import s3
from concertina_trainer.batch import plan_batch
from concertina_trainer.config import DataConfig
from concertina_trainer.data.manifest import FORMAT, NAME, Manifest, TokenizerFacts
from concertina_trainer.data.reader import Reader
from concertina_trainer.data.write import Draft
from concertina_trainer.storage.folder import Folder

LENGTH, BATCH, THREADS, SHARD_BYTES = 2048, 32, 4, 64 * 2**20
CONSOLE = Console(stderr=True)
ORDER = """
import json, re, time
import numpy as np
from concertina_trainer.data.order import Order
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024
before = peak()
counts = np.full(8_000_000, 30_000, dtype=np.int64)
started = time.perf_counter()
Order(counts, 1).at(np.arange(10**11, 10**11 + 4096))
seconds = time.perf_counter() - started
print(json.dumps([seconds, peak() - before]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=512)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="*", default=[1, 5, 50], help="of the stall, Mtok/s")
    parser.add_argument("--without-peers", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="concertina-data-"))
    os.environ["CONCERTINA_CACHE"] = str(folder / "cache")
    try:
        speeds, facts = measure(options, folder)
    finally:
        shutil.rmtree(folder)
    order = [json.loads(subprocess.check_output([sys.executable, "-c", ORDER])) for _ in range(options.runs)]
    report.show("Tokens a second", speeds, "Mtok/s", more_is_better=True)
    costs = {"order of 8 million shards, s": [o[0] for o in order], "its memory, MB": [o[1] for o in order]}
    report.show("Order", costs, "")
    for name, value in facts.items():
        print(f"{name}: {value}")
    report.write(options.json, "data", costs, speeds, **facts)
    sys.stdout.flush()
    os._exit(0)  # the threads that prepare batches never end by themselves


def measure(options: argparse.Namespace, folder: Path) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Mtok/s by row, and what else there is to say."""
    speeds: dict[str, list[float]] = collections.defaultdict(list)
    facts: dict[str, Any] = {}
    made = folder / "data"
    write(str(made), options.mebibytes)
    with s3.serve(f"bench-data-{os.getpid()}", ["data"]) as server:
        os.environ.update(server.environment())
        write("s3://data/set", options.mebibytes)
        for run in range(options.runs):
            CONSOLE.print(f"run {run + 1} of {options.runs}")
            speeds["gather (limit)"].append(gather(str(made)))
            speeds["concertina, local"].append(read(str(made)))
            speeds["raw store"].append(raw("s3://data/set"))
            shutil.rmtree(folder / "cache", ignore_errors=True)
            speeds["concertina, cold S3"].append(read("s3://data/set"))
            for name in () if options.without_peers else data_peers.PEERS:
                scratch = folder / "peer"
                scratch.mkdir()
                (scratch / "data").symlink_to(made)
                found = data_peers.measure(name, scratch / "data", LENGTH, BATCH)
                shutil.rmtree(scratch)
                if "error" in found:
                    facts[f"{name} did not run"] = found["error"]
                else:
                    speeds[name].append(found["tokens"] / found["seconds"] / 1e6)
    for rate in options.rates:
        facts[f"stall at {rate:g} Mtok/s, %"] = [round(stall(str(made), rate * 1e6), 3) for _ in range(options.runs)]
    return speeds, facts


def write(uri: str, mebibytes: int) -> None:
    """Random tokens in documents of about 1000, as `data build` lays them out."""
    generator = np.random.default_rng(0)
    folder, shards = Folder(uri, create=True), []
    for index in range(max(1, mebibytes * 2**20 // SHARD_BYTES)):
        tokens = generator.integers(1, 50_000, SHARD_BYTES // 2, dtype=np.uint16)
        draft = Draft()
        draft.documents = [part.tobytes() for part in np.array_split(tokens, len(tokens) // 1000)]
        shards += draft.put(folder, f"shard-{index:06}", 2)
    manifest = Manifest(FORMAT, 2, 50_000, TokenizerFacts("random", "random", 0), tuple(shards))
    folder.put(NAME, manifest.to_json())


def read(uri: str) -> float:
    """An epoch through the reader, its start included. Mtok/s."""
    started = time.perf_counter()
    reader = Reader(DataConfig(uri=uri, fetch_threads=THREADS), LENGTH, seed=1)
    count = reader.epoch_size // BATCH * BATCH
    for position in range(0, count, BATCH):
        reader.read(position, position + BATCH)
    return count * LENGTH / (time.perf_counter() - started) / 1e6


def gather(uri: str) -> float:
    """The same sequences, from arrays in memory by numpy's own indexing, as int64. Mtok/s."""
    reader = Reader(DataConfig(uri=uri), LENGTH, seed=1)
    count = reader.epoch_size // BATCH * BATCH
    _, shards, rows = reader.places(np.arange(count))
    files = [np.fromfile(file, "<u2") for file in sorted(Path(uri).glob("*.bin"))]
    height = min((len(file) - 1) // LENGTH for file in files)
    every = np.concatenate([file[: height * LENGTH].reshape(height, LENGTH) for file in files])
    places = shards * height + rows
    started = time.perf_counter()
    for position in range(0, count, BATCH):
        np.take(every, places[position : position + BATCH], axis=0).astype(np.int64)
    return count * LENGTH / (time.perf_counter() - started) / 1e6


def raw(uri: str) -> float:
    """All shards by plain GETs. Mtok/s."""
    folder = Folder(uri)
    names = [key for key in folder.list("") if key.endswith(".bin")]
    started = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        size = sum(len(content or b"") for content in pool.map(folder.get, names))
    return size / 2 / (time.perf_counter() - started) / 1e6


def stall(uri: str, rate: float, seconds: float = 5.0) -> float:
    """Percent of the time that a loop waits which takes `rate` tokens a second, once it is warm."""
    import torch

    from concertina_trainer.data.batches import Batches

    reader = Reader(DataConfig(uri=uri), LENGTH, seed=1)
    batches = Batches(reader, plan_batch(BATCH, BATCH, 1), 0, 0, torch.device("cpu"))
    warm = time.perf_counter() + 1.0
    while time.perf_counter() < warm:
        batches.next(lambda reason, waited: None)
    batches.stalled_seconds, started = 0.0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        time.sleep(BATCH * LENGTH / rate)
        batches.next(lambda reason, waited: None)
    return 100 * batches.stalled_seconds / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
