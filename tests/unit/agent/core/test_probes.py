"""Whom an agent pings before a round."""

from __future__ import annotations

import collections

from concertina_agent.core.round import probes
from concertina_protocol import Candidate


def candidates(count: int) -> tuple[Candidate, ...]:
    return tuple(Candidate(f"r{i}", f"10.0.0.{i}:29400") for i in range(count))


def asked(count: int, me: int, claim: str = "c") -> list[str]:
    return [candidate.replica for candidate in probes.chosen(candidates(count), f"r{me}", claim)]


def test_in_a_small_world_everybody_asks_everybody() -> None:
    everybody = [f"r{i}" for i in range(probes.ALL_PAIRS)]
    assert all(asked(probes.ALL_PAIRS, me) == everybody for me in range(probes.ALL_PAIRS))


def test_in_a_large_one_each_asks_the_first_its_neighbours_and_some_others() -> None:
    count, most = 1000, 1 + 1 + 2 * probes.NEIGHBOURS + probes.SAMPLE
    asked_by = collections.Counter[str]()
    for me in range(count):
        names = asked(count, me)
        ring = {f"r{(me + step) % count}" for step in range(-probes.NEIGHBOURS, probes.NEIGHBOURS + 1)}
        assert {"r0"} | ring <= set(names)
        assert len(names) <= most
        asked_by.update(names)
    assert max(asked_by[f"r{i}"] for i in range(1, count)) < 4 * probes.SAMPLE, "the sample is spread"


def test_others_are_drawn_for_the_next_claim() -> None:
    assert asked(1000, 500, "one") != asked(1000, 500, "two")
    assert asked(1000, 500, "one") == asked(1000, 500, "one")
