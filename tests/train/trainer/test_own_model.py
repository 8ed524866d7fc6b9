"""A model of a user's own in the trainer's frame: plain gradients in every world, exact restores, refusals."""

import pytest
import torch
import torch.nn.functional as F

from builders.programs import PROGRAMS
from builders.train import node
from builders.train.gradients import whole_gradient
from concertina_state.format.read_plan import Box
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.data.read.reader import Reader
from concertina_trainer.model.initial import usual

REASSOCIATION = 2e-4
"""As in test_resume.py."""


@pytest.fixture(scope="module")
def own(trainer):
    """The trainer's configuration with a model of tests/programs/workers/own.py."""
    return lambda name="spec", **options: {
        **trainer, "model": {"entrypoint": f"workers.own:{name}", "options": options, "sequenceLength": 32}
    }  # fmt: skip


@pytest.fixture
def programs(monkeypatch):
    monkeypatch.syspath_prepend(str(PROGRAMS))


def plain(trainer):
    """Gradients of one plain model and a whole batch, and the loss."""
    from workers.own import Model, logits

    config = TrainerConfig.model_validate(trainer)
    reader = Reader(config.data, 32, config.seed)
    model = Model(reader.vocab_size, **config.model.options)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(usual(name, p.shape, Box((0,) * p.dim(), tuple(p.shape)), config.seed))
    tokens = torch.from_numpy(reader.read(100, 100 + config.global_batch_size))
    loss = F.cross_entropy(logits(model, tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}, loss.item()


WORLDS = {"1": (1, {}), "2": (2, {}), "hsdp": (4, {"shard": 2}), "3": (3, {}), "copies": (2, {"shard": 1})}
LAW = "tests/train/trainer/test_own_model.py::test_gradients_are_a_plain_model_s_in_every_world[hsdp]"


@pytest.mark.parametrize(
    "world",
    ["1", "hsdp", *(pytest.param(each, marks=pytest.mark.long(law=LAW)) for each in ("2", "3", "copies"))],
)
def test_gradients_are_a_plain_model_s_in_every_world(parent, own, tmp_path, programs, world):
    size, parallelism = WORLDS[world]
    expected, loss = plain(own())
    found = whole_gradient(parent, own(), size, tmp_path, parallelism=parallelism)
    assert found["gradients"].keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found["gradients"][name], gradient, rtol=1e-4, atol=1e-7)
    assert found["loss"] == pytest.approx(loss, rel=1e-6)
    assert not found["late"], "the parent has not imported the job's model"


def test_killed_in_one_world_it_goes_on_in_another(folder, parent, own):
    whole = node.Job(folder / "whole", parent, own()).run(1)
    assert whole.codes == {0: 0}, whole.output
    job = node.Job(folder / "killed", parent, own())
    first = job.run(3, script=node.Script(kill=(5, (1,))))
    job.lose(1)
    resumed = job.run(2, job.newest())
    assert set(resumed.codes.values()) == {0}, resumed.output
    assert resumed.progress[-1].restored_from == "Memory"
    assert {**first.losses, **resumed.losses} == pytest.approx(whole.losses, rel=REASSOCIATION)
    assert whole.losses[12] < 0.9 * whole.losses[1], "it learns"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("raises", "raised KeyError"),
        ("mean", "not the sum of each prediction's loss times its weight"),
    ],
)
def test_what_is_refused_ends_the_round_with_a_sentence(folder, parent, own, name, says):
    outcome = node.Job(folder, parent, own(name)).run(1)
    assert outcome.codes == {0: 78}, outcome.output
    assert says in outcome.faults[0].message
