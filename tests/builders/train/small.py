"""Small checkpoint that is shipped and published as an agent's uploader does it, without a worker.

By default it contains the weights of one norm.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from builders.train.published import run_of_environment
from concertina_protocol import Durable, SnapshotId
from concertina_protocol.worker_channel import Publish, Ship
from concertina_state.format.shardfile import Chunk, Layout, ShardMetadata
from concertina_state.uploader import Destination, answer

DIM = 16


NORM = {"norm.weight": np.zeros(DIM, np.float32)}


def publish(
    uri: str, folder: Path, data: str = "data", weights: Mapping[str, NDArray[np.float32]] = NORM,
    averages: Mapping[str, NDArray[np.float32]] = MappingProxyType({}),
) -> Durable:  # fmt: skip
    """Publish a checkpoint of step 1 of round 1, and return it. `data` is the digest of the run's data.

    `averages` are the averages of weights that `optimizer.emaDecay` keeps.
    """
    id = SnapshotId(1, 1, "layout", 1)
    named = {f"model.{name}": value for name, value in weights.items()}
    named |= {f"optimizer.ema.{name}": value for name, value in averages.items()}
    layout = Layout([Chunk(name, "F32", (0,) * value.ndim, value.shape, value.shape) for name, value in named.items()])
    content = b"".join(named[chunk.name].tobytes() for chunk in layout.chunks)
    (folder / "shard").write_bytes(layout.header(ShardMetadata(id, 0, 1, "config", data)) + content)
    config = Destination(uri=uri)
    shipped = answer(Ship(id, 0, str(folder / "shard")), config, "u1")
    published = answer(Publish(id), config, "u1", run_of_environment())
    assert (shipped.error, published.error) == ("", "")
    return published.durable
