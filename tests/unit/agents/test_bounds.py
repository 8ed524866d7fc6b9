"""Cost of agents' lines: it is that of the content that they may have, whatever they contain."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

import concertina_protocol as protocol
from builders.answering import report
from concertina.agents.bounds import LINES, MOST, MOST_MEMBERS, MOST_SEPARATORS, line_limits
from concertina.agents.calls import CallError, parsed
from concertina.api.spec import MOST_REPLICAS, MOST_STANDBY_REPLICAS
from concertina_protocol.codec import lines

FAILURE = protocol.Failure("r0", protocol.FailureReason.WORKER_FAILED, "no")
RANGES = tuple((10**10 + number, 10**10 + number + 1) for number in range(32))
FAILS = dataclasses.replace(FAILURE, rollback=protocol.Rollback(9, RANGES))


def line(**fields: Any) -> bytes:
    """Return a report with those fields as JSON, known or not."""
    frame = json.loads(protocol.encode(report()))
    frame["body"].update(fields)
    return json.dumps(frame, separators=(",", ":")).encode()


def test_a_line_of_more_values_than_any_agent_says_is_refused_before_it_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol, "decode", lambda *_: pytest.fail("it was decoded"))
    for unknown in ([0] * MOST_SEPARATORS, [[]] * (MOST_SEPARATORS // 2), [{}] * (MOST_SEPARATORS // 2)):
        with pytest.raises(CallError, match="r0 sent a line of more than"):
            parsed(line(unknown=unknown), "r0")


def test_the_report_of_the_largest_world_is_no_such_line() -> None:
    """The report says that all ranks fail, with ranges to skip, and its last output is lists of numbers."""
    said = dataclasses.replace(FAILS, last_lines=(str(list(range(300))),) * LINES)
    names = [f"job-{index}-0" for index in range(MOST_REPLICAS + MOST_STANDBY_REPLICAS)]
    member = protocol.MemberState("r0", "i1", 1, "c1", protocol.State.FAILED, failure=FAILURE)
    largest = dataclasses.replace(
        report(), members=dict.fromkeys(names, member), failures=(said, said, *[FAILS] * len(names))
    )
    message = parsed(protocol.encode(largest), "r0")
    assert isinstance(message, protocol.Report)
    assert (len(message.members), len(message.failures)) == (len(names), len(names) + 2)


def test_entries_that_are_left_out_are_not_converted() -> None:
    failure = {"replica": "r0", "reason": "WorkerFailed", "message": "no"}
    odd = {"of": "another kind"}
    message = parsed(line(failures=[*[failure] * MOST_MEMBERS, *[odd] * 20_000]), "r0")
    assert isinstance(message, protocol.Report)
    assert len(message.failures) == MOST_MEMBERS
    progress = json.loads(protocol.encode(report()))["body"]["progress"]
    message = parsed(line(progress={**progress, "skipped": [*[[1, 2]] * MOST, "odd"]}), "r0")
    assert isinstance(message, protocol.Report)
    assert message.progress
    assert len(message.progress.skipped) == MOST


@pytest.mark.parametrize("members", [1, 64])
def test_a_line_of_more_values_than_its_job_needs_is_refused_before_they_are_converted(
    members: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "from_json", lambda *_: pytest.fail("it was converted"))
    limits = line_limits(members)
    heartbeat = {"rank": 1, "step": 1, "phase": "", "still": 0}
    flood = {"m": {"replica": "m", "heartbeats": [heartbeat] * limits.most_containers}}
    with pytest.raises(CallError, match=f"r0 sent .* more than {limits.most_containers} objects and arrays"):
        parsed(line(members=flood), "r0", limits)
    with pytest.raises(CallError, match=f"r0 sent .* more than {limits.most_values} values"):
        parsed(line(unknown=[0] * (limits.most_values + 1)), "r0", limits)
