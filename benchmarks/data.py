"""Throughput of the data layer in tokens per second, from disk and from S3, compared with other libraries.

    python benchmarks/data.py [--mebibytes 512] [--stored-mebibytes 512] [--runs 3] [--json FILE] [--without-peers]

All libraries read the same random tokens (two bytes each), shuffled, in sequences of 2048 and batches of 32, and return
int64. An epoch is measured from its second batch on. The files were just written. The rows alternate:
- gather: numpy alone takes the same sequences in the same order from one memory map. This is an upper bound.
- concertina, local: each file is verified.
- concertina, cold S3: the data are read from SeaweedFS into an empty cache, including the start. With
  `--stored-mebibytes 2048` there are 32 shards, so shards are fetched while others are in use.
- trainingjob.data: the API with which a user's script reads the same files.
- raw store: obstore downloads the same objects by plain GET requests, 4, 8 or 16 at the same time. The contents are
  counted and dropped.
- grain, litdata, mosaicml-streaming, Ray Data, torchdata's StatefulDataLoader and WebDataset from disk. A first pass
  determines the fastest of the variants in data_peers.WAYS, and that variant is measured. A further variant reads runs
  of 8 consecutive sequences, which is less work and gives a different order. None of these libraries verifies the data.

The rows of the store run in new processes. For each, the benchmark reports processor time and minor page faults.

The benchmark also measures the cost of computing the order, and how long training waits for data (stall). Order:
seconds and memory to find 4096 positions among 8 million shards, in a new process. Stall: share of the time for which
training at a given rate waits for data.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import data_peers
import numpy as np
import obstore
import report
from rich.console import Console

import trainingjob
from concertina.local import s3
from concertina_data.data_manifest import FORMAT, NAME, DataManifest, TokenizerFacts, TokenShard, token_field
from concertina_state.objects.prefix import ObjectPrefix, parts_of
from concertina_state.objects.stores import open_store
from concertina_trainer.config.data_config import DataConfig
from concertina_trainer.data.build.draft import Draft
from concertina_trainer.data.read.batch import plan_batch
from concertina_trainer.data.read.sequence_reader import Reader

LENGTH, BATCH, THREADS, SHARD_BYTES = 2048, 32, 4, 64 * 2**20
SWEEP_SECONDS, MOST_SECONDS = 2.0, 8.0
"""Time limits in seconds: for one pass of a variant, and for one run of a row."""
CONNECTIONS = (4, 8, 16)
"""Numbers of plain GET requests at the same time. The fastest is the limit for reading from the store."""
COLD = "concertina, cold S3"
CONSOLE = Console(stderr=True)
ORDER = """
import json, re, time
import numpy as np
from concertina_trainer.data.batch_order import BatchOrder
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024
before = peak()
counts = np.full(8_000_000, 30_000, dtype=np.int64)
started = time.perf_counter()
BatchOrder(counts, 1, range(16)).at(np.arange(10**11, 10**11 + 4096))
seconds = time.perf_counter() - started
print(json.dumps([seconds, peak() - before]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=512)
    parser.add_argument("--stored-mebibytes", type=int, default=512, help="size of the data in S3")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="*", default=[1, 5, 50], help="of the stall, Mtok/s")
    parser.add_argument("--without-peers", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--alone", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        measure_alone(*options.alone)
        return
    folder = Path(tempfile.mkdtemp(prefix="concertina-data-"))
    os.environ["CONCERTINA_CACHE"] = str(folder / "cache")
    try:
        speeds, facts = measure(options, folder)
    finally:
        shutil.rmtree(folder)
    order = [json.loads(subprocess.check_output([sys.executable, "-c", ORDER])) for _ in range(options.runs)]
    for name, sweep in facts.get("sweep", {}).items():
        report.show(f"Ways of {name}", {way: [speed] for way, speed in sweep.items()}, "Mtok/s", more_is_better=True)
    report.show("Tokens a second", speeds, "Mtok/s", more_is_better=True)
    costs = {"order of 8 million shards, s": [o[0] for o in order], "its memory, MB": [o[1] for o in order]}
    report.show("Order", costs, "")
    for name, value in facts.items():
        if name != "sweep":
            print(f"{name}: {value}")
    report.write(options.json, "data", costs, speeds, **facts)
    sys.stdout.flush()
    os._exit(0)  # The threads that prepare batches never end by themselves.


def measure(options: argparse.Namespace, folder: Path) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Return the speed in Mtok/s by row, and further facts such as the cost of computing the order of sequences."""
    speeds: dict[str, list[float]] = collections.defaultdict(list)
    facts: dict[str, Any] = {}
    made = folder / "data"
    write(str(made), options.mebibytes)
    best = [] if options.without_peers else sweep(made, facts)
    with s3.serve(f"bench-data-{os.getpid()}", ["data"]) as server:
        os.environ.update(server.environment())
        write("s3://data/set", options.stored_mebibytes)
        use: dict[str, list[dict[str, float]]] = collections.defaultdict(list)
        for run in range(options.runs):
            CONSOLE.print(f"run {run + 1} of {options.runs}")
            speeds["gather (limit)"].append(speed(gather(made)))
            speeds["concertina, local"].append(speed(read(str(made))))
            speeds["trainingjob.data, local"].append(speed(read_in_script(str(made))))
            for name, way in best:
                reached = data_peers.measure(name, way, made, LENGTH, BATCH, MOST_SECONDS)
                speeds[f"{name}: {way}"].append(reached)
            for connections in CONNECTIONS:
                row = f"raw store, {connections} at once"
                speeds[row].append(alone("raw", "s3://data/set", connections, use[row]))
            shutil.rmtree(folder / "cache", ignore_errors=True)
            speeds[COLD].append(alone("cold", "s3://data/set", THREADS, use[COLD]))
    best_raw = max(statistics.median(values) for row, values in speeds.items() if row.startswith("raw store"))
    facts["cold S3, as a share of the fastest plain GETs"] = round(statistics.median(speeds[COLD]) / best_raw, 3)
    facts["processor time and page faults of the rows of the store"] = use
    for rate in options.rates:
        facts[f"stall at {rate:g} Mtok/s, %"] = [round(stall(str(made), rate * 1e6), 3) for _ in range(options.runs)]
    return speeds, facts


def write(uri: str, mebibytes: int) -> None:
    """Write documents of about 1000 random tokens each, in the same layout as `data build`."""
    generator = np.random.default_rng(0)
    folder, shards = ObjectPrefix(uri, create=True), list[TokenShard]()
    for index in range(max(1, mebibytes * 2**20 // SHARD_BYTES)):
        tokens = generator.integers(1, 50_000, SHARD_BYTES // 2, dtype=np.uint16)
        draft = Draft()
        draft.documents = [part.tobytes() for part in np.array_split(tokens, len(tokens) // 1000)]
        shards += draft.put(folder, f"shard-{index:06}", 2)
    manifest = DataManifest(
        FORMAT, 50_000, TokenizerFacts("random", "random", 0), (token_field(50_000),), tuple(shards)
    )
    folder.put(NAME, manifest.to_json())


def sweep(made: Path, facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return two variants of each other library: its fastest variant for single sequences, and its variant for runs.

    The first variant shuffles single sequences. The second one shuffles runs of consecutive sequences. `facts` receives
    the speed of all variants in Mtok/s. If a library could not run, `facts` receives the reason.
    """
    best, facts["sweep"] = [], {}
    for name, ways in data_peers.WAYS.items():
        CONSOLE.print(f"trying the ways of {name}")
        try:
            tried = {way: data_peers.measure(name, way, made, LENGTH, BATCH, SWEEP_SECONDS) for way in ways}
        except (RuntimeError, subprocess.SubprocessError) as error:
            facts[f"{name} did not run"] = str(error)
            continue
        facts["sweep"][name] = tried
        single = {way: rate for way, rate in tried.items() if way != data_peers.IN_RUNS}
        best += [(name, max(single, key=single.__getitem__)), (name, data_peers.IN_RUNS)]
    return best


def speed(batches: Iterable[Any]) -> float:
    """Return the speed in Mtok/s, measured in the same way as for the other libraries."""
    seconds, tokens = data_peers.consume(batches, LENGTH, MOST_SECONDS)
    return tokens / seconds / 1e6


def read(uri: str, threads: int = THREADS) -> Iterator[Any]:
    """Yield the batches of an epoch from the trainer's reader."""
    reader = Reader(DataConfig(uri=uri), LENGTH, seed=1, threads=threads)
    for position in range(0, reader.epoch_size // BATCH * BATCH, BATCH):
        yield reader.read(position, position + BATCH)


def read_in_script(uri: str) -> Iterator[Any]:
    """Yield the batches of an epoch in the same way as a user's script would read them."""
    data = trainingjob.data(uri, length=LENGTH, batch=BATCH, seed=1)
    for _ in range(data.epoch_size // BATCH):
        yield next(data)


def cold(uri: str, threads: int) -> int:
    """Read an epoch from S3, with an empty cache, and return the number of tokens.

    The time includes the start, in which the first shards are downloaded.
    """
    return sum(len(batch) for batch in read(uri, threads)) * LENGTH


def gather(made: Path) -> Iterator[Any]:
    """Yield the same sequences in the same order, taken from one file by numpy indexing."""
    file = made.parent / "rows"
    if not file.exists():
        with file.open("wb") as out:
            for row in data_peers.Rows(made, LENGTH):
                out.write(row.tobytes())
    rows = np.memmap(file, "<u2", mode="r").reshape(-1, LENGTH + 1)
    reader = Reader(DataConfig(uri=str(made)), LENGTH, seed=1)
    _, shards, inside = reader.places(np.arange(reader.epoch_size // BATCH * BATCH))
    places = shards * (reader.epoch_size // len(data_peers.Rows(made, LENGTH).files)) + inside
    for some in places.reshape(-1, BATCH):
        yield np.take(rows, some, axis=0)


def raw(uri: str, connections: int) -> int:
    """Download all shards with plain GET requests, and return the number of tokens."""
    scheme, bucket, path = parts_of(uri)
    store = open_store(scheme, bucket, path.strip("/"), {})
    names = [key for key in ObjectPrefix(uri).list("") if key.endswith(".bin")]
    with concurrent.futures.ThreadPoolExecutor(connections) as pool:
        return sum(pool.map(lambda name: len(obstore.get(store, name).bytes()), names)) // 2


ALONE: dict[str, Callable[[str, int], int]] = {"raw": raw, "cold": cold}


def alone(row: str, uri: str, threads: int, use: list[dict[str, float]]) -> float:
    """Measure a row of the store in a new process, and return its speed in Mtok/s. Append what it used to `use`."""
    command = [sys.executable, __file__, "--alone", row, uri, str(threads)]
    result = json.loads(subprocess.check_output(command, text=True).splitlines()[-1])
    use.append(result["use"])
    return float(result["speed"])


def measure_alone(row: str, uri: str, threads: str) -> None:
    """Run a row in this process, and print its speed in Mtok/s, with the processor time and page faults that it took.

    Imports are not measured.
    """
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    tokens = ALONE[row](uri, int(threads))
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
    use = {name: round(getattr(after, name) - getattr(before, name), 3) for name in ("ru_utime", "ru_stime", "ru_minflt")}
    print(json.dumps({"speed": tokens / seconds / 1e6, "use": use}))
    sys.stdout.flush()
    os._exit(0)


def stall(uri: str, rate: float, seconds: float = 5.0) -> float:
    """Return the percentage of time for which a loop waits for data if it consumes `rate` tokens per second.

    The measurement begins after a warm-up.
    """
    import torch

    from concertina_trainer.data.read.batches import Batches

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
