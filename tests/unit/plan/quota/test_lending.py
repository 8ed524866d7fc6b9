"""Jobs with a queue: quota is lent once in every interleaving, and an undisturbed job gets its size."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from unittest import mock

import pytest

from builders.queueing import Site, virtual_time
from concertina.controller import workload_writes, writes
from concertina.kube.resources import WORKLOADS, Raw
from concertina.plan.kueue import LOWEST_PRIORITY

SEEDS = range(40)
MORE_SEEDS = range(40, 400)


def run(site: Site, story: Callable[[Site], Awaitable[None]]) -> None:
    async def main() -> None:
        with virtual_time(site):
            await story(site)
            site.writes.close()
            await asyncio.sleep(0)

    asyncio.run(main())


def lent_once(site: Site) -> Callable[[], None]:
    def check() -> None:
        used, quota = site.kueue.used(), site.kueue.quota
        assert site.pods <= quota, f"{site.pods} pods run on quota for {quota}, of which Kueue counts {used}"

    return check


async def competition(site: Site) -> None:
    """Let two elastic jobs compete with others that preempt them; the operator is restarted now and then."""
    check = lent_once(site)
    first = site.add_job("first", replicas=site.rng.choice((4, 6)), least=site.rng.choice((1, 2)))
    second = site.add_job("second", replicas=3, least=site.rng.choice((None, 1, 2)))
    await site.turns(site.rng.randrange(40, 120), check)
    for number in range(4):
        name = f"stranger-{number}"
        site.add_stranger(name, site.rng.randrange(1, 8), site.rng.choice((0, 10, 10)))
        await site.turns(site.rng.randrange(10, 120), check)
        match site.rng.randrange(5):
            case 0:
                await site.restart_operator()
            case 1:
                site.change_job(first, suspend=True)
                await site.turns(site.rng.randrange(60), check)
                site.change_job(first, suspend=False)
            case 2:
                site.change_job(second, replicas=site.rng.choice((2, 3, 4)))
        await site.turns(site.rng.randrange(60), check)
        site.remove_stranger(name)
    for number in range(4):
        site.remove_stranger(f"stranger-{number}")
    for _ in range(30):
        await site.turns(50, check)
        if all(len(site.pods_of(uid)) == site.jobs[uid]["spec"]["replicas"] for uid in (first, second)):
            return
    fits = sum(site.jobs[uid]["spec"]["replicas"] for uid in (first, second)) <= site.kueue.quota
    held = {uid: (len(site.pods_of(uid)), site.lendings[uid].message) for uid in (first, second)}
    assert not fits, f"the jobs have not come back to their size: {held}"


@pytest.mark.parametrize("seed", SEEDS)
def test_no_quota_is_lent_twice(seed: int) -> None:
    run(Site(seed, quota=10), competition)


@pytest.mark.long(law="tests/unit/plan/quota/test_lending.py::test_no_quota_is_lent_twice")
@pytest.mark.parametrize("seed", MORE_SEEDS)
def test_no_quota_is_lent_twice_by_more_seeds(seed: int) -> None:
    run(Site(seed, quota=10), competition)


# --- guards without which quota is lent twice


async def without_a_look_at_the_lender(self: Any, job: Any, create: Any) -> bool:
    return bool(await self._create_pod(job, create))


def test_a_pod_whose_lender_has_changed_would_be_beyond_the_quota() -> None:
    with mock.patch.object(writes.ObjectWriter, "_create_within_quota", without_a_look_at_the_lender):
        for seed in SEEDS:
            try:
                run(Site(seed, quota=10), competition)
            except AssertionError:
                return
    pytest.fail("no seed needs the look at the lender")


async def evicted_with_pods_that_the_cache_does_not_know(site: Site) -> None:
    uid = site.add_job("job", replicas=4, least=1)
    await site.turns(100)
    site.add_stranger("urgent", 4, priority=100)
    while site.lendings[uid].reason != "Evicted":
        await site.turns(1)
    for pod in site.pods_of(uid):
        site.forget_pod(pod)
    await site.turns(60, lent_once(site))


async def no_pods_left(*_: Any) -> int:
    return 0


def test_quota_is_given_back_after_a_live_list_of_pods() -> None:
    run(calm(quota=4), evicted_with_pods_that_the_cache_does_not_know)
    with (
        mock.patch.object(workload_writes, "pods_left", no_pods_left),
        pytest.raises(AssertionError, match="pods run on quota for 4"),
    ):
        run(calm(quota=4), evicted_with_pods_that_the_cache_does_not_know)


# --- stories


def calm(quota: int, seed: int = 1) -> Site:
    """Return a site whose requests and watches are hardly late."""
    return Site(seed, quota, slow=1)


def workloads(site: Site) -> list[Raw]:
    return list(site.api.objects[WORKLOADS.plural].values())


def reserved(site: Site, name: str) -> bool:
    return site.api.objects[WORKLOADS.plural][name]["status"].get("admission") is not None


def test_no_pod_runs_before_admission_and_then_as_many_as_are_admitted() -> None:
    async def story(site: Site) -> None:
        site.add_stranger("other", 4, priority=5)
        await site.turns(30)
        uid = site.add_job("job", replicas=4, least=None)
        await site.turns(80)
        assert site.pods_of(uid) == []
        assert site.lendings[uid].reason == "Queued"
        assert "4 more needed" in site.lendings[uid].message
        site.remove_stranger("other")
        await site.turns(80)
        assert len(site.pods_of(uid)) == 4
        assert {pod["metadata"]["labels"]["kueue.x-k8s.io/podset"] for pod in site.pods_of(uid)} == {"trainer"}

    run(calm(quota=4), story)


def test_a_first_request_is_walked_down_to_what_fits() -> None:
    async def story(site: Site) -> None:
        site.add_stranger("other", 3, priority=5)
        await site.turns(30)
        uid = site.add_job("job", replicas=4, least=1)
        await site.turns(200)
        assert len(site.pods_of(uid)) == 2

    run(calm(quota=5), story)


@pytest.mark.parametrize(("quota", "asked", "kept"), [(4, 3, 1), (6, 4, 2), (4, 4, 0)])
def test_a_preempted_job_shrinks_to_what_the_preemptor_leaves_and_grows_back(quota: int, asked: int, kept: int) -> None:
    async def story(site: Site) -> None:
        check = lent_once(site)
        uid = site.add_job("job", replicas=4, least=1)
        await site.turns(100, check)
        assert len(site.pods_of(uid)) == 4
        site.add_stranger("urgent", asked, priority=100)
        await site.turns(200, check)
        assert reserved(site, "urgent")
        assert len(site.pods_of(uid)) == kept
        site.remove_stranger("urgent")
        await site.turns(600, check)
        assert len(site.pods_of(uid)) == 4

    run(calm(quota), story)


def test_a_job_that_is_to_be_suspended_gives_all_quota_back() -> None:
    async def story(site: Site) -> None:
        uid = site.add_job("job", replicas=4, least=1, onPreemption="Suspend")
        await site.turns(100)
        site.add_stranger("urgent", 3, priority=100)
        most = 4
        for _ in range(60):
            await site.turns(5)
            most = min(most, len(site.pods_of(uid)))
        assert most == 0
        assert reserved(site, "urgent")

    run(calm(quota=4), story)


def test_a_job_grows_into_free_quota_alone() -> None:
    async def story(site: Site) -> None:
        site.add_stranger("humble", 2, priority=-5)
        await site.turns(30)
        uid = site.add_job("job", replicas=4, least=2)
        # The job's first request may preempt, like that of any job. Its later requests may not.
        await site.turns(100)
        site.add_stranger("humble again", 1, priority=-5)
        site.change_job(uid, replicas=6)
        await site.turns(200)
        assert reserved(site, "humble again")
        pending = [
            w for w in workloads(site) if not w["status"].get("admission") and "ownerReferences" in w["metadata"]
        ]
        assert [w["spec"]["priority"] for w in pending] == [LOWEST_PRIORITY]

    run(calm(quota=5), story)


def test_a_smaller_job_gives_quota_back_without_an_eviction() -> None:
    async def story(site: Site) -> None:
        check = lent_once(site)
        uid = site.add_job("job", replicas=4, least=1)
        await site.turns(100, check)
        site.change_job(uid, replicas=2)
        await site.turns(100, check)
        assert len(site.pods_of(uid)) == 2
        assert site.kueue.used() == 2

    run(calm(quota=4), story)


def test_a_job_that_has_ended_frees_its_quota_once_no_pod_runs() -> None:
    async def story(site: Site) -> None:
        uid = site.add_job("job", replicas=4, least=1)
        await site.turns(100)
        ended = {"type": "Complete", "status": "True", "reason": "Succeeded", "message": "done"}
        site.change_status(uid, conditions=[{**ended, "lastTransitionTime": "2026-01-01T00:00:00Z"}])
        await site.turns(50)
        assert site.kueue.used() == 4
        for pod in site.pods_of(uid):
            site.end_pod(pod["metadata"]["name"])
        await site.turns(100)
        assert site.kueue.used() == 0
        assert site.finished(uid) == ["Succeeded"]

    run(calm(quota=4), story)


def test_a_deleted_workload_is_asked_for_again() -> None:
    async def story(site: Site) -> None:
        check = lent_once(site)
        uid = site.add_job("job", replicas=4, least=1)
        await site.turns(100, check)
        site.api.mark_deleted(WORKLOADS.plural, workloads(site)[0]["metadata"]["name"])
        await site.turns(300, check)
        assert len(site.pods_of(uid)) == 4
        assert len(workloads(site)) == 1

    run(calm(quota=4), story)
