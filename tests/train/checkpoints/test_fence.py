"""The storage fence, seen from the member that it shuts out: a world that was cut off goes on and tries to publish."""

import asyncio
import json
import os

import pytest

import concertina_protocol as p
from builders.train.replicas import running, trained
from concertina_state.checkpoints.latest import read_latest
from concertina_state.objects.prefix import ObjectPrefix


@pytest.mark.long(
    law="tests/train/checkpoints/test_races.py::test_latest_never_goes_back_while_two_publish_at_the_same_time[s3]"
)
def test_a_world_that_was_cut_off_cannot_move_latest_once_a_higher_round_has_published(folder, trainer, s3, tmp_path):
    """Train in two replicas that can't reach each other, as in a partition of the network.

    One continues in round 1, and the operator starts round 2 with the other, from storage. Agents, workers, uploaders
    and the S3 server are real.
    """
    uri = f"s3://train/{tmp_path.name}"
    environment = {
        "CONCERTINA_TRAINER": json.dumps({**trainer, "steps": 1_000_000}),
        # Kept, all of them: at steps of a millisecond the zombie would delete what the heir is about to read.
        "CONCERTINA_CHECKPOINT": json.dumps({"uri": uri, "everySteps": 5, "keep": 1000}),
        "CONCERTINA_CACHE": os.environ["CONCERTINA_CACHE"],
        **s3.environment(),
    }
    latest = lambda: read_latest(ObjectPrefix(uri))  # noqa: E731

    async def body():
        async with running(folder, 2, ["--bundled"], **environment) as job:
            zombie, heir = job[0], job[1]
            await job.begin(1, zombie)
            report = await job.until(zombie, lambda r: r.storage and r.storage.latest, "never published")
            assert latest().round == 1

            prepared = await job.prepare(2, heir)
            restore = p.Restore("Storage", (durable := latest()).step, durable=durable)
            await job.assign(job.assignment(prepared, restore))
            await job.until(heir, lambda r: r.storage.latest and r.storage.latest.round == 2, "never published")
            passed = latest()
            assert passed.round == 2

            # The zombie has heard of nothing; its step is far beyond that of the round that counts.
            beyond = zombie.report.progress.step + 20
            await job.until(zombie, trained(beyond))
            now = latest()
            assert (now.round, now.step >= passed.step) == (2, True)
            refused = "LATEST is already at round 2"
            report = await job.until(zombie, lambda r: refused in r.storage.message, "it was not refused")
            assert (report.round, report.storage.state) == (1, "Error")
            await job.until(heir, lambda r: r.storage.latest.step > now.step, "the heir was held up")

    asyncio.run(body())
