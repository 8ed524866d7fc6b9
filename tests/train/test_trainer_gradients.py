"""The gradient means the same in every world (AdamW hides its scale, so losses alone would not show it)."""

import os
import socket
import tempfile

import pytest
import torch
import torch.nn.functional as F

from concertina_trainer.config import TrainerConfig
from concertina_trainer.data.reader import Reader
from concertina_trainer.model import Decoder, initial_weight


def whole_gradient(parent, trainer, world, tmp_path):
    listener = socket.create_server(("127.0.0.1", 0))
    result = tmp_path / f"gradient-{world}"
    with tempfile.TemporaryFile("w+b") as log:
        store = parent.fork("concertina_trainer.store:serve", {}, log.fileno(), listener.fileno())
        environment = {
            "CONCERTINA_TRAINER": TrainerConfig.model_validate(trainer).model_dump_json(by_alias=True),
            "CONCERTINA_ROUND": "1",
            "CONCERTINA_POD_IP": "127.0.0.1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(listener.getsockname()[1]),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": "0",
            "RESULT": str(result),
        }
        listener.close()
        ranks = [parent.fork("gradients:main", {**environment, "RANK": str(r)}, log.fileno()) for r in range(world)]
        codes = [parent.wait(pid) for pid in ranks]
        os.kill(store, 9)
        parent.wait(store)
        log.seek(0)
        assert codes == [0] * world, log.read().decode()
    return torch.load(result)


@pytest.fixture(scope="module")
def reference(trainer):
    """One plain model, no sharding, no microbatches: the mean over all tokens of the batch."""
    config = TrainerConfig.model_validate(trainer)
    model = Decoder(config.model)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(initial_weight(name, p.shape, config.model, config.seed))
    reader = Reader(config.data, config.model.sequence_length, config.seed)
    tokens = torch.from_numpy(reader.read(100, 100 + config.global_batch_size))
    F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_gradients_are_the_mean_over_the_global_batch(parent, trainer, reference, tmp_path, world):
    found = whole_gradient(parent, trainer, world, tmp_path)
    assert found["gradients"].keys() == reference.keys()
    for name, gradient in reference.items():
        torch.testing.assert_close(found["gradients"][name], gradient, rtol=1e-4, atol=1e-7)
    norm = torch.cat([gradient.flatten() for gradient in reference.values()]).norm().item()
    assert not found["late"], "imported after the fork: add it to preload"
    assert found["norm"] == pytest.approx(norm, rel=1e-5)
