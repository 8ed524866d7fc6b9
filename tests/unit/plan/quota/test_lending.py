"""A job with a queue: quota is lent once at every interleaving, and a job that is left alone gets its size."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from builders.queueing import Site, virtual_time

SEEDS = range(400)


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
    """Two elastic jobs and others that preempt them, come and go; the operator is restarted now and then."""
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
