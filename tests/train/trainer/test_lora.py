"""Adapters: frozen weights stay as they are in every layout, and adapters are trained as on one process."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from builders.train import node, states
from builders.train.course import HALF, Course
from concertina_state.checkpoints.reader import StoredCheckpoint
from concertina_state.objects.prefix import ObjectPrefix
from concertina_trainer.config.model_config import LoraConfig
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.export.export import export
from concertina_trainer.model.decoder import Decoder
from concertina_trainer.model.lora import LoraLinear, freeze

LORA = {"rank": 3, "alpha": 12.0}
LAYOUTS = {
    "fsdp x tensor": (4, {"tensor": 2}),
    "pipeline x tensor": (4, {"pipeline": 2, "tensor": 2}),
    "hsdp": (4, {"shard": 2}),
    "context x tensor": (4, {"context": 2, "tensor": 2}),
    "fsdp x zero bubble": (4, {"pipeline": 2, "schedule": "InterleavedZeroBubble"}),
    "copies x interleaved": (4, {"pipeline": 2, "schedule": "Interleaved1F1B", "shard": 1}),
}
LAW = "tests/train/trainer/test_lora.py::test_one_layout_goes_on_from_another"


@pytest.fixture(scope="module")
def course(parent, trainer, folder_of_module):
    """Of a rank that no world divides."""
    model = {**trainer["model"], "layers": 4, "heads": 4, "kvHeads": 2, "hiddenDim": 44, "vocabSize": 259, "lora": LORA}
    changed = {"steps": 2 * HALF, "microBatchSize": 4, "model": model, "snapshot": {"everySteps": HALF}}
    return Course(parent, {**trainer, **changed}, LAYOUTS, folder_of_module)


def test_a_layer_adds_the_product_to_its_weight():
    layer = LoraLinear(5, 4, LoraConfig(rank=2, alpha=6.0)).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    freeze(torch.nn.Sequential(layer))
    x = torch.randn(3, 5, dtype=torch.float64)
    layer(x).square().sum().backward()
    whole = (layer.weight + 3 * layer.lora_b @ layer.lora_a).detach().requires_grad_()
    torch.nn.functional.linear(x, whole).square().sum().backward()
    assert layer.weight.grad is None
    torch.testing.assert_close(layer.lora_a.grad, 3 * layer.lora_b.detach().T @ whole.grad)
    torch.testing.assert_close(layer.lora_b.grad, 3 * whole.grad @ layer.lora_a.detach().T)


def test_one_layout_goes_on_from_another(course):
    course.run(4, course.leg("fsdp x tensor"), course.leg("pipeline x tensor", "fsdp x tensor"))


@pytest.mark.long(law=LAW)
def test_so_does_every_layout_from_the_one_before(course):
    names = list(LAYOUTS)
    course.halves()
    course.run(4, *(course.leg(name, names[at - 1]) for at, name in enumerate(names)))


def test_a_model_is_tuned_and_exported_with_its_adapters_added(parent, trainer, folder, tmp_path):
    """Begun with the weights of another run, on other ranks; transformers computes what we do."""
    [before] = node.Job(folder / "before", parent, trainer, {"uri": f"file://{tmp_path}/before"}).run(2).durable
    tuned = {**trainer, "steps": 4, "model": {**trainer["model"], "lora": {**LORA, "targets": ["Value", "Down"]}}}
    job = node.Job(folder / "tuned", parent, tuned, {"uri": f"file://{tmp_path}/tuned", "initFrom": before.uri})
    outcome = job.run(3)
    assert set(outcome.codes.values()) == {0}, outcome.output
    assert outcome.losses[1] == pytest.approx(loss_at_first(parent, trainer, folder, tmp_path, before), rel=1e-5)
    found, weights = states.of_checkpoint(outcome.durable[-1].uri), states.of_checkpoint(before.uri)
    frozen = [name for name in weights if name.startswith("model.")]
    assert all(torch.equal(found[name], weights[name]) for name in frozen)
    adapters = {f"blocks.{layer}.{target}.lora_{end}" for layer in (0, 1) for end in "ab"
                for target in ("attention.value", "feed_forward.down")}  # fmt: skip
    assert {
        name.removeprefix("model.") for name in found.keys() - weights.keys() if "optimizer" not in name
    } == adapters
    moments = {name for name in found if name.startswith("optimizer.")}
    assert moments == {f"optimizer.{kind}.{name}" for kind in ("exp_avg", "exp_avg_sq") for name in adapters}
    assert all(found[f"model.{name}"].abs().max() > 0 for name in adapters), "all of them have been trained"

    export(
        StoredCheckpoint(outcome.durable[-1].uri), ObjectPrefix(str(tmp_path / "hf"), create=True), lambda size: None
    )
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    ours = Decoder(TrainerConfig.model_validate(tuned).model)
    ours.load_state_dict({name.removeprefix("model."): found[name] for name in found if name.startswith("model.")})
    tokens = torch.randint(0, 256, (3, 20), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours(tokens), rtol=1e-4, atol=1e-4)


def loss_at_first(parent, trainer, folder, tmp_path, before):
    """Return the first loss of full training from these weights. At that step, adapters add nothing yet."""
    options = {"uri": f"file://{tmp_path}/all", "initFrom": before.uri}
    return node.Job(folder / "all", parent, {**trainer, "steps": 1}, options).run(1).losses[1]
