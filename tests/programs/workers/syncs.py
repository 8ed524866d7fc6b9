"""Worker that logs each time the host waits for its GPU, as torch reports it."""

import warnings

import torch

from concertina_trainer import worker


def main() -> None:
    warnings.simplefilter("always")
    torch.cuda.set_sync_debug_mode("warn")
    worker.main()
