"""Loss scaling for float16, whose range of exponents is too small for gradients.

The loss is linear in the weights of its tokens. The trainer therefore multiplies these weights by a power of two, the
loss scale. All gradients of the backward pass are then larger by this factor. Losses, and gradients in float32, are
then divided by the loss scale. The division is exact.

If a gradient overflows, all ranks lower the scale and compute the same samples again, so no sample is left out. After
GROWTH_STEPS steps without an overflow, all ranks raise the scale. The scale is a part of the saved state. Source:
Micikevicius et al. 2017, Mixed Precision Training (arXiv 1710.03740).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from torch import Tensor

from concertina_state.errors import InvalidInput
from concertina_state.format.shardfile import LossScale
from concertina_trainer.config.trainer import Precision
from concertina_trainer.data.read.batches import Microbatch
from concertina_trainer.training.agreement import StepResult

GROWTH_STEPS = 2000
MOST_EXPONENT = 24


class LossScaling:
    """Loss scale of a run, which is 1 unless the precision is Float16."""

    def __init__(self, precision: Precision, restored: LossScale, own: bool = False) -> None:
        """Begin with the scale from the restored state.

        `own` says whether code of the job's author computes the loss, which may add up scaled losses in float16.

        Raises:
            InvalidInput: When the state has a scale that no run can have.
        """
        if not 0 <= restored.exponent <= MOST_EXPONENT or not 0 <= restored.steps < GROWTH_STEPS:
            raise InvalidInput(f"the saved state has the loss scale {restored}: restore another checkpoint.")
        self.state = restored
        self.is_used = precision is Precision.float16
        self._own = own
        self._exponent = restored.exponent
        """Exponent of the loss scale at the end of the last step."""

    @property
    def scale(self) -> float:
        return 2.0**self.state.exponent if self.is_used else 1.0

    def scaled(self, microbatches: Sequence[Microbatch]) -> Sequence[Microbatch]:
        """Return microbatches in which the weight of each token is multiplied by `scale`."""
        if not self.is_used:
            return microbatches
        return [dataclasses.replace(batch, weights=batch.weights * self.scale) for batch in microbatches]

    def unscaled(self, losses: Sequence[Tensor]) -> Sequence[Tensor]:
        return [loss / self.scale for loss in losses] if self.is_used else losses

    def result(self, result: StepResult) -> StepResult:
        """Return the result of a step, with the gradient norm divided by the loss scale."""
        return dataclasses.replace(result, squared_norm=result.squared_norm / self.scale**2)

    def lowered(self, result: StepResult) -> bool:
        """Lower the scale if gradients have overflowed and a lower scale can help.

        Return True if the scale was lowered.

        All ranks make the same decision, because `result` is the same on all of them. The trainer's own code computes
        losses in float32. If such a loss is not finite, activations have overflowed, and no scale helps. The loss of a
        custom model may be a sum in float16, which a lower scale can help.
        """
        overflowed = math.isfinite(result.loss) and not math.isfinite(result.squared_norm)
        overflowed |= self._own and not math.isfinite(result.loss)
        if not (self.is_used and overflowed and self.state.exponent):
            return False
        self.state = LossScale(self.state.exponent - 1, 0, self.state.recomputed + 1)
        return True

    def stepped(self) -> None:
        """Count a step without an overflow, and raise the scale after enough such steps."""
        if self.is_used:
            steps = (self.state.steps + 1) % GROWTH_STEPS
            exponent = min(MOST_EXPONENT, self.state.exponent + (not steps))
            self.state = dataclasses.replace(self.state, exponent=exponent, steps=steps)
            self._exponent = exponent

    def skipped(self) -> None:
        """Undo all but one halving of the loss scale in the last step, because its batch is left out.

        The gradients of a bad batch may overflow at any scale. With the lowest scale, small gradients of the next steps
        would be rounded to 0.
        """
        if self.is_used:
            self._exponent = max(self.state.exponent, self._exponent - 1)
            self.state = dataclasses.replace(self.state, exponent=self._exponent)

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the loss scale, for the report of a step."""
        return {"loss_scale": self.scale, "recomputed_steps": self.state.recomputed} if self.is_used else {}
