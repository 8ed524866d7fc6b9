"""Reports of rank 0 as counters that only grow, and gauges of the current round."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families as parse

import concertina_protocol as p
from concertina_agent.metrics import families as f
from concertina_agent.metrics.exposition import Histogram, render
from concertina_agent.metrics.training import Training

FIRST = p.Progress(1, 10, 2.5, 100.0, 9.0, 8, "training", 1000.0, first_step_at=999.0)


def told(step: int, **more: Any) -> p.Progress:
    return dataclasses.replace(FIRST, step=step, **{"step_seconds": 0.3, **more})


def values(training: Training, current: p.Progress | None = None, now: float = 0.0, busy: p.Busy | None = None) -> Any:
    samples = {(each.family, *each.labels): each.value for each in training.samples(current, busy, now)}
    histogram = samples.get((f.STEP_SECONDS,))
    if isinstance(histogram, Histogram):
        samples[(f.STEP_SECONDS,)] = [value for suffix, _, value in histogram.parts() if suffix in ("_sum", "_count")]
    return samples


def test_steps_are_timed_but_the_first_of_each_round() -> None:
    training = Training()
    for round, steps in ((1, (1, 2, 5)), (2, (3, 4))):
        starting = told(steps[0] - 1, step_seconds=0.0, first_step_at=None)
        training.on_progress(round, starting, 0.0)
        for step in steps:
            training.on_progress(round, told(step, step_seconds=9.0 if step in (1, 3) else 0.25), 0.0)
    assert values(training)[f.STEP_SECONDS,] == [1.25, 5]


def test_seconds_of_rounds_add_up_and_never_fall() -> None:
    training = Training()
    for round, waited, seconds in (
        (1, 1.0, {"forward": 2.0}),
        (1, 3.0, {"forward": 5.0, "of a newer trainer": 1.0, "and another": 1.0}),
        (2, 0.5, {"forward": 0.5}),
        (2, 0.25, {"forward": math.nan}),  # A worker with such reports does no harm.
        (1, 99.0, {"forward": 99.0}),  # The report is of a round that is over.
    ):
        training.on_progress(
            round, told(2, stalled_seconds=waited, checkpoint_seconds=2 * waited, seconds=seconds), 0.0
        )
    found = values(training)
    assert found[f.DATA_WAIT_SECONDS,] == 3.5
    assert found[f.SAVE_WAIT_SECONDS,] == 7.0
    assert found[f.PART_SECONDS, "forward"] == 5.5
    assert found[f.PART_SECONDS, "other"] == 2.0


def test_tokens_count_what_is_trained_again_and_the_run_does_not() -> None:
    training = Training()
    for round, tokens in ((1, 100), (1, 300), (2, 200), (2, 300)):
        training.on_progress(round, told(2, tokens=tokens), 0.0)
    found = values(training, told(2, tokens=300))
    assert (found[f.TOKENS,], found[f.RUN_TOKENS,]) == (300, 300)


def test_who_has_lost_rank_0_keeps_its_counters_and_drops_its_gauges() -> None:
    training = Training()
    training.on_progress(1, told(2, mfu=0.4), 0.0)
    assert values(training, told(2, mfu=0.4))[f.MFU,] == 0.4
    left = {key[0] for key in values(training)}
    assert all(family.kind is not f.MetricKind.GAUGE for family in left)
    assert f.STEP_SECONDS in left


def test_a_script_that_tells_no_loss_has_none_and_one_whose_loss_breaks_has_nan() -> None:
    training = Training()
    training.on_progress(1, told(1, loss=math.nan), 0.0)
    assert (f.LOSS,) not in values(training, told(1, loss=math.nan))
    training.on_progress(1, told(2, loss=1.0), 0.0)
    assert math.isnan(values(training, told(3, loss=math.nan))[f.LOSS,])
    assert (f.LOSS,) not in values(training, told(2, loss=0.0, first_step_at=None)), "a round that begins has none yet"


def test_metrics_have_names_of_ours_or_their_own_and_are_bounded() -> None:
    names = {f"m{number}": float(number) for number in range(100)}
    found = values(
        Training(), told(2, metrics={"gradient_norm": 1.5, "learning_rate": 0.1, "loss_scale": 8.0, **names})
    )
    assert found[f.GRADIENT_NORM,] == 1.5
    assert found[f.LEARNING_RATE,] == 0.1
    assert found[f.METRIC, "loss_scale"] == 8.0
    assert len([key for key in found if key[0] is f.METRIC]) == p.MOST_METRICS - 2


def test_the_age_of_a_snapshot_is_that_of_its_step() -> None:
    training = Training()
    for now, step in ((10.0, 3), (20.0, 3), (30.0, 4), (32.0, 4)):
        training.on_progress(1, told(5, snapshot_step=step), now)
    assert values(training, told(5, snapshot_step=4), now=35.0)[f.SNAPSHOT_AGE,] == 5.0


NUMBERS = st.floats() | st.integers().map(float)
STEPS = st.integers() | st.sampled_from([0, 1, 2, 10**400])
STRANGE = st.builds(
    p.Progress,
    step=STEPS,
    steps=st.none() | STEPS,
    loss=NUMBERS,
    tokens_per_second=NUMBERS,
    step_seconds=NUMBERS,
    position=STEPS,
    phase=st.text(),
    at=NUMBERS,
    first_step_at=st.none() | NUMBERS,
    snapshot_step=st.none() | STEPS,
    checkpoint_seconds=NUMBERS,
    stalled_seconds=NUMBERS,
    mfu=st.none() | NUMBERS,
    timeline=st.dictionaries(st.text() | st.just("start"), NUMBERS),
    save_seconds=st.none() | NUMBERS,
    evaluated=st.none()
    | st.builds(p.Evaluated, STEPS, NUMBERS, st.none() | NUMBERS, st.dictionaries(st.text(), NUMBERS)),
    tokens=st.none() | STEPS,
    seconds=st.dictionaries(st.text() | st.just("forward"), NUMBERS),
    metrics=st.dictionaries(st.text() | st.just("gradient_norm"), NUMBERS),
)


@given(st.lists(st.tuples(st.integers(0, 3), STRANGE), min_size=1, max_size=4))
def test_whatever_a_worker_says_is_taken_and_can_be_read_by_prometheus(said: list[tuple[int, p.Progress]]) -> None:
    """An error here would end the agent."""
    training = Training()
    for round, progress in said:
        training.on_progress(round, progress, 0.0)
    text = render(training.samples(said[-1][1], p.Busy(1.0, math.nan, math.inf), 1.0), (("replica", "r"),))
    samples = [sample for family in parse(text.decode()) for sample in family.samples]
    assert samples
    assert len({(sample.name, *sorted(sample.labels.items())) for sample in samples}) == len(samples)
    counters = [sample for sample in samples if sample.name.endswith(("_total", "_bucket", "_count"))]
    assert not [sample for sample in counters if not sample.value >= 0]


def test_what_ranks_do_beside_waiting_is_counted_over_rounds() -> None:
    training = Training()
    training.on_progress(1, told(2), 0.0)
    values(training, busy=p.Busy(1.0, 2.0, 3.0))
    found = values(training, busy=p.Busy(2.0, 3.0, 5.0))
    training.on_progress(2, told(2), 0.0)
    assert found[f.BUSY_SECONDS, "slowest"] == 5.0
    assert values(training, busy=p.Busy(1.0, 1.0, 1.0))[f.BUSY_SECONDS, "slowest"] == 6.0
