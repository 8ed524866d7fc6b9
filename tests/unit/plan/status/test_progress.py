"""Progress of the run, and the times at which the status is written."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

import concertina_protocol as protocol
from builders import jobs
from builders.jobs import T0
from concertina.api.loss_history import unpacked
from concertina.api.status import rfc3339
from concertina.plan.actions import Plan
from concertina.plan.observed import JobObservation, PodPhase
from concertina.plan.plan import plan
from concertina.plan.status.progress import MOST_SHARES


def with_coordinator(seen: JobObservation, **report: object) -> JobObservation:
    coordinator = replace(seen.agents["demo-0-0"], report=jobs.coordinator_report(**report))
    return replace(seen, agents={**seen.agents, "demo-0-0": coordinator})


def progress(step: int, at: float, **fields: float) -> protocol.Progress:
    return protocol.Progress(step, 100, 2.0, 1000.0, 0.5, step * 32, "training", at, T0 + 6, **fields)


def test_progress_is_written_when_it_is_due_and_a_transition_at_once() -> None:
    seen = jobs.running(jobs.spec())
    newer = with_coordinator(seen, progress=progress(44, T0 + 11))
    assert plan(newer, T0 + 11).status is newer.job.status
    assert plan(replace(newer, progress_every=0.5), T0 + 11).status.progress.step == 44
    assert plan(newer, T0 + 12.5).status.progress.step == 44
    done = with_coordinator(seen, progress=progress(100, T0 + 11), state="succeeded")
    assert plan(done, T0 + 11).status.progress.step == 100


def test_progress_alone_is_only_numbers_and_a_transition_is_not() -> None:
    seen = jobs.running(jobs.spec())
    newer = with_coordinator(seen, progress=progress(44, T0 + 11))
    assert plan(newer, T0 + 12.5).only_numbers
    done = with_coordinator(seen, progress=progress(100, T0 + 11), state="succeeded")
    assert not plan(done, T0 + 12.5).only_numbers
    assert not plan(seen, T0 + 10).only_numbers, "nothing is written"


def test_a_job_that_starts_as_asked_has_three_statuses_written_and_no_event() -> None:
    """The job waits, has committed, trains. The first status holds the first claim."""
    pods = tuple(jobs.pod(index) for index in range(3))
    statuses, events = [], []

    def look(seen: JobObservation, now: float) -> tuple[JobObservation, Plan]:
        made = plan(seen, now)
        if made.status is not seen.job.status:
            statuses.append(made.status)
        events.extend(made.events)
        return jobs.then(seen, made), made

    seen, _ = look(jobs.observed(jobs.job(jobs.spec()), words_every=5.0), T0)
    for count in (1, 2):
        agents = {pod.name: jobs.agent(pod.name) for pod in pods[:count]}
        seen, waiting = look(replace(seen, pods=pods[:count], agents=agents), T0 + count)
        assert (waiting.recheck_after or 60) <= 5 - count, "it is written later"
    agents = {pod.name: jobs.agent(pod.name) for pod in pods}
    seen, claimed = look(replace(seen, pods=pods, agents=agents), T0 + 3)
    agents = {
        name: jobs.called(agents[name], message, T0 + 3, done_at=T0 + 3, reply=jobs.prepared(name, message))
        for name, message in jobs.sends(claimed, protocol.Prepare).items()
    }
    seen, committed = look(replace(seen, agents=agents), T0 + 3)
    agents = {
        name: jobs.called(
            agents[name], message, T0 + 3, done_at=T0 + 3, reply=protocol.Accepted(message.round, message.claim)
        )
        for name, message in jobs.sends(committed, protocol.Assign).items()
    }
    agents["demo-0-0"] = replace(agents["demo-0-0"], report=jobs.coordinator_report())
    look(replace(seen, agents=agents), T0 + 4)
    assert [status.condition("Ready").reason for status in statuses] == ["Waiting", "Starting", "Training"]
    assert [bool(status.internal.first_claim) for status in statuses] == [True, False, False]
    assert statuses[1].world.claim is not None
    assert statuses[1].world.claim.claim_id == statuses[0].internal.first_claim
    assert events == []


def test_a_start_is_reported_only_if_it_takes_longer_than_most() -> None:
    seen = jobs.running(jobs.spec())
    world = seen.job.status.world.model_copy(update={"since": rfc3339(T0 + 10)})
    seen = replace(seen, job=replace(seen.job, status=seen.job.status.model_copy(update={"world": world})))
    starting = protocol.Progress(44, 100, 0.0, 0.0, 0.0, 0, "restoring", T0 + 11)
    seen = with_coordinator(seen, progress=starting)
    soon, later, set_back = (plan(seen, T0 + seconds) for seconds in (11.9, 12.1, -3600))
    assert soon.status.conditions == seen.job.status.conditions
    assert soon.recheck_after == pytest.approx(0.1, abs=0.01)
    assert later.status.condition("Running").reason == "RoundStarting"
    assert set_back.status.condition("Running").reason == "RoundStarting", "otherwise it is silent for an hour"
    assert later.status.condition("Running").message == "round 1 with 3 replicas is restoring"


def test_what_only_counts_is_written_when_progress_is_due() -> None:
    waiting = jobs.observed(jobs.job(jobs.spec()))
    waiting = replace(jobs.then(waiting, plan(waiting, T0)), pods=(jobs.pod(0),))
    assert plan(waiting, T0 + 1.9).status is waiting.job.status
    assert plan(waiting, T0 + 2).status.replicas == 1


def test_a_speed_that_nobody_knows_is_not_said_to_be_none_at_all() -> None:
    seen = with_coordinator(jobs.running(jobs.spec()), progress=replace(progress(44, T0 + 13), tokens_per_second=0.0))
    assert plan(seen, T0 + 13).status.progress.step == 44
    assert plan(seen, T0 + 13).status.progress.tokens_per_second is None


def test_an_evaluation_stays_until_the_next_one_or_until_its_step_is_undone() -> None:
    seen = jobs.running(jobs.spec())
    reported = replace(
        progress(44, T0 + 13),
        evaluated=protocol.Evaluated(
            40, 1.23456789, 3.5, {"a": 2.0, "b": math.nan}, token_accuracy=0.25, bits_per_byte=0.5,
            set_token_accuracies={"a": 0.25, "b": 0.75}, set_bits_per_byte={"a": 0.5},
        ),
    )  # fmt: skip
    seen = with_coordinator(seen, progress=reported)
    seen = jobs.then(seen, plan(seen, T0 + 13))
    mark = seen.job.status.progress.evaluation
    assert (mark.step, mark.loss, mark.perplexity) == (40, 1.234568, 3.5)
    assert (mark.token_accuracy, mark.bits_per_byte) == (0.25, 0.5)
    figures = [(one.name, one.loss, one.token_accuracy, one.bits_per_byte) for one in mark.sets]
    assert figures == [("a", 2.0, 0.25, 0.5), ("b", None, 0.75, None)]
    assert plan(with_coordinator(seen, progress=progress(41, T0 + 16)), T0 + 16).status.progress.evaluation == mark
    assert plan(with_coordinator(seen, progress=progress(39, T0 + 16)), T0 + 16).status.progress.evaluation is None
    worse = replace(reported, evaluated=protocol.Evaluated(44, float("nan")), at=T0 + 16)
    assert plan(with_coordinator(seen, progress=worse), T0 + 16).status.progress.evaluation.loss is None


def test_the_best_checkpoint_is_that_of_the_newest_latest() -> None:
    trainer = {"data": {"uri": "/data"}, "evaluation": {}}
    spec = jobs.spec(trainer=trainer, checkpoint={"uri": "s3://bucket/run", "keepBest": True})
    seen = jobs.running(jobs.spec())
    seen = replace(seen, job=replace(seen.job, spec=spec))
    best = protocol.BestCheckpoint(jobs.UID, 1, 20, 1.25)
    latest = protocol.Durable(jobs.UID, 1, 30, f"s3://bucket/run/{jobs.UID}/round-1/step-30", best=best)
    older = replace(latest, step=10, best=replace(best, step=10))
    seen = with_coordinator(seen, storage=protocol.Storage("Ready", latest))
    other = replace(
        jobs.agent("demo-1-0"), report=replace(jobs.report("demo-1-0"), storage=protocol.Storage("Ready", older))
    )
    seen = replace(seen, agents={**seen.agents, "demo-1-0": other})
    mark = plan(seen, T0 + 13).status.best_checkpoint
    assert (mark.step, mark.loss, mark.uri) == (20, 1.25, f"s3://bucket/run/{jobs.UID}/round-1/step-20")
    seen = jobs.then(seen, plan(seen, T0 + 13))
    assert plan(replace(seen, agents={}), T0 + 20).status.best_checkpoint == mark, "known without agents"
    unknown = replace(best, loss=math.nan)
    said = with_coordinator(seen, storage=protocol.Storage("Ready", replace(latest, step=40, best=unknown)))
    assert plan(said, T0 + 20).status.best_checkpoint is None


def test_shares_are_told_by_replica_the_least_first_and_of_this_round_alone() -> None:
    seen = jobs.running(jobs.spec())
    reported = replace(progress(44, T0 + 13), shares=(6, 3, 9))
    made = plan(with_coordinator(seen, progress=reported), T0 + 13)
    found = [(mark.replica, mark.node, mark.sequences, mark.factor) for mark in made.status.batch_assignment]
    nodes = [(f"demo-{index}-0", f"node-{index}") for index in range(3)]
    assert found == [(*nodes[1], 3, 0.5), (*nodes[0], 6, 1.0), (*nodes[2], 9, 1.5)]
    seen = jobs.then(seen, made)
    silent = replace(seen.agents["demo-0-0"], report=None)
    kept = plan(replace(seen, agents={**seen.agents, "demo-0-0": silent}), T0 + 16)
    assert kept.status.batch_assignment == made.status.batch_assignment
    for nonsense in ((), (9, 9), (0, 0, 0), (-1, 9, 10)):
        newer = replace(reported, shares=nonsense, at=T0 + 16)
        assert plan(with_coordinator(seen, progress=newer), T0 + 16).status.batch_assignment == ()
    pod = replace(seen.pods[1], exit_code=1, phase=PodPhase.FAILED)
    lost = plan(replace(seen, pods=(seen.pods[0], pod, seen.pods[2])), T0 + 16)
    assert lost.status.batch_assignment == (), "each round begins with even shares"


def test_shares_of_many_replicas_are_those_of_the_slowest() -> None:
    many = jobs.running(jobs.spec(replicas=20), 20)
    reported = replace(progress(44, T0 + 13), shares=tuple(range(1, 21))[::-1])
    shares = plan(with_coordinator(many, progress=reported), T0 + 13).status.batch_assignment
    assert [mark.sequences for mark in shares] == list(range(1, MOST_SHARES + 1))
    assert shares[0].replica == many.job.status.world.members[-1].replica


def test_a_command_of_ones_own_trains_as_soon_as_it_runs() -> None:
    seen = jobs.running(jobs.command_spec(), progress=None)
    assert seen.job.status.condition("Ready").reason == "Training"
    assert seen.job.status.progress is None


def test_the_course_of_a_run_grows_with_news_of_it_alone() -> None:
    seen = jobs.running(jobs.spec())
    for step, at in ((44, 12), (45, 13), (50, 16)):  # the second comes too soon after the first
        reported = with_coordinator(seen, progress=progress(step, T0 + at))
        seen = jobs.then(reported, plan(reported, T0 + at))
    known = unpacked(seen.job.status.history or "")
    told_of = [(point.step, point.loss, point.replicas) for point in known.points]
    assert told_of == [(40, 2.5, 3), (44, 2.0, 3), (50, 2.0, 3)]
    later = plan(with_coordinator(seen, progress=progress(50, T0 + 16)), T0 + 60)
    assert later.status.history == seen.job.status.history, "nothing was told since"


def test_before_a_rounds_first_step_the_last_loss_and_pace_are_those_of_the_round_before() -> None:
    seen = jobs.running(jobs.spec())
    reported = with_coordinator(seen, progress=progress(44, T0 + 12))
    seen = jobs.then(reported, plan(reported, T0 + 12))
    starting = protocol.Progress(43, 100, 0.0, 0.0, 0.0, 0, "restoring", T0 + 16)
    status = plan(with_coordinator(seen, progress=starting), T0 + 16).status
    found = status.progress
    assert (found.step, found.percent) == (43, 43.0)
    assert (found.loss, found.tokens_per_second, found.step_seconds) == (2.0, 1000.0, 0.5)
    assert all(point.loss for point in unpacked(status.history).points)
    first = jobs.running(jobs.spec(), progress=None)
    alone = plan(with_coordinator(first, progress=replace(starting, step=0)), T0 + 16).status.progress
    assert (alone.step, alone.loss, alone.tokens_per_second) == (0, None, None)


def test_counted_steps_are_shown_as_such_and_compared_with_none_of_another_round() -> None:
    seen = jobs.running(jobs.command_spec(), progress=None)
    counted = replace(progress(300, T0 + 11, optimizer="AdamW"), steps=None, loss=float("nan"))
    status = plan(with_coordinator(seen, progress=counted), T0 + 12.5).status
    assert (status.progress.step, status.progress.optimizer, status.progress.percent) == (300, "AdamW", None)
    assert status.history is None, "a curve has steps of the run"
    again = replace(seen, job=replace(seen.job, status=status))
    restarted = replace(counted, step=2, first_step_at=T0 + 20, at=T0 + 21)
    later = plan(with_coordinator(again, progress=restarted), T0 + 30).status
    assert (later.progress.step, later.steps_replayed) == (2, 0)


def test_a_script_that_reports_after_counted_steps_has_replayed_none_of_them() -> None:
    seen = jobs.running(jobs.command_spec(), progress=None)
    counted = replace(progress(300, T0 + 11, optimizer="AdamW"), steps=None)
    status = plan(with_coordinator(seen, progress=counted), T0 + 12.5).status
    again = replace(seen, job=replace(seen.job, status=status))
    own = progress(21, T0 + 20, restored_step=20)
    later = plan(with_coordinator(again, progress=own), T0 + 30).status
    assert (later.progress.step, later.progress.optimizer, later.steps_replayed) == (21, None, 0)


def test_settings_that_the_trainer_chose_stay_in_the_status() -> None:
    seen = jobs.running(jobs.spec())
    read = "glm4_moe with 46 layers and 106,000,000 weights, without the layers of num_nextn_predict_layers"
    chosen = {"microBatchSize": "2", "memory.activations": "KeepProducts", "model.from": read}
    reported = with_coordinator(seen, progress=progress(44, T0 + 11, settings=chosen))
    status = plan(reported, T0 + 12.5).status
    assert {mark.field: mark.value for mark in status.settings} == chosen
    again = replace(reported, job=replace(reported.job, status=status))
    starting = protocol.Progress(44, 100, 0.0, 0.0, 0.0, 0, "starting", T0 + 13)
    assert plan(with_coordinator(again, progress=starting), T0 + 20).status.settings == status.settings
