"""Adapters: frozen weights stay as they are in every layout, and adapters are trained as on one process."""

import copy
import json

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import trainingjob.dcp
from builders.train import node, plain, routed, states
from builders.train.course import HALF, Course
from builders.train.gradients import check, whole_gradient
from concertina_state.checkpoints.reader import StoredCheckpoint
from concertina_state.errors import InvalidInput
from concertina_state.format.shardfile import FrozenWeights
from concertina_state.objects.prefix import ObjectPrefix
from concertina_trainer.config.model_config import LoraConfig, Projection
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.data.read.sequence_reader import Reader
from concertina_trainer.export import peft
from concertina_trainer.export.export import export
from concertina_trainer.format import hf_names
from concertina_trainer.format.adapters import is_adapter
from concertina_trainer.format.hf_config import config_json
from concertina_trainer.format.hf_families import FAMILIES
from concertina_trainer.generation.generate import load
from concertina_trainer.model.decoder import Decoder
from concertina_trainer.model.lora import LoraLinear, freeze
from concertina_trainer.model.quantized import dequantized, quantized
from train.trainer.test_gradients import initialised
from train.trainer.test_precisions import BOUND as ROUNDED_BLOCKS

LORA = {"rank": 3, "alpha": 12.0, "frozenDtype": "Float32"}
LAYOUTS = {
    "fsdp x tensor": (4, {"tensor": 2}),
    "pipeline x tensor": (4, {"pipeline": 2, "tensor": 2}),
    "hsdp": (4, {"shard": 2}),
    "context x tensor": (4, {"context": 2, "tensor": 2}),
    "fsdp x zero bubble": (4, {"pipeline": 2, "schedule": "InterleavedZeroBubble"}),
    "copies x interleaved": (4, {"pipeline": 2, "schedule": "Interleaved1F1B", "shard": 1}),
}
LAW = "tests/train/trainer/test_lora.py::test_frozen_weights_are_read_from_their_files_and_not_saved"


@pytest.fixture(scope="module")
def course(parent, trainer, folder_of_module):
    """Of a rank that no world divides."""
    model = {**trainer["model"], "layers": 4, "heads": 4, "kvHeads": 2, "hiddenDim": 44, "vocabSize": 259, "lora": LORA}
    changed = {"steps": 2 * HALF, "microBatchSize": 4, "model": model, "snapshot": {"everySteps": HALF}}
    return Course(parent, {**trainer, **changed}, LAYOUTS, folder_of_module)


def test_a_layer_adds_the_product_to_its_weight():
    layer = LoraLinear(5, 4, LoraConfig(rank=2, alpha=6.0), Projection.query).double()
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


@pytest.mark.long(law=LAW)
def test_one_layout_goes_on_from_another(course):
    course.run(4, course.leg("fsdp x tensor"), course.leg("pipeline x tensor", "fsdp x tensor"))


@pytest.mark.long(law=LAW)
def test_so_does_every_layout_from_the_one_before(course):
    in_turn(course)


OF_EXPERTS = {
    "fsdp": (4, {}),
    "experts x tensor": (4, {"expert": 2, "tensor": 2}),
    "experts x context": (4, {"expert": 4, "context": 2}),
}
EXPERTS = {"count": 4, "hiddenDim": 24, "shared": 1, "firstDense": 1, "scores": "Sigmoid", "biasRate": 0.0}


def in_turn(course):
    """Run the first half in each layout, and the second half in the next one."""
    names = list(course.layouts)
    course.halves()
    course.run(4, *(course.leg(name, names[at - 1]) for at, name in enumerate(names)))


@pytest.mark.long(law=LAW)
def test_so_do_layouts_of_a_model_with_experts(parent, course, tmp_path):
    model = {**course.trainer["model"], "experts": EXPERTS, "lora": {**LORA, "rank": 8}}
    in_turn(Course(parent, {**course.trainer, "model": model}, OF_EXPERTS, tmp_path))


DROPOUT = {**LORA, "rank": 8, "dropout": 0.1}


def test_a_layout_drops_what_one_process_drops(parent, trainer, tmp_path):
    """Compare gradients under tensor and expert parallelism.

    Each rank has a part of the columns of Output and Down, and of the tokens that the router sends to other ranks.
    """
    wide = {"layers": 3, "heads": 4, "kvHeads": 2, "experts": EXPERTS, "lora": DROPOUT}
    changed = {**trainer, "model": {**trainer["model"], **wide}}
    world, parallelism = OF_EXPERTS["experts x tensor"]
    found = whole_gradient(parent, changed, world, tmp_path, parallelism=parallelism, dtype=torch.float64)
    gradients, loss = of_one_process(changed)
    check(found, gradients, loss)
    without, _ = of_one_process({**changed, "model": {**changed["model"], "lora": {**DROPOUT, "dropout": 0.0}}})
    assert {name for name in gradients if not torch.equal(gradients[name], without[name])} == {
        name for name in gradients if name.endswith("lora_b")
    }, "the other matrices have no gradient at the first step"


