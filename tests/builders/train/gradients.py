"""What workers in some layout compute of one global batch: its gradient, or what another program saves of it."""

import json
import os
import socket
import tempfile

import torch

from concertina_trainer.config.trainer import TrainerConfig


def whole_gradient(parent, trainer, world, tmp_path, shares=(), parallelism=None, program="workers.gradients:main"):
    listener = socket.create_server(("127.0.0.1", 0))
    result = tmp_path / f"gradient-{world}"
    with tempfile.TemporaryFile("w+b") as log:
        store = parent.fork("concertina_trainer.store:serve", {}, log.fileno(), listener.fileno())
        environment = {
            "CONCERTINA_TRAINER": TrainerConfig.model_validate(trainer).model_dump_json(by_alias=True),
            "CONCERTINA_PARALLELISM": json.dumps(parallelism or {}),
            "CONCERTINA_ROUND": "1",
            "CONCERTINA_POD_IP": "127.0.0.1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(listener.getsockname()[1]),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": "0",
            "RESULT": str(result),
            "SHARES": json.dumps(shares),
        }
        listener.close()
        ranks = [parent.fork(program, {**environment, "RANK": str(r)}, log.fileno()) for r in range(world)]
        codes = [parent.wait(pid) for pid in ranks]
        os.kill(store, 9)
        parent.wait(store)
        log.seek(0)
        assert codes == [0] * world, log.read().decode()
    return torch.load(result)
