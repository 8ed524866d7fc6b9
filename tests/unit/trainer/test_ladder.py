"""Settings that are chosen for a job: what they may be, and which of them."""

from __future__ import annotations

import itertools
import random

import pytest

from concertina_trainer.config.memory_choice import MemoryChoice, absent
from concertina_trainer.config.memory_config import Activations, Resharding
from concertina_trainer.config.parallelism import ParallelismConfig
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.ladder import BUSY_TOKENS, GIB, USABLE, first_fitting, ladder, usable_memory
from concertina_trainer.layouts import problems

JOB = {"data": {"uri": "/data"}, "globalBatchSize": 512, "model": {"sequenceLength": 2048}}
ZERO_BUBBLE = {"pipeline": 2, "schedule": "InterleavedZeroBubble"}


def config(**changes: object) -> TrainerConfig:
    return TrainerConfig.model_validate({**JOB, **changes})


def rungs(ranks: int = 8, parallelism: dict | None = None, has_blocks: bool = True, **changes: object):
    layout = ParallelismConfig.model_validate(parallelism or {})
    return ladder(config(**changes), layout, ranks, has_blocks)


def test_a_job_that_sets_nothing_may_have_any_of_these() -> None:
    keep = [(rows, "Keep", how) for rows in (16, 8, 4) for how in ("Never", "Always")]
    products = [(rows, "KeepProducts", "Always") for rows in (4, 2, 1)]
    recompute = [(rows, "Recompute", "Always") for rows in (4, 2, 1)]
    found = [(rung.micro_batch_size, rung.activations, rung.reshard_after_forward) for rung in rungs()]
    assert found == [*keep, *products, *recompute]


@pytest.mark.parametrize(
    "changes",
    [
        {"microBatchSize": 3},
        {"memory": {"activations": "Recompute"}},
        {"memory": {"reshardAfterForward": "Never"}},
        {"microBatchSize": 3, "memory": {"activations": "KeepProducts", "reshardAfterForward": "Always"}},
    ],
)
def test_what_a_job_sets_is_never_changed(changes: dict) -> None:
    asked = config(**changes)
    for rung in rungs(**changes):
        filled = rung.filled(asked)
        assert not absent(filled)
        assert filled == MemoryChoice(rung.micro_batch_size, rung.activations, rung.reshard_after_forward).filled(asked)
        assert asked.micro_batch_size in (None, rung.micro_batch_size)
        assert asked.memory.activations in (None, rung.activations)
        assert asked.memory.reshard_after_forward in (None, rung.reshard_after_forward)
        assert rung.chosen(asked).keys() == set(absent(asked))


def test_a_model_without_blocks_recomputes_none() -> None:
    assert {rung.activations for rung in rungs(has_blocks=False)} == {Activations.keep}
    assert rungs(has_blocks=False)[-1].micro_batch_size == 1, "smaller micro-batches are all that is left"


def test_zero_bubble_keeps_gathered_weights() -> None:
    found = rungs(parallelism=ZERO_BUBBLE)
    assert {rung.reshard_after_forward for rung in found} == {Resharding.never}
    layout = ParallelismConfig.model_validate(ZERO_BUBBLE)
    assert all(problems(rung.filled(config()), layout) == () for rung in found)


def test_a_pipeline_is_left_microbatches_to_fill_it() -> None:
    assert max(rung.micro_batch_size for rung in rungs(ranks=8, parallelism={"pipeline": 8}, globalBatchSize=64)) == 2


def test_bitwise_has_one_micro_batch_in_all_worlds() -> None:
    found = {rung.micro_batch_size for ranks in (1, 2, 8) for rung in rungs(ranks, determinism="Bitwise")}
    assert found == {32}


def test_a_micro_batch_has_no_more_rows_than_a_rank_has_sequences() -> None:
    assert rungs(ranks=8, globalBatchSize=24)[0].micro_batch_size == 3


def test_more_memory_never_chooses_a_later_setting_and_the_choice_fits() -> None:
    """Peaks are random, because nothing says that they fall along the ladder."""
    choices = rungs()
    for seed in range(300):
        dice = random.Random(seed)
        peaks = {choice: dice.random() for choice in choices}
        limits = sorted(dice.random() for _ in range(20))
        found = [first_fitting(choices, limit, peaks.__getitem__) for limit in limits]
        assert found == [first_fitting(choices, limit, peaks.__getitem__) for limit in limits], "it is a function"
        places = [choices.index(choice) for choice in found]
        assert all(after <= before for before, after in itertools.pairwise(places))
        for limit, choice in zip(limits, found, strict=True):
            assert peaks[choice] <= limit or choice == choices[-1]


def test_with_falling_peaks_it_is_the_first_that_fits() -> None:
    choices = rungs()
    peaks = {choice: float(len(choices) - place) for place, choice in enumerate(choices)}
    for limit in range(1, len(choices) + 1):
        assert peaks[first_fitting(choices, limit, peaks.__getitem__)] == limit


def test_drivers_that_report_other_sizes_of_one_device_give_one_choice() -> None:
    sizes = (84_929_806_336, 85_029_158_912, 85_174_386_688)  # H100 and A100, by several drivers
    assert {usable_memory(size) for size in sizes} == {79 * GIB * USABLE}


def test_a_micro_batch_is_busy_before_activations_are_recomputed() -> None:
    kept = [rung for rung in rungs() if rung.activations is Activations.keep]
    assert min(rung.micro_batch_size for rung in kept) * 2048 == BUSY_TOKENS