def of_one_process(trainer):
    """Return the gradients of a batch, and its loss, by the reference implementation of experts."""
    config = TrainerConfig.model_validate(trainer)
    model = initialised(config, torch.float64)
    for bias in model.buffers():
        bias.zero_()
    layers = routed.write_out(model, config.model)
    reader = Reader(config.data, config.model.sequence_length, config.seed)
    samples = np.arange(100, 100 + config.global_batch_size)
    tokens, _, weights = plain.batch(reader, samples, torch.float64)
    loss = model(tokens[:, :-1], None, tokens[:, 1:], weights, plain.keys(config, reader, samples))
    (loss + sum(layer.loss for layer in layers)).backward()
    return {name: p.grad for name, p in routed.names(model).items() if p.requires_grad}, loss.item()


DROPS = "tests/train/trainer/test_lora.py::test_a_layout_drops_what_one_process_drops"


@pytest.mark.long(law=DROPS)
def test_compiled_blocks_drop_the_same(parent, trainer, tmp_path):
    """Compare gradients under tensor parallelism, where compiled code has distributed masks."""
    wide = {"layers": 3, "heads": 4, "kvHeads": 2, "lora": DROPOUT}
    changed = {**trainer, "compile": "Blocks", "model": {**trainer["model"], **wide}}
    found = whole_gradient(
        parent, changed, 2, tmp_path, parallelism={"tensor": 2}, dtype=torch.float64, COMPILED="aot_eager"
    )
    assert found["graphs"] > 0
    check({**found, "late": ()}, *of_one_process(changed))


@pytest.mark.long(law=DROPS)
@pytest.mark.parametrize("with_experts", [False, True], ids=["dense", "experts"])
def test_with_dropout_every_layout_goes_on_from_the_one_before(parent, course, tmp_path, with_experts):
    model = {**course.trainer["model"], "lora": DROPOUT, **({"experts": EXPERTS} if with_experts else {})}
    in_turn(Course(parent, {**course.trainer, "model": model}, OF_EXPERTS if with_experts else LAYOUTS, tmp_path))


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

    export(StoredCheckpoint(outcome.durable[-1].uri)).write(ObjectPrefix(str(tmp_path / "hf"), create=True))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    check_alone(outcome.durable[-1].uri, theirs, weights, tmp_path / "peft")
    ours = Decoder(TrainerConfig.model_validate(tuned).model)
    ours.load_state_dict({name.removeprefix("model."): found[name] for name in found if name.startswith("model.")})
    tokens = torch.randint(0, 256, (3, 20), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours(tokens), rtol=1e-4, atol=1e-4)


