"""Test experts that are divided among ranks.

Loss, gradients, loads and biases are those of one process that computes every expert for every token. A run that is
killed continues with another degree.
"""

import json

import pytest
import torch

from builders.train import node, routed, states
from builders.train.chains import chains
from builders.train.gradients import check, whole_gradient
from concertina_state.format.read_plan import Box
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.data.read.sequence_reader import Reader
from concertina_trainer.model.decoder import Decoder
from concertina_trainer.model.initial import initial_value

EXPERTS = {
    "count": 4, "hiddenDim": 24, "shared": 1, "sharedGate": True, "firstDense": 1, "shareScale": 2.5,
    "balanceLoss": 0.5, "biasRate": 0.01,
}  # fmt: skip
LAYOUTS = {
    "one": (1, {}),
    "fsdp": (3, {}),
    "ep 2": (2, {"expert": 2}),
    "ep 2 x fsdp": (4, {"expert": 2}),
    "ep 4": (4, {"expert": 4}),
    "ep 2 x copies": (4, {"expert": 2, "shard": 2}),
}

BESIDE = {
    "context": (2, {"context": 2}),
    "ep 2 x context": (4, {"expert": 2, "context": 2}),
    "ep 4 x context": (4, {"expert": 4, "context": 2}),
    "ep 2 x context x copies": (4, {"expert": 2, "context": 2, "shard": 1}),
    "pipeline": (2, {"pipeline": 2}),
    "ep 2 x pipeline": (4, {"expert": 2, "pipeline": 2}),
    "ep 2 x GPipe": (4, {"expert": 2, "pipeline": 2, "schedule": "GPipe"}),
    "ep 2 x interleaved": (4, {"expert": 2, "pipeline": 2, "schedule": "Interleaved1F1B"}),
    "zero bubble": (2, {"pipeline": 2, "schedule": "InterleavedZeroBubble"}),
    "ep 2 x zero bubble": (4, {"expert": 2, "pipeline": 2, "schedule": "InterleavedZeroBubble"}),
    "ep 2 x pipeline x context": (4, {"expert": 2, "pipeline": 2, "context": 2}),
    "tensor": (2, {"tensor": 2}),
    "fsdp x tensor": (4, {"tensor": 2}),
    "ep 2 x tensor": (4, {"expert": 2, "tensor": 2}),
    "ep 4 x tensor": (4, {"expert": 4, "tensor": 2}),
    "async tensor": (2, {"tensor": 2, "asyncTensor": True}),
    "ep 2 x async tensor": (4, {"expert": 2, "tensor": 2, "asyncTensor": True}),
    "ep 2 x pipeline x async tensor": (4, {"expert": 2, "pipeline": 2, "tensor": 2, "asyncTensor": True}),
    "ep 2 x tensor x copies": (4, {"expert": 2, "tensor": 2, "shard": 1}),
    "ep 4 x context x tensor": (4, {"expert": 4, "context": 2, "tensor": 2}),
    "ep 2 x pipeline x tensor": (4, {"expert": 2, "pipeline": 2, "tensor": 2}),
}
"""Beside the other dimensions, of a model that has heads and layers enough for them."""
LAW = "tests/train/trainer/test_experts.py::test_every_layout_has_the_gradients_of_one_process[ep 2 x context, float64]"
QUICK = ("fsdp", "ep 2 x fsdp", "ep 2 x copies", "ep 2 x context", "tensor")
CASES = [
    pytest.param(layout, dtype, id=f"{layout}, {str(dtype).removeprefix('torch.')}", marks=marks)
    for layout, dtype in (*((layout, torch.float64) for layout in LAYOUTS | BESIDE), ("ep 2 x fsdp", torch.float32))
    for marks in [() if layout in QUICK else pytest.mark.long(law=LAW)]
]
"""In float32 once: torch's grouped products know no float64."""


def with_experts(trainer, **changed):
    """Return a configuration with experts. `changed` has changes of the model."""
    return {**trainer, "model": {**trainer["model"], "experts": EXPERTS, **changed}}


WIDE = {"layers": 5, "heads": 4, "kvHeads": 2}


