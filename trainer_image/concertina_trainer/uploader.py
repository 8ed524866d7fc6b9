"""The uploader: a process of the agent that lives across rounds and ships committed shards to durable storage."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NoReturn

from concertina_protocol import Storage, StorageHealth
from concertina_protocol.sidecar import Damaged
from concertina_protocol.worker_channel import (
    ChannelClosed,
    Message,
    Probe,
    Publish,
    Published,
    Ship,
    Shipped,
    StorageState,
    Undo,
    UploaderHello,
    WorkerEnd,
)
from concertina_trainer.checkpoints import checkpoint, rollback
from concertina_trainer.checkpoints.manifest import about_this_process
from concertina_trainer.checkpoints.retention import Keeping
from concertina_trainer.config import CheckpointConfig, of_any_version
from concertina_trainer.objects.prefix import IMPATIENCE, ObjectPrefix, StorageError


def main() -> NoReturn:
    """Answers the agent's requests one by one until the agent is gone."""
    channel = WorkerEnd(os.environ["CONCERTINA_SOCKET"])
    channel.send(UploaderHello(os.getpid()))
    config = CheckpointConfig.model_validate(json.loads(os.environ["CONCERTINA_CHECKPOINT"]))
    uid = os.environ["CONCERTINA_UID"]
    try:
        while True:
            channel.send(answer(channel.receive(object), config, uid))
    except ChannelClosed:
        os._exit(0)


def answer(request: object, config: CheckpointConfig, uid: str) -> Message:
    """Every error is in the answer, as a sentence."""
    if isinstance(request, Ship):
        return _ship(request, config, uid)
    if isinstance(request, Publish):
        return _publish(request, config, uid)
    assert isinstance(request, (Probe, Undo)), request
    try:
        folder = ObjectPrefix(config.uri, IMPATIENCE, create=True)
        if isinstance(request, Undo):
            latest = rollback.undo(folder, uid, request.undone)
        else:
            latest = checkpoint.read_latest(folder)
    except StorageError as error:
        return StorageState(Storage(StorageHealth.ERROR, None, str(error)))
    return StorageState(Storage(StorageHealth.READY, latest))


def _ship(request: Ship, config: CheckpointConfig, uid: str) -> Shipped:
    path = Path(request.path)
    try:
        checkpoint.ship(ObjectPrefix(config.uri, create=True), uid, request.id, request.shard, path)
    except (StorageError, Damaged) as error:
        return Shipped(request.id, request.shard, str(error))
    except FileNotFoundError:
        return Shipped(request.id, request.shard, f"{path} is gone: its snapshot was given up.")
    path.unlink(missing_ok=True)
    return Shipped(request.id, request.shard)


def _publishing(config: CheckpointConfig, uid: str) -> checkpoint.Publishing:
    job, code = about_this_process()
    text = os.environ.get("CONCERTINA_TRAINER", "")
    trainer = of_any_version(json.loads(text)) if text else None
    back = trainer.anomalies.reaches if trainer else ()
    said = trainer.model_dump(mode="json", by_alias=True, exclude_none=True) if trainer else {}
    return checkpoint.Publishing(uid, job, said, code, Keeping(config.keep, config.keep_every_steps, back))


def _publish(request: Publish, config: CheckpointConfig, uid: str) -> Published:
    try:
        folder = ObjectPrefix(config.uri, create=True)
        durable = checkpoint.publish(folder, _publishing(config, uid), request.id, request.complete)
    except checkpoint.Fenced as error:
        return Published(request.id, None, str(error), refused=True)
    except StorageError as error:
        return Published(request.id, None, str(error))
    return Published(request.id, durable)
