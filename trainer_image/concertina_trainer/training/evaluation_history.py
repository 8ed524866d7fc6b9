"""Best evaluation of a run, and the rule that ends a run whose evaluation loss no longer improves.

The history of evaluations is saved with the state. A run that resumes, with any number of ranks, therefore continues
its counts, and a rollback also restores the earlier history. All ranks have the same losses, so they make the same
decisions.

A loss that is not finite is never the best, and never an improvement.

The module does not import torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from concertina_state.format.shardfile import Evaluations
from concertina_trainer.config.data_config import StoppingConfig


def continued(history: Evaluations, of: str) -> Evaluations:
    """Return the history with which a round begins. It is empty if the earlier history is of different documents."""
    return history if history.of == of else Evaluations(of)


def with_result(
    history: Evaluations, step: int, loss: float, sets: Mapping[str, float], least_improvement: float = 0.0
) -> Evaluations:
    """Return the history after one more evaluation.

    An evaluation is an improvement if its loss is lower than the loss of the last improvement by more than
    `least_improvement`. The best evaluation is the one with the lowest loss, whether it counts as an improvement or
    not.
    """
    best = history.best_loss
    is_best = math.isfinite(loss) and (best is None or loss < best)
    reference = history.reference
    improves = math.isfinite(loss) and (reference is None or loss < reference - least_improvement)
    return dataclasses.replace(
        history,
        step=step,
        loss=_finite(loss),
        sets={name: _finite(value) for name, value in sets.items()},
        best_step=step if is_best else history.best_step,
        best_loss=loss if is_best else best,
        reference=loss if improves else reference,
        without_improvement=0 if improves else history.without_improvement + 1,
    )


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


def stop_reason(history: Evaluations, stopping: StoppingConfig | None) -> str:
    """Return a sentence that says why the run ends, or an empty string if the run continues."""
    if stopping is None or history.without_improvement < stopping.patience:
        return ""
    by = f" by more than {stopping.least_improvement:g}" if stopping.least_improvement else ""
    best = (
        "" if history.best_loss is None else f", and the lowest is {history.best_loss:.6g} at step {history.best_step}"
    )
    return (
        f"training stopped early after step {history.step}: {history.without_improvement} evaluations in a row did not "
        f"improve the evaluation loss{by}{best}"
    )
