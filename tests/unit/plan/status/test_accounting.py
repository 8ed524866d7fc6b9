"""Accounting of time: every second is in one class. Also the costs of an incident and of a token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import concertina_protocol as protocol
from builders import jobs
from builders.jobs import T0
from concertina.api.accounting import CLASSES, MOST_CAUSES, Goodput, RecoveryTime
from concertina.api.status import JobStatus, unix_seconds
from concertina.plan.observed import JobObservation, PodPhase
from concertina.plan.plan import plan
from concertina.plan.status.time_accounting import OTHER
from concertina.terminal import show
from concertina_protocol import StepPart

PRICE = {"perReplicaHour": "3600.0", "spotPerReplicaHour": "360.0", "currency": "EUR"}
"""Price of one a second, and of a tenth."""


def with_coordinator(seen: JobObservation, **report: object) -> JobObservation:
    coordinator = replace(seen.agents["demo-0-0"], report=jobs.coordinator_report(**report))
    return replace(seen, agents={**seen.agents, "demo-0-0": coordinator})


def progress(step: int, at: float, **fields: Any) -> protocol.Progress:
    return protocol.Progress(step, 100, 2.0, 1000.0, 0.5, step * 32, "training", at, T0 + 6, **fields)


def passed(seen: JobObservation, now: float) -> JobObservation:
    return jobs.then(seen, plan(seen, now))


def failed(at: float) -> dict[str, Any]:
    return {"failures": (protocol.Failure("demo-1-0", "WorkerFailed", "x", at=at),)}


def next_round(seen: JobObservation, now: float, held: int | None = None) -> JobObservation:
    """Commit a round without a step so far. The replicas that were asked to prepare have a snapshot of step `held`."""
    made = plan(seen, now)
    asked = jobs.sends(made, protocol.Prepare)
    number = next(iter(asked.values())).round
    id = protocol.SnapshotId(number - 1, held or 0, "layout", 1)
    snapshots = {"snapshots": (protocol.HeldSnapshot(id, (0,)),)} if held else {}
    agents = dict(seen.agents)
    for name, message in asked.items():
        reply = jobs.prepared(name, message, **snapshots)
        agents[name] = jobs.called(agents[name], message, now, done_at=now, reply=reply)
    seen = jobs.then(seen, made, agents=agents)
    made = plan(seen, now)
    agents = dict(agents)
    for name, message in jobs.sends(made, protocol.Assign).items():
        reply = protocol.Accepted(message.round, message.claim)
        agents[name] = jobs.called(agents[name], message, now, done_at=now, reply=reply)
    coordinator = made.status.world.coordinator
    told = {"round": number, "claim": "claim-b", "progress": None, "failures": (), "state": "running"}
    agents[coordinator] = replace(
        agents[coordinator],
        report=replace(jobs.coordinator_report(**told), replica=coordinator, instance=f"i-{coordinator}"),
    )
    return jobs.then(seen, made, agents=agents)


def at_work(seen: JobObservation, now: float, step: int, **fields: Any) -> JobObservation:
    """Return the observation in which the round has made a step."""
    coordinator = seen.job.status.world.coordinator
    reported = protocol.Progress(step, 100, 2.0, 1000.0, 0.5, step * 32, "training", now, now, **fields)
    report = replace(seen.agents[coordinator].report, progress=reported)
    return passed(
        replace(seen, agents={**seen.agents, coordinator: replace(seen.agents[coordinator], report=report)}), now
    )


def total(status: JobStatus) -> float:
    return sum(status.goodput.by_class.values())


def test_the_seconds_add_up_to_the_time_since_the_creation() -> None:
    seen = jobs.running(jobs.spec())
    for second in range(12, 40, 2):
        broken = failed(T0 + 29.5) if second == 30 else {}
        reported = progress(40 + second, T0 + second, checkpoint_seconds=second / 100, stalled_seconds=second / 50)
        seen = passed(with_coordinator(seen, progress=reported, **broken), T0 + second)
        status = seen.job.status
        assert total(status) == pytest.approx(unix_seconds(status.goodput.at) - T0, abs=0.02)
    goodput = plan(replace(seen, job=replace(seen.job, generation=2)), T0 + 38).status.goodput
    assert goodput.recovery_seconds == pytest.approx(0.5 + 8, abs=0.02)
    assert goodput.checkpoint_seconds == pytest.approx(0.30, abs=0.01)
    assert goodput.input_seconds == pytest.approx(0.60, abs=0.01)
    assert goodput.percent == pytest.approx(100 * goodput.productive_seconds / 38, abs=0.2)


def test_what_workers_say_of_their_steps_is_taken_out_of_what_was_productive() -> None:
    seen = jobs.running(jobs.spec())
    before = seen.job.status.goodput
    parts = {StepPart.FORWARD: 3.0, StepPart.ALL_GATHER: 1.0, StepPart.REDUCE_SCATTER: 0.5, StepPart.ALL_REDUCE: 2.5}
    parts |= {StepPart.EVALUATION: 1.5, StepPart.COMPILE: 0.25}
    busy = protocol.Busy(coordinator=6.0, median=6.5, most=8.0)
    seen = passed(with_coordinator(seen, progress=progress(60, T0 + 20, seconds=parts), busy=busy), T0 + 20)
    found = {name: value - before.by_class[name] for name, value in seen.job.status.goodput.by_class.items()}
    assert found == {
        **dict.fromkeys(before.by_class, 0.0),
        "communication": pytest.approx(4.0 - 2.0),  # rank 0 waits 2 s for the slowest
        "straggler": pytest.approx(1.5),
        "evaluation": 1.5,
        "compile": 0.25,
        "productive": pytest.approx(10 - 2.0 - 1.5 - 1.5 - 0.25),
    }
    again = passed(with_coordinator(seen, progress=progress(61, T0 + 24, seconds=parts), busy=busy), T0 + 24)
    assert again.job.status.goodput.productive_seconds == pytest.approx(
        found["productive"] + before.productive_seconds + 4
    )


def test_waits_that_are_reported_late_leave_the_recovery_of_earlier_incidents_alone() -> None:
    """The last report of a round contains waits that were counted as productive."""
    seen = passed(with_coordinator(jobs.running(jobs.spec()), **failed(T0 + 20)), T0 + 22)
    seen = at_work(next_round(seen, T0 + 26), T0 + 27, 61)
    seen = at_work(seen, T0 + 50, 90)
    before = seen.job.status.goodput
    assert before.recovery_seconds == pytest.approx(7)
    [ended] = seen.job.status.incidents
    status = seen.job.status
    drains = [each.model_copy(update={"reason": "Draining"}) for each in status.conditions if each.type == "Ready"]
    others = [each for each in status.conditions if each.type != "Ready"]
    internal = status.internal.model_copy(update={"incident": ended})
    status = status.model_copy(update={"conditions": (*drains, *others), "internal": internal})
    seen = replace(seen, job=replace(seen.job, status=status))
    goodput = at_work(seen, T0 + 60, 90, stalled_seconds=14.0).job.status.goodput
    assert goodput.input_seconds == pytest.approx(14)
    assert goodput.recovery_seconds >= before.recovery_seconds
    assert sum(entry.seconds for entry in goodput.recovery) == pytest.approx(goodput.recovery_seconds)


def test_a_slow_rank_0_is_no_less_a_straggler_and_no_communication() -> None:
    seen = jobs.running(jobs.spec())
    reported = progress(60, T0 + 20, seconds={StepPart.ALL_REDUCE: 1.0})
    seen = passed(
        with_coordinator(seen, progress=reported, busy=protocol.Busy(coordinator=9.0, median=5.0, most=9.0)), T0 + 20
    )
    goodput = seen.job.status.goodput
    assert (goodput.communication_seconds, goodput.straggler_seconds) == (1.0, 4.0)
    assert goodput.productive_seconds == pytest.approx(5.0)


def test_the_wait_for_a_slow_rank_is_not_the_network_s_before_the_work_of_ranks_is_known() -> None:
    seen, at = jobs.running(jobs.spec()), T0 + 100
    waited = progress(60, at, seconds={StepPart.ALL_REDUCE: 60.0})
    seen = passed(with_coordinator(seen, progress=waited), at)
    assert seen.job.status.goodput.communication_seconds == 0
    busy = protocol.Busy(coordinator=1.0, median=1.0, most=61.0)
    seen = passed(with_coordinator(seen, progress=replace(waited, at=at + 2), busy=busy), at + 2)
    goodput = seen.job.status.goodput
    assert (goodput.communication_seconds, goodput.straggler_seconds) == (0, 60.0)


def test_a_measurement_that_falls_and_rises_again_is_counted_once() -> None:
    seen, counted = jobs.running(jobs.spec()), []
    for second, most in enumerate([9.0, 6.0, 9.0, 6.0, 10.0]):
        busy, at = protocol.Busy(coordinator=5.0, median=5.0, most=most), T0 + 20 + 10 * second
        seen = passed(with_coordinator(seen, progress=progress(60 + second, at), busy=busy), at)
        counted.append(seen.job.status.goodput.straggler_seconds)
    assert counted == [4.0, 4.0, 4.0, 4.0, 5.0]


EVENTS = st.sampled_from(["train", "silent", "fail", "suspend", "resume", "lose"])
TOLD = st.dictionaries(st.sampled_from(list(StepPart)), st.floats(0, 1e4))


@pytest.mark.parametrize("spec", [jobs.spec, jobs.command_spec], ids=["bundled", "a script"])
@given(story=st.lists(st.tuples(st.floats(0.01, 30), EVENTS, TOLD), max_size=12))
def test_whatever_happens_and_whatever_workers_say_each_second_is_counted_once(spec: Any, story: list[Any]) -> None:
    script = spec is jobs.command_spec
    seen, now, reported_at = jobs.running(spec(), **({"progress": None} if script else {})), T0 + 10, None
    for seconds, what, parts in story:
        now += seconds
        if what in ("suspend", "resume"):
            job = replace(seen.job, spec=seen.job.spec.model_copy(update={"suspend": what == "suspend"}))
            seen = replace(seen, job=replace(job, generation=job.generation + 1))
        if what == "lose":
            seen = replace(seen, pods=seen.pods[:-1])
        reported = progress(60, now, seconds=parts, checkpoint_seconds=parts.get(StepPart.FORWARD, 0.0))
        if what == "silent" or (script and what != "train"):
            reported = None
        elif reported_at is None:
            reported_at = T0 + 6
        seen = passed(with_coordinator(seen, progress=reported, **(failed(now - 0.1) if what == "fail" else {})), now)
        status = seen.job.status
        assert min(status.goodput.by_class.values()) >= 0
        assert total(status) == pytest.approx(unix_seconds(status.goodput.at) - T0, abs=0.02)
        assert sum(entry.seconds for entry in status.goodput.recovery) == pytest.approx(
            status.goodput.recovery_seconds, abs=0.02
        )
        if script and reported_at is None:
            assert status.goodput.productive_seconds == 0
            assert status.goodput.percent is None or not status.goodput.unknown_seconds


def test_an_operator_counts_by_a_clock_that_nobody_sets() -> None:
    seen = jobs.running(jobs.spec())
    before = total(seen.job.status)
    reported = with_coordinator(seen, progress=progress(60, T0 + 20))
    for hour in (3600.0, -3600.0):
        made = plan(replace(reported, counted_for=7.5, progress_every=0.0), T0 + 20 + hour)
        assert total(made.status) == pytest.approx(before + 7.5, abs=0.01)


def test_a_suspension_is_neither_a_failure_nor_lost_and_what_follows_is_a_start() -> None:
    seen = jobs.running(jobs.spec())
    before = seen.job.status.goodput
    suspended = replace(seen.job, spec=seen.job.spec.model_copy(update={"suspend": True}), generation=2)
    seen = passed(replace(seen, job=suspended), T0 + 10)
    assert seen.job.status.internal.incident is None
    seen = passed(replace(seen, pods=(), agents={}), T0 + 15)
    assert seen.job.status.condition("Ready").reason == "Suspended"
    resumed = replace(seen.job, spec=seen.job.spec.model_copy(update={"suspend": False}), generation=3)
    seen = passed(replace(seen, job=resumed), T0 + 100)
    status = seen.job.status
    assert status.goodput.suspended_seconds == pytest.approx(90)
    assert status.goodput.percent == before.percent
    assert status.incidents == ()


def test_an_incident_says_why_who_and_what_it_cost() -> None:
    seen = jobs.running(jobs.spec(price=PRICE))
    seen = passed(with_coordinator(seen, progress=progress(60, T0 + 30)), T0 + 30)
    seen = passed(with_coordinator(seen, progress=progress(60, T0 + 30), **failed(T0 + 33)), T0 + 34)
    under_way = seen.job.status.internal.incident
    assert (under_way.cause, under_way.replica, under_way.node) == ("WorkerFailed", "demo-1-0", "node-1")
    assert seen.job.status.incidents == ()
    seen = next_round(with_coordinator(seen, progress=progress(60, T0 + 30), **failed(T0 + 33)), T0 + 35, held=58)
    seen = at_work(seen, T0 + 36, 59)
    (incident,) = seen.job.status.incidents
    assert unix_seconds(incident.at) == T0 + 33
    assert (incident.round, incident.cause, incident.steps_replayed) == (1, "WorkerFailed", 2)
    assert incident.seconds == pytest.approx(3.0)
    assert incident.replayed_seconds == pytest.approx(1.0)
    assert incident.cost == pytest.approx(3 * (3.0 + 1.0))
    assert seen.job.status.internal.incident is None
    goodput = seen.job.status.goodput
    assert goodput.replayed_seconds == pytest.approx(1.0)
    assert goodput.recovery == (RecoveryTime(cause="WorkerFailed", times=1, seconds=3.0),)
    assert total(seen.job.status) == pytest.approx(36, abs=0.02)


def test_steps_of_a_round_that_ended_before_its_first_word_are_not_trained_again_once_more() -> None:
    seen = jobs.running(jobs.spec())
    seen = passed(with_coordinator(seen, progress=progress(60, T0 + 30)), T0 + 30)
    seen = next_round(with_coordinator(seen, progress=progress(60, T0 + 30), **failed(T0 + 33)), T0 + 35, held=58)
    assert seen.job.status.steps_replayed == 2
    coordinator = seen.job.status.world.coordinator
    dead = replace(seen.agents[coordinator].report, **failed(T0 + 36))
    silent = replace(
        seen, agents={**seen.agents, coordinator: replace(seen.agents[coordinator], report=dead)}, fresh_claim="claim-c"
    )
    again = next_round(silent, T0 + 37, held=58)
    assert (again.job.status.world.round, again.job.status.steps_replayed) == (3, 2)
    assert again.job.status.goodput.replayed_seconds == pytest.approx(1.0)
    further_back = next_round(silent, T0 + 37, held=55)
    assert further_back.job.status.steps_replayed == 5, "of those it has lost three more"
    spoke = at_work(seen, T0 + 36, 59)
    dead = replace(spoke.agents[coordinator].report, **failed(T0 + 37))
    spoke = replace(
        spoke,
        agents={**spoke.agents, coordinator: replace(spoke.agents[coordinator], report=dead)},
        fresh_claim="claim-c",
    )
    assert next_round(spoke, T0 + 38, held=58).job.status.steps_replayed == 3


def test_causes_without_end_are_counted_together() -> None:
    seen = jobs.running(jobs.spec())
    known = tuple(RecoveryTime(cause=f"Cause{number}", times=1, seconds=1.0) for number in range(MOST_CAUSES - 1))
    goodput = seen.job.status.goodput.model_copy(update={"recovery": known, "recovery_seconds": float(len(known))})
    seen = replace(seen, job=replace(seen.job, status=seen.job.status.model_copy(update={"goodput": goodput})))
    seen = passed(with_coordinator(seen, progress=progress(60, T0 + 10), **failed(T0 + 12)), T0 + 13)
    found = seen.job.status.goodput.recovery
    assert len(found) == MOST_CAUSES
    assert (found[-1].cause, found[-1].seconds) == (OTHER, 1.0)


def test_what_a_token_costs_follows_from_replicas_with_a_node_and_from_what_kind_it_is() -> None:
    seen = jobs.running(jobs.spec(price=PRICE))
    assert jobs.running(jobs.spec()).job.status.cost is None
    before = seen.job.status.cost.total
    spot = {name: replace(node, spot=name == "node-2") for name, node in seen.nodes.items()}
    pending = jobs.pod(3, node="", ip="", phase=PodPhase.PENDING)
    seen = replace(seen, nodes=spot, pods=(*seen.pods, pending))
    seen = passed(with_coordinator(seen, progress=progress(60, T0 + 20, tokens=3_000_000)), T0 + 20)
    cost = seen.job.status.cost
    assert cost.total - before == pytest.approx(10 * 2.1, abs=0.01)
    assert cost.currency == "EUR"
    assert cost.spot_replica_hours == pytest.approx(10 / 3600, abs=1e-5)
    assert cost.per_million_tokens == pytest.approx(cost.total / 3, abs=1e-4)
    assert seen.job.status.goodput.tokens_per_second == pytest.approx(3_000_000 / 20, rel=1e-3)


def test_tokens_of_the_job_that_it_goes_on_from_are_not_its_own() -> None:
    seen = jobs.running(jobs.spec(price=PRICE))
    fresh = seen.job.status.model_copy(update={"progress": None})
    seen = replace(seen, job=replace(seen.job, status=fresh))
    before = progress(1000, T0 + 15, tokens=5_000_000, restored_step=999)
    seen = passed(with_coordinator(seen, progress=before), T0 + 15)
    assert seen.job.status.goodput.tokens_per_second is None
    seen = passed(with_coordinator(seen, progress=replace(before, step=1500, at=T0 + 20, tokens=8_000_000)), T0 + 20)
    status = seen.job.status
    assert status.goodput.tokens_per_second == pytest.approx(3_000_000 / 20, rel=1e-3)
    assert status.cost.per_million_tokens == pytest.approx(status.cost.total / 3, abs=1e-4)


# --- scripts, which report their steps or do not


def silent(**fields: Any) -> JobObservation:
    """Return a script in its first round, whose workers have run since T0 + 10."""
    return jobs.running(jobs.command_spec(**fields), progress=None)


def touched(seen: JobObservation) -> JobObservation:
    """Change the spec, so that the next pass writes the status."""
    return replace(seen, job=replace(seen.job, generation=seen.job.generation + 1))


def test_time_without_known_steps_is_neither_productive_nor_part_of_the_goodput() -> None:
    seen = passed(touched(silent(price=PRICE)), T0 + 40)
    failing = with_coordinator(seen, progress=None, **failed(T0 + 43))
    seen = passed(next_round(failing, T0 + 45), T0 + 45)
    status = plan(touched(seen), T0 + 95).status
    goodput = status.goodput
    assert goodput.percent is None
    assert goodput.productive_seconds == 0
    assert goodput.unknown_seconds == pytest.approx(33 + 50, abs=0.02)
    assert goodput.recovery_seconds == pytest.approx(2, abs=0.02)
    assert total(status) == pytest.approx(95, abs=0.02)
    (incident,) = status.incidents
    assert (incident.at_least, incident.seconds) == (True, pytest.approx(2, abs=0.02))
    assert "at least 2.0s without training, at least" in show.incident(incident, status.cost)
    assert show.goodput(goodput).startswith("unknown: the script has reported no step")
    assert show.recovery_spent(goodput) == "WorkerFailed 1 x, at least 2.0s"


def test_the_time_of_a_silent_script_is_counted_each_minute() -> None:
    """The status has no other news."""
    seen = silent(price=PRICE)
    status = seen.job.status
    assert (status.goodput.percent, status.goodput.unknown_seconds) == (None, 0.0)
    early = plan(seen, T0 + 69)
    assert early.status is status
    assert early.recheck_after == pytest.approx(1.0)
    later = plan(seen, T0 + 71)
    assert later.only_numbers
    assert later.status.goodput.unknown_seconds == pytest.approx(61)
    assert later.status.cost.total > status.cost.total


def test_a_first_report_of_the_first_step_makes_the_time_before_it_startup() -> None:
    seen = silent()
    startup = seen.job.status.goodput.startup_seconds
    seen = passed(touched(seen), T0 + 30)
    assert seen.job.status.goodput.unknown_seconds == pytest.approx(20)
    reported = replace(progress(1, T0 + 35), first_step_at=T0 + 34.0, restored_step=0)
    seen = passed(with_coordinator(seen, progress=reported), T0 + 35)
    goodput = seen.job.status.goodput
    assert (goodput.unknown_seconds, goodput.productive_seconds) == (0.0, pytest.approx(1.0))
    assert goodput.startup_seconds == pytest.approx(startup + 24)
    assert goodput.percent == pytest.approx(100 / 35, abs=0.01)


def test_counted_optimizer_steps_say_when_the_first_step_was() -> None:
    """The step's number in the run is unknown, but it is the first one of this process."""
    seen = silent()
    reported = replace(progress(70, T0 + 40), first_step_at=T0 + 34.0, restored_step=None, optimizer="AdamW")
    seen = passed(with_coordinator(seen, progress=reported), T0 + 40)
    goodput = seen.job.status.goodput
    assert (goodput.unknown_seconds, goodput.productive_seconds) == (0.0, pytest.approx(6.0))
    assert goodput.percent == pytest.approx(100 * 6 / 40, abs=0.01)


