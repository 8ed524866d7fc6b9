"""Agents with the forkserver, snapshots, copies and uploads, and a trainer without torch (`tiny`)."""

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path

import concertina_protocol as p
from builders.programs import FAULTS, SEARCH_PATH
from builders.train.replicas import GIVE_UP, UID, Job, Replica, gone, newest_complete, running, trained

TINY = ["--bundled", "--package", "tiny"]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def vanished(path: Path) -> None:
    async with asyncio.timeout(GIVE_UP):
        while await asyncio.to_thread(path.exists):
            await asyncio.sleep(0.02)


def run(body) -> None:
    asyncio.run(body())


def test_a_run_of_three_completes(folder):
    async def body():
        async with running(folder, 3, TINY, TINY_STEPS="12") as job:
            await job.begin(1, job[0], job[1], job[2])
            report = await job.until(job[0], lambda r: r.state == "succeeded", "never succeeded")
            assert report.progress.step == 12
            assert not report.failures
            await job.until(job[1], lambda r: r.state == "succeeded")

    run(body)


def sockets(pid: int) -> int:
    """Return the number of open sockets of a process. A standby process that waits has one."""
    with contextlib.suppress(FileNotFoundError):
        return sum(os.readlink(file).startswith("socket:") for file in Path(f"/proc/{pid}/fd").iterdir())
    return 0


async def standby_pid(replica: Replica) -> int:
    """Wait until an agent has a standby process, and return its pid."""
    async with asyncio.timeout(GIVE_UP):
        while True:
            pids = [event["pid"] for event in replica.events() if event["event"] == "standby_ready"]
            if pids and sockets(pids[-1]) == 1:
                return pids[-1]
            await asyncio.sleep(0.02)


def test_standby_processes_become_the_successor_of_a_killed_worker_and_the_store(folder):
    async def body():
        async with running(folder, 2, TINY, TINY_STEPS="100000") as job:
            await job.begin(1, job[0], job[1])
            await job.until(job[0], trained(10))
            store, worker = await standby_pid(job[0]), await standby_pid(job[1])
            os.kill(job[1].worker_pids()[1], 9)
            await job.until(job[0], lambda r: len(r.failures) == 2)
            prepared = await job.prepare(2, job[0], job[1])
            restore = newest_complete(prepared)
            await job.assign(job.assignment(prepared, restore))
            await job.until(job[0], lambda r: r.round == 2 and trained(restore.step + 5)(r))
            assert job[1].worker_pids()[1] == worker
            assert sockets(store) > 2, "it serves the workers"
            for replica in job.replicas.values():
                replica.kill()
            async with asyncio.timeout(GIVE_UP):
                while not all(gone(pid) for pid in (store, worker)):
                    await asyncio.sleep(0.02)

    run(body)


def test_killed_worker_then_killed_agent_resume_from_memory(folder):
    async def body():
        async with running(folder, 3, TINY, TINY_STEPS="100000") as job:
            await job.begin(1, job[0], job[1], job[2])
            report = await job.until(job[0], lambda r: trained(10)(r) and (r.progress.snapshot_step or 0) > 0)
            on_peers = report.progress.snapshot_step
            os.kill(job[1].worker_pids()[1], 9)
            report = await job.until(job[0], lambda r: len(r.failures) == 3)
            causes = {f.replica: f.reason for f in report.failures if not f.secondary}
            assert causes == {job[1].name: "WorkerSignaled"}

            prepared = await job.prepare(2, job[1], job[2], job[0])
            restore = newest_complete(prepared)
            assert restore.id.round == 1
            assert restore.step >= on_peers
            await job.assign(job.assignment(prepared, restore))
            coordinator = job[1]
            report = await job.until(coordinator, trained(restore.step + 10))
            assert report.progress.restored_step == restore.step
            assert report.progress.restored_from == "Memory"

            for replica in job.replicas.values():
                await vanished(replica.folder / "snapshots/round-1")
                await vanished(replica.folder / "copies/round-1")
            job[0].kill()
            await job.until(coordinator, lambda r: any(f.reason == "MemberLost" for f in r.failures))
            prepared = await job.prepare(3, job[2], job[1])
            again = newest_complete(prepared)
            assert again.id.round == 2, "the lost one's shard was to be found at its peer"
            assert again.step > restore.step
            assert {id.round for answer in prepared.values() for id in (h.id for h in answer.snapshots)} == {2}
            await job.assign(job.assignment(prepared, again))
            await job.until(job[2], trained(again.step + 5))

    run(body)


