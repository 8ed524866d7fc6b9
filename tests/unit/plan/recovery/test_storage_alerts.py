"""Stores that fail while a round continues."""

from dataclasses import replace

from builders import jobs
from concertina.plan.plan import plan
from concertina_protocol import Storage

NOW = jobs.T0 + 20


def trouble(storage=None, **progress):
    seen = jobs.running(jobs.spec())
    coordinator = seen.agents["demo-0-0"]
    report = replace(coordinator.report, storage=storage, progress=replace(coordinator.report.progress, **progress))
    made = plan(replace(seen, agents={**seen.agents, "demo-0-0": replace(coordinator, report=report)}), NOW)
    assert made.status.condition("Running").status == "True"
    condition = made.status.trouble
    return condition and (condition.type, condition.reason, condition.message)


def test_a_round_that_waits_for_data_is_stalled_with_the_reason_and_only_as_long_as_it_waits():
    lost = Storage("Error", None, "http://store can't be reached.")
    waits = {"phase": "loading data", "waits_for": "http://data can't be reached."}
    assert trouble(**waits) == ("Stalled", "DataUnavailable", "training waits for data: http://data can't be reached.")
    assert trouble(lost, **waits)[1] == "DataUnavailable", "it stands still, which is worse"
    goes_on = "training continues, but no checkpoint can be written: http://store can't be reached."
    assert trouble(lost) == ("Degraded", "StorageUnavailable", goes_on)
    assert trouble() is None
