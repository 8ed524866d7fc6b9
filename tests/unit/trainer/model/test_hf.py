"""Models of transformers as ModelSpecs: what they compute, which names they have, and what is refused."""

import builtins
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, OlmoeForCausalLM

from builders.train import families
from concertina_state.errors import InvalidInput
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.data.read.batches import Microbatch
from concertina_trainer.model import hf
from concertina_trainer.model import loss as chunked_loss
from concertina_trainer.model.spec import DataShape
from concertina_trainer.planning.described_model import DataDescription, described

LENGTH, SHAPE = 24, DataShape(24, 100)
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 128}
OTHERS = {
    "gpt2": GPT2,
    "olmo2": {**families.SIZES, "pad_token_id": 0},
    "granite": {**families.SIZES, "pad_token_id": 0},
    "qwen3_moe": {**families.SIZES, **families.EXPERTS, "head_dim": 16},
    "gemma2": {**families.SIZES, **families.GEMMA},
    "olmoe": families.OF_TRANSFORMERS["olmoe"],
}


def options_of(kind, **changed):
    """Return the fields of a config.json as the trainer reads them."""
    return {**AutoConfig.for_model(kind, **{**OTHERS.get(kind, {}), **changed}).to_dict(), "model_type": kind}


def built(options, shape=SHAPE):
    with torch.device("meta"):
        return hf.build(options, shape)


def with_values(kind, **changed):
    """Return a model as the trainer builds it, and the same model as transformers builds it, with equal weights."""
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**OTHERS[kind], **changed})).eval()
    ours = built(options_of(kind, **changed))
    for module in ours.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                module._parameters[name] = torch.nn.Parameter(torch.empty_like(parameter, device="cpu"))
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def microbatch(ids):
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(1, 100, (2, LENGTH + 1), generator=generator)
    return Microbatch(tokens, torch.rand(2, LENGTH, generator=generator), ids)


@pytest.mark.parametrize("kind", OTHERS)
def test_losses_of_packed_documents_are_those_of_each_alone(kind):
    ours, theirs = with_values(kind)
    ends = [0, 5, 6, 17, LENGTH]
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor([5, 1, 11, 7])).expand(2, -1)
    batch, expected = microbatch(ids.int()), 0.0
    for begin, end in itertools.pairwise(ends):
        logits = theirs(batch.tokens[:, begin:end]).logits
        targets = batch.tokens[:, begin + 1 : end + 1]
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        expected += (losses * batch.weights[:, begin:end].flatten()).sum()
    with torch.no_grad():
        torch.testing.assert_close(hf.loss(ours, batch), expected, rtol=1e-5, atol=1e-5)
        whole = F.cross_entropy(theirs(batch.tokens[:, :-1]).logits.flatten(0, 1), batch.tokens[:, 1:].flatten(),
                                reduction="none")  # fmt: skip
        expected = (whole * batch.weights.flatten()).sum()
        torch.testing.assert_close(hf.loss(ours, microbatch(None)), expected, rtol=1e-5, atol=1e-5)


class Largest(TorchDispatchMode):
    """Size of the largest tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


VOCABULARY = 1000
"""So many tokens that nothing else in a model is as large as all logits."""
PLAIN = ("gpt2", "olmo2", "qwen3_moe", "olmoe")
"""Models whose last operation is the product with the output layer's weight."""


