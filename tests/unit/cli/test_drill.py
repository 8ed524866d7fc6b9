"""What a drill makes of what it saw."""

from __future__ import annotations

from dataclasses import replace

import pytest

from concertina.drill.scenarios import SCENARIOS
from concertina.drill.verdict import Expect, Seconds, Seen, evaluate, positions
from concertina_protocol import RestoreSource
from concertina_protocol.log_lines import RoundStarted

START = RoundStarted(4, 13, RestoreSource.MEMORY, 12, {}, at=100.0)
SEEN = Seen(
    Seconds(first_step=1.0), before=3, after=2, end=3, rounds=1, rounds_in_all=2, cause="MemberLost", start=START
)
CRASH = Expect(seconds=5.0, replayed=1, counted=False, reasons=("MemberLost", "NodeLost"))
CALM = replace(SEEN, rounds=0, rounds_in_all=0, start=None, cause="")


def test_what_is_promised_passes() -> None:
    verdict = evaluate("kill-node", "a/b", "killed node n1", CRASH, SEEN)
    assert verdict.passed
    assert verdict.reasons == ()
    assert verdict.positions == "exact: round 4 went on with step 13, its state is the memory of step 12"


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (replace(SEEN, seconds=Seconds(first_step=5.1)), "seen after 5.10 s, promised are 5 s"),
        (replace(SEEN, seconds=Seconds()), "the first step was not seen"),
        (replace(SEEN, rounds=0), "no new round"),
        (replace(SEEN, replayed=2), "2 steps were trained again"),
        (replace(SEEN, counted=1), "counted against maxRestarts"),
        (replace(SEEN, cause="WorkerFailed: x"), "the operator says: WorkerFailed: x"),
        (replace(SEEN, end=2), "with 2 of 3 replicas"),
        (replace(SEEN, start=replace(START, step=14)), "NOT exact"),
        (replace(SEEN, missing="a step did not come"), "a step did not come"),
    ],
)
def test_each_broken_promise_is_named(seen: Seen, words: str) -> None:
    verdict = evaluate("kill-node", "a/b", "killed node n1", CRASH, seen)
    assert not verdict.passed
    assert len(verdict.reasons) == 1
    assert words in verdict.reasons[0]


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (
            replace(CALM, rounds_in_all=1, cause="MemberLost"),
            "1 new rounds were started, and none was needed: MemberLost",
        ),
        (replace(CALM, same_pods=False), "pods of the job were replaced"),
    ],
)
def test_a_job_that_must_not_notice(seen: Seen, words: str) -> None:
    expect = Expect(seconds=5.0, new_round=False)
    assert evaluate("operator-kill", "a/b", "", expect, CALM).passed
    assert words in evaluate("operator-kill", "a/b", "", expect, seen).reasons[0]


def test_positions_from_the_seed_and_without_a_log() -> None:
    assert positions(replace(SEEN, start=RoundStarted(2, 1, RestoreSource.FRESH, 0, {}, 1.0))).startswith("exact")
    assert positions(replace(SEEN, start=None)).startswith("can't be told")
    assert positions(CALM).startswith("not touched")


def test_every_scenario_can_be_played_or_says_why() -> None:
    for name, scenario in SCENARIOS.items():
        for way in (scenario.local, scenario.elsewhere):
            assert callable(way) or len(way.split()) > 5, name
