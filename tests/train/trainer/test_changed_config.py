"""A run that resumes with another spec.trainer: refused for another model, told for another way to train it."""

import pytest

from builders.train import node
from concertina_protocol import FailureReason
from concertina_protocol.worker_channel import BAD_INPUT_EXIT

STEP = 4
MODEL = pytest.mark.long(
    law="tests/train/trainer/test_changed_config.py::test_another_model_order_of_data_or_optimizer_is_refused_for_good"
)


@pytest.fixture(scope="module")
def drained(folder_of_module, parent, trainer):
    """Return a job that has a snapshot of step STEP, and the snapshot to resume from."""
    job = node.Job(folder_of_module, parent, trainer)
    outcome = job.run(2, script=node.Script(drain=(STEP - 1, False)))
    assert set(outcome.codes.values()) == {0}, outcome.output
    return job, job.newest()


def resumed(drained, change, world=2):
    """Return the outcome of a round that resumes with these fields changed."""
    job, restore = drained
    trainer = {**job.trainer, **change, "model": {**job.trainer["model"], **change.get("model", {})}}
    job.trainer, before = trainer, job.trainer
    try:
        return job.run(world, restore)
    finally:
        job.trainer = before


@pytest.mark.parametrize(
    ("change", "said", "world"),
    [
        ({"model": {"ropeTheta": 100.0}}, "model.ropeTheta was 10000.0 and is now 100.0", 3),
        pytest.param({"model": {"heads": 1}}, "model.heads was 2 and is now 1", 2, marks=MODEL),
        pytest.param({"model": {"normEpsilon": 1e-3}}, "model.normEpsilon was 1e-05 and is now 0.001", 2, marks=MODEL),
        ({"seed": 8}, "seed was 7 and is now 8", 2),
        ({"optimizer": {"name": "RAdam"}}, 'optimizer.name was "AdamW" and is now "RAdam"', 2),
    ],
)
def test_another_model_order_of_data_or_optimizer_is_refused_for_good(drained, change, said, world):
    """Names and shapes of all tensors are the same."""
    outcome = resumed(drained, change, world)
    assert BAD_INPUT_EXIT in outcome.codes.values(), outcome.output
    assert outcome.faults
    assert not outcome.losses
    for fault in outcome.faults.values():
        assert fault.reason == FailureReason.INVALID_INPUT
        assert said in fault.message
        assert "Set the fields back to resume, or start a new run under another checkpoint.uri" in fault.message


def test_another_schedule_and_batch_are_taken_and_told(drained):
    change = {"optimizer": {"learningRate": 0.02, "warmupSteps": 4}, "globalBatchSize": 6, "steps": 8}
    outcome = resumed(drained, change)
    assert set(outcome.codes.values()) == {0}, outcome.output
    step = drained[1].step
    told = "globalBatchSize 7 -> 6; optimizer.learningRate 0.01 -> 0.02; steps 12 -> 8"
    assert f"spec.trainer has changed since step {step}: {told}\n" in outcome.output
    assert outcome.output.count("spec.trainer has changed") == 1, "once for all ranks"
    assert list(outcome.losses) == list(range(step + 1, 9))
