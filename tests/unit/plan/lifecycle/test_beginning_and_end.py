"""Beginning and end of a job: what keeps it from starting, suspending and resuming, deadlines, and its remains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import concertina_protocol as protocol
from builders import jobs
from builders.jobs import T0
from concertina.api.restarts import LastFailure
from concertina.api.status import JobStatus, rfc3339
from concertina.api.world import Base
from concertina.plan.actions import CreatePod, DeleteJob, DeletePod, EndPod, Plan
from concertina.plan.facts import constants
from concertina.plan.observed import JobObservation, PodPhase, UriHolder
from concertina.plan.plan import plan
from concertina_protocol import Durable, Evaluated, Storage

WITH_STORAGE = jobs.spec(checkpoint={"uri": "s3://bucket/run"})


def condition(made: Plan, type: str) -> tuple[str, str, str]:
    condition = made.status.condition(type)
    return (condition.status, condition.reason, condition.message) if condition else ("False", "", "")


def ready_agents(
    storage: Storage | None = None, count: int = 3, spec: Any = WITH_STORAGE, **fields: Any
) -> JobObservation:
    pods = tuple(jobs.pod(index) for index in range(3))
    agents = {
        pod.name: jobs.agent(pod.name, report=jobs.report(pod.name, storage=storage, ready=pod.index < count))
        for pod in pods
    }
    return jobs.observed(jobs.job(spec), pods, agents, **fields)


def with_status(seen: JobObservation, status: JobStatus) -> JobObservation:
    return replace(seen, job=replace(seen.job, status=status))


# --- the beginning


@pytest.mark.parametrize(
    ("ready", "after", "claimed"),
    [(3, 1.0, True), (2, 1.0, False), (2, 5.0, True), (1, 60.0, False)],
    ids=["all", "some, at first", "enough, after stabilizationWindowSeconds", "too few"],
)
def test_a_first_round_waits_for_all_and_then_for_enough(ready: int, after: float, claimed: bool) -> None:
    made = plan(ready_agents(count=ready, spec=jobs.spec()), T0 + after)
    assert (made.status.world.claim is not None) == claimed
    if not claimed:
        assert condition(made, "Ready")[1] == "Waiting"
        assert f"{ready} of 3 replicas are ready" in condition(made, "Running")[2]


@pytest.mark.parametrize("hour", [-3600, 3600])
def test_how_long_a_first_round_waits_no_clock_says(hour: int) -> None:
    """The clocks of the API server, by which pods are created, and of this operator may be an hour apart."""
    pods = (jobs.pod(0, created=T0 + hour), jobs.pod(1, created=T0 + hour))
    spec = jobs.spec(replicas=3, elastic={"minReplicas": 2, "scaleUp": {"stabilizationWindowSeconds": 60}})
    seen = jobs.observed(jobs.job(spec), pods, {pod.name: jobs.agent(pod.name) for pod in pods})
    early = plan(replace(seen, seen_for={pod.uid: 59.0 for pod in pods}), T0 + 59)
    late = plan(replace(seen, seen_for={pod.uid: 60.0 for pod in pods}), T0 + 60)
    assert jobs.sends(early, protocol.Prepare) == {}
    assert early.recheck_after == pytest.approx(1.0)
    assert jobs.sends(late, protocol.Prepare).keys() == {pod.name for pod in pods}


def test_a_job_of_fixed_size_waits_for_all_its_replicas() -> None:
    made = plan(ready_agents(count=2, spec=jobs.spec(elastic=None)), T0 + 1000)
    assert made.status.world.claim is None


@pytest.mark.parametrize(
    ("storage", "claimed", "stalled"),
    [
        (Storage("Ready"), True, ""),
        (Storage("Unknown"), False, ""),
        (Storage("Error", None, "bucket demo does not exist: create it"), False, "StorageUnavailable"),
    ],
)
def test_nothing_starts_before_storage_was_seen(storage: Storage, claimed: bool, stalled: str) -> None:
    made = plan(ready_agents(storage), T0 + 1)
    assert (made.status.world.claim is not None) == claimed
    assert condition(made, "Stalled")[1] == stalled
    assert storage.message in condition(made, "Stalled")[2]
    assert claimed or made.recheck_after is not None


@pytest.mark.parametrize(("step", "complete", "phase"), [(100, True, "Complete"), (50, True, "Starting")])
def test_a_job_whose_last_step_is_in_storage_is_complete_at_once(step: int, complete: bool, phase: str) -> None:
    latest = Durable("an-earlier-job", 7, step, "s3://bucket/run/x", complete)
    made = plan(ready_agents(Storage("Ready", latest)), T0 + 1)
    assert condition(made, "Ready")[1] == phase


def test_two_jobs_on_one_checkpoint_uri() -> None:
    made = plan(ready_agents(uri_holder=UriHolder("default/older", "uid-of-older")), T0 + 1)
    assert condition(made, "Stalled")[:2] == ("True", "CheckpointURIInUse")
    message = condition(made, "Stalled")[2]
    assert "belongs to the job default/older, which has already started" in message
    assert "set checkpoint.takeOver: uid-of-older" in message
    assert all(isinstance(action, DeletePod) for action in made.actions)


def test_a_size_that_no_block_fits() -> None:
    spec = jobs.command_spec(replicas=3, elastic=None, parallelism={"tensor": 4})
    made = plan(jobs.observed(jobs.job(spec)), T0)
    assert condition(made, "Stalled")[:2] == ("True", "NoValidSize")
    assert "at least 4" in condition(made, "Stalled")[2]
    assert not made.actions


def test_an_image_that_can_not_be_had_stalls_the_job_until_it_can() -> None:
    waiting = {"phase": "Pending", "waiting": "ImagePullBackOff", "waiting_message": "no such image: nope"}
    pods = tuple(jobs.pod(index, **waiting) for index in range(3))
    made = plan(jobs.observed(jobs.job(jobs.spec()), pods), T0 + 1)
    assert condition(made, "Stalled")[:2] == ("True", "ImageUnavailable")
    assert "no such image: nope" in condition(made, "Stalled")[2]
    mended = ready_agents(spec=jobs.spec())
    made = plan(with_status(mended, made.status), T0 + 2)
    assert condition(made, "Stalled")[0] == "False"
    assert len(jobs.sends(made, protocol.Prepare)) == 3


def test_pods_that_can_not_be_scheduled_are_named() -> None:
    waiting = {"phase": "Pending", "waiting": "Unschedulable", "waiting_message": "0/3 nodes are available"}
    made = plan(jobs.observed(jobs.job(jobs.spec()), tuple(jobs.pod(i, **waiting) for i in range(3))), T0 + 1)
    assert "demo-0-0: Unschedulable (0/3 nodes are available)" in condition(made, "Running")[2]


def test_a_manifest_that_got_past_an_older_crd_says_what_is_wrong() -> None:
    job = replace(jobs.job(None), spec_error="spec.replicas must be a whole number")
    made = plan(jobs.observed(job, (jobs.pod(0),)), T0)
    assert condition(made, "Stalled") == ("True", "InvalidSpec", "spec.replicas must be a whole number")
    assert made.actions == ()


@pytest.mark.parametrize("how", ["Complete", "Failed"])
def test_a_job_that_has_ended_stays_so_while_its_manifest_can_not_be_read(how: str) -> None:
    if how == "Complete":
        seen = jobs.running(jobs.spec(), state="succeeded")
    else:
        failure = protocol.Failure("demo-1-0", "BadConfig", "no such model", at=T0 + 14, permanent=True)
        seen = jobs.running(jobs.spec(), failures=(failure,))
    seen = jobs.then(seen, plan(seen, T0 + 15))
    ended, spec = seen.job.status, seen.job.spec
    unreadable = replace(seen, job=replace(seen.job, spec=None, spec_error="spec.replicas must be at most 1024"))
    made = plan(unreadable, T0 + 20)
    assert (made.status, made.actions, made.events) == (ended, (), ())
    seen = replace(jobs.then(unreadable, made), pods=(), agents={})
    made = plan(replace(seen, job=replace(seen.job, spec=spec)), T0 + 30)
    assert condition(made, how)[0] == "True"
    assert (made.status.completion_time, made.actions) == (ended.completion_time, ())


def test_nothing_is_done_for_a_job_that_is_being_deleted() -> None:
    seen = jobs.running(jobs.spec())
    made = plan(replace(seen, job=replace(seen.job, deleting=True)), T0 + 20)
    assert (made.actions, dict(made.watch), made.status) == ((), {}, seen.job.status)


# --- suspend and resume


def suspended(seen: JobObservation, spec: Any = WITH_STORAGE, **fields: Any) -> JobObservation:
    return replace(seen, job=replace(seen.job, spec=spec.model_copy(update={"suspend": True, **fields})))


def training() -> JobObservation:
    """Return a job with storage whose coordinator trains in round 1."""
    seen = jobs.running(jobs.spec())
    return replace(seen, job=replace(seen.job, spec=WITH_STORAGE))


def test_a_job_created_suspended_gets_no_pods() -> None:
    made = plan(suspended(jobs.observed(jobs.job(WITH_STORAGE))), T0)
    assert made.actions == ()
    assert condition(made, "Suspended")[0] == "True"
    assert condition(made, "Ready")[:2] == ("True", "Suspended")
    assert made.status.start_time is None


def test_suspending_drains_into_storage_then_deletes_the_pods() -> None:
    seen = suspended(training())
    made = plan(seen, T0 + 20)
    drain = jobs.sends(made, protocol.Drain)["demo-0-0"]
    assert (drain.durable, drain.round, drain.claim) == (True, 1, "claim-a")
    assert not [action for action in made.actions if isinstance(action, DeletePod)]
    assert condition(made, "Ready")[1] == "Suspending"

    coordinator = jobs.called(
        seen.agents["demo-0-0"], drain, T0 + 20, done_at=T0 + 20, reply=protocol.Accepted(1, "claim-a")
    )
    asked = jobs.then(seen, made, agents={**seen.agents, "demo-0-0": coordinator})
    assert not jobs.sends(plan(asked, T0 + 21), protocol.Drain), "once is enough"

    coordinator = replace(coordinator, report=jobs.coordinator_report(state="drained"))
    drained = jobs.then(seen, made, agents={**seen.agents, "demo-0-0": coordinator})
    made = plan(drained, T0 + 22)
    assert len([action for action in made.actions if isinstance(action, DeletePod)]) == 3
    made = plan(jobs.then(drained, made, pods=()), T0 + 23)
    assert condition(made, "Suspended")[0] == "True"
    assert made.status.world.members == ()

    resumed = jobs.then(drained, made, pods=())
    made = plan(replace(resumed, job=replace(resumed.job, spec=WITH_STORAGE)), T0 + 24)
    created = [(action.index, action.attempt) for action in made.actions if isinstance(action, CreatePod)]
    assert created == [(0, 1), (1, 1), (2, 1)], "names of their own"
    assert condition(made, "Suspended")[0] == "False"


def test_a_round_that_was_drained_for_another_reason_is_saved_before_its_pods_go() -> None:
    seen = suspended(training())
    drain = protocol.Drain(jobs.UID, 1, "claim-a", "replicas join", False, 30.0)
    coordinator = jobs.called(
        replace(seen.agents["demo-0-0"], report=jobs.coordinator_report(state="drained")),
        drain, T0 + 19, done_at=T0 + 19, reply=protocol.Accepted(1, "claim-a"),
    )  # fmt: skip
    made = plan(replace(seen, agents={**seen.agents, "demo-0-0": coordinator}), T0 + 20)
    asked = jobs.sends(made, protocol.Drain)["demo-0-0"]
    assert asked.durable
    assert not pods_changed(made)

    coordinator = jobs.called(coordinator, asked, T0 + 20, done_at=T0 + 20, reply=protocol.Accepted(1, "claim-a"))
    seen = jobs.then(seen, made, agents={**seen.agents, "demo-0-0": coordinator})
    assert not pods_changed(plan(seen, T0 + 20.1)), "that report may be from before it was asked"
    durable = protocol.Durable(jobs.UID, 1, 40, "file:///c/step-40")
    saved = replace(coordinator, report=replace(coordinator.report, storage=Storage("Ready", durable)))
    assert pods_changed(plan(replace(seen, agents={**seen.agents, "demo-0-0": saved}), T0 + 20.2))
    assert pods_changed(plan(seen, T0 + 30)), "a part went with its member: nothing more will be saved"


@pytest.mark.parametrize(("durable", "again"), [(30, True), (40, False), (None, True)])
def test_what_node_memory_alone_has_of_a_script_is_saved_by_another_round(durable: int | None, again: bool) -> None:
    spec = jobs.command_spec(checkpoint={"uri": "file:///c"})
    seen = suspended(jobs.running(spec), spec)
    base = Base(round=1, step=40, source="Memory")
    world = seen.job.status.world.model_copy(update={"base": base})
    seen = replace(seen, job=replace(seen.job, status=seen.job.status.model_copy(update={"world": world})))
    latest = None if durable is None else protocol.Durable(jobs.UID, 1, durable, "file:///c/step")
    report = jobs.coordinator_report(state="drained", progress=None, keeps_state=True, storage=Storage("Ready", latest))
    drain = protocol.Drain(jobs.UID, 1, "claim-a", "spec.suspend is set", True, 300.0)
    coordinator = jobs.called(
        replace(seen.agents["demo-0-0"], report=report),
        drain, T0 + 19, done_at=T0 + 19, reply=protocol.Accepted(1, "claim-a"),
    )  # fmt: skip
    made = plan(replace(seen, agents={**seen.agents, "demo-0-0": coordinator}), T0 + 21)
    assert (bool(jobs.sends(made, protocol.Prepare)), bool(pods_changed(made))) == (again, not again)


def test_a_suspend_that_can_not_be_saved_waits_and_says_so() -> None:
    seen = suspended(training())
    broken = Storage("Error", None, "access denied: check secret s3")
    coordinator = replace(seen.agents["demo-0-0"], report=jobs.coordinator_report(state="draining", storage=broken))
    made = plan(replace(seen, agents={**seen.agents, "demo-0-0": coordinator}), T0 + 20)
    assert not [action for action in made.actions if isinstance(action, DeletePod)]
    assert "access denied" in condition(made, "Ready")[2]


# --- pods of another template


def remade(seen: JobObservation, spec: Any = WITH_STORAGE, **hashes: str) -> JobObservation:
    """Return a job that was resumed under the template `new`, with pods of these templates, by name.

    Nothing is known of the other pods.
    """
    pods = tuple(replace(pod, template_hash=hashes.get(pod.name.replace("-", "_"), "")) for pod in seen.pods)
    return replace(seen, pods=pods, job=replace(seen.job, spec=spec, template_hash="new"))


OLD = dict.fromkeys(("demo_0_0", "demo_1_0", "demo_2_0"), "old")


def test_a_suspension_is_finished_where_the_template_changed_before_the_job_was_resumed() -> None:
    """The pods were still draining: they are saved, and replaced by pods of the new template."""
    seen = remade(training(), **OLD)
    made = plan(seen, T0 + 20)
    assert condition(made, "Running")[1] == "TemplateChanged"
    assert not pods_changed(made)

    drain = jobs.sends(made, protocol.Drain)["demo-0-0"]
    assert drain.durable
    coordinator = replace(seen.agents["demo-0-0"], report=jobs.coordinator_report(state="drained"))
    coordinator = jobs.called(coordinator, drain, T0 + 20, done_at=T0 + 20, reply=protocol.Accepted(1, "claim-a"))
    drained = jobs.then(seen, made, agents={**seen.agents, "demo-0-0": coordinator})
    made = plan(drained, T0 + 21)
    claim = made.status.world.claim
    assert made.status.world.members == ()
    assert claim is not None
    assert (claim.committed, claim.round) == (True, 2)
    assert not jobs.sends(made, protocol.Prepare), "no round of theirs follows"
    assert [event.reason for event in made.events] == ["TemplateChanged"]

    made = plan(jobs.then(drained, made), T0 + 22)
    assert pods_changed(made) == (["demo-0-0", "demo-1-0", "demo-2-0"], [(0, 1), (1, 1), (2, 1)])
    assert not jobs.sends(made, protocol.Prepare)
    assert made.status.restarts.total == 0


def pods_changed(made: Plan) -> Any:
    """Return the pods that are deleted, and those that are created."""
    deleted = [action.name for action in made.actions if isinstance(action, DeletePod)]
    created = [(action.index, action.attempt) for action in made.actions if isinstance(action, CreatePod)]
    return (deleted, created) if deleted or created else ()


def test_a_pod_that_an_older_pass_made_joins_no_round_of_the_new_template() -> None:
    pods = tuple(jobs.pod(index) for index in range(3))
    seen = jobs.observed(jobs.job(jobs.spec()), pods, {pod.name: jobs.agent(pod.name) for pod in pods})
    seen = remade(seen, jobs.spec(), demo_0_0="new", demo_1_0="old", demo_2_0="new")
    made = plan(seen, T0 + 20)
    assert pods_changed(made) == (["demo-1-0"], [(1, 1)])
    assert set(jobs.sends(made, protocol.Prepare)) == {"demo-0-0", "demo-2-0"}
    assert made.status.restarts.total == 0


@pytest.mark.parametrize("made_of", ["", "new"])
def test_pods_of_an_older_operator_and_of_this_template_are_left_alone(made_of: str) -> None:
    made = plan(remade(training(), **dict.fromkeys(OLD, made_of)), T0 + 20)
    assert made.actions == ()
    assert condition(made, "Ready")[1] == "Training"


def test_what_is_suspended_drains_as_it_was_whatever_its_template_is_now() -> None:
    seen = suspended(remade(training(), **OLD))
    spare = jobs.pod(3, template_hash="old")
    made = plan(replace(seen, pods=(*seen.pods, spare)), T0 + 20)
    assert jobs.sends(made, protocol.Drain)
    assert condition(made, "Ready")[1] == "Suspending"


@pytest.mark.parametrize("suspend", [False, True], ids=["resumed", "still suspended"])
def test_new_pods_do_not_join_members_of_the_old_template_in_a_round_that_saves_them(suspend: bool) -> None:
    seen = remade(training(), jobs.spec(checkpoint={"uri": "s3://bucket/run"}, suspend=suspend), **OLD)
    fresh = jobs.pod(2, 1, template_hash="new")
    gone = replace(seen, pods=(*seen.pods[:2], fresh), agents={**seen.agents, fresh.name: jobs.agent(fresh.name)})
    made = plan(gone, T0 + 20)
    assert set(jobs.sends(made, protocol.Prepare)) == {"demo-0-0", "demo-1-0"}


# --- the end


@pytest.mark.parametrize(("after", "phase"), [(50, "Training"), (70, "Failed")])
def test_the_deadline(after: float, phase: str) -> None:
    seen = jobs.running(jobs.spec(activeDeadlineSeconds=60))
    made = plan(seen, T0 + after)
    assert condition(made, "Ready")[1] == phase
    if phase == "Training":
        assert made.recheck_after == pytest.approx(20)
    else:
        assert condition(made, "Failed")[1] == "DeadlineExceeded"


@pytest.mark.parametrize(
    ("replicas", "failed", "missing"), [(4, "demo-3-0", True), (4, "demo-1-0", False), (3, "demo-3-0", False)]
)
def test_a_job_that_completes_without_a_replica_that_failed_says_so(replicas: int, failed: str, missing: bool) -> None:
    failure = LastFailure(
        reason="WorkerFailed",
        round=1,
        message="Rank 3 exited with code 1: ValueError: three",
        replica=failed,
        at=rfc3339(T0),
    )
    seen = jobs.running(jobs.spec(replicas=replicas))
    status = seen.job.status.model_copy(update={"last_failure": failure})
    report = jobs.coordinator_report(state=protocol.State.SUCCEEDED)
    agents = {**seen.agents, "demo-0-0": replace(seen.agents["demo-0-0"], report=report)}
    made = plan(replace(seen, job=replace(seen.job, status=status), agents=agents), T0 + 15)
    complete = made.status.condition("Complete")
    assert complete is not None
    said = "without 1 of 4 replicas. The last failure of demo-3-0 was WorkerFailed: Rank 3 exited with code 1"
    assert (said in complete.message) is missing


def test_after_its_end_pods_are_deleted_and_the_job_too_when_its_time_has_come() -> None:
    seen = jobs.running(jobs.spec(ttlSecondsAfterFinished=100), state="succeeded")
    made = plan(seen, T0 + 15)
    assert condition(made, "Complete")[0] == "True"
    assert (made.actions, made.recheck_after) == ((), pytest.approx(5))
    made = plan(seen, T0 + 21)
    assert len([action for action in made.actions if isinstance(action, DeletePod)]) == 3
    seen = jobs.then(seen, made, pods=())
    made = plan(seen, T0 + 60)
    assert (made.actions, made.recheck_after) == ((), pytest.approx(50))
    assert made.status.conditions == seen.job.status.conditions
    assert plan(seen, T0 + 111).actions == (DeleteJob(),)


PERMANENT = protocol.Failure(
    "demo-1-0",
    "InvalidInput",
    "Rank 1 (exit code 78): a.bin is bad",
    ("reads a.bin", "", "it is bad"),
    1,
    78,
    permanent=True,
)


def ending(policy: str, **fields: Any) -> tuple[JobObservation, dict[str, str]]:
    """End a job with this coordinator's report.

    Return the observation when its end was written, and the actions for its pods: at once for those that are told to
    end, after a while for those that are deleted. One pod had ended, and one is pending.
    """
    seen = jobs.running(jobs.spec(cleanPodPolicy=policy))
    ended = jobs.pod(2, phase="Failed", exit_code=1, exit_reason="Error")
    pods = (*seen.pods[:2], ended, jobs.pod(3, phase="Pending", node=""))
    coordinator = replace(seen.agents["demo-0-0"], report=jobs.coordinator_report(**fields))
    seen = replace(seen, pods=pods, agents={"demo-0-0": coordinator})
    first = plan(seen, T0 + 20)
    after = jobs.then(seen, first)
    ends = {action.name: "ended" for action in first.actions if isinstance(action, EndPod)}
    assert first.recheck_after or policy == "None"
    told = replace(after, pods=tuple(replace(pod, ending=pod.name in ends) for pod in after.pods))
    second = plan(told, T0 + 31)
    assert not [action for action in second.actions if isinstance(action, EndPod)], "once is enough"
    return told, ends | {action.name: "deleted" for action in second.actions if isinstance(action, DeletePod)}


ALL = ("demo-0-0", "demo-1-0", "demo-2-0", "demo-3-0")


@pytest.mark.parametrize(
    ("policy", "failed", "complete"),
    [
        (
            "Running",
            {"demo-0-0": "ended", "demo-1-0": "ended", "demo-3-0": "deleted"},
            {"demo-0-0": "deleted", "demo-1-0": "deleted", "demo-3-0": "deleted"},
        ),
        ("All", dict.fromkeys(ALL, "deleted"), dict.fromkeys(ALL, "deleted")),
        ("None", {}, {}),
    ],
)
def test_which_pods_go_when_the_job_has_ended(policy: str, failed: dict[str, str], complete: dict[str, str]) -> None:
    assert ending(policy, failures=(PERMANENT,))[1] == failed
    assert ending(policy, state="succeeded")[1] == complete


def test_a_pod_that_does_not_end_with_its_job_is_deleted_and_one_of_a_lost_node_soon() -> None:
    seen, _ = ending("Running", failures=(PERMANENT,))
    late = plan(seen, T0 + 20 + seen.pods[0].grace + constants.END)
    assert {action.name for action in late.actions if isinstance(action, DeletePod)} == {*ALL} - {"demo-2-0"}
    nodes = {**seen.nodes, "node-1": replace(seen.nodes["node-1"], ready=False)}
    lost = plan(replace(seen, nodes=nodes), T0 + 31)
    assert [(a.name, a.force) for a in lost.actions if isinstance(a, DeletePod)] == [
        ("demo-1-0", True),
        ("demo-3-0", False),
    ]


def test_a_permanent_failure_stands_in_the_status_once_and_its_message_alone_in_the_conditions() -> None:
    status = ending("Running", failures=(replace(PERMANENT, message="why " * 500, at=T0 + 15),))[0].job.status
    assert {len(found.message) for found in status.conditions if found.message} == {1000}
    told = status.last_failure
    assert told is not None
    assert (told.replica, told.node, told.round, told.exit_code) == ("demo-1-0", "node-1", 1, 78)
    assert told.last_lines == ("reads a.bin", "it is bad")
    assert str(status.manifest()).count("reads a.bin") == 1


def test_what_is_kept_of_a_workers_words_is_bounded() -> None:
    lines = tuple(f"{i} " + "x" * 3000 for i in range(50))
    told = ending("Running", failures=(replace(PERMANENT, last_lines=lines),))[0].job.status.last_failure
    assert told is not None
    assert [line.split()[0] for line in told.last_lines] == [str(i) for i in range(30, 50)]
    assert {len(line) for line in told.last_lines} == {400}


def test_pods_that_have_all_ended_well_while_nobody_looked_are_success() -> None:
    seen = jobs.running(jobs.spec())
    pods = tuple(replace(pod, phase=PodPhase.SUCCEEDED, exit_code=0) for pod in seen.pods)
    made = plan(replace(seen, pods=pods, agents={}), T0 + 30)
    assert condition(made, "Complete")[0] == "True"


def test_a_run_that_has_stopped_early_is_complete_and_says_why() -> None:
    seen = jobs.running(jobs.spec())
    stopped = Evaluated(40, 2.0, best_step=10, best_loss=1.5, without_improvement=3, stop_reason="it does not improve")
    report = seen.agents["demo-0-0"].report
    assert report is not None
    assert report.progress is not None
    said = replace(report, state="succeeded", progress=replace(report.progress, step=40, evaluated=stopped))
    made = plan(
        replace(seen, agents={**seen.agents, "demo-0-0": replace(seen.agents["demo-0-0"], report=said)}), T0 + 20
    )
    true, reason, message = condition(made, "Complete")
    assert (true, reason) == ("True", "StoppedEarly")
    assert message.startswith("it does not improve; ")
    assert made.status.progress is not None
    mark = made.status.progress.evaluation
    assert mark is not None
    assert (mark.best_step, mark.best_loss, mark.without_improvement) == (10, 1.5, 3)
    pods = tuple(replace(pod, phase=PodPhase.SUCCEEDED, exit_code=0) for pod in seen.pods)
    unseen = replace(jobs.running(jobs.spec()), pods=pods, agents={})
    known = replace(unseen, job=replace(unseen.job, status=unseen.job.status.model_copy(update={
        "progress": made.status.progress})))  # fmt: skip
    assert condition(plan(known, T0 + 30), "Complete")[1] == "StoppedEarly", "by the status alone"
    assert condition(plan(unseen, T0 + 30), "Complete")[1] == "Succeeded"


def test_training_goes_on_while_storage_fails_but_a_person_must_act() -> None:
    seen = training()
    failing = Storage("Error", None, "no space left in the bucket")
    coordinator = replace(seen.agents["demo-0-0"], report=jobs.coordinator_report(storage=failing))
    made = plan(replace(seen, agents={**seen.agents, "demo-0-0": coordinator}), T0 + 20)
    assert condition(made, "Running")[0] == "True"
    assert condition(made, "Degraded")[:2] == ("True", "StorageUnavailable")


def test_the_status_names_the_newest_checkpoint_and_where_the_run_is() -> None:
    seen = training()
    latest = Durable(jobs.UID, 1, 30, "s3://bucket/run/30", at=T0 + 15)
    coordinator = replace(seen.agents["demo-0-0"], report=jobs.coordinator_report(storage=Storage("Ready", latest)))
    status = plan(replace(seen, agents={**seen.agents, "demo-0-0": coordinator}), T0 + 20).status
    assert status.last_checkpoint is not None
    assert (status.last_checkpoint.step, status.last_checkpoint.at) == (30, rfc3339(T0 + 15))
    assert status.progress is not None
    assert (status.progress.step, status.progress.percent, status.progress.eta_seconds) == (40, 40.0, 6.0)
