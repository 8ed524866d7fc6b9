"""Members that answer a Prepare late: which are waited for, how long, and the state from which the round begins."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import concertina_protocol as protocol
from builders import jobs
from builders.jobs import T0
from concertina.plan.actions import Plan
from concertina.plan.facts import constants
from concertina.plan.observed import JobObservation, PodPhase
from concertina.plan.plan import plan

ASKED = T0 + 11
ANSWERED = ASKED + 0.1
PATIENCE_OVER = ANSWERED + constants.PATIENCE + 0.01
NEWEST, OLDER = 39, 38
FAILED = {"done_at": ANSWERED, "error": "connection reset"}


def snapshot(step: int, round: int = 1) -> protocol.SnapshotId:
    return protocol.SnapshotId(round, step, "layout", 4)


def holds(*shards: int, step: int = NEWEST) -> tuple[protocol.HeldSnapshot, ...]:
    return (protocol.HeldSnapshot(snapshot(step), shards),)


def own_and_copy(rank: int, step: int = NEWEST) -> tuple[protocol.HeldSnapshot, ...]:
    """Return a member's shard and that of the member before it."""
    return holds(*sorted((rank, (rank - 1) % 4)), step=step)


def running() -> JobObservation:
    return jobs.running(jobs.spec(replicas=4, elastic={"minReplicas": 1}), 4)


def late(
    *names: str,
    held: dict[str, tuple[protocol.HeldSnapshot, ...]] | None = None,
    ends: dict[str, Any] | None = None,
    reached: bool = True,
    connected: bool = False,
) -> JobObservation:
    """Return a failed round of four members, of which these have not answered the Prepare of the next round.

    The others hold their own shard of the newest snapshot and the copy of their neighbour's, and the same of the
    previous snapshot. `held` is what some hold instead, `ends` how the calls of the late members end, and `reached`
    says whether the others reach them.
    """
    seen = running()
    failure = protocol.Failure("demo-1-0", "WorkerFailed", "exit code 1", at=ASKED)
    coordinator = replace(seen.agents["demo-0-0"], report=jobs.coordinator_report(failures=(failure,)))
    seen = replace(seen, agents={**seen.agents, "demo-0-0": coordinator})
    made = plan(seen, ASKED)
    order = [member.replica for member in made.status.world.members]
    agents = dict(seen.agents)
    for name, message in jobs.sends(made, protocol.Prepare).items():
        rank = order.index(name)
        everything = own_and_copy(rank) + own_and_copy(rank, OLDER)
        reply = jobs.prepared(name, message, snapshots=(held or {}).get(name, everything))
        if not reached:
            reply = replace(reply, reachable=tuple(other for other in reply.reachable if other not in names))
        done = (ends or {}) if name in names else {"done_at": ANSWERED, "reply": reply}
        agents[name] = jobs.called(replace(agents[name], connected=connected), message, ASKED, **done)
    return jobs.then(seen, made, agents=agents)


def begins_from(made: Plan) -> int | None:
    """Return the step of the committed round; None if none was committed."""
    assigns = jobs.sends(made, protocol.Assign)
    return next(iter(assigns.values())).restore.step if assigns else None


def ranked(*ranks: int) -> tuple[str, ...]:
    """Return the members of these ranks."""
    members = running().job.status.world.members
    return tuple(members[rank].replica for rank in ranks)


def test_late_neighbours_that_hold_the_newest_snapshot_are_waited_for() -> None:
    """The shard of the first of them is on these two members alone."""
    seen = late(*ranked(1, 2))
    made = plan(seen, PATIENCE_OVER)
    assert begins_from(made) is None
    assert made.recheck_after is not None
    assert made.recheck_after <= constants.RETRY
    assert begins_from(plan(seen, ASKED + constants.PATIENCE_STATE - 0.01)) is None


def test_the_round_begins_from_their_snapshot_once_one_of_them_answers() -> None:
    first, second = ranked(1, 2)
    seen = late(first, second)
    call = seen.agents[first].prepare
    assert call is not None
    message = protocol.Prepare(jobs.UID, call.round, call.claim, call.candidates)
    reply = jobs.prepared(first, message, snapshots=own_and_copy(1))
    answered = replace(seen.agents[first], prepare=replace(call, done_at=ASKED + 3, reply=reply))
    seen = replace(seen, agents={**seen.agents, first: answered})
    assert begins_from(plan(seen, ASKED + 3)) is None, "the second has the usual patience from the last answer on"
    assert begins_from(plan(seen, ASKED + 3.51)) == NEWEST


@pytest.mark.parametrize("after", [constants.PATIENCE_STATE, 60.0])
def test_the_wait_is_bounded(after: float) -> None:
    assert begins_from(plan(late(*ranked(1, 2)), ASKED + after)) == 0