@pytest.mark.parametrize("keeps_state", [False, True], ids=["a script", "a script with State"])
def test_before_a_first_report_of_a_later_step_there_may_have_been_steps(keeps_state: bool) -> None:
    """A script may report each hundredth step, or resume from another job's checkpoint. State commits each step."""
    seen = silent()
    reported = replace(progress(100, T0 + 34), first_step_at=T0 + 34.0, restored_step=99)
    seen = passed(with_coordinator(seen, progress=reported, keeps_state=keeps_state), T0 + 40)
    goodput = seen.job.status.goodput
    assert goodput.unknown_seconds == (0.0 if keeps_state else pytest.approx(24.0))
    assert goodput.productive_seconds == pytest.approx(6.0)
    assert goodput.percent == pytest.approx(100 * 6 / (40 - goodput.unknown_seconds), abs=0.01)
    words = "suspended time" if keeps_state else "suspended and unknown time"
    assert show.goodput(goodput) == f"{goodput.percent:.1f}% of the time was spent on new steps ({words} excluded)"


def test_a_script_that_reports_recovers_until_its_next_report() -> None:
    seen = passed(with_coordinator(silent(), progress=progress(40, T0 + 30)), T0 + 30)
    productive = seen.job.status.goodput.productive_seconds
    seen = next_round(with_coordinator(seen, progress=progress(40, T0 + 30), **failed(T0 + 33)), T0 + 34)
    seen = passed(seen, T0 + 35)
    assert seen.job.status.phase == "Training", "its workers run"
    assert seen.job.status.incidents == ()
    seen = passed(touched(seen), T0 + 42)
    assert seen.job.status.internal.incident.seconds == pytest.approx(9.0)
    coordinator = seen.job.status.world.coordinator
    reported = replace(progress(39, T0 + 47), first_step_at=T0 + 45.0, restored_step=38)
    report = replace(seen.agents[coordinator].report, progress=reported)
    seen = passed(
        replace(seen, agents={**seen.agents, coordinator: replace(seen.agents[coordinator], report=report)}), T0 + 47
    )
    goodput = seen.job.status.goodput
    (incident,) = seen.job.status.incidents
    assert (incident.at_least, incident.seconds) == (False, pytest.approx(12.0))
    (recovery,) = goodput.recovery
    assert (recovery.cause, recovery.times, recovery.seconds) == ("WorkerFailed", 1, pytest.approx(12.0))
    assert goodput.unknown_seconds == 0
    assert goodput.productive_seconds + goodput.replayed_seconds == pytest.approx(productive + 3 + 2)


