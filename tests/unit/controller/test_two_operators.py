"""Two operators that serve the same job, on an API server in memory: they do not write against each other forever."""

from __future__ import annotations

import asyncio

import pytest

from builders.one_job import UID, ApiServer, Operator
from concertina.api.status import Condition
from concertina.controller.cache import taken_back
from concertina.controller.cache.taken_back import FIRST_YIELD_SECONDS, LONGEST_YIELD_SECONDS, TakenBack
from concertina.controller.master_keys import key_id
from concertina.plan.actions import Plan
from concertina.plan.observed import JobObservation

PASSES = 30
"""Number of passes of each operator, one after the other, as each write of one wakes the other."""
OURS, THEIRS = b"a" * 32, b"b" * 32


async def _passes(*operators: Operator) -> None:
    for _ in range(PASSES):
        for operator in operators:
            await operator.pass_()


def test_an_operator_without_the_key_of_a_job_leaves_it_to_the_one_that_has_it_and_says_so_once() -> None:
    server = ApiServer()
    ours, theirs = Operator(server, "ours", OURS), Operator(server, "theirs", THEIRS)

    async def scenario() -> None:
        await _passes(ours, theirs)
        assert server.job["status"]["masterKey"] == key_id(OURS)
        assert server.condition("Stalled") == ("False", "NotStalled")
        assert (server.writes["ours"], server.writes["theirs"]) == (2, 1)
        assert theirs.said.told.count("ServedByAnotherOperator") == 1
        assert theirs.reconciler.of_another == {UID}
        assert ours.said.told.count("ServedByAnotherOperator") == 0
        theirs.reconciler.forget(UID)
        assert not theirs.reconciler.of_another

    asyncio.run(scenario())


def test_a_job_whose_key_nobody_has_is_told_so() -> None:
    server = ApiServer()
    gone, new = Operator(server, "gone", OURS), Operator(server, "new", THEIRS)

    async def scenario() -> None:
        await gone.pass_()
        for _ in range(PASSES):
            await new.pass_()
        assert server.condition("Stalled") == ("True", "MasterKeyMismatch")
        assert (server.writes["new"], new.reconciler.of_another) == (1, set())

    asyncio.run(scenario())


def test_conditions_that_another_client_takes_back_are_restored_once_and_then_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other client has the same key and decides otherwise, such as an operator of another version."""
    monkeypatch.setattr(taken_back, "FIRST_SECONDS", 1000.0)
    monkeypatch.setattr(taken_back, "LONGEST_SECONDS", 1000.0)
    server = ApiServer()
    running = Condition(type="Running", status="True", reason="Other", last_transition_time="2026-01-01T00:00:00Z")

    def otherwise(observed: JobObservation, now: float) -> Plan:
        status = observed.job.status.model_copy(update={"conditions": (running,)})
        return Plan(status, only_conditions=True)

    async def scenario() -> None:
        ours, theirs = Operator(server, "ours", OURS), Operator(server, "theirs", OURS, otherwise)
        await _passes(ours, theirs)
        assert (server.writes["ours"], server.writes["theirs"]) == (2, 2)
        recheck = await ours.pass_()
        assert recheck is not None, "the next write that restores it is due by itself"
        server.job["spec"]["suspend"], server.job["metadata"]["generation"] = False, 2
        server.job["metadata"]["resourceVersion"] = "100"
        before = server.writes["ours"]
        await ours.pass_()
        assert server.writes["ours"] == before + 1, "what follows from news is written at once"

    asyncio.run(scenario())


def test_a_job_of_another_operator_counts_as_nobodys_once_that_one_has_long_written_nothing() -> None:
    known, theirs, ours = TakenBack(), [{"n": each} for each in range(10)], {"stalled": True}
    assert known.yield_seconds_left(theirs[0], 0.0) == 0.0, "nobody was seen to write"
    known.written(ours, ours, False, 0.0)
    assert known.yield_seconds_left(ours, 1.0) == 0.0
    assert known.yield_seconds_left(theirs[1], 2.0) == FIRST_YIELD_SECONDS
    assert known.yield_seconds_left(theirs[2], 100.0) == FIRST_YIELD_SECONDS
    assert known.yield_seconds_left(theirs[2], 200.0) == FIRST_YIELD_SECONDS - 100.0
    assert known.yield_seconds_left(theirs[2], 100.0 + FIRST_YIELD_SECONDS) == 0.0
    waits, now = [], 1000.0
    for each in theirs[3:]:
        known.written(ours, ours, False, now)
        waits.append(known.yield_seconds_left(each, now))
        now += waits[-1]
    assert waits[:2] == [2 * FIRST_YIELD_SECONDS, 4 * FIRST_YIELD_SECONDS]
    assert waits[-1] == LONGEST_YIELD_SECONDS


@pytest.mark.parametrize("wrote", [True, False])
def test_only_what_this_operator_has_written_is_taken_back(wrote: bool) -> None:
    mine = {"conditions": [{"type": "Ready", "status": "True", "reason": "Suspended", "message": "one"}]}
    other = {"conditions": [{"type": "Ready", "status": "True", "reason": "Other"}]}
    known = TakenBack()
    if wrote:
        known.written(mine, mine, False, 0.0)
    assert known.restores(other, mine) is wrote
    assert not known.restores(mine, mine)
    assert not known.restores(other, other)
