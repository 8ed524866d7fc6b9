"""Candidates that an agent pings before a round."""

from __future__ import annotations

import collections

from concertina_agent.core.round import probes
from concertina_protocol import Candidate


def candidates(count: int, without: int | None = None) -> tuple[Candidate, ...]:
    return tuple(Candidate(f"r{i}", f"10.0.0.{i}:29400") for i in range(count) if i != without)


def asked(count: int, me: int, without: int | None = None) -> list[str]:
    return [candidate.replica for candidate in probes.chosen(candidates(count, without), f"r{me}")]


def test_in_a_small_world_everybody_asks_everybody() -> None:
    everybody = [f"r{i}" for i in range(probes.ALL_PAIRS)]
    assert all(asked(probes.ALL_PAIRS, me) == everybody for me in range(probes.ALL_PAIRS))


def test_in_a_large_one_each_asks_the_first_its_neighbours_and_some_others() -> None:
    count = 300
    asked_by = collections.Counter[str]()
    for me in range(count):
        names = asked(count, me)
        assert {"r0", *(f"r{(me + step) % count}" for step in (-1, 0, 1))} <= set(names)
        assert len(names) <= 4 + probes.SAMPLE
        asked_by.update(names)
    assert max(asked_by[f"r{i}"] for i in range(1, count)) < 10 * probes.SAMPLE, "the sample is spread"


def test_whoever_is_there_still_is_asked_again() -> None:
    """Connections that are kept open need no handshake in the next round."""
    before, after = (set(asked(1000, 500, without=gone)) for gone in (None, 3))
    assert before - {"r3"} <= after | {"r499", "r501"}
    assert after == set(asked(1000, 500, without=3))