def test_a_late_member_of_which_neighbours_hold_all_is_not_waited_for() -> None:
    made = plan(late(*ranked(1)), PATIENCE_OVER)
    assert begins_from(made) == NEWEST
    assert len(made.status.world.members) == 3


def test_a_late_member_is_not_waited_for_where_others_lack_what_it_cannot_hold() -> None:
    """A newer snapshot lacks the shard of a failed member, and its copy was never made.

    Rank 3 is late, and holds its own shard and that of rank 2, so it can't complete the snapshot.
    """
    (failed, last), keepers = ranked(1, 3), ranked(0, 2)
    newer = {keepers[0]: holds(0, 3, step=NEWEST + 1), keepers[1]: holds(2, step=NEWEST + 1)}
    whole = {name: held + holds(0, 1, 2, 3) for name, held in newer.items()}
    seen = late(failed, last, held=whole)
    call = seen.agents[failed].prepare
    assert call is not None
    gone = replace(seen.agents[failed], prepare=replace(call, **FAILED))
    assert begins_from(plan(replace(seen, agents={**seen.agents, failed: gone}), PATIENCE_OVER)) == NEWEST


def test_a_late_member_is_waited_for_whose_shard_alone_a_newer_snapshot_lacks() -> None:
    last, *others = ranked(3, 0, 1, 2)
    newer = {name: holds(0, 1, 2, step=NEWEST + 1) + holds(0, 1, 2, 3) for name in others}
    assert begins_from(plan(late(last, held=newer), PATIENCE_OVER)) is None


def test_a_snapshot_of_an_earlier_round_may_be_with_any_late_member() -> None:
    """The status lists only the members of the last round."""
    last, *others = ranked(3, 0, 1, 2)
    earlier = {name: (protocol.HeldSnapshot(snapshot(NEWEST, round=0), (0,)),) for name in others}
    seen = late(last, held=earlier)
    base = seen.job.status.world.base
    assert base is not None
    world = seen.job.status.world.model_copy(update={"base": base.model_copy(update={"step": NEWEST})})
    job = replace(seen.job, status=seen.job.status.model_copy(update={"world": world}))
    assert begins_from(plan(replace(seen, job=job), PATIENCE_OVER)) is None


@pytest.mark.parametrize(
    "evidence",
    [{"ends": FAILED}, {"ends": {"done_at": ANSWERED, "reply": protocol.Refused("older", 1, "x")}}, {"reached": False}],
    ids=["its call failed", "it refused", "nobody reaches it"],
)
def test_a_member_that_is_not_heard_is_not_waited_for(evidence: dict[str, Any]) -> None:
    assert begins_from(plan(late(*ranked(1, 2), **evidence), PATIENCE_OVER)) == 0


def test_a_member_that_the_operator_hears_is_waited_for_though_others_do_not_reach_it_yet() -> None:
    assert begins_from(plan(late(*ranked(1, 2), reached=False, connected=True), PATIENCE_OVER)) is None


def test_a_member_whose_pod_has_ended_is_not_waited_for() -> None:
    gone = ranked(1, 2)
    seen = late(*gone)
    pods = tuple(replace(pod, phase=PodPhase.FAILED) if pod.name in gone else pod for pod in seen.pods)
    assert begins_from(plan(replace(seen, pods=pods), PATIENCE_OVER)) == 0


# --- who has answered, and was not reached by others


def cut_off() -> JobObservation:
    """Observe a round that all four members have answered.

    The others did not reach ranks 1 and 2, which alone hold a shard of the newest snapshot.
    """
    seen = late(*ranked(1, 2), reached=False)
    agents = dict(seen.agents)
    for rank, name in zip((1, 2), ranked(1, 2), strict=True):
        call = agents[name].prepare
        assert call is not None
        message = protocol.Prepare(jobs.UID, call.round, call.claim, call.candidates)
        reply = jobs.prepared(name, message, snapshots=own_and_copy(rank))
        agents[name] = replace(agents[name], prepare=replace(call, done_at=ANSWERED, reply=reply))
    return replace(seen, agents=agents, fresh_claim="claim-c")


def test_where_state_would_be_left_behind_all_look_for_each_other_once_more() -> None:
    """A busy agent answers a Ping too late, like a Prepare."""
    made = plan(cut_off(), PATIENCE_OVER)
    assert sorted(jobs.sends(made, protocol.Prepare)) == sorted(ranked(0, 1, 2, 3))
    claim = made.status.world.claim
    assert claim is not None
    assert (claim.round, claim.committed) == (3, False)


def test_they_look_once() -> None:
    seen = cut_off()
    world = seen.job.status.world.model_copy(update={"round": 0})
    job = replace(seen.job, status=seen.job.status.model_copy(update={"world": world}))
    assert begins_from(plan(replace(seen, job=job), PATIENCE_OVER)) == 0
