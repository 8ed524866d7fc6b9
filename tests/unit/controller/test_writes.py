"""Writes outside the passes: each is under way once, none waits for a failing one; a refused job sends few."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

from concertina.api.status import JobStatus
from concertina.api.world import World
from concertina.controller.cache.job import CachedJob
from concertina.controller.writes import A_TURN, FIRST, SLOTS, SMALLEST, WriteQueue
from concertina.kube.parse.views import job_view, pod_view
from concertina.plan.actions import Action, CreatePod, DeletePod, ReleaseWorkload, WorkloadKey


def job(name: str) -> CachedJob:
    metadata = {"name": name, "namespace": "n", "uid": name, "creationTimestamp": "2026-01-01T00:00:00Z"}
    return CachedJob(job_view({"metadata": {**metadata, "generation": 1}}), 1, {})


class Server:
    """Server that answers writes when the test lets it; `refuses` names jobs whose pods it refuses."""

    def __init__(self, *refuses: str) -> None:
        self.refuses = refuses
        self.answers = asyncio.Event()
        self.asked: list[tuple[str, Action]] = []
        self.failures: list[str] = []
        self.changed: list[str] = []
        self.holds_lease = True
        self.writes = WriteQueue(self.write, self.failed, self.changed.append, lambda: self.holds_lease)

    async def write(self, job: CachedJob, action: Action) -> bool:
        self.asked.append((job.view.uid, action))
        if isinstance(action, DeletePod):
            raise RuntimeError(action.name)
        await self.answers.wait()
        return job.view.uid not in self.refuses

    async def failed(self, job: CachedJob, action: Action, error: Exception) -> None:
        self.failures.append(f"{job.view.uid}: {error}")

    def count(self, uid: str) -> int:
        return sum(of == uid for of, _ in self.asked)


def run(scenario: Callable[[], object]) -> None:
    async def inside() -> None:
        async with asyncio.timeout(60):
            await scenario()  # type: ignore[misc]

    asyncio.run(inside())


async def settled() -> None:
    for _ in range(100):
        await asyncio.sleep(0)


CREATES = [CreatePod(index, 0) for index in range(1000)]


def test_what_is_under_way_is_not_begun_again() -> None:
    async def scenario() -> None:
        server, a = Server(), job("a")
        for _ in range(3):
            server.writes.start(a, [CreatePod(0, 0, avoid_nodes=("x",)), CreatePod(1, 0)])
            server.writes.start(a, [CreatePod(0, 0), CreatePod(1, 0)])
            await settled()
        assert server.count("a") == 2
        server.answers.set()
        await settled()
        server.writes.start(a, [CreatePod(0, 0)])
        await settled()
        assert server.count("a") == 3

    run(scenario)


def test_a_pass_follows_a_create_where_others_have_waited_for_it() -> None:
    async def scenario() -> None:
        server = Server()
        server.writes.start(job("small"), CREATES[:FIRST])
        server.writes.start(job("large"), CREATES[: FIRST + 1])
        server.answers.set()
        await settled()
        assert (server.count("small"), server.count("large")) == (FIRST, FIRST)
        assert server.changed == ["large"] * FIRST

    run(scenario)


def test_a_pod_that_is_there_by_now_is_not_created_again() -> None:
    """A pass is planned before its status is written, and creates end meanwhile."""

    async def scenario() -> None:
        server, mine = Server(), job("a")
        made = {"name": "a-1-0", "namespace": "n", "uid": "p", "creationTimestamp": "2026-01-01T00:00:00Z"}
        mine.pods["p"] = pod_view({"metadata": made, "spec": {}}).view
        server.writes.start(mine, CREATES[:3])
        await settled()
        assert [action for _, action in server.asked] == [CREATES[0], CREATES[2]]
        server.writes.close()

    run(scenario)


def test_what_waits_is_written_as_the_last_pass_wants_it() -> None:
    """A turn may take long to come, and a pod that was to be deleted then may be a member by now."""

    async def scenario() -> None:
        server, late = Server(), job("late")
        for number in range(SLOTS):
            server.writes.start(job(f"other-{number}"), CREATES[:1])
        await settled()
        server.writes.start(late, [CreatePod(0, 0), CreatePod(1, 0), DeletePod("member", "u", "is not needed")])
        await settled()
        server.writes.start(late, [CreatePod(0, 0, avoid_nodes=("bad",))])
        server.answers.set()
        await settled()
        assert [action for uid, action in server.asked if uid == "late"] == [CreatePod(0, 0, avoid_nodes=("bad",))]
        server.writes.start(late, CREATES[:2])
        await settled()
        assert server.count("late") == 3, "one that was left is wanted again"

    run(scenario)


def test_of_a_job_that_is_gone_nothing_more_is_written() -> None:
    async def scenario() -> None:
        server = Server()
        for number in range(SLOTS):
            server.writes.start(job(f"other-{number}"), CREATES[:1])
        server.writes.start(job("gone"), CREATES)
        await settled()
        server.writes.forget("gone")
        server.answers.set()
        await settled()
        assert server.count("gone") == 0

    run(scenario)


def test_one_who_wants_thousands_leaves_slots_to_the_others() -> None:
    async def scenario() -> None:
        server = Server()
        for name in "abcdefgh":  # Each job has as many writes as its window takes, which is more than there are slots.
            server.writes.start(job(name), CREATES)
        await settled()
        assert len(server.asked) == SLOTS
        server.writes.start(job("new"), CREATES[:1])
        trains = job("trains")
        trains.view = dataclasses.replace(trains.view, status=JobStatus(world=World(round=1)))
        server.writes.start(trains, CREATES[:1])
        server.answers.set()
        await settled()
        asked = [uid for uid, _ in server.asked]
        assert asked.index("new") <= SLOTS + 8 * A_TURN  # Each job has one turn, and not all that it waits for.
        assert asked.index("trains") <= SLOTS + 1  # Writes that have not begun can wait.

    run(scenario)


def test_a_job_that_is_refused_asks_for_one_pod_at_a_time_until_one_is_taken() -> None:
    async def scenario() -> None:
        server, a = Server("a"), job("a")
        server.answers.set()
        server.writes.start(a, CREATES)
        await settled()
        assert server.count("a") == FIRST
        for tries in range(1, 4):
            server.writes.start(a, CREATES)
            await settled()
            assert server.count("a") == FIRST + tries * SMALLEST
        server.refuses = ()
        for size in (1, 2, 4, 8):
            before = server.count("a")
            server.writes.start(a, CREATES)
            await settled()
            assert server.count("a") == before + size

    run(scenario)


def test_nothing_is_remembered_of_a_refused_job_that_is_gone() -> None:
    async def scenario() -> None:
        server = Server("refused")
        server.answers.set()
        server.writes.start(job("refused"), CREATES[:1])
        await settled()
        server.writes.start(job("refused"), CREATES)
        await settled()
        assert server.count("refused") == 1 + SMALLEST
        server.writes.forget("refused")
        server.writes.start(job("refused"), CREATES)
        await settled()
        assert server.count("refused") == 1 + SMALLEST + FIRST, "as at first"

    run(scenario)


def test_one_that_fails_is_told_and_stops_no_other() -> None:
    async def scenario() -> None:
        server = Server()
        server.answers.set()
        server.writes.start(job("a"), [DeletePod("x", "u", "why"), CreatePod(0, 0), DeletePod("y", "v", "why")])
        await settled()
        assert server.count("a") == 3
        assert sorted(server.failures) == ["a: x", "a: y"]

    run(scenario)


def test_what_waited_for_its_turn_is_not_written_once_another_operator_may_act() -> None:
    async def scenario() -> None:
        server = Server()
        server.writes.start(job("a"), [*CREATES[:SLOTS], DeletePod("a member of the successor's round", "uid", "")])
        await settled()
        assert server.count("a") == SLOTS
        server.holds_lease = False
        server.answers.set()
        await settled()
        assert server.count("a") == SLOTS
        assert server.changed == ["a"], "a pass plans it again, should the Lease be held after all"

    run(scenario)


RELEASE = ReleaseWorkload(WorkloadKey("w", "u", "1"))


def test_quota_is_given_back_only_while_no_pod_is_being_created() -> None:
    async def scenario() -> None:
        server, one = Server(), job("one")
        server.writes.start(one, [CreatePod(0, 0)])
        await settled()
        server.writes.start(one, [CreatePod(0, 0), RELEASE])
        await settled()
        assert [action for _, action in server.asked] == [CreatePod(0, 0)]
        server.answers.set()
        await settled()
        assert server.changed == ["one"]  # so that the release is planned again
        server.writes.start(one, [RELEASE])
        await settled()
        assert server.asked[-1] == ("one", RELEASE)

    run(scenario)


def test_no_pod_is_created_while_quota_is_given_back() -> None:
    async def scenario() -> None:
        server, one, two = Server(), job("one"), job("two")
        server.writes.start(one, [RELEASE])
        await settled()
        server.writes.start(one, [RELEASE, CreatePod(0, 0)])
        server.writes.start(two, [CreatePod(0, 0)])
        await settled()
        assert [uid for uid, _ in server.asked] == ["one", "two"]
        server.answers.set()
        await settled()
        assert "one" in server.changed

    run(scenario)
