"""A run as its tracker shows it, through rounds, kills and a new lead; the files of TensorBoard are read back."""

import asyncio
import json
import os

import pytest

from builders.train.replicas import newest_complete, running, trained

event_accumulator = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
)


def scalars(folder):
    """Every point that TensorBoard shows, by tag: (step, value)."""
    found = event_accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    texts = {tag: found.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in found.Tags()["tensors"]}
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}, texts


def test_one_run_through_rounds_and_a_new_lead_has_each_step_once(folder, trainer, tmp_path):
    steps = 40
    environment = {
        "CONCERTINA_TRAINER": json.dumps({**trainer, "steps": steps}),
        "CONCERTINA_CACHE": os.environ["CONCERTINA_CACHE"],
        "CONCERTINA_TRACKING": json.dumps({"backend": "TensorBoard", "uri": f"file://{tmp_path}/runs"}),
    }

    async def body():
        async with running(folder, 3, ["--bundled"], **environment) as job:
            await job.begin(1, job[0], job[1], job[2])
            await job.until(job[0], trained(10))
            os.kill(job[1].worker_pids()[1], 9)
            await job.until(job[0], lambda r: r.failures)
            prepared = await job.prepare(2, job[1], job[0], job[2])
            restore = newest_complete(prepared)
            await job.assign(job.assignment(prepared, restore))
            await job.until(job[1], lambda r: r.round == 2 and trained(restore.step + 5)(r))
            job[2].kill()
            await job.until(job[1], lambda r: r.failures)
            prepared = await job.prepare(3, job[1], job[0])
            await job.assign(job.assignment(prepared, newest_complete(prepared)))
            await job.until(job[1], lambda r: r.state == "succeeded", "never succeeded")
            for one in (job[0], job[1]):
                assert await asyncio.to_thread(one.process.wait, 60) == 0

    asyncio.run(body())
    (run,) = (tmp_path / "runs" / "test").iterdir()
    points, texts = scalars(run)
    assert [step for step, _ in points["loss"]] == list(range(1, steps + 1))
    assert [value for _, value in points["workers"]][-1] == 2.0
    assert points["samples"][-1] == (steps, steps * trainer["globalBatchSize"])
    assert texts["outcome/text_summary" if "outcome/text_summary" in texts else "outcome"] == "succeeded"
