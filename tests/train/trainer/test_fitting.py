"""Settings that a job leaves out: chosen for the first round, and the same in every later one."""

import pytest

from builders.train import families, node
from concertina_protocol import Restore
from concertina_trainer.config.parallelism import ParallelismConfig
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.fitting import DEVICE_BYTES, LEAST_RANKS
from concertina_trainer.ladder import GIB, usable_memory
from concertina_trainer.planning.choice import Job
from concertina_trainer.planning.choice import chosen as chosen_by_plan

LARGE = str(16 << 30)
KEPT = {"memory.activations": "Keep", "memory.reshardAfterForward": "Never", "compile": "Never"}


@pytest.fixture
def absent(trainer):
    return {name: value for name, value in trainer.items() if name != "microBatchSize"} | {"steps": 24}


def chosen(outcome):
    assert outcome.losses, outcome.output
    return dict(outcome.progress[-1].settings)


def test_without_a_gpu_a_job_has_the_same_settings_in_every_round(folder, parent, absent):
    job = node.Job(folder, parent, absent)
    first = job.run(2, script=node.Script(drain=(5, False)))
    assert chosen(first) == {"microBatchSize": "8", **KEPT}
    job.trainer = {**absent, "microBatchSize": 2, "memory": {"activations": "Recompute"}}
    last = job.run(1, job.newest())
    assert set(last.codes.values()) == {0}, last.output
    still = {"memory.reshardAfterForward": "Never", "compile": "Never"}
    assert chosen(last) == still, "what the job sets is never changed"
    assert "microBatchSize 8 -> 2" in last.output


@pytest.mark.long(
    law="tests/train/trainer/test_fitting.py::test_without_a_gpu_a_job_has_the_same_settings_in_every_round"
)
def test_a_job_keeps_the_settings_that_fit_its_first_devices(folder, parent, absent, tmp_path):
    """The micro-batch is the whole batch of the smallest world. A CPU would have another one."""
    job = node.Job(folder, parent, absent, {"uri": f"file://{tmp_path}/checkpoints"})
    job.environment = {DEVICE_BYTES: LARGE, LEAST_RANKS: "1"}
    first = job.run(2, script=node.Script(drain=(5, False)))
    assert chosen(first) == {"microBatchSize": "7", **KEPT}
    assert "settings for 1 ranks, whose smallest device has 16.0 GiB: microBatchSize 7" in first.output
    job.environment = {}
    second = job.run(3, job.newest(), node.Script(drain=(10, True)))
    assert chosen(second) == chosen(first)
    assert "spec.trainer has changed" not in second.output
    durable = second.durable[-1]
    last = job.run(1, Restore("Storage", durable.step, durable=durable))
    assert set(last.codes.values()) == {0}, last.output
    assert chosen(last) == chosen(first)

    other = node.Job(
        folder / "other", parent, absent, {"uri": f"file://{tmp_path}/other", "resumeFrom": durable.uri}, "u2"
    )
    other.environment = {DEVICE_BYTES: "1000"}
    refused = other.run(1)
    assert {fault.reason for fault in refused.faults.values()} == {"DoesNotFit"}, refused.output
    assert "microBatchSize 7" in refused.faults[0].message, "the settings of the run that it continues"


def test_a_job_that_cannot_fit_is_refused_with_what_would_make_it_fit(folder, parent, trainer):
    model = {"layers": 4, "dim": 64, "heads": 2, "kvHeads": 1, "sequenceLength": 2048}
    memory = {"activations": "Keep"}
    job = node.Job(folder, parent, {**trainer, "model": model, "memory": memory, "globalBatchSize": 64,
                                    "microBatchSize": 64})  # fmt: skip
    job.environment = {DEVICE_BYTES: str(1 << 30), LEAST_RANKS: "1"}
    outcome = job.run(2)
    assert outcome.losses == {}
    assert set(outcome.codes.values()) == {78}
    assert {fault.reason for fault in outcome.faults.values()} == {"DoesNotFit"}
    message = outcome.faults[0].message
    assert "needs 1.6 GiB on a device with microBatchSize 64, memory.activations Keep" in message
    assert "but the smallest device has 1.0 GiB, with 1 ranks" in message
    assert "set microBatchSize 16, memory.activations Keep, memory.reshardAfterForward Never (0.4 GiB)" in message
    assert "train on at least 2 GPUs: raise elastic.minReplicas (0.8 GiB)" in message


@pytest.mark.long(
    law="tests/train/trainer/test_fitting.py::test_a_job_that_cannot_fit_is_refused_with_what_would_make_it_fit"
)
def test_a_described_model_that_cannot_fit_is_refused_too(folder, parent, trainer):
    """Three heads are no whole number for each rank of a tensor group of two, which is no remedy then."""
    model = families.made("qwen3", vocab_size=256, num_attention_heads=6, num_key_value_heads=3)
    model.save_pretrained(folder / "qwen")
    section = {"from": str(folder / "qwen"), "sequenceLength": 32}
    job = node.Job(folder / "job", parent, {**trainer, "model": section})
    job.environment = {DEVICE_BYTES: "1000"}
    outcome = job.run(1)
    assert {fault.reason for fault in outcome.faults.values()} == {"DoesNotFit"}, outcome.output


@pytest.mark.long(
    law="tests/train/trainer/test_fitting.py::test_a_job_that_cannot_fit_is_refused_with_what_would_make_it_fit"
)
def test_the_planned_peak_of_what_is_chosen_fits_and_more_memory_never_chooses_less():
    model = {"layers": 24, "dim": 256, "heads": 4, "sequenceLength": 2048, "vocabSize": 8192}
    config = TrainerConfig.model_validate({"data": {"uri": "/none"}, "globalBatchSize": 64, "model": model})
    job, places = Job(config, ParallelismConfig(), 2), []
    for gibibytes in (1, 2, 3, 6, 12, 24):
        found = chosen_by_plan(job, gibibytes * GIB)
        assert found.peak == job.peak(found.choice) <= usable_memory(gibibytes * GIB)
        places.append(job.ladder().index(found.choice))
    assert places == sorted(places, reverse=True)
    assert len(set(places)) > 2, places
