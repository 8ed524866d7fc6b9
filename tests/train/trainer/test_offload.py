"""With the state in host memory a run has the very bits that it has without, in each layout, whatever it starts from.

On CPU device and host are one: what this can't show is in tests/gpu, and in tests/unit/trainer/test_host_state.py."""

import json

import pytest
import torch

from builders.train import node, states
from concertina.demo import text
from concertina_protocol import Restore
from concertina_trainer.data.build.build import build
from concertina_trainer.data.build.recipe import Recipe

STEPS = 5
REASSOCIATION = 2e-4
"""As in test_resume.py."""
EXPERTS = {"count": 4, "hiddenDim": 24, "shared": 1, "firstDense": 1, "biasRate": 0.01}
MUON = {"optimizer": {"name": "Muon", "learningRate": 0.01, "warmupSteps": 4}}
FREED = {"microBatchSize": 1, "memory": {"reshardAfterForward": "Always"}}
"""Each microbatch's gradients are added up in host memory."""
CASES = {
    "fsdp": (3, {}, {}),
    "fsdp, freed": (2, {}, FREED),
    "hsdp, freed": (4, {"shard": 2}, FREED),
    "bitwise": (2, {}, {"determinism": "Bitwise", "globalBatchSize": 8}),
    "copies x tensor": (4, {"shard": 1, "tensor": 2}, {}),
    "context": (2, {"context": 2}, {}),
    "pipeline": (2, {"pipeline": 2}, {}),
    "pipeline x fsdp, freed": (4, {"pipeline": 2}, FREED),
    "interleaved x copies": (4, {"pipeline": 2, "schedule": "Interleaved1F1B", "shard": 1}, {}),
    "zero bubble": (2, {"pipeline": 2, "schedule": "InterleavedZeroBubble"}, {}),
    "experts x copies": (4, {"expert": 2, "shard": 2}, {"experts": EXPERTS}),
    "experts x tensor": (4, {"expert": 2, "tensor": 2}, {"experts": EXPERTS}),
    "muon, copies x tensor": (4, {"shard": 1, "tensor": 2}, MUON),
    "muon, experts": (3, {}, {**MUON, "experts": EXPERTS}),
}
LAW = "tests/train/trainer/test_offload.py::test_the_bits_are_the_same[fsdp, freed]"
QUICK = ("fsdp, freed", "pipeline")


def offloaded(trainer):
    return {**trainer, "memory": {**trainer.get("memory", {}), "offload": "State"}}


def begun(folder, parent, trainer, parallelism):
    job = node.Job(folder, parent, trainer)
    job.environment["CONCERTINA_PARALLELISM"] = json.dumps(parallelism)
    return job


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name].view(torch.int32), value.view(torch.int32)), name


@pytest.fixture(scope="module")
def wide(trainer):
    """With as many heads and layers as the layouts need."""

    def changed(experts=None, **fields):
        model = {**trainer["model"], "layers": 4, "heads": 4, "kvHeads": 2}
        model |= {"experts": experts} if experts else {}
        return {**trainer, "steps": STEPS, "model": model, **fields}

    return changed


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.long(law=LAW)) for case in CASES]
)
def test_the_bits_are_the_same(folder, parent, wide, case):
    """Of losses, weights, moments and biases."""
    world, parallelism, changed = CASES[case]
    trainer = wide(**changed)
    whole, job = (begun(folder / name, parent, config, parallelism)
                  for name, config in (("a", trainer), ("b", offloaded(trainer))))  # fmt: skip
    expected, found = whole.run(world), job.run(world)
    assert set(found.codes.values()) == {0}, found.output
    assert list(found.losses) == list(range(1, STEPS + 1))
    assert found.losses == expected.losses
    same(states.whole(job), states.whole(whole))


