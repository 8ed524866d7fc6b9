"""Limit on pods that are given up for silence: each namespace has its own rate, and none uses up that of the others."""

from __future__ import annotations

from collections import Counter

from concertina.controller.silence_limit import NAMESPACE_SECONDS, PER_MINUTE, SilenceLimit


class Limit(SilenceLimit):
    def __init__(self) -> None:
        self.now = 1000.0
        super().__init__(lambda: self.now)


def served(namespaces: list[str], seconds: float) -> list[tuple[float, str]]:
    """Return when pods are given up, and of which namespace, where each of those always wants one more."""
    limit, due, granted = Limit(), dict.fromkeys(namespaces, 1000.0), []
    end = limit.now + seconds
    while min(due.values()) < end:
        limit.now = min(due.values())
        for namespace in [name for name in namespaces if due[name] <= limit.now]:
            wait = limit.ask(namespace)
            if not wait:
                granted.append((limit.now - 1000.0, namespace))
            due[namespace] = limit.now + wait
    return granted


def test_a_namespace_has_one_pod_in_ten_seconds() -> None:
    assert [at for at, _ in served(["a"], 60.0)] == [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]


def test_all_together_have_six_a_minute() -> None:
    granted = served([f"team-{number}" for number in range(20)], 600.0)
    for begin, _ in granted:
        assert sum(begin <= at < begin + 60.0 for at, _ in granted) <= PER_MINUTE
    assert len(granted) == 60


def test_namespaces_have_their_turns() -> None:
    counts = Counter(name for _, name in served(["a", "b", "c", "d"], 600.0))
    assert sum(counts.values()) == 60
    assert max(counts.values()) - min(counts.values()) <= 2


def test_one_that_comes_late_goes_before_those_that_had_theirs() -> None:
    limit = Limit()
    for _ in range(PER_MINUTE):
        assert limit.ask("greedy") == 0.0
        limit.now += NAMESPACE_SECONDS
    # The oldest pod of the greedy namespace is a minute old at this moment, so one slot is free.
    assert limit.ask("greedy") == 0.0
    assert limit.ask("late") == NAMESPACE_SECONDS
    limit.now += NAMESPACE_SECONDS
    assert limit.ask("greedy") > 0.0
    assert limit.ask("late") == 0.0


def test_a_place_is_kept_for_one_that_waits_and_lost_by_one_that_asks_no_more() -> None:
    limit = Limit()
    for number in range(PER_MINUTE):
        assert limit.ask(f"team-{number}") == 0.0
    assert limit.ask("waits") == 60.0
    limit.now += 60.0
    granted = [limit.ask(f"other-{number}") == 0.0 for number in range(PER_MINUTE)]
    assert sum(granted) == PER_MINUTE - 1
    limit.now += 75.0
    granted = [limit.ask(f"more-{number}") == 0.0 for number in range(PER_MINUTE)]
    assert sum(granted) == PER_MINUTE
