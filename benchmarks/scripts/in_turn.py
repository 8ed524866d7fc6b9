"""Turns of a training process that `benchmarks/trainer.py` compares with others.

All processes are started at once, and then train one after another, a block of steps each. So every process has its
turn under the same load of the machine.
"""

from __future__ import annotations

import json
import os
import socket
import time

import torch


class Turn:
    """Connection to the benchmark. The environment variable TURNS configures it.

    TURNS is JSON. `socket` is the path of the benchmark's socket, `name` identifies this process, `warm` is the number
    of steps before the first block, and `block` the number of steps in a block.
    """

    def __init__(self) -> None:
        settings = json.loads(os.environ["TURNS"])
        self._block, self._left = settings["block"], settings["warm"]
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(settings["socket"])
        self._send({"name": settings["name"], "pid": os.getpid()})
        self._processor, self._began = time.process_time(), time.perf_counter()

    def build(self) -> None:
        """Wait for this process's turn to build its model. The benchmark measures the memory from here on."""
        self._wait()

    def step(self, loss: float, weights: int) -> None:
        """End a step. At the end of a block, wait until the benchmark asks for the next one.

        The processor time of a block includes that of all threads since the end of the previous block. Otherwise, what
        a thread prepares while the process waits would cost nothing.

        Args:
            loss: Loss of the step.
            weights: Number of weights of the model.
        """
        self._left -= 1
        if self._left:
            return
        on_gpu = torch.cuda.is_initialized()
        if on_gpu:
            torch.cuda.synchronize()
        processor, self._processor = self._processor, time.process_time()
        took = {"processor": self._processor - processor, "seconds": time.perf_counter() - self._began}
        memory = torch.cuda.max_memory_allocated() if on_gpu else None
        self._send({**took, "memory": memory, "loss": loss, "weights": weights})
        self._wait()
        self._left, self._began = self._block, time.perf_counter()

    def _send(self, message: dict[str, object]) -> None:
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def _wait(self) -> None:
        if not self._connection.recv(1):
            os._exit(0)
