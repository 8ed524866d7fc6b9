"""The host waits for the device once a step, and once more for each layer whose experts are on several ranks."""

import json
import re

import pytest

from builders.train import node

HERE = "tests/train/trainer/test_host_waits.py"
LAW = f"{HERE}::test_the_host_waits_once_a_step[dense]"
LAYERS, STEPS = 2, 6
EXPERTS = {"count": 4, "hiddenDim": 24, "shared": 1, "biasRate": 0.01}
CASES = {
    "dense": (1, {}, {}, 1),
    "experts on each rank": (1, {"experts": EXPERTS}, {}, 1),
    "experts on two ranks": (2, {"experts": EXPERTS}, {"expert": 2}, 1 + LAYERS),
}
"""Ranks, model, parallelism, and waits in a step."""


def waits(job, world):
    """Return the numbers of waits of all steps but the first, in which torch prepares itself."""
    outcome = job.run(world)
    assert set(outcome.codes.values()) == {0}, outcome.output
    found = [(int(step), int(count)) for step, count in re.findall(r"after step (\d+) waits: (\d+)", outcome.output)]
    assert len(found) == STEPS * world, outcome.output
    return {count for step, count in found if step > 1}


def job(folder, parent, trainer, model, **environment):
    """Return a job with one microbatch a step, and with snapshots and documents in each of them."""
    model = {**trainer["model"], "layers": LAYERS, **model}
    data = {**trainer["data"], "documents": "Masked"}
    trainer = {**trainer, "steps": STEPS, "globalBatchSize": 2, "microBatchSize": 2, "model": model, "data": data}
    job = node.Job(folder, parent, trainer)
    job.worker, job.environment = "workers.waits:main", environment
    return job


@pytest.mark.parametrize(
    "case", [name if name == "dense" else pytest.param(name, marks=pytest.mark.long(law=LAW)) for name in CASES]
)
def test_the_host_waits_once_a_step(folder, parent, trainer, case):
    """The host waits for the loss, the norm and the flags at once, and per layer for the number of exchanged rows."""
    world, model, parallelism, expected = CASES[case]
    environment = {"CONCERTINA_PARALLELISM": json.dumps(parallelism)}
    assert waits(job(folder / "job", parent, trainer, model, **environment), world) == {expected}


@pytest.mark.long(law=LAW)
def test_another_wait_is_counted(folder, parent, trainer):
    assert waits(job(folder / "job", parent, trainer, {}, PLANTED="1"), 1) == {2}