def test_a_script_that_goes_silent_after_its_reports_stays_productive() -> None:
    """A step may take long. Hang detection decides when it takes too long."""
    seen = passed(with_coordinator(silent(), progress=progress(40, T0 + 30)), T0 + 30)
    before = seen.job.status.goodput.productive_seconds
    seen = passed(touched(seen), T0 + 90)
    unheard = passed(touched(with_coordinator(seen, round=0)), T0 + 100)
    assert unheard.job.status.goodput.productive_seconds == pytest.approx(before + 70)


def test_the_goodput_of_a_script_that_waits_for_room_is_known() -> None:
    seen = passed(jobs.observed(jobs.job(jobs.command_spec())), T0 + 1)
    seen = passed(touched(seen), T0 + 50)
    assert (seen.job.status.goodput.percent, seen.job.status.goodput.unknown_seconds) == (0.0, 0.0)
    assert show.goodput(seen.job.status.goodput).startswith("0.0% of the time")


def test_a_job_that_has_ended_counts_and_costs_no_more() -> None:
    seen = with_coordinator(jobs.running(jobs.spec(price=PRICE)), progress=progress(100, T0 + 20), state="succeeded")
    seen = passed(seen, T0 + 20)
    ended = seen.job.status
    assert ended.condition("Complete").status == "True"
    assert total(ended) == pytest.approx(20, abs=0.02)
    later = plan(replace(seen, job=replace(seen.job, generation=5)), T0 + 500).status
    assert (later.goodput, later.cost) == (ended.goodput, ended.cost)


def test_each_class_is_a_field_and_has_a_name() -> None:
    assert [f"{name}_seconds" for name in Goodput().by_class] == list(CLASSES)
