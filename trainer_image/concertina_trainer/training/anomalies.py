"""Detection of steps that look wrong: a loss or gradient that is not finite, or a loss far above the previous ones.

Every rank judges the same sums over all ranks, before the weights are updated. All ranks therefore make the same
decision. The history of losses is a mean and a variance, which are saved with the state. A resumed run therefore judges
steps like an uninterrupted run.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Protocol

from concertina_protocol import FailureReason
from concertina_protocol.messages.ranges import MOST_RANGES, Ranges, united, words
from concertina_state.errors import InvalidInput
from concertina_state.format.shardfile import Trend
from concertina_trainer.config.anomaly_config import AnomalyResponse
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.data.read.skips import positions
from concertina_trainer.errors import RollBack

SMOOTHING = 1 / 16
"""Weight of a new loss in the moving mean and variance."""
SEASONED = 32
"""Minimum number of previous losses for judging whether a new loss is too high."""
IN_A_ROW = 8
"""Maximum number of consecutive batches to skip. If the next batch looks wrong too, the batches are not the cause."""


class Measured(Protocol):
    """Loss and gradient norm of a step, as in `agreement.StepResult`.

    The module does not import `agreement`, because a simulation uses the rules of this module without torch.
    """

    @property
    def loss(self) -> float: ...
    @property
    def squared_norm(self) -> float: ...


def with_loss(trend: Trend, loss: float) -> Trend:
    """Return the trend after one more loss. A trend is an exponentially weighted mean and variance (West 1979)."""
    if trend.losses == 0:
        return Trend(loss, 0.0, 1)
    deviation = loss - trend.mean
    variance = (1 - SMOOTHING) * (trend.variance + SMOOTHING * deviation * deviation)
    return Trend(trend.mean + SMOOTHING * deviation, variance, trend.losses + 1)


def spikes(trend: Trend, loss: float, deviations: float) -> bool:
    return trend.losses >= SEASONED and loss > trend.mean + deviations * math.sqrt(trend.variance)


@dataclasses.dataclass(frozen=True)
class _Anomaly:
    reason: FailureReason
    description: str
    answer: AnomalyResponse


class Anomalies:
    """Detection of steps that look wrong in a round, and the response to them.

    A round is a period in which a fixed set of replicas trains.
    """

    def __init__(self, config: TrainerConfig, skipped: Ranges, trend: Trend) -> None:
        """Begin with the skipped samples and the trend of losses from the restored state.

        Raises:
            InvalidInput: When more ranges of samples were skipped than can be recorded.
        """
        self._policy, self._batch = config.anomalies, config.global_batch_size
        self.skipped, self.trend = _few(skipped), trend
        self._in_a_row = 0

    def skips(self, step: int, position: int, result: Measured) -> str:
        """Return a sentence about why the batch of this step is skipped, or an empty string if the batch is used.

        `position` is the number of samples consumed before this step.

        Raises:
            RollBack: When all ranks have to go back to an earlier state.
            FloatingPointError: When the loss or the gradient is not finite, and the batch may not be skipped.
            InvalidInput: When the loss spikes and the batch may not be skipped, or when too many ranges of samples have
                already been skipped.
        """
        anomaly = self._find(result)
        if anomaly is None:
            self.trend, self._in_a_row = with_loss(self.trend, result.loss), 0
            return ""
        batch = positions(position, position + self._batch, self.skipped)
        event = f"step {step + 1} ({words(batch)}): {anomaly.description}"
        if anomaly.answer is AnomalyResponse.roll_back:
            back = max(0, step - self._policy.rollback_steps)
            first = position - (step - back) * self._batch
            skip = positions(max(0, first), position + self._batch, self.skipped)
            raise RollBack(anomaly.reason, f"{event}; rolled back to step {back} or before, {words(skip)} left out",
                           back, self._with(skip))  # fmt: skip
        if anomaly.answer is AnomalyResponse.skip and self._in_a_row < IN_A_ROW:
            self.skipped, self._in_a_row = self._with(batch), self._in_a_row + 1
            return f"{event}; left out"
        also = (
            f". The {IN_A_ROW} batches before were already left out, so the batch is not the cause"
            if self._in_a_row
            else ""
        )
        if anomaly.reason == FailureReason.LOSS_NOT_FINITE:
            raise FloatingPointError(f"{event}{also}; the results of that step are discarded")
        raise InvalidInput(
            f"{event}{also}. The job stops, because trainer.anomalies.spike is Stop. Change it or remove "
            "the cause, and start the job again: it continues from its checkpoint."
        )

    def _find(self, result: Measured) -> _Anomaly | None:
        policy = self._policy
        if not math.isfinite(result.loss + result.squared_norm):
            norm = math.sqrt(result.squared_norm) if result.squared_norm >= 0 else result.squared_norm
            description = f"the loss is {result.loss} and the gradient's norm {norm}"
            return _Anomaly(FailureReason.LOSS_NOT_FINITE, description, policy.non_finite)
        if policy.spike is AnomalyResponse.ignore or not spikes(self.trend, result.loss, policy.spike_deviations):
            return None
        description = (
            f"the loss is {result.loss:.4f}; the mean before was {self.trend.mean:.4f} with a standard deviation of "
        )
        return _Anomaly(FailureReason.LOSS_SPIKE, description + f"{math.sqrt(self.trend.variance):.4f}", policy.spike)

    def _with(self, more: Ranges) -> Ranges:
        return _few(united(self.skipped, more))


def _few(skipped: Ranges) -> Ranges:
    if len(skipped) > MOST_RANGES:
        raise InvalidInput(f"samples were already left out in {MOST_RANGES} places, which is more than "
                           "chance: check the data and the learning rate.")  # fmt: skip
    return skipped
