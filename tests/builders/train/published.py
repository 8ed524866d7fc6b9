"""Small real checkpoints, written by the real uploader's own functions, without workers."""

from __future__ import annotations

import os
from pathlib import Path

from concertina_protocol import SnapshotId
from concertina_protocol.worker_channel import Publish, Published, Ship
from concertina_state.format.shardfile import Chunk, Continued, Evaluations, Layout, ShardMetadata
from concertina_state.lineage import Origin
from concertina_state.uploader import UNKNOWN, Destination, UploadedRun, answer
from concertina_trainer import uploader
from concertina_trainer.training.evaluation_history import with_result

NOTHING = Origin()
NO_EVALUATIONS = Evaluations()


def shard_file(
    folder: Path,
    id: SnapshotId,
    shard: int,
    continued: Continued | None = None,
    origin: Origin = NOTHING,
    trainer: str = "",
    evaluations: Evaluations = NO_EVALUATIONS,
) -> Path:
    """Write a small real shard with one tensor that has 2 rows in each shard. See Layout for `trainer`."""
    layout = Layout([Chunk("x", "F32", (2 * shard, 0), (2, 3), (2 * id.shards, 3))], trainer)
    path = folder / f"{id.round}-{id.step}-{shard}"
    facts = ShardMetadata(id, shard, 7 * id.step, "config", "data", continued, origin=origin, evaluations=evaluations)
    path.write_bytes(layout.header(facts) + bytes(24))
    return path


def publish(
    uri: str,
    tmp_path: Path,
    round: int,
    step: int,
    uid: str = "u1",
    continued: Continued | None = None,
    origin: Origin = NOTHING,
    trainer: str = "",
    loss: float | None = None,
    of: str = "documents",
    keep_best: bool = False,
) -> Published:
    """Publish a checkpoint of two shards. `loss` is the evaluation loss of its step, with the digest `of`."""
    id = SnapshotId(round, step, "layout", 2)
    config = Destination(uri=uri, keep=2, keep_best=keep_best)
    evaluations = NO_EVALUATIONS if loss is None else with_result(Evaluations(of), step, loss, {})
    for shard in range(2):
        path = shard_file(tmp_path, id, shard, continued, origin, trainer, evaluations)
        shipped = answer(Ship(id, shard, str(path)), config, uid)
        assert shipped.error == ""
    return answer(Publish(id), config, uid, run_of_environment())


def flip_a_byte(checkpoint: str, shard: int) -> None:
    """Flip a byte of a shard's tensors, in a checkpoint on files."""
    (path,) = Path(checkpoint.removeprefix("file://")).glob(f"shard-{shard}-of-*.safetensors")
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)


def run_of_environment() -> UploadedRun:
    """Return the run folder of the bundled trainer, if a test names one."""
    return uploader.run(os.environ) if "CONCERTINA_TRAINER" in os.environ else UNKNOWN
