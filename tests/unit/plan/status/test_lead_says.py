"""Workers that start plainly, or import by themselves, though they should start warm; a tracker in trouble."""

from dataclasses import replace

from builders import jobs
from concertina.plan.observed import Observed
from concertina.plan.plan import plan

NOW = jobs.T0 + 20
WHY = "with -I Python is isolated"


def says(seen: Observed, plainly: str, anew: str = "", tracking: str = "") -> Observed:
    lead = seen.agents["demo-0-0"]
    assert lead.report is not None
    said = replace(lead, report=replace(lead.report, starts_plainly=plainly, imports_anew=anew, tracking=tracking))
    return replace(seen, agents={**seen.agents, "demo-0-0": said})


def test_why_workers_start_plainly_is_said_once_and_stands_in_the_status_while_it_is_so() -> None:
    seen = jobs.running(jobs.spec())
    assert plan(seen, NOW).status.starts_plainly is None
    made = plan(says(seen, WHY), NOW)
    assert made.status.starts_plainly == WHY
    (event,) = [event for event in made.events if event.reason == "StartsPlainly"]
    assert (event.type, event.message) == ("Normal", f"workers start plainly, not warm: {WHY}")

    later = replace(says(seen, WHY), job=replace(seen.job, status=made.status))
    assert not plan(later, NOW + 1).events
    assert plan(says(later, "another"), NOW + 1).events[0].message.endswith("another")
    assert plan(says(later, ""), NOW + 1).status.starts_plainly is None


def test_what_workers_import_by_themselves_is_said_once_too() -> None:
    seen = jobs.running(jobs.spec())
    made = plan(says(seen, "", "no_such_module (it is not there)"), NOW)
    assert (made.status.starts_plainly, made.status.imports_anew) == (None, "no_such_module (it is not there)")
    (event,) = made.events
    expected = ("Normal", "ImportsAnew", "each worker imports by itself: no_such_module (it is not there)")
    assert (event.type, event.reason, event.message) == expected
    later = replace(says(seen, "", "no_such_module (it is not there)"), job=replace(seen.job, status=made.status))
    assert not plan(later, NOW + 1).events
    assert plan(says(later, ""), NOW + 1).status.imports_anew is None


def test_a_tracker_that_takes_nothing_is_warned_of_once() -> None:
    seen = jobs.running(jobs.spec())
    why = "MLflow: ConnectionError: refused"
    made = plan(says(seen, "", tracking=why), NOW)
    assert made.status.tracking == why
    (event,) = made.events
    assert (event.type, event.reason) == ("Warning", "TrackerUnreachable")
    assert event.message.endswith(why)
    later = replace(says(seen, "", tracking=why), job=replace(seen.job, status=made.status))
    assert not plan(later, NOW + 1).events
    assert plan(says(later, ""), NOW + 1).status.tracking is None
