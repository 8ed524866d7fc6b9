"""Results of workers in some layout for one global batch: its gradient, or what another program saves of it."""

import contextlib
import json
import os
import signal
import socket
import tempfile

import pytest
import torch

from builders.train import gpus
from concertina_trainer.config.trainer import TrainerConfig

CLOSE = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-7, "norm": 1e-5, "loss": 1e-6},
    torch.float64: {"rtol": 1e-10, "atol": 1e-14, "norm": 1e-12, "loss": 1e-13},
}
"""Relative tolerance between the sums of a batch in two orders. In float64 the sums have n terms with an error of 1e-16
each, where n is some hundred tokens times the depth, and gradients lose two or three digits to cancellation."""


def whole_gradient(
    parent, trainer, world, tmp_path, shares=(), parallelism=None, program="workers.gradients:main",
    dtype=torch.float32, **variables
):  # fmt: skip
    """Return the gradient of one global batch, as workers in some layout compute it.

    `dtype` is that of the weights and of the computation; `variables` are added to the workers' environment.
    """
    variables |= {"SHARES": json.dumps(shares), "DTYPE": str(dtype).removeprefix("torch.")}
    return computed(parent, program, trainer, world, tmp_path, parallelism, **variables)


def computed(parent, program, trainer, world, tmp_path, parallelism=None, **variables):
    """Run workers, and return what rank 0 has saved in RESULT."""
    listener = socket.create_server(("127.0.0.1", 0))
    result = tmp_path / f"result-{world}"
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
            "RESULT": str(result),
            **variables,
        }
        listener.close()
        ranks = [
            parent.fork(program, {**environment, "RANK": str(r), **gpus.variables(r, world)}, log.fileno())
            for r in range(world)
        ]
        try:
            codes = [parent.wait(pid) for pid in ranks]
        except TimeoutError:
            for pid in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGABRT)  # The error then says where the problem is.
            codes = [parent.wait(pid) for pid in ranks]
        os.kill(store, signal.SIGKILL)
        parent.wait(store)
        log.seek(0)
        assert codes == [0] * world, log.read().decode()
    return torch.load(result)


def check(found, gradients, loss):
    """Check that workers have computed these gradients, by name, and this loss."""
    assert found["gradients"].keys() == gradients.keys()
    for name, gradient in gradients.items():
        close = CLOSE[gradient.dtype]
        torch.testing.assert_close(
            found["gradients"][name], gradient, rtol=close["rtol"], atol=close["atol"],
            msg=lambda said, name=name: f"{name}: {said}",
        )  # fmt: skip
    norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm().item()
    assert found["norm"] == pytest.approx(norm, rel=close["norm"], abs=0)
    assert found["loss"] == pytest.approx(loss, rel=close["loss"], abs=0)
    assert not found["late"], "imported after the fork: add it to preload"
