"""Lines of the trainer's log that programs read: each is parsed to what was written, and any other line is ignored."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from concertina_protocol import RestoreSource
from concertina_protocol.log_lines import LogLine, RoundStarted, StepDoneLine, parse

ROUND = RoundStarted(3, 13, RestoreSource.MEMORY, 12, {"start": 0.041, "group": 0.12, "first_step": 1.5}, 1763860000.25)
STEP = StepDoneLine(12, 1000, loss=5.5437, rate=1e-3, tokens_per_second=12345.0, seconds=0.02)
GOLDEN = {
    "round 3 is at work: step 13, state from memory of step 12; "
    "seconds: start 0.041  group 0.120  first_step 1.500; at 1763860000.2500": ROUND,
    "step 12/1000  loss 5.5437  rate 1.00e-03  12,345 tokens/s  20 ms": STEP,
}


def rounded(most: float, digits: int) -> some.SearchStrategy[float]:
    """Generate numbers that a line with so many digits represents exactly."""
    return some.floats(0, most).map(lambda value: round(value, digits))


counts = some.integers(0, 10**12)
parts = some.dictionaries(some.from_regex(r"[a-z_]{1,20}", fullmatch=True), rounded(1e6, 3), max_size=12)
rates = some.floats(0, 1e3).map(lambda value: float(f"{value:.2e}"))
losses = some.floats(-1e9, 1e9).map(lambda value: round(value, 4)) | some.just(float("inf"))
starts = some.builds(RoundStarted, counts, counts, some.sampled_from(RestoreSource), counts, parts, rounded(1e10, 4))
steps = some.builds(
    StepDoneLine, counts, counts, losses, rates, rounded(1e12, 0), some.integers(0, 10**9).map(lambda ms: ms / 1000)
)


@pytest.mark.parametrize(("text", "line"), GOLDEN.items())
def test_the_lines_as_people_know_them(text: str, line: LogLine) -> None:
    assert str(line) == text
    assert parse(text) == line
    assert parse(f"[rank 0] {text}") == line, "of several workers"


@given(starts | steps)
def test_what_is_written_is_what_is_read(line: LogLine) -> None:
    assert parse(str(line)) == line


@given(some.text() | some.sampled_from(sorted(GOLDEN)).flatmap(lambda text: some.permutations(text).map("".join)))
def test_any_other_line_is_none(text: str) -> None:
    parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "step 12/1000  loss 1.2.3  rate 1.00e-03  12,345 tokens/s  20 ms",
        "step 12: evaluation loss 5.5437 (mean of 8 sequences)",
        f"step {'9' * 5000}/1  loss 5.5437  rate 1.00e-03  12,345 tokens/s  20 ms",
        f"step 12/1000  loss 5.5437  rate 1.00e-03  12,345 tokens/s  {'9' * 400} ms",
        f"said: {STEP!s}",
        f"{STEP} and more",
        "round 3 is at work: step 13, state from the seed; seconds: start 0.041; at 1763860000.2500",
    ],
)
def test_what_only_looks_like_one_is_none(text: str) -> None:
    assert parse(text) is None