def check_alone(uri, merged, weights, folder):
    """Check adapters that are exported alone: the merged weights are the frozen ones plus scale * B A, also in PEFT."""
    files = peft.export(StoredCheckpoint(uri)).write(ObjectPrefix(str(folder), create=True))
    assert files == ["adapter_model.safetensors", "adapter_config.json"]
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["target_modules"] == ["down_proj", "v_proj"]
    scale, tensors = config["lora_alpha"] / config["r"], load_file(folder / "adapter_model.safetensors")
    assert len(tensors) == 8
    for name, weight in merged.named_parameters():
        [own] = hf_names.ours(name, FAMILIES["llama"])
        module = f"base_model.model.{name.removesuffix('.weight')}"
        expected = weights[f"model.{own.name}"]
        if f"{module}.lora_A.weight" in tensors:
            a, b = (tensors.pop(f"{module}.lora_{end}.weight") for end in "AB")
            expected = expected + scale * (b @ a)
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-6, atol=1e-7)
    assert not tensors
    base = copy.deepcopy(merged)
    tokens = torch.randint(0, 256, (3, 20), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        for name, weight in base.named_parameters():
            weight.copy_(weights[f"model.{hf_names.ours(name, FAMILIES['llama'])[0].name}"])
        before = base(tokens).logits
        logits = PeftModel.from_pretrained(base, folder)(tokens).logits
        torch.testing.assert_close(logits, merged(tokens).logits, rtol=1e-4, atol=1e-4)
    assert (logits - before).abs().max() > 1e-3, "the adapters change the model"


def test_frozen_weights_are_read_from_their_files_and_not_saved(parent, trainer, folder, tmp_path):
    """A survivor keeps them; every layout reads the same ones, and other ones are refused."""
    base = tmp_path / "base"
    model = {**trainer["model"], "heads": 4, "kvHeads": 2, "lora": {"rank": 3, "alpha": 12.0}}
    tuned = {**trainer, "steps": 12, "model": model}
    config = TrainerConfig.model_validate(tuned)
    torch.manual_seed(5)
    model = LlamaForCausalLM(LlamaConfig(**config_json(config.model)))
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.9, 1.1)
    model.to(torch.bfloat16).save_pretrained(base, max_shard_size="40KB")
    options = {"uri": f"file://{tmp_path}/alone", "initFrom": f"file://{base}"}
    alone = node.Job(folder / "alone", parent, tuned, options).run(1)
    assert set(alone.codes.values()) == {0}, alone.output

    job = node.Job(folder / "tuned", parent, tuned, {**options, "uri": f"file://{tmp_path}/tuned"}, stays=True)
    first = job.run(1, script=node.Script(drain=(4, False)))
    assert all(is_adapter(name) or name.startswith("optimizer.") for name in states.whole(job))
    away = base.rename(tmp_path / "away")
    second = job.run(1, job.newest(), node.Script(drain=(8, False)))
    assert second.losses, second.output
    assert second.pids == first.pids
    away.rename(base)
    job.environment = {"CONCERTINA_PARALLELISM": json.dumps({"tensor": 2, "shard": 1})}
    third = job.run(4, job.newest())
    assert set(third.codes.values()) == {0}, third.output
    assert first.losses | second.losses | third.losses == pytest.approx(alone.losses, rel=1e-5)

    checkpoint = StoredCheckpoint(third.durable[-1].uri)
    frozen = StoredCheckpoint(alone.durable[-1].uri).manifest.frozen
    assert checkpoint.manifest.frozen == frozen == FrozenWeights(base.as_uri(), frozen.digest)
    with pytest.raises(InvalidInput, match="has only the adapters of a model"):
        trainingjob.dcp.convert(checkpoint.uri, tmp_path / "dcp")
    export(checkpoint).write(ObjectPrefix(str(tmp_path / "hf"), create=True))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).state_dict()
    adapters = states.of_checkpoint(checkpoint.uri)
    for name, weight in AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).state_dict().items():
        [own] = hf_names.ours(name, FAMILIES["llama"])
        a, b = (adapters.get(f"model.{own.name.removesuffix('.weight')}.lora_{end}") for end in "ab")
        torch.testing.assert_close(exported[name], weight if a is None else weight + 4 * b @ a)

    changed = next(base.glob("*.safetensors"))
    weights = load_file(changed)
    next(iter(weights.values())).view(-1)[0] += 1
    save_file(weights, changed, {"format": "pt"})
    again = {"uri": f"file://{tmp_path}/again", "resumeFrom": checkpoint.uri}
    refused = node.Job(folder / "again", parent, {**tuned, "steps": 13}, again).run(1)
    assert f"were trained with weights of digest {frozen.digest}" in refused.faults[0].message


QUANTIZED = {"layers": 2, "dim": 128, "heads": 4, "kvHeads": 2, "hiddenDim": 128, "sequenceLength": 32}
QUANTIZED_LAW = "tests/train/trainer/test_lora.py::test_quantized_weights_are_the_same_numbers_in_every_layout"


def quantized_job(parent, trainer, folder, tmp_path, dtype, steps=6):
    """Return a function that makes jobs with frozen weights in `dtype`, their configuration, and these weights."""
    base = tmp_path / "base"
    model = {**QUANTIZED, "vocabSize": 259, "lora": {"rank": 3, "alpha": 12.0, "frozenDtype": dtype}}
    tuned = {**trainer, "steps": steps, "model": model}
    config = TrainerConfig.model_validate(tuned)
    torch.manual_seed(5)
    plain = LlamaForCausalLM(LlamaConfig(**config_json(config.model))).to(torch.bfloat16)
    plain.save_pretrained(base, max_shard_size="80KB")

    def job(name, **parallelism):
        options = {"uri": f"file://{tmp_path}/{name}", "initFrom": f"file://{base}"}
        made = node.Job(folder / name, parent, tuned, options, stays=True)
        made.environment = {"CONCERTINA_PARALLELISM": json.dumps(parallelism)}
        return made

    return job, config, plain


