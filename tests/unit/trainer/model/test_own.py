"""Custom models that are refused before training starts, and the error messages."""

import pytest
import torch

from builders.programs import PROGRAMS
from concertina_state.errors import InvalidInput
from concertina_state.format.read_plan import Box
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.data.read.batches import Microbatch
from concertina_trainer.model.own import OwnModel, OwnSpec
from concertina_trainer.model.spec import DataShape


def own(name, options=None, memory=None):
    trainer = {"data": {"uri": "/data"}, "model": {"entrypoint": name, "options": options}, "memory": memory or {}}
    return OwnSpec(TrainerConfig.model_validate(trainer), DataShape(16, 50))


@pytest.fixture(autouse=True)
def programs(monkeypatch):
    monkeypatch.syspath_prepend(str(PROGRAMS))


def test_what_is_right_is_built_of_its_options_without_memory():
    model = own("workers.own:spec", {"dim": 32, "layers": 3})
    module = model.module()
    assert {parameter.device.type for parameter in module.parameters()} == {"meta"}
    assert module.embedding.weight.shape == (50, 32)
    assert list(model.blocks(module)) == ["mixers.0", "mixers.1", "mixers.2"]
    assert model.flops() == 1e6


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no_such_package:spec", "ModuleNotFoundError"),
        ("workers.own:no_such_name", "AttributeError"),
        ("workers.no_import:spec", "RuntimeError: no GPU in this module"),
        ("workers.own:no_spec", "is a function: it must name"),
        ("workers.own:no_module", "returns a NoneType"),
        ("workers.own:raises", "raised KeyError: 'missing': correct the function or trainer.model.options"),
        ("workers.own:tied", "head.weight of workers.own:tied is a parameter of two modules"),
        ("workers.own:buffered", r"has buffers \(scale\)"),
        ("workers.own:double", "is torch.float64 of shape"),
    ],
)
def test_what_is_wrong_is_refused_with_a_sentence(name, says):
    with pytest.raises(InvalidInput, match=says):
        own(name).module()


def test_options_that_the_model_does_not_know_are_refused():
    with pytest.raises(InvalidInput, match="unexpected keyword argument 'width'"):
        own("workers.own:spec", {"width": 3}).module()


def test_blocks_are_parts_and_there_where_they_are_computed_again():
    wrong = own("workers.own:no_part")
    with pytest.raises(InvalidInput, match="something outside the module"):
        wrong.blocks(wrong.module())
    none = own("workers.own:no_blocks", memory={"activations": "Recompute"})
    with pytest.raises(InvalidInput, match=r"recomputes blocks, and workers\.own:no_blocks defines none"):
        none.blocks(none.module())


def test_a_weight_that_nothing_begins_is_named():
    model = own("workers.own:uncovered")
    assert model.initial("mixers.0.norm.bias", (24,), Box((0,), (24,))).shape == (24,)
    with pytest.raises(InvalidInput, match=r"a NoneType for temperature, but a box of shape \[1\] was requested"):
        model.initial("temperature", (1,), Box((0,), (1,)))


def filled(model):
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, p in model.model.named_parameters():
            p.copy_(model.own.initial(name, p.shape, Box((0,) * p.dim(), tuple(p.shape))))
    return model


def microbatch(first):
    return Microbatch(torch.arange(34).view(2, 17), torch.full((2, 16), 1 / 32), None, (first, first + 1))


def test_noise_is_of_the_sample_and_only_where_there_are_gradients():
    model = filled(OwnModel(own("workers.own:spec", {"dropout": 0.5}), torch.float32))
    drawn = [float(model(microbatch(first)).detach()) for first in (0, 2, 0)]
    assert drawn[0] == drawn[2] != drawn[1]
    with torch.no_grad():
        evaluated = [float(model(microbatch(first))) for first in (0, 2)]
        plain = float(filled(OwnModel(own("workers.own:spec"), torch.float32))(microbatch(0)))
    assert evaluated == [plain, plain]


def test_a_part_that_is_in_eval_stays_so_after_an_evaluation():
    model = filled(OwnModel(own("workers.own:still"), torch.float32))
    before = float(model(microbatch(0)).detach())
    with torch.no_grad():
        model(microbatch(0))
    assert float(model(microbatch(0)).detach()) == before
    assert [mixer.training for mixer in model.model.mixers] == [False, True]


@pytest.mark.parametrize("name", ["mean", "regularised"])
def test_a_loss_that_is_no_weighted_sum_is_told_by_its_gradient(name):
    model, batch = filled(OwnModel(own(f"workers.own:{name}"), torch.float32)), microbatch(0)
    loss = model(batch)
    loss.backward()
    with pytest.raises(InvalidInput, match="the sum of each prediction's loss times its weight"):
        model.prove(batch, loss.detach())


def test_a_loss_in_float16_is_refused_in_training():
    model = filled(OwnModel(own("workers.own:half"), torch.float32))
    with torch.no_grad():
        assert model(microbatch(0)).dtype == torch.float16
    with pytest.raises(InvalidInput, match=r"compute it in float32, as \(losses\.float\(\) \* microbatch\.weights\)"):
        model(microbatch(0))


def test_a_loss_that_is_not_finite_proves_nothing():
    """Otherwise an overflow in the first step would hide a mean until the next round."""
    model = filled(OwnModel(own("workers.own:mean"), torch.float32))
    temperature = model.model.temperature.detach().clone()
    for value in (torch.inf, temperature):
        with torch.no_grad():
            model.model.temperature.copy_(torch.as_tensor(value))
        batch = microbatch(0)
        loss = model(batch)
        loss.backward()
        if not loss.isfinite():
            model.prove(batch, loss.detach())
    with pytest.raises(InvalidInput, match="the sum of each prediction's loss times its weight"):
        model.prove(batch, loss.detach())


def test_a_loss_that_is_one_is_proved_once():
    model, batch = filled(OwnModel(own("workers.own:spec"), torch.float32)), microbatch(0)
    loss = model(batch)
    loss.backward()
    model.prove(batch, loss.detach())
    again = microbatch(2)
    model(again)
    assert not again.weights.requires_grad
