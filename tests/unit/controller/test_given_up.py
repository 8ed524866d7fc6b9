"""Silent pods are given up one by one, by the pass after the one that asked for it."""

from __future__ import annotations

import asyncio

from builders.one_job import ApiServer, Operator
from concertina.controller.silence_limit import SilenceLimit
from concertina.plan.actions import Plan
from concertina.plan.observed import JobObservation


def test_one_silent_pod_is_given_up_at_once_and_the_next_after_ten_seconds() -> None:
    silent: tuple[str, ...] = ("longest", "other")
    seen: list[frozenset[str]] = []
    now = 1000.0

    def silences(observed: JobObservation, at: float) -> Plan:
        seen.append(observed.given_up)
        return Plan(observed.job.status, silent=silent)

    async def scenario() -> None:
        nonlocal silent, now
        operator = Operator(ApiServer(), "ours", b"a" * 32, silences)
        operator.reconciler.silence = SilenceLimit(lambda: now)
        for _ in range(3):
            await operator.pass_()
        assert seen == [frozenset(), {"longest"}, {"longest"}]
        assert operator.due == [0.0, 10.0, 10.0]
        now += 10.0
        silent = ("other",)  # The first agent was connected again.
        await operator.pass_()
        silent = ("other", "longest")
        await operator.pass_()
        assert seen[-1] == {"other"}, "a pod that falls silent anew waits for its turn anew"
        assert operator.due[3:] == [0.0, 10.0]

    asyncio.run(scenario())
