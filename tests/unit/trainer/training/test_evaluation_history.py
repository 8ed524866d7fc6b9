"""The best evaluation, and the evaluations without an improvement."""

import math

from hypothesis import given
from hypothesis import strategies as st

from concertina_state.format.shardfile import Evaluations
from concertina_trainer.config.data_config import StoppingConfig
from concertina_trainer.training.evaluation_history import continued, stop_reason, with_result

LOSSES = st.lists(st.floats(0, 4) | st.just(math.nan) | st.just(math.inf) | st.just(-math.inf))


def after(losses: list[float], least: float = 0.0) -> Evaluations:
    history = Evaluations("d")
    for number, loss in enumerate(losses, 1):
        history = with_result(history, 10 * number, loss, {"a": loss}, least)
    return history


@given(LOSSES)
def test_the_best_is_the_first_lowest_finite_loss(losses: list[float]) -> None:
    history = after(losses)
    finite = [loss for loss in losses if math.isfinite(loss)]
    assert history.best_loss == min(finite, default=None)
    assert history.best_step == (10 * (1 + losses.index(min(finite))) if finite else 0)


def test_an_improvement_is_lower_by_more_than_the_least_than_the_last_one() -> None:
    assert [after([3.0, 2.9, 2.8][:n], 0.15).without_improvement for n in (1, 2, 3)] == [0, 1, 0]
    slow = after([3.0, 2.9, 2.8], 0.25)
    assert slow.without_improvement == 2
    assert (slow.best_step, slow.best_loss) == (30, 2.8), "the best one is not only among the improvements"


def test_a_run_stops_after_as_many_evaluations_in_a_row_without_an_improvement() -> None:
    stopping = StoppingConfig(patience=2)
    assert not stop_reason(after([3.0, 3.0]), stopping)
    said = stop_reason(after([3.0, 3.0, math.nan]), stopping)
    assert said == (
        "training stopped early after step 30: 2 evaluations in a row did not improve the evaluation loss, and the "
        "lowest is 3 at step 10"
    )
    assert stop_reason(after([math.nan, math.nan]), stopping)
    assert not stop_reason(after([3.0] * 9), None)
    assert not stop_reason(after([3.0, 3.0, 3.0]), StoppingConfig(patience=3)), "who raises it goes on"


def test_with_other_documents_the_history_begins_anew() -> None:
    history = after([3.0, 3.0])
    assert continued(history, "d") == history
    assert continued(history, "other") == Evaluations("other")