def test_a_state_moves_to_the_host_and_back(folder, parent, wide):
    """Kill a run that continues from node memory, and stop it so that it continues from storage.

    The results have the bits of an uninterrupted run.
    """
    plain = wide(steps=20)
    whole = node.Job(folder / "a", parent, plain)
    expected = whole.run(2).losses
    job = node.Job(folder / "b", parent, plain, {"uri": f"file://{folder}/checkpoints", "everySteps": 100})
    first = job.run(2, script=node.Script(kill=(3, (0, 1))))
    job.trainer = offloaded(plain)
    second = job.run(2, job.newest(), node.Script(drain=(4, True)))
    assert second.progress[-1].restored_from == "Memory"
    durable = job.durable = second.durable[-1]
    for rank in range(2):
        job.lose(rank)
    job.trainer = plain
    third = job.run(2, Restore("Storage", durable.step, durable=durable))
    assert set(third.codes.values()) == {0}, third.output
    assert third.progress[-1].restored_step == durable.step
    assert {**first.losses, **second.losses, **third.losses} == expected
    same(states.whole(job), states.whole(whole))


OTHERS = {
    "fsdp": (3, {}),
    "copies x tensor": (4, {"shard": 1, "tensor": 2}),
    "pipeline x fsdp": (4, {"pipeline": 2}),
    "interleaved x copies": (4, {"pipeline": 2, "schedule": "Interleaved1F1B", "shard": 1}),
}
GOES_ON = "tests/train/trainer/test_offload.py::test_a_state_moves_to_the_host_and_back"


@pytest.mark.long(law=GOES_ON)
@pytest.mark.parametrize("first", [False, True], ids=["device first", "host first"])
def test_killed_it_goes_on_elsewhere_in_another_layout(folder, parent, wide, first):
    plain = wide(steps=3 * len(OTHERS))
    expected = node.Job(folder / "alone", parent, plain).run(1).losses
    job, losses, restore = node.Job(folder / "killed", parent, plain), {}, node.FRESH
    for i, (world, parallelism) in enumerate(OTHERS.values()):
        job.environment["CONCERTINA_PARALLELISM"] = json.dumps(parallelism)
        job.trainer = offloaded(plain) if (i % 2 == 0) is first else plain
        last = i == len(OTHERS) - 1
        outcome = job.run(world, restore, None if last else node.Script(kill=(3 * (i + 1), tuple(range(world)))))
        assert outcome.losses, outcome.output
        losses |= outcome.losses
        restore = job.newest()
    assert set(outcome.codes.values()) == {0}, outcome.output
    assert losses == pytest.approx(expected, rel=REASSOCIATION)


OWN = {"entrypoint": "workers.own:constant", "options": {}, "sequenceLength": 32}
"""With a buffer."""


@pytest.mark.long(law=LAW)
@pytest.mark.parametrize(("world", "parallelism"), [(3, {}), (2, {"shard": 1})], ids=["fsdp", "copies"])
def test_so_are_those_of_a_model_of_one_s_own(folder, parent, trainer, world, parallelism):
    plain = {**trainer, "steps": STEPS, "model": OWN}
    whole, job = (begun(folder / name, parent, config, parallelism)
                  for name, config in (("a", plain), ("b", offloaded(plain))))  # fmt: skip
    expected, found = whole.run(world), job.run(world)
    assert set(found.codes.values()) == {0}, found.output
    assert found.losses == expected.losses
    same(states.whole(job), states.whole(whole))


@pytest.mark.long(law=LAW)
def test_so_are_evaluations_and_digests_see_nothing(folder, parent, trainer, tmp_path):
    out = str(tmp_path / "data")
    (tmp_path / "text").mkdir()
    list(build(text.write(tmp_path / "text", 30, 20_000), out, 300_000, Recipe(validation=0.3)))
    plain = {
        **trainer, "steps": STEPS, "data": {"uri": out}, "evaluation": {"everySteps": 2, "sequences": 9},
        "anomalies": {"corruptionCheckSteps": 1},
    }  # fmt: skip
    expected, found = (node.Job(folder / name, parent, config).run(2)
                       for name, config in (("a", plain), ("b", offloaded(plain))))  # fmt: skip
    assert set(found.codes.values()) == {0}, found.output
    told, without = ({p.evaluated.step: p.evaluated.loss for p in outcome.progress if p.evaluated}
                     for outcome in (found, expected))  # fmt: skip
    assert told == without
    assert list(told) == [2, 4, 5]
    assert found.losses == expected.losses
