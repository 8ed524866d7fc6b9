"""Coordinator's sentences: workers in worlds of their own, plain starts, skipped modules, and a failing tracker."""

from dataclasses import replace

import concertina_protocol as protocol
from builders import jobs
from concertina.api.spec import Launcher
from concertina.api.status import ConditionType, JobStatus
from concertina.plan.observed import JobObservation
from concertina.plan.plan import plan

NOW = jobs.T0 + 20
WHY = "with -I Python is isolated"


def says(seen: JobObservation, plainly: str, anew: str = "", tracking: str = "", mismatch: str = "") -> JobObservation:
    coordinator = seen.agents["demo-0-0"]
    assert coordinator.report is not None
    report = replace(
        coordinator.report,
        warm_start_disabled_reason=plainly,
        warm_start_skipped_modules=anew,
        tracking=tracking,
        world_mismatch=mismatch,
    )
    said = replace(coordinator, report=report)
    return replace(seen, agents={**seen.agents, "demo-0-0": said})


def test_why_workers_start_plainly_is_said_once_and_stands_in_the_status_while_it_is_so() -> None:
    seen = jobs.running(jobs.spec())
    assert plan(seen, NOW).status.warm_start_disabled_reason is None
    made = plan(says(seen, WHY), NOW)
    assert made.status.warm_start_disabled_reason == WHY
    (event,) = [event for event in made.events if event.reason == "WarmStartDisabled"]
    assert (event.type, event.message) == ("Normal", f"workers start cold: {WHY}")

    later = replace(says(seen, WHY), job=replace(seen.job, status=made.status))
    assert not plan(later, NOW + 1).events
    assert plan(says(later, "another"), NOW + 1).events[0].message.endswith("another")
    assert plan(says(later, ""), NOW + 1).status.warm_start_disabled_reason is None


def test_what_workers_import_by_themselves_is_said_once_too() -> None:
    seen = jobs.running(jobs.spec())
    made = plan(says(seen, "", "no_such_module (it is not there)"), NOW)
    assert (made.status.warm_start_disabled_reason, made.status.warm_start_skipped_modules) == (
        None,
        "no_such_module (it is not there)",
    )
    (event,) = made.events
    expected = (
        "Normal",
        "WarmStartIncomplete",
        "each worker imports modules by itself: no_such_module (it is not there)",
    )
    assert (event.type, event.reason, event.message) == expected
    later = replace(says(seen, "", "no_such_module (it is not there)"), job=replace(seen.job, status=made.status))
    assert not plan(later, NOW + 1).events
    assert plan(says(later, ""), NOW + 1).status.warm_start_skipped_modules is None


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


ALONE = "processes with WORLD_SIZE=1 were started by torchrun in a round of 3 workers"


def degraded(status: JobStatus) -> tuple[str, str] | None:
    condition = status.condition(ConditionType.DEGRADED)
    return condition and (condition.status, condition.reason)


def test_replicas_that_train_alone_are_warned_of_once_and_degrade_the_job_until_a_round_without_it() -> None:
    seen = jobs.running(jobs.spec())
    assert degraded(plan(seen, NOW).status) is None
    made = plan(says(seen, "", mismatch=ALONE), NOW)
    assert (made.status.world_mismatch, degraded(made.status)) == (ALONE, ("True", "WorldMismatch"))
    (event,) = made.events
    assert (event.type, event.reason) == ("Warning", "WorldMismatch")
    assert event.message.startswith(f"each replica trains alone: {ALONE}. To train together, remove the launcher")
    assert event.message.endswith("set launcher: Torchrun")
    condition = made.status.condition(ConditionType.DEGRADED)
    assert condition is not None
    assert condition.message == event.message
    assert made.status.is_true(ConditionType.RUNNING), "nothing is stopped"

    later = replace(says(seen, "", mismatch=ALONE), job=replace(seen.job, status=made.status))
    assert not plan(later, NOW + 1).events
    mended = plan(says(later, ""), NOW + 1).status
    assert (mended.world_mismatch, degraded(mended)) == (None, ("False", "NotDegraded"))


def test_a_long_sentence_still_ends_with_what_to_do() -> None:
    (event,) = plan(says(jobs.running(jobs.spec()), "", mismatch="x" * 2000), NOW).events
    assert len(event.message) == 1000
    assert event.message.endswith("set launcher: Torchrun")


def test_a_job_that_completes_says_that_its_replicas_trained_alone() -> None:
    seen = says(jobs.running(jobs.spec()), "", mismatch=ALONE)
    coordinator = seen.agents["demo-0-0"]
    assert coordinator.report is not None
    ended = replace(coordinator, report=replace(coordinator.report, state=protocol.State.SUCCEEDED))
    seen = replace(seen, agents={**seen.agents, "demo-0-0": ended})
    made = plan(seen, NOW)
    complete = made.status.true_condition(ConditionType.COMPLETE)
    assert complete is not None
    assert complete.message.startswith(
        "all 3 workers of round 1 have ended with exit code 0; each replica trains alone"
    )
    assert not made.status.is_true(ConditionType.DEGRADED)
    again = plan(replace(seen, job=replace(seen.job, status=made.status)), NOW + 1).status
    assert again.true_condition(ConditionType.COMPLETE) == complete


def test_with_launcher_torchrun_nothing_of_an_earlier_launcher_is_left() -> None:
    seen = jobs.running(jobs.spec())
    before = plan(says(seen, "", mismatch=ALONE), NOW).status
    spec = seen.job.spec
    assert spec is not None
    own = spec.model_copy(update={"launcher": Launcher.TORCHRUN, "trainer": None})
    after = plan(replace(seen, job=replace(seen.job, spec=own, status=before)), NOW + 1).status
    assert after.world_mismatch is None