def test_drain_loses_no_step_and_waits_for_the_peers_copies(folder):
    async def body():
        async with running(folder, 3, TINY, TINY_STEPS="100000") as job:
            await job.begin(1, job[0], job[1], job[2])
            await job.until(job[0], trained(5))
            drain = p.Drain(UID, 1, "claim-1", "scale", durable=False, grace_seconds=20)
            assert isinstance(await job.call(job[0], drain), p.Accepted)
            report = await job.until(job[0], lambda r: r.state == "drained", "never drained")
            last = report.members[job[0].name].step
            assert {m.step for m in report.members.values()} == {last}
            job[2].kill()
            prepared = await job.prepare(2, job[0], job[1])
            assert newest_complete(prepared).step == last

    run(body)


def test_durable_drain_and_completion_wait_for_a_bucket_that_is_not_there_yet(folder):
    bucket = folder / "bucket"

    async def body():
        environment = {"TINY_BUCKET": str(bucket), "CONCERTINA_CHECKPOINT": json.dumps({"uri": "s3://b/run"})}
        async with running(folder, 2, TINY, TINY_STEPS="30", TINY_PAUSE="0.05", **environment) as job:
            report = await job.until(job[0], lambda r: r.storage and r.storage.state == "Error")
            assert report.storage.message == "There is no bucket bucket; create it."
            await job.begin(1, job[0], job[1])
            await job.until(job[0], trained(5))
            drain = p.Drain(UID, 1, "claim-1", "suspend", durable=True, grace_seconds=20)
            await job.call(job[0], drain)
            ended = lambda r: {m.state for m in r.members.values()} == {"drained"}  # noqa: E731
            report = await job.until(job[0], ended)
            assert report.state == "draining", "drained was said without the checkpoint"
            bucket.mkdir()
            report = await job.until(job[0], lambda r: r.state == "drained")
            step = report.members[job[0].name].step
            assert (report.storage.latest.step, report.storage.latest.complete) == (step, False)
            await job.until(job[1], lambda r: r.storage.latest and r.storage.latest.step == step)

            prepared = await job.prepare(2, job[1], job[0])
            assert prepared[job[1].name].storage.latest.step == step
            restore = p.Restore("Storage", step, durable=report.storage.latest)
            await job.assign(job.assignment(prepared, restore))
            report = await job.until(job[1], lambda r: r.state == "succeeded", "never succeeded")
            assert (report.storage.latest.step, report.storage.latest.complete) == (30, True)
            assert not list(folder.rglob("shipping-*"))

    run(body)


def test_bad_input_is_permanent_and_early_exit_is_a_failure(folder):
    async def body():
        async with running(folder, 2, TINY, TINY_STEPS="10", TINY_BAD_INPUT="1") as job:
            await job.begin(1, job[0], job[1])
            report = await job.until(job[0], lambda r: any(f.permanent for f in r.failures))
            failure = next(f for f in report.failures if f.permanent)
            assert (failure.reason, failure.exit_code, failure.secondary) == ("InvalidInput", 78, False)
            assert "The file a.bin has another checksum; build it again." in failure.message

    run(body)


def test_the_warm_parent_may_die_with_all_its_children_and_is_replaced(folder):
    async def body():
        async with running(folder, 1, TINY, TINY_STEPS="100000") as job:
            await job.begin(1, job[0])
            await job.until(job[0], trained(3))
            worker = job[0].worker_pids()[0]
            os.kill(parent_of(worker), 9)
            report = await job.until(job[0], lambda r: r.failures)
            assert report.failures[0].message == "Rank 0 was killed by SIGKILL."
            prepared = await job.prepare(2, job[0])
            assert gone(worker)
            await job.assign(job.assignment(prepared, newest_complete(prepared)))
            await job.until(job[0], lambda r: r.round == 2 and trained(6)(r))

    run(body)


def test_a_trainer_that_cant_be_imported_is_said_once_and_for_all(folder):
    async def body():
        job = Job(folder, 1, ["--bundled", "--package", "no_such_trainer"])
        try:
            job[0].start()
            report = await job.until(job[0], lambda r: r.startup_error)
        finally:
            await job.stop()
        assert not report.ready
        assert "importing no_such_trainer.preload failed: ModuleNotFoundError" in report.startup_error

    run(body)


