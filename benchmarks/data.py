"""Throughput of the data layer in tokens per second, from disk and from S3, compared with other libraries.

    python benchmarks/data.py [--mebibytes 512] [--stored-mebibytes 512] [--store-speeds 100] [--runs 3] [--json FILE]
                              [--without-peers] [--only NAME ...]

All libraries read the same random tokens (two bytes each), shuffled, in sequences of 2048 and batches of 32, and return
int64. The files were just written. The rows alternate. From disk, an epoch is measured from its second batch on:
- gather: numpy alone takes the same sequences in the same order from one memory map. This is an upper bound.
- concertina: each file is verified.
- trainingjob.data: the API with which a user's script reads the same files.
- the other libraries of data_peers.WAYS. A first pass determines the fastest of the variants, and that variant is
  measured. A further variant reads runs of 8 consecutive sequences, which is less work and gives a different order.

From S3, the data are read from SeaweedFS into an empty cache, and the time includes the start, without imports and the
start of Ray. With `--stored-mebibytes 2048` there are 32 shards, so shards are fetched while others are in use:
- concertina.
- raw store: obstore downloads the same objects by plain GET requests, 4, 8 or 16 at the same time. The contents are
  counted and dropped.
- the other libraries of data_peers.S3_WAYS, in their fastest variants. grain has no reader for S3 in this comparison.
The server shares the cores with the readers. So all these rows are repeated with a store that sends at most
`--store-speeds` MiB/s, as over a network.

None of the other libraries verifies the data. All rows except gather and trainingjob.data run in new processes. For
those of the store, the benchmark reports processor time and minor page faults, which leave out worker processes. If a
row could not run, the results contain the reason. They also contain the date, the load and the versions.

The benchmark also measures the cost of computing the order, and how long training waits for data (stall). Order:
seconds and memory to find 4096 positions among 8 million shards, in a new process. Stall: share of the time for which
training at a given rate waits for data.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import data_peers
import numpy as np
import paced_store
import report
from rich.console import Console

import trainingjob
from concertina.local import s3
from concertina_data.data_manifest import FORMAT, NAME, DataManifest, TokenizerFacts, TokenShard, token_field
from concertina_state.objects.prefix import ObjectPrefix
from concertina_trainer.config.data_config import DataConfig
from concertina_trainer.data.build.draft import Draft
from concertina_trainer.data.read.batch import plan_batch
from concertina_trainer.data.read.sequence_reader import Reader

LENGTH, BATCH, THREADS, SHARD_BYTES = 2048, 32, 4, 64 * 2**20
SWEEP_SECONDS, MOST_SECONDS = 2.0, 8.0
"""Time limits in seconds: for one pass of a variant, and for one run of a row."""
STORED_SECONDS = 60.0
"""Time limit in seconds for one run of a row from S3."""
NO_RUN = (RuntimeError, subprocess.SubprocessError)
"""Errors by which a row could not run."""
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
    parser.add_argument("--store-speeds", type=float, nargs="*", default=[100], help="of a limited S3, MiB/s")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="*", default=[1, 5, 50], help="of the stall, Mtok/s")
    parser.add_argument("--without-peers", action="store_true")
    names = sorted({*data_peers.WAYS, *data_peers.S3_WAYS})
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", default=names, help="of these libraries")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="concertina-data-"))
    os.environ["CONCERTINA_CACHE"] = str(folder / "cache")
    try:
        speeds, facts = measure(options, folder)
    finally:
        shutil.rmtree(folder)
    order = [json.loads(subprocess.check_output([sys.executable, "-c", ORDER])) for _ in range(options.runs)]
    for name, sweep in facts["sweep"].items():
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
    facts: dict[str, Any] = {"sweep": {}, "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
    facts["load"] = [list(os.getloadavg())]
    made, stored = folder / "disk" / "set", folder / "stored" / "set"
    write(str(made), options.mebibytes)
    write(str(stored), options.stored_mebibytes)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(s3.serve(f"bench-data-{os.getpid()}", ["data"]))
        os.environ.update(server.environment())
        write("s3://data/set", options.stored_mebibytes)
        stores = {"cold S3": server.endpoint} | {
            f"cold S3 at {mebibytes:g} MiB/s": stack.enter_context(paced_store.paced(server.endpoint, mebibytes))
            for mebibytes in options.store_speeds
        }
        local = data_peers.Source(made)
        best = sweep(chosen(data_peers.WAYS, options), local, SWEEP_SECONDS, facts)
        remote = data_peers.Source(stored, "s3://data")
        best_remote = sweep(chosen(data_peers.S3_WAYS, options), remote, STORED_SECONDS, facts)
        rows = [(f"{name}: {way}", "", name, way, local, MOST_SECONDS) for name, way in best]
        for title, endpoint in stores.items():
            rows += [
                (f"{name}, {title}: {way}", endpoint, name, way, remote, STORED_SECONDS) for name, way in best_remote
            ]
        use: dict[str, list[dict[str, float]]] = collections.defaultdict(list)
        for run in range(options.runs):
            CONSOLE.print(f"run {run + 1} of {options.runs}")
            speeds["gather (limit)"].append(speed(gather(made)))
            speeds["trainingjob.data, local"].append(speed(read_in_script(str(made))))
            for row, endpoint, name, way, source, seconds in rows:
                if endpoint:
                    os.environ["AWS_ENDPOINT_URL"] = endpoint
                try:
                    measured = data_peers.measure(name, way, source, LENGTH, BATCH, seconds)
                except NO_RUN as error:
                    facts.setdefault(f"{row} did not run", []).append(str(error))
                    continue
                speeds[row].append(measured.speed)
                if endpoint:
                    use[row].append({**measured.use, "tokens": measured.tokens})
    medians = {row: statistics.median(values) for row, values in speeds.items()}
    for title in stores:
        ours = medians.get(f"{data_peers.CONCERTINA}, {title}: {THREADS} threads")
        raw = [value for row, value in medians.items() if row.startswith(f"{data_peers.RAW}, {title}:")]
        if ours and raw:
            facts[f"{title}, as a share of the fastest plain GETs"] = round(ours / max(raw), 3)
    facts["processor time and page faults of the rows of the store"] = use
    for rate in options.rates:
        facts[f"stall at {rate:g} Mtok/s, %"] = [round(stall(str(made), rate * 1e6), 3) for _ in range(options.runs)]
    facts["load"].append(list(os.getloadavg()))
    facts["versions"] = data_peers.versions()
    return speeds, facts


def chosen(table: data_peers.Table, options: argparse.Namespace) -> data_peers.Table:
    """Return the part of a table that the options select."""
    names = data_peers.OURS if options.without_peers else tuple(table)
    return {name: ways for name, ways in table.items() if name in names and name in options.only}


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


def sweep(
    table: data_peers.Table, source: data_peers.Source, most_seconds: float, facts: dict[str, Any]
) -> list[tuple[str, str]]:
    """Return the variants to measure: the fastest one of each library, and its variant for runs, if it has one.

    The first variant shuffles single sequences. The second one shuffles runs of consecutive sequences. All variants of
    concertina and of plain GET requests are measured. `facts` receives the speed of all variants in Mtok/s. If a
    variant could not run, `facts` receives the reason.
    """
    best = []
    for name, ways in table.items():
        if name in data_peers.OURS:
            best += [(name, way) for way in ways]
            continue
        title = f"{name}, cold S3" if source.uri else name
        CONSOLE.print(f"trying the ways of {title}")
        tried = {}
        for way in ways:
            try:
                tried[way] = data_peers.measure(name, way, source, LENGTH, BATCH, most_seconds).speed
            except NO_RUN as error:
                facts[f"{title}: {way} did not run in the sweep"] = str(error)
        facts["sweep"][title] = tried
        single = {way: rate for way, rate in tried.items() if way != data_peers.IN_RUNS}
        best += [(name, way) for way in sorted(single, key=single.__getitem__)[-1:]]
        best += [(name, way) for way in tried if way == data_peers.IN_RUNS]
    return best


def speed(batches: Iterable[Any]) -> float:
    """Return the speed in Mtok/s, measured in the same way as for the other libraries."""
    seconds, tokens = data_peers.consume(batches, LENGTH, MOST_SECONDS)
    return tokens / seconds / 1e6


def read_in_script(uri: str) -> Iterator[Any]:
    """Yield the batches of an epoch in the same way as a user's script would read them."""
    data = trainingjob.data(uri, length=LENGTH, batch=BATCH, seed=1)
    for _ in range(data.epoch_size // BATCH):
        yield next(data)


def gather(made: Path) -> Iterator[Any]:
    """Yield the same sequences in the same order, taken from one file by numpy indexing."""
    source = data_peers.Source(made)
    data_peers.ONE_FILE.prepare(source, LENGTH)
    rows = data_peers.mapped_rows(source, LENGTH)
    reader = Reader(DataConfig(uri=str(made)), LENGTH, seed=1)
    _, shards, inside = reader.places(np.arange(reader.epoch_size // BATCH * BATCH))
    places = shards * (reader.epoch_size // len(data_peers.Rows(made, LENGTH).files)) + inside
    for some in places.reshape(-1, BATCH):
        yield np.take(rows, some, axis=0)


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
