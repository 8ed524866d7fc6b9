"""What real agents tell Prometheus of real workers, with and without `trainingjob`."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

import concertina_protocol as p
from builders.train.replicas import GIVE_UP, UID, Replica, running, trained
from concertina_agent.metrics import families as f

PORT = 9400
REPORTS = """
import os, time, trainingjob
assert "CONCERTINA_METRICS_TOKEN" not in os.environ
for step in range(10**9):
    trainingjob.report(step=step + 1, steps=1000, loss=1.0, samples=8 * step, tokens_per_second=50.0)
    time.sleep(0.02)
"""
SLEEPS = "import time; time.sleep(600)"
Series = dict[tuple[str, str], float]


def command(text: str) -> list[str]:
    return ["--", sys.executable, "-c", text]


def metrics(**more: object) -> dict[str, str]:
    return {"CONCERTINA_METRICS": json.dumps({"port": PORT, **more})}


def host(replica: Replica) -> str:
    return replica.address.partition(":")[0]


def scraped(replica: Replica, token: str = "") -> Series:
    """Value by name and the label besides the pod's own, of a place in the pod or none."""
    fields = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"http://{host(replica)}:{PORT}/metrics", headers=fields)
    with urllib.request.urlopen(request, timeout=30) as answer:
        text = answer.read().decode()
    found = {}
    for family in parse(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            pod = [labels.pop(name) for name in f.POD_LABELS]
            assert pod == ["test", "job", replica.name]
            found[sample.name, "".join(labels.values())] = sample.value
    return found


async def until(replica: Replica, holds, token: str = "") -> Series:
    found: Series = {}
    try:
        async with asyncio.timeout(GIVE_UP):
            while not holds(found := await asyncio.to_thread(scraped, replica, token)):
                await asyncio.sleep(0.2)
    except TimeoutError:
        raise AssertionError(f"{found}\n{replica.log()[-3000:]}") from None
    return found


def run(body) -> None:
    asyncio.run(body())


def test_training_is_told_by_the_agent_of_rank_0_and_workers_by_each(folder):
    async def body():
        token = {"CONCERTINA_METRICS_TOKEN": "s3cret"}
        async with running(folder, 2, command(REPORTS), workers=2, **metrics(token=True), **token) as job:
            await job.begin(1, job[0], job[1])
            coordinator = await until(
                job[0], lambda found: found.get(("concertina_training_step", ""), 0) > 20, "s3cret"
            )
            assert coordinator["concertina_training_steps", ""] == 1000
            assert coordinator["concertina_training_loss", ""] == 1.0
            assert coordinator["concertina_training_tokens_per_second", ""] == 50.0
            assert coordinator["concertina_training_samples", ""] >= 8 * 20
            assert coordinator["concertina_training_step_seconds_count", ""] >= 15
            assert coordinator["concertina_training_step_seconds_sum", ""] > 15 * 0.02
            assert coordinator["concertina_agent_round", ""] == 1
            other = await until(job[1], lambda found: found[("concertina_worker_running", "")] == 2, "s3cret")
            for seen in (coordinator, other):
                assert seen["concertina_worker_cpu_seconds_total", ""] > 0
                assert seen["concertina_worker_resident_memory_bytes", ""] > 1 << 20
            assert not [name for name, _ in other if name.startswith("concertina_training_")]
            with pytest.raises(urllib.error.HTTPError, match="401"):
                await asyncio.to_thread(scraped, job[0])

            await job.begin(2, job[1], job[0])
            await until(job[1], lambda found: found.get(("concertina_training_step", ""), 0) > 2, "s3cret")
            left = await until(job[0], lambda found: found["concertina_agent_round", ""] == 2, "s3cret")
            kept, gone = ("concertina_training_step_seconds_count", ""), ("concertina_training_step", "")
            assert left[kept] >= coordinator[kept]
            assert gone not in left
            assert (
                left["concertina_worker_cpu_seconds_total", ""]
                >= coordinator["concertina_worker_cpu_seconds_total", ""]
            )

    run(body)


def test_a_command_that_tells_nothing_is_told_of_by_worker_where_that_is_asked_for(folder):
    async def body():
        async with running(folder, 1, command(SLEEPS), workers=2, **metrics(perRank=True)) as job:
            await job.begin(1, job[0])
            running_of_both = [("concertina_worker_running", place) for place in "01"]
            found = await until(job[0], lambda found: all(found.get(each) == 1 for each in running_of_both))
            assert [found["concertina_worker_rank", place] for place in "01"] == [0, 1]
            assert all(found["concertina_worker_resident_memory_bytes", place] > 1 << 20 for place in "01")
            assert ("concertina_worker_running", "") not in found
            assert not [name for name, _ in found if name.startswith("concertina_training_")]
            os.kill(job[0].worker_pids()[1], 9)
            found = await until(job[0], lambda found: found["concertina_worker_running", "1"] == 0)
            assert found["concertina_worker_running", "0"] == 1

    run(body)


def test_what_goes_to_durable_storage_is_counted_and_what_it_refuses(folder):
    bucket = folder / "bucket"
    environment = {"TINY_BUCKET": str(bucket), "CONCERTINA_CHECKPOINT": json.dumps({"uri": "s3://b/run"}), **metrics()}
    tiny = ["--bundled", "--package", "tiny"]

    async def body():
        async with running(folder, 2, tiny, TINY_STEPS="1000", TINY_PAUSE="0.05", **environment) as job:
            await job.until(job[0], lambda report: report.storage and report.storage.state == "Error")
            await job.begin(1, job[0], job[1])
            await job.until(job[0], trained(5))
            bucket.mkdir()
            await job.call(job[0], p.Drain(UID, 1, "claim-1", "suspend", durable=True, grace_seconds=20))
            report = await job.until(job[0], lambda report: report.state == "drained")
            coordinator, member = [await asyncio.to_thread(scraped, replica) for replica in (job[0], job[1])]
            for seen in (coordinator, member):
                assert seen["concertina_checkpoint_shards_shipped_total", ""] >= 1
                assert seen["concertina_checkpoint_shipped_bytes_total", ""] > 100
                assert seen["concertina_checkpoint_ship_seconds_total", ""] > 0
                assert seen["concertina_checkpoint_storage_failures_total", ""] >= 1
            assert coordinator["concertina_training_checkpoint_step", ""] == report.storage.latest.step
            assert coordinator["concertina_training_snapshot_step", ""] >= 1
            assert ("concertina_training_checkpoint_step", "") not in member

    run(body)


def test_without_a_port_none_is_open_and_one_that_is_taken_stops_nothing(folder):
    async def body():
        async with running(folder, 1, command(REPORTS)) as job:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((host(job[0]), PORT), timeout=10)
            with socket.create_server((host(job[0]), PORT)):
                job[0].environment.update(metrics())
                job[0].restart(command(REPORTS))
                await job.ready()
                await job.begin(1, job[0])
                await job.until(job[0], lambda report: report.progress and report.progress.step > 3, "no steps")
            assert [each["port"] for each in job[0].events() if each["event"] == "metrics_not_served"] == [PORT]

    run(body)