@pytest.mark.parametrize("kind", OTHERS)
def test_logits_are_computed_in_chunks_if_nothing_changes_them(kind, monkeypatch):
    """Granite divides its logits, and Gemma 2 bounds them."""
    monkeypatch.setattr(chunked_loss, "CHUNK_LOGITS", 5 * VOCABULARY)
    ours, _ = with_values(kind, vocab_size=VOCABULARY)
    assert ours.concertina_ends_with_product == (kind in PLAIN)
    found = []
    for in_chunks in (True, False):
        ours.concertina_ends_with_product &= in_chunks
        batch = microbatch(None)
        batch.weights.requires_grad_()
        ours.zero_grad()
        with chunked_loss.correct_weights() as correct, Largest() as largest:
            value = hf.loss(ours, batch)
        value.backward()
        assert (largest.elements < batch.weights.numel() * VOCABULARY) == (in_chunks and kind in PLAIN)
        found.append([value, batch.weights.grad, *correct, *(p.grad for p in ours.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_logits_that_are_changed_in_place_or_have_a_bias_are_whole():
    ours, _ = with_values("gpt2")
    forward = type(ours).forward

    def halved(module, *arguments, **keywords):
        result = forward(module, *arguments, **keywords)
        result.logits.mul_(0.5)
        return result

    ours.__class__ = type("Halved", (type(ours),), {"forward": halved})
    with torch.no_grad():
        whole = hf.loss(ours, microbatch(None))
        assert not ours.concertina_ends_with_product
        torch.testing.assert_close(hf.loss(ours, microbatch(None)), whole)
    assert not built(options_of("phi", **families.SIZES)).concertina_ends_with_product


def test_parameters_are_on_meta_and_buffers_have_their_values():
    module = built(options_of("gpt2"))
    assert all(parameter.is_meta for parameter in module.parameters())
    assert hf.tied_names(module) == {"lm_head.weight": "transformer.wte.weight"}
    assert not any(part.training for part in module.modules()), "no dropout"
    assert len(list(hf.blocks(module))) == GPT2["n_layer"]
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model("granite", **OTHERS["granite"]))
    values = dict(built(options_of("granite")).named_buffers())
    assert values.keys() == dict(theirs.named_buffers()).keys()
    for name, buffer in theirs.named_buffers():
        torch.testing.assert_close(values[name], buffer)


def planned(kind):
    """Return what `concertina plan` knows of a model."""
    model = {"hf": "/none", "options": options_of(kind), "sequenceLength": LENGTH}
    config = TrainerConfig.model_validate({"data": {"uri": "/none"}, "model": model, "globalBatchSize": 2})
    return described(config, DataDescription(100))


def test_tied_weights_are_planned_once():
    found = planned("gpt2")
    assert found.weights == found.trained == sum(p.numel() for p in built(options_of("gpt2")).parameters())


def test_models_that_read_values_can_t_be_planned(monkeypatch):
    """Such as the loop over the experts that have tokens, which transformers runs if torch has no grouped products."""
    monkeypatch.setattr(OlmoeForCausalLM, "get_correct_experts_implementation", lambda model, requested: "eager")
    with pytest.raises(InvalidInput, match=r"/none can't be planned, .*nonzero.*, and transformers reads values to"):
        planned("olmoe")


def test_a_layer_that_transformers_does_not_load_is_named():
    module = built(options_of("deepseek_v3", **families.OF_TRANSFORMERS["deepseek_v3"]))
    assert hf.left_out(module) == "", "the published model has 61 layers"
    module._keys_to_ignore_on_load_unexpected = [r"model\.layers\.3.*"]
    assert hf.left_out(module) == "layer 3 of the files"


def test_models_that_do_not_fit_are_refused():
    """BERT attends in both directions, and Mamba ignores where documents begin."""
    bert = {**families.SIZES, "is_decoder": False, "intermediate_size": 48}
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model("bert", **bert)).eval()
    with pytest.raises(InvalidInput, match="BertLMHeadModel of transformers is not causal"):
        hf.loss(module, microbatch(None))
    mamba = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 128, "state_size": 4}
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba", **mamba)).eval()
    hf.loss(module, microbatch(None))
    del module.concertina_is_proved
    with pytest.raises(InvalidInput, match="MambaForCausalLM of transformers does not separate the documents"):
        hf.loss(module, microbatch(torch.zeros(2, LENGTH, dtype=torch.int32)))


def test_values_that_are_not_finite_are_no_proof_of_anything():
    """The loss shows them, and the trainer responds as `trainer.anomalies` says."""
    module, _ = with_values("gpt2")
    with torch.no_grad():
        next(module.parameters()).fill_(torch.nan)
    assert not hf.loss(module, microbatch(None)).isfinite()
    assert not module.concertina_is_proved


@pytest.mark.parametrize(
    ("kind", "changed", "shape", "says"),
    [
        ("gpt2", {}, DataShape(24, 129), "tokens up to 128, but vocab_size in config.json is 128"),
        ("gpt2", {}, DataShape(65, 100), "max_position_embeddings in config.json is 64, and .* is 65"),
        ("gpt2", {}, DataShape(24, 100, {"time": 0}), "the data have the fields time"),
        ("gpt2", {"quantization_config": {"quant_method": "fp8"}}, SHAPE, "quantization_config in config.json is set"),
        ("gpt2", {"vision_config": {"depth": 2}}, SHAPE, "config.json has vision_config: .* text only"),
        ("gpt2", {"model_type": "house"}, SHAPE, "transformers can't use the config.json .* model_type 'house'"),
        ("gpt2", {"model_type": None}, SHAPE, "transformers can't use the config.json"),
        ("t5", {}, SHAPE, 'transformers has no causal language model of model_type "t5"'),
        (
            "olmo2",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            SHAPE,
            "rope_type in config.json is dynamic",
        ),
    ],
)
def test_configurations_are_refused_by_name(kind, changed, shape, says):
    with pytest.raises(InvalidInput, match=says):
        built({**options_of(kind), **changed}, shape)


def test_code_in_the_folder_is_not_run():
    remote = {"auto_map": {"AutoConfig": "configuration_house.HouseConfig"}, "model_type": "house"}
    with pytest.raises(InvalidInput, match="Code in the model's folder is never run"):
        built(remote)


def test_without_transformers_the_extra_is_named(monkeypatch):
    importing = builtins.__import__

    def without(name, *arguments, **keywords):
        if name == "transformers":
            raise ImportError("No module named 'transformers'")
        return importing(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InvalidInput, match=r"trainer\.model\.hf needs transformers .*concertina-trainer\[hf\]"):
        hf._config(options_of("gpt2"))
