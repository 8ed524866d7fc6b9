"""Experts dealt out to ranks: loss, every gradient, loads and biases are those of one process that computes every
expert for every token; and a run that is killed goes on at another degree."""

import json

import pytest
import torch

from builders.train import node, routed, states
from builders.train.gradients import check, whole_gradient
from concertina_state.format.read_plan import Box
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.data.read.reader import Reader
from concertina_trainer.model.decoder import Decoder
from concertina_trainer.model.initial import initial_value

EXPERTS = {"count": 4, "hiddenDim": 24, "shared": 1, "firstDense": 1, "balanceLoss": 0.5, "biasRate": 0.01}
LAYOUTS = {
    "one": (1, {}),
    "fsdp": (3, {}),
    "ep 2": (2, {"expert": 2}),
    "ep 2 x fsdp": (4, {"expert": 2}),
    "ep 4": (4, {"expert": 4}),
    "ep 2 x copies": (4, {"expert": 2, "shard": 2}),
}


def with_experts(trainer, **fields):
    return {**trainer, "model": {**trainer["model"], "experts": {**EXPERTS, **fields}}}


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
    return {dtype: written_out(with_experts(trainer), dtype) for dtype in (torch.float32, torch.float64)}


@pytest.mark.parametrize(
    ("layout", "dtype"), [*((layout, torch.float64) for layout in LAYOUTS), ("ep 2 x fsdp", torch.float32)]
)
def test_every_layout_has_the_gradients_of_one_process(parent, trainer, references, tmp_path, layout, dtype):
    """In float32 once: torch's grouped products know no float64."""
    world, parallelism = LAYOUTS[layout]
    loss, gradients, loads, biases = references[dtype]
    found = whole_gradient(parent, with_experts(trainer), world, tmp_path, parallelism=parallelism, dtype=dtype)
    check(found, gradients, loss)
    assert found["loads"] == loads
    assert min(loads) < max(loads), "loads are uneven"
    for bias, expected in zip(found["biases"].values(), biases, strict=True):
        torch.testing.assert_close(bias, expected.float())


CHAIN = ("ep 2", "one", "ep 4", "ep 2 x copies")
STEPS = 12


def test_killed_it_goes_on_at_another_degree(folder, parent, trainer):
    """With the losses, and the biases, of one worker that nothing happens to."""
    trainer = with_experts(trainer)
    alone = node.Job(folder / "alone", parent, trainer)
    reference = alone.run(1)
    assert reference.codes == {0: 0}, reference.output
    job, losses, restore = node.Job(folder / "killed", parent, trainer), {}, node.FRESH
    for i, name in enumerate(CHAIN):
        world, parallelism = LAYOUTS[name]
        job.environment["CONCERTINA_PARALLELISM"] = json.dumps(parallelism)
        last = i == len(CHAIN) - 1
        script = node.Script() if last else node.Script(kill=(3 * (i + 1), tuple(range(world))))
        outcome = job.run(world, restore, script)
        assert outcome.losses, outcome.output
        losses |= outcome.losses
        restore = job.newest()
    assert set(outcome.codes.values()) == {0}, outcome.output
    assert list(losses) == list(range(1, STEPS + 1))
    assert losses == pytest.approx(reference.losses, rel=2e-4)
    [(name, bias)] = [(name, value) for name, value in states.whole(alone).items() if name.endswith("router.bias")]
    assert bias.any(), "it has moved"
    torch.testing.assert_close(states.whole(job)[name], bias)
    told = outcome.progress[-1]
    assert 1 <= told.metrics["busiest_expert"] < EXPERTS["count"]
    assert told.seconds["all_to_all"] > 0
