"""A run that is killed and goes on in another layout each time has the losses of one worker that nothing happens to."""

import json

import pytest

from builders.train import node
from builders.train.chains import chains

HERE = "tests/train/trainer/test_layouts.py"
REASSOCIATION = 2e-4
"""As in test_resume: the same float32 numbers are added in another order."""
STEPS = 12
LAYOUTS = {
    "fsdp": (3, {}),
    "hsdp": (4, {"shard": 2}),
    "tensor": (2, {"tensor": 2}),
    "fsdp x tensor": (4, {"tensor": 2}),
    "hsdp x tensor": (4, {"tensor": 2, "shard": 1}),
    "async tensor": (2, {"tensor": 2, "asyncTensor": True}),
    "context": (4, {"context": 2}),
    "context x tensor": (4, {"context": 2, "tensor": 2}),
    "pipeline": (2, {"pipeline": 2}),
    "pipeline x fsdp": (4, {"pipeline": 2}),
    "pipeline x tensor": (4, {"pipeline": 2, "tensor": 2}),
    "interleaved x copies": (4, {"pipeline": 2, "schedule": "Interleaved1F1B", "shard": 1}),
}
CHAIN = ["pipeline x tensor", "fsdp", "context x tensor", "interleaved x copies"]
MORE = [
    ["pipeline", "pipeline x fsdp", "fsdp", "interleaved x copies"],
    ["fsdp", "fsdp x tensor", "context x tensor", "hsdp"],
    ["context", "tensor", "async tensor", "hsdp x tensor"],
]
SAME = "async tensor"
MORE_SAME = [
    "fsdp x tensor",
    "context x tensor",
    "pipeline x tensor",
    "hsdp",
    "interleaved x copies",
    "experts",
    "experts x copies",
]
"""Layouts in which a process has another place in an equal mesh if the ranks are in another order."""
OF_EXPERTS = {"experts": (4, {"expert": 4}), "experts x copies": (4, {"expert": 2, "shard": 2})}
EXPERTS = {"count": 4, "hiddenDim": 24, "shared": 1, "firstDense": 1, "balanceLoss": 0.5, "biasRate": 0.01}


@pytest.fixture(scope="module")
def wide(trainer):
    """With as many heads as tensor parallelism needs."""
    return {**trainer, "steps": STEPS, "model": {**trainer["model"], "layers": 4, "heads": 4, "kvHeads": 2}}


@pytest.fixture(scope="module")
def reference(folder_of_module, parent, wide):
    return node.Job(folder_of_module, parent, wide).run(world=1).losses


@pytest.mark.parametrize(
    ("chain", "stays"), chains(f"{HERE}::test_each_layout_goes_on_from_the_one_before", CHAIN, *MORE)
)
def test_each_layout_goes_on_from_the_one_before(folder, parent, wide, reference, chain, stays):
    """One rank is killed; the others stay in their process, in the reverse order of ranks.

    In the cases `forked`, each round has new processes.
    """
    job, losses, restore = node.Job(folder, parent, wide, stays=stays), {}, node.FRESH
    for i, name in enumerate(chain):
        world, parallelism = LAYOUTS[name]
        job.environment["CONCERTINA_PARALLELISM"] = json.dumps(parallelism)
        last = i == len(chain) - 1
        script = node.Script() if last else node.Script(kill=(3 * (i + 1), (world - 1,)))
        outcome = job.run(world, restore, script)
        assert outcome.losses, outcome.output
        losses |= outcome.losses
        if last:
            assert set(outcome.codes.values()) == {0}, outcome.output
        else:
            restore = job.newest()
    assert list(losses) == list(range(1, STEPS + 1))
    assert losses == pytest.approx(reference, rel=REASSOCIATION)


@pytest.fixture(scope="module")
def with_experts(wide):
    return {**wide, "model": {**wide["model"], "experts": EXPERTS}}


@pytest.fixture(scope="module")
def reference_with_experts(folder_of_module, parent, with_experts):
    return node.Job(folder_of_module / "experts", parent, with_experts).run(world=1).losses


@pytest.mark.parametrize(
    "name",
    [
        SAME,
        *(
            pytest.param(
                name, marks=pytest.mark.long(law=f"{HERE}::test_the_same_layout_goes_on_in_another_order[{SAME}]")
            )
            for name in MORE_SAME
        ),
    ],
)
def test_the_same_layout_goes_on_in_another_order(folder, parent, request, name):
    """No process ends, and each has another rank in each round.

    There are two rounds in the gate, and a third one in the long suite.
    """
    world, parallelism = {**LAYOUTS, **OF_EXPERTS}[name]
    fixtures = ("with_experts", "reference_with_experts") if name in OF_EXPERTS else ("wide", "reference")
    trainer, reference = map(request.getfixturevalue, fixtures)
    job, losses, restore = node.Job(folder, parent, trainer, stays=True), {}, node.FRESH
    job.environment["CONCERTINA_PARALLELISM"] = json.dumps(parallelism)
    pids = set()
    for step in (6, None) if name == SAME else (4, 8, None):
        outcome = job.run(world, restore, node.Script(drain=step and (step, False)))
        assert set(outcome.codes.values()) == {0}, outcome.output
        pids |= set(outcome.pids.values())
        losses |= outcome.losses
        restore = job.newest()
    assert len(pids) == world
    assert list(losses) == list(range(1, STEPS + 1))
    assert losses == pytest.approx(reference, rel=REASSOCIATION)