def written_out(trainer, dtype):
    """Loss, gradients, loads and biases after a step of the whole batch."""
    config = TrainerConfig.model_validate(trainer)
    model = Decoder(config.model)
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            whole = Box((0,) * value.dim(), tuple(value.shape))
            value.copy_(initial_value(name, value.shape, whole, config.model, config.seed))
    layers = routed.write_out(model.to(dtype), config.model)
    reader = Reader(config.data, config.model.sequence_length, config.seed)
    tokens = torch.from_numpy(reader.read(100, 100 + config.global_batch_size))
    targets = tokens[:, 1:]
    weights = torch.full(targets.shape, 1 / targets.numel(), dtype=dtype)
    loss = model(tokens[:, :-1], None, targets, weights)
    (loss + sum(layer.loss for layer in layers)).backward()
    gradients = {name: p.grad for name, p in routed.names(model).items() if p.requires_grad}
    loads = [layer.loads for layer in layers]
    biases = [config.model.experts.bias_rate * torch.sign(each.mean() - each) for each in loads]
    return loss.item(), gradients, torch.cat(loads).tolist(), biases


@pytest.fixture(scope="module")
def references(trainer):
    """Of a model as the layouts alone need it, and of one as those beside them do, by whether it is wide and dtype."""
    models = {wide: with_experts(trainer, **(WIDE if wide else {})) for wide in (False, True)}
    dtypes = (torch.float32, torch.float64)
    return models, {(wide, dtype): written_out(models[wide], dtype) for wide in models for dtype in dtypes}


@pytest.mark.parametrize(("layout", "dtype"), CASES)
def test_every_layout_has_the_gradients_of_one_process(parent, references, tmp_path, layout, dtype):
    world, parallelism = (LAYOUTS | BESIDE)[layout]
    models, computed = references
    changed, (loss, gradients, loads, biases) = models[layout in BESIDE], computed[layout in BESIDE, dtype]
    found = whole_gradient(parent, changed, world, tmp_path, parallelism=parallelism, dtype=dtype)
    check(found, gradients, loss)
    assert found["loads"] == loads
    assert min(loads) < max(loads), "loads are uneven"
    for (_, bias), expected in zip(sorted(found["biases"].items()), biases, strict=True):
        torch.testing.assert_close(bias, expected.float())


ALONE = ("ep 2", "one", "ep 4", "ep 4", "ep 2 x copies")
GOES_ON = "tests/train/trainer/test_experts.py::test_killed_it_goes_on_in_another_layout"
MORE = (
    ("ep 2 x context", "ep 2 x interleaved", "fsdp", "ep 2 x pipeline x tensor"),
    ("ep 4 x tensor", "ep 2 x pipeline", "context", "ep 4 x context x tensor"),
)
STEPS = 12


@pytest.mark.parametrize(("chain", "stays"), chains(GOES_ON, ALONE, *MORE))
def test_killed_it_goes_on_in_another_layout(folder, parent, trainer, chain, stays):
    """With the losses, and the biases, of one worker that nothing happens to.

    One rank is killed. The others stay in their process, in the reverse order of ranks. In the cases `forked`, each
    round has new processes.
    """
    trainer = with_experts(trainer, **({} if chain is ALONE else WIDE))
    trainer = {**trainer, "data": {**trainer["data"], "groups": 1}}
    alone = node.Job(folder / "alone", parent, trainer)
    reference = alone.run(1)
    assert reference.codes == {0: 0}, reference.output
    job, losses, restore = node.Job(folder / "killed", parent, trainer, stays=stays), {}, node.FRESH
    for i, name in enumerate(chain):
        world, parallelism = (LAYOUTS | BESIDE)[name]
        job.environment["CONCERTINA_PARALLELISM"] = json.dumps(parallelism)
        last = i == len(chain) - 1
        script = node.Script() if last else node.Script(kill=(2 * (i + 1), (world - 1,)))
        outcome = job.run(world, restore, script)
        assert outcome.losses, outcome.output
        losses |= outcome.losses
        restore = job.newest()
    assert set(outcome.codes.values()) == {0}, outcome.output
    assert list(losses) == list(range(1, STEPS + 1))
    assert losses == pytest.approx(reference.losses, rel=2e-4)
    biases = {name: value for name, value in states.whole(alone).items() if name.endswith("router.bias")}
    found = states.whole(job)
    assert any(bias.any() for bias in biases.values()), "they have moved"
    for name, bias in biases.items():
        torch.testing.assert_close(found[name], bias)
    told = outcome.progress[-1]
    assert 1 <= told.metrics["busiest_expert"] < EXPERTS["count"]
    assert told.seconds["all_to_all"] > 0
