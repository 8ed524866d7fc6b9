"""Ledger of the soak test: it must detect a step in the logs that was skipped, repeated, or trained on other data."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
from soak_ledger import judge, rounds

from concertina_protocol import RestoreSource
from concertina_protocol.log_lines import RoundStarted, StepDoneLine


def steps(*numbers: int) -> list[str]:
    return [str(StepDoneLine(n, 99, 6 - n / 10, rate=1e-3, tokens_per_second=1.0, seconds=0.1)) for n in numbers]


FIRST = [str(RoundStarted(1, 1, RestoreSource.FRESH, 0, {"start": 0.1}, at=1.0)), *steps(1, 2, 3)]
SECOND = [str(RoundStarted(2, 3, RestoreSource.MEMORY, 2, {"start": 0.1}, at=2.0)), *steps(3, 4)]


def test_a_crash_that_is_replayed_is_exact() -> None:
    verdict = judge(rounds([FIRST, SECOND]), final=4)
    assert (verdict.wrong, verdict.replayed, verdict.unheard, verdict.worst_difference) == ((), 1, 0, 0.0)


@pytest.mark.parametrize(
    ("second", "final", "said"),
    [
        ([SECOND[0], SECOND[2]], 4, "round 2 is based on step 2 and trained [4]"),
        ([SECOND[0], SECOND[1], SECOND[1], SECOND[2]], 4, "round 2 is based on step 2 and trained [3, 3, 4]"),
        (SECOND, 5, "the last step in the logs is 4, the last checkpoint is of step 5"),
    ],
)
def test_a_step_skipped_repeated_or_missing_is_noticed(second: list[str], final: int, said: str) -> None:
    assert judge(rounds([FIRST, second]), final).wrong == (said,)


def test_a_step_trained_on_other_samples_shows_in_its_loss() -> None:
    other = [SECOND[0], SECOND[1].replace("5.7", "5.1"), SECOND[2]]
    assert judge(rounds([FIRST, other]), final=4).worst_difference > 0.1


def test_a_log_that_was_read_twice_counts_once() -> None:
    for logs in ([FIRST, SECOND[:2], SECOND], [FIRST, SECOND, SECOND[:2]], [FIRST, SECOND, FIRST]):
        verdict = judge(rounds(logs), final=4)
        assert (verdict.wrong, verdict.replayed, verdict.unheard) == ((), 1, 0)


def test_a_round_that_two_processes_train_is_noticed() -> None:
    other = [str(RoundStarted(2, 3, RestoreSource.MEMORY, 2, {"start": 0.1}, at=2.5)), *steps(3, 4)]
    (wrong,) = judge(rounds([FIRST, SECOND, other]), final=4).wrong
    assert wrong.startswith("round 2 is based on step 2 and trained")