def as_trained(config, plain, adapters):
    """Return the decoder with the values of quantized weights, as a run with these adapters has them."""
    decoder = Decoder(config.model)
    for name, parameter in plain.state_dict().items():
        [own] = hf_names.ours(name, FAMILIES["llama"])
        if own.name == "head.weight":  # the embeddings, which are tied to it
            continue
        layer = own.name.removesuffix(".weight")
        is_quantized = f"model.{layer}.lora_a" in adapters
        value = parameter.float()
        if is_quantized:
            value = dequantized(*quantized(parameter, config.model.lora.frozen_dtype), torch.float32)
        decoder.get_parameter(own.name).data.copy_(value)
        for end in "ab" if is_quantized else ():
            decoder.get_parameter(f"{layer}.lora_{end}").data.copy_(adapters[f"model.{layer}.lora_{end}"])
    return decoder


def test_quantized_weights_are_the_same_numbers_in_every_layout(parent, trainer, folder, tmp_path):
    """A run with an uneven number of ranks, and then with tensor parallelism, has the losses of one rank."""
    job, config, plain = quantized_job(parent, trainer, folder, tmp_path, "NormalFloat4")
    alone = job("alone").run(1)
    assert set(alone.codes.values()) == {0}, alone.output
    tuned = job("tuned")
    first = tuned.run(3, script=node.Script(drain=(2, False)))
    assert all(is_adapter(name) or name.startswith("optimizer.") for name in states.whole(tuned))
    tuned.environment = {"CONCERTINA_PARALLELISM": json.dumps({"tensor": 2})}
    second = tuned.run(4, tuned.newest())
    assert set(second.codes.values()) == {0}, second.output
    assert first.losses | second.losses == pytest.approx(alone.losses, rel=1e-5)

    checkpoint = StoredCheckpoint(second.durable[-1].uri)
    frozen, unquantized = (StoredCheckpoint(uri).manifest.frozen for uri in (alone.durable[-1].uri, checkpoint.uri))
    assert frozen == unquantized
    result = export(checkpoint)
    assert "NormalFloat4" in result.message
    result.write(ObjectPrefix(str(tmp_path / "hf"), create=True))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    tokens = torch.randint(0, 256, (3, 20), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        ours = as_trained(config, plain, states.of_checkpoint(checkpoint.uri))(tokens)
        torch.testing.assert_close(theirs(tokens).logits, ours, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(load(checkpoint, config.model).float()(tokens), ours, rtol=1e-5, atol=1e-5)


@pytest.mark.long(law=QUANTIZED_LAW)
@pytest.mark.parametrize("dtype", ["NormalFloat4", "Int8"])
def test_so_they_are_in_all_others(parent, trainer, folder, tmp_path, dtype):
    job, _, _ = quantized_job(parent, trainer, folder, tmp_path, dtype)
    alone = job("alone").run(1)
    for number, (size, parallelism) in enumerate(LAYOUTS.values()):
        if "Interleaved" not in str(parallelism.get("schedule")):  # the model has two layers
            found = job(f"layout-{number}", **parallelism).run(size)
            assert found.losses == pytest.approx(alone.losses, rel=1e-5), found.output


@pytest.mark.long(law=QUANTIZED_LAW)
@pytest.mark.parametrize("dtype", ["NormalFloat4", "Int8"])
def test_in_float16_they_differ_by_its_rounding(parent, trainer, folder, tmp_path, dtype):
    """FSDP gathers codes as they are, and casts the scales, which are bfloat16, to float16."""
    losses = {}
    for precision, size in (("Float32", 1), ("Float16", 1), ("Float16", 3)):
        job, _, _ = quantized_job(parent, {**trainer, "precision": precision}, folder, tmp_path, dtype)
        outcome = job(f"{precision}-{size}").run(size)
        assert set(outcome.codes.values()) == {0}, outcome.output
        losses[precision, size] = outcome.losses
    for size in (1, 3):
        assert losses["Float16", size] == pytest.approx(losses["Float32", 1], rel=ROUNDED_BLOCKS)
    assert losses["Float16", 1] != losses["Float32", 1]


def test_quantized_weights_need_files(parent, trainer, folder, tmp_path):
    """Without files, there would be no original values after a restore."""
    tuned = {**trainer, "model": {**QUANTIZED, "lora": {"frozenDtype": "Int8"}}}
    refused = node.Job(folder / "refused", parent, tuned, {"uri": f"file://{tmp_path}/refused"}).run(1)
    assert "set checkpoint.initFrom to such files" in refused.faults[0].message


def loss_at_first(parent, trainer, folder, tmp_path, before):
    """Return the first loss of full training from these weights. At that step, adapters add nothing yet."""
    options = {"uri": f"file://{tmp_path}/all", "initFrom": before.uri}
    return node.Job(folder / "all", parent, {**trainer, "steps": 1}, options).run(1).losses[1]
