"""Replica, round and rank to which a line of a log belongs."""

from __future__ import annotations

import json

from concertina.api.status import rfc3339
from concertina.api.world import Member, World
from concertina.cli.logs import MOST_STREAMS, chosen
from concertina.kube.manifests.names import INDEX
from concertina.terminal.log_entries import LogFilter, LogReader, split

T0 = 1_800_000_000
WORLD = World(
    round=4,
    since=rfc3339(T0),
    members=(
        Member(replica="a-0-0", uid="u", instance="i", workers=2),
        Member(replica="a-1-0", uid="v", instance="j", workers=1),
    ),
)


def started(round: int, rank: int) -> str:
    return json.dumps({"t": T0, "event": "worker_started", "round": round, "rank": rank}, separators=(",", ":"))


def test_round_and_rank_are_those_that_the_agent_has_told_of_last() -> None:
    reader, at = LogReader("a-1-0", World()), rfc3339(T0)
    assert reader.read(at, "before").rank is None
    assert reader.read(at, started(2, 3)).fact == {"t": T0, "event": "worker_started", "round": 2, "rank": 3}
    entry = reader.read(at, "step 7/9  loss 1.0000  rate 1.00e-03  10 tokens/s  5 ms")
    assert (entry.round, entry.rank, entry.step) == (2, 3, 7)
    assert entry.line().startswith("a-1-0 rank 3 | step 7/9")
    assert json.loads(entry.json("a")) == {
        "at": at, "job": "a", "replica": "a-1-0", "round": 2, "rank": 3, "step": 7, "text": entry.text,
    }  # fmt: skip
    reader.read(at, started(5, 0))
    after = reader.read(at, "words")
    assert (after.round, after.rank, after.step) == (5, 0, None)
    assert LogFilter(0, 5).has(after)
    assert not LogFilter(round=2).has(after)
    assert not LogFilter(rank=3).has(after)


def test_of_several_workers_the_line_says_whose_it_is() -> None:
    reader = LogReader("a-0-0", World())
    for rank in (0, 1):
        reader.read("", started(1, rank))
    line = reader.read("", "[rank 1] words")
    assert (line.rank, line.text) == (1, "words")
    assert reader.read("", "of nobody").rank is None


def test_a_log_that_is_read_from_its_middle_is_of_the_present_world() -> None:
    assert LogReader("a-1-0", WORLD).read(rfc3339(T0 + 1), "x").rank == 2
    assert LogReader("a-1-0", WORLD).read(rfc3339(T0 - 1), "x").rank is None, "of an earlier round"
    assert LogReader("a-0-0", WORLD).read(rfc3339(T0 + 1), "x").round == 4
    assert LogReader("b-0-0", WORLD).read(rfc3339(T0 + 1), "x").round is None


def test_what_a_script_prints_is_not_taken_for_what_its_agent_says() -> None:
    reader = LogReader("a-1-0", World())
    for text in ('{"t":1,"event":3}', '{"t":', '{"t":1}', '{"t":[' * 5000, '{"event":"worker_started"}'):
        assert reader.read("", text).fact is None
    assert reader.read("", '{"t":1,"event":"worker_started","round":-1,"rank":true}').round is None


def test_of_many_replicas_those_are_read_that_tell_most() -> None:
    pods = [{"metadata": {"name": f"a-{index}-0", "labels": {INDEX: str(index)}}} for index in reversed(range(1000))]
    names = [pod["metadata"]["name"] for pod in chosen(pods, ("", "a-700-0", "a-9-0", None))]
    assert names == [*(f"a-{index}-0" for index in range(MOST_STREAMS - 1)), "a-700-0"]


def test_the_time_before_a_line() -> None:
    assert split("2026-01-02T03:04:05.123456789Z words of it") == ("2026-01-02T03:04:05.123456789Z", "words of it")
    assert split("no time") == ("", "no time")