def test_a_damaged_snapshot_is_passed_over(folder):
    async def body():
        async with running(folder, 3, TINY, TINY_STEPS="100000") as job:
            await job.begin(1, job[0], job[1], job[2])
            await job.until(job[0], trained(5))
            drain = p.Drain(UID, 1, "claim-1", "scale", durable=False, grace_seconds=20)
            await job.call(job[0], drain)
            await job.until(job[0], lambda r: r.state == "drained")
            prepared = await job.prepare(2, job[0], job[1], job[2])
            restore = newest_complete(prepared)
            for path in (job[1].folder / "snapshots/round-1/shard-1").glob("slot-?"):
                data = bytearray(path.read_bytes())
                data[-1] ^= 1
                path.write_bytes(data)
            await job.assign(job.assignment(prepared, restore))
            report = await job.until(job[0], lambda r: r.round == 2 and (r.failures or trained(restore.step + 3)(r)))
            assert not report.failures, "the copy on its peer is as good"

    run(body)


def flip(slot: Path) -> None:
    """One bit of a snapshot, as a bad memory would."""
    content = bytearray(slot.read_bytes())
    content[len(content) // 2] ^= 1
    slot.write_bytes(content)


def slots_of(job: Job, id: p.SnapshotId, shard: int) -> list[Path]:
    """Where a shard of a snapshot lies, the owner's first."""
    found = []
    for kind in ("snapshots", "copies"):
        for replica in job.replicas.values():
            for mark in (replica.folder / kind / f"round-{id.round}/shard-{shard}").glob("*.json"):
                if json.loads(mark.read_text())["id"] == vars(id):
                    found.append(mark.with_suffix(""))
    return found


def test_a_snapshot_of_which_every_copy_is_damaged_is_passed_over_for_an_older_one(folder):
    """The damage is found when it is read: that round fails, and the next Prepare does not offer it any more."""

    async def body():
        async with running(folder, 3, TINY, TINY_STEPS="100000") as job:
            await job.begin(1, job[0], job[1], job[2])
            await job.until(job[0], lambda r: trained(10)(r) and (r.progress.snapshot_step or 0) > 2)
            os.kill(job[0].worker_pids()[0], 9)
            await job.until(job[0], lambda r: r.failures)
            prepared = await job.prepare(2, job[0], job[1], job[2])
            newest = newest_complete(prepared)
            damaged = slots_of(job, newest.id, 1)
            assert damaged
            for slot in damaged:
                flip(slot)
            await job.assign(job.assignment(prepared, newest))
            report = await job.until(job[0], lambda r: r.round == 2 and r.failures)
            assert "RestoreFailed" in {failure.reason for failure in report.failures}
            prepared = await job.prepare(3, job[0], job[1], job[2])
            older = newest_complete(prepared)
            assert older.step < newest.step
            await job.assign(job.assignment(prepared, older))
            await job.until(job[0], lambda r: r.round == 3 and trained(older.step + 5)(r))

    run(body)


def test_members_whose_clocks_are_off_by_minutes_train_and_recover(folder):
    """One is ten minutes ahead, one behind: nothing compares what they say the time is."""

    async def body():
        job = Job(folder, 3, TINY, TINY_STEPS="100000")
        try:
            for replica, off in zip(job.replicas.values(), ("0", "600", "-600"), strict=True):
                replica.environment |= {"PYTHONPATH": f"{SEARCH_PATH}:{FAULTS}", "CLOCK_OFF_BY": off}
                replica.start()
            await job.ready()
            message = job.assignment(await job.prepare(1, job[0], job[1], job[2]))
            await job.assign(p.Assign(**{**vars(message), "limits": p.Limits(hang_seconds=1.0)}))
            await job.until(job[0], lambda r: trained(10)(r) and (r.progress.snapshot_step or 0) > 2)
            assert abs(job[1].events()[0]["t"] - job[2].events()[0]["t"]) > 1000, "the clocks are not off"
            await asyncio.sleep(p.SILENCE_SECONDS + 1)
            assert (job[0].report.failures, job[0].report.hang) == ((), None), "clocks were compared"
            job[1].process.send_signal(signal.SIGSTOP)
            report = await job.until(job[0], lambda r: r.failures)
            assert {f.reason for f in report.failures if not f.secondary} == {"MemberLost"}
            prepared = await job.prepare(2, job[2], job[0])
            restore = newest_complete(prepared)
            await job.assign(job.assignment(prepared, restore))
            await job.until(job[2], lambda r: r.round == 2 and trained(restore.step + 5)(r))
        finally:
            await job.stop()

    run(body)
