"""Uploader whose storage is a folder. Storage fails as long as the folder does not exist."""

import json
import os
from pathlib import Path

from concertina_protocol import Durable, Storage
from concertina_protocol import worker_channel as w
from concertina_protocol.codec.typed_json import from_json


def main() -> int:
    end, bucket = w.WorkerEnd(os.environ["CONCERTINA_SOCKET"]), Path(os.environ["TINY_BUCKET"])
    end.send(w.UploaderHello(os.getpid()))
    answers = {w.Probe: probe, w.Ship: ship, w.Publish: publish}
    try:
        while True:
            for message in end.poll() or [end.receive(object)]:
                end.send(answers[type(message)](bucket, message))
    except w.ChannelClosed:
        return 0


def latest(bucket: Path):
    path = bucket / "LATEST"
    return from_json(Durable, json.loads(path.read_text())) if path.exists() else None


def probe(bucket: Path, message: w.Probe) -> w.StorageState:
    if not bucket.exists():
        return w.StorageState(Storage("Error", None, f"There is no bucket {bucket.name}; create it."))
    return w.StorageState(Storage("Ready", latest(bucket)))


def ship(bucket: Path, message: w.Ship) -> w.Shipped:
    if not bucket.exists():
        return w.Shipped(message.id, message.shard, f"There is no bucket {bucket.name}; create it.")
    os.replace(message.path, bucket / f"{message.id.round}-{message.id.step}-{message.shard}")
    return w.Shipped(message.id, message.shard)


def publish(bucket: Path, message: w.Publish) -> w.Published:
    parts = [bucket / f"{message.id.round}-{message.id.step}-{shard}" for shard in range(message.id.shards)]
    assert all(part.exists() for part in parts), parts
    durable = Durable(os.environ["CONCERTINA_UID"], message.id.round, message.id.step, "tiny", message.complete, 1.0)
    known = latest(bucket)
    if known is not None and known.round > message.id.round:
        return w.Published(message.id, None, f"Round {known.round} has written here.", refused=True)
    draft = bucket / "LATEST.new"
    draft.write_text(json.dumps(vars(durable)))
    draft.replace(bucket / "LATEST")
    return w.Published(message.id, durable)
