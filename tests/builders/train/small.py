"""A checkpoint of one norm's weights, shipped and published as an agent's uploader does it, without a worker."""

from pathlib import Path

from builders.train.published import run_of_environment
from concertina_protocol import Durable, SnapshotId
from concertina_protocol.worker_channel import Publish, Ship
from concertina_state.format.shardfile import Chunk, Layout, ShardMetadata
from concertina_state.uploader import Destination, answer

DIM = 16


def publish(uri: str, folder: Path, data: str = "data") -> Durable:
    """Step 1 of round 1; `data`: the digest of the run's data."""
    id = SnapshotId(1, 1, "layout", 1)
    layout = Layout([Chunk("model.norm.weight", "F32", (0,), (DIM,), (DIM,))])
    (folder / "shard").write_bytes(layout.header(ShardMetadata(id, 0, 1, "config", data)) + bytes(4 * DIM))
    config = Destination(uri=uri)
    shipped = answer(Ship(id, 0, str(folder / "shard")), config, "u1")
    published = answer(Publish(id), config, "u1", run_of_environment())
    assert (shipped.error, published.error) == ("", "")
    return published.durable
