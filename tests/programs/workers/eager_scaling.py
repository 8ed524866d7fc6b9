"""Worker that raises the loss scale after each step, so that gradients soon overflow."""

from concertina_trainer import worker
from concertina_trainer.training import loss_scaling

loss_scaling.GROWTH_STEPS = 1


def main() -> None:
    worker.main()
