"""Counters that the metrics driver derives from the events of the agent."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from builders.agent import Driver
from concertina_agent import settings
from concertina_agent.core import events as e
from concertina_agent.metrics.exposition import render
from concertina_agent.metrics.metrics_driver import MetricsDriver
from concertina_agent.transfers.uploads import Shipping
from concertina_protocol import Replaced


def replaced_workers(folder: Path, command: tuple[str, ...], events: Iterable[e.Event]) -> dict[str, float]:
    """Return `concertina_worker_replaced_total` by reason, as a scrape after these events would have it."""
    environment = {
        "CONCERTINA_UID": "uid", "CONCERTINA_REPLICA": "r0", "CONCERTINA_POD_IP": "127.0.0.1",
        "CONCERTINA_VOLUME": str(folder),
    }  # fmt: skip

    async def play() -> bytes:
        metrics = MetricsDriver(settings.read(environment, command), Driver().core, dict, Shipping(), lambda _: None)
        for event in events:
            metrics.on_event(event)
        return render((await metrics._facts()).samples, ())

    samples = (sample for family in parse(asyncio.run(play()).decode()) for sample in family.samples)
    return {each.labels["reason"]: each.value for each in samples if each.name == "concertina_worker_replaced_total"}


@pytest.mark.parametrize("command", [(), ("python", "script.py")], ids=["bundled", "script"])
@pytest.mark.parametrize("why", Replaced)
def test_workers_that_were_killed_before_a_round_are_counted_by_reason(
    tmp_path: Path, why: Replaced, command: tuple[str, ...]
) -> None:
    other = next(each for each in Replaced if each is not why)
    events = (e.WorkersGone(2, replaced=(why, other, why)), e.WorkersGone(3), e.WorkersGone(4, replaced=(why,)))
    counted = replaced_workers(tmp_path, command, events)
    assert counted == {**dict.fromkeys((each.value for each in Replaced), 0), why.value: 3, other.value: 1}
