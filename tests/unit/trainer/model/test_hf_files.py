"""Names and places of the tensors of transformers' models in the files that transformers writes and publishes."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, conversion_mapping
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose, WeightConverter

from builders.train import families
from concertina_state.errors import InvalidInput
from concertina_trainer.format.hf_names import Place
from concertina_trainer.model import hf
from concertina_trainer.model.hf_files import HfFiles
from concertina_trainer.model.spec import DataShape
from concertina_trainer.state import weights
from concertina_trainer.state.described_model import read_options
from concertina_trainer.state.weights import SafetensorsFiles

MODELS = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 128},
    "granitemoe": {**families.SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0},
    "phimoe": {**families.SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
    **families.OF_TRANSFORMERS,
}
"""With tied weights, with tensors of other names, with both, and with one tensor for each expert."""


def options_of(kind):
    """Return the fields of a config.json as the trainer reads them."""
    return {**AutoConfig.for_model(kind, **MODELS[kind]).to_dict(), "model_type": kind}


def built(kind):
    with torch.device("meta"):
        return hf.build(options_of(kind), DataShape(24, 100))


def files(kind):
    return HfFiles(built(kind))


@pytest.mark.parametrize("kind", MODELS)
def test_each_tensor_of_a_file_is_where_transformers_puts_it(kind, tmp_path):
    torch.manual_seed(3)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **MODELS[kind])).eval()
    theirs.save_pretrained(tmp_path)
    stored, ours = load_file(tmp_path / "model.safetensors"), files(kind)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    missing = {name: torch.ones_like(tensor, dtype=torch.bool) for name, tensor in loaded.items()}
    for name, tensor in stored.items():
        place = ours.place(name)
        if place.box is None:
            part = (slice(None),)
        else:
            assert place.whole == tuple(loaded[place.name].shape)
            part = tuple(slice(a, a + n) for a, n in zip(place.box.offsets, place.box.shape, strict=True))
        assert torch.equal(loaded[place.name][part].reshape(tensor.shape), tensor), name
        missing[place.name][part] = False
    tied = hf.tied_names(built(kind))
    assert {name for name, elements in missing.items() if elements.any()} == set(tied)
    written = {name: place for own in loaded.keys() - tied.keys() for name, place in ours.names(own)}
    assert written == {name: ours.place(name) for name in stored}, "the names that transformers writes"


def test_names_may_have_the_prefix_of_the_base_model():
    ours = files("gpt2")
    place = Place("transformer.h.0.ln_1.weight")
    assert ours.place("transformer.h.0.ln_1.weight") == ours.place("h.0.ln_1.weight") == place
    assert ours.place("lm_head.weight") == ours.place("wte.weight") == Place("transformer.wte.weight"), "tied"
    with pytest.raises(InvalidInput, match=r"the tensor h\.0\.gate is not a weight of GPT2LMHeadModel"):
        ours.place("h.0.gate")


def saved(kind, folder):
    """Save a random model, and return its tensors and a function that reads the files after changes."""
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **MODELS[kind])).save_pretrained(folder)

    def read(tensors):
        save_file(tensors, folder / "model.safetensors")
        found = SafetensorsFiles(folder.as_uri())
        read_files, _ = found.of_module(read_options(folder.as_uri()), files(kind).place)
        for rank in range(3):
            found.check_copies(rank, 3)
        return [stored.chunk for file in read_files for stored in file.header.chunks.values()]

    return load_file(folder / "model.safetensors"), read


def test_tied_weights_are_read_once_and_refused_if_they_differ(tmp_path, monkeypatch):
    """transformers does not tie an output layer that differs from the embeddings."""
    monkeypatch.setattr(weights, "COMPARED_BYTES", 100)
    tensors, read = saved("gpt2", tmp_path)
    embeddings = tensors["transformer.wte.weight"]
    expected = {chunk.name: chunk.global_shape for chunk in read(tensors)}
    both = read({**tensors, "lm_head.weight": embeddings.clone()})
    renamed = read({**tensors, "wte.weight": embeddings.clone()})
    del tensors["transformer.wte.weight"]
    only = read({**tensors, "lm_head.weight": embeddings.clone()})
    for chunks in (both, renamed, only):
        assert sorted((chunk.name, chunk.global_shape) for chunk in chunks) == sorted(expected.items())
    for row in (0, 64, 127):
        other = embeddings.clone()
        other[row, 5] += 1
        with pytest.raises(InvalidInput, match=r"different values in lm_head\.weight and transformer\.wte\.weight"):
            read({**tensors, "transformer.wte.weight": embeddings, "lm_head.weight": other})
    with pytest.raises(InvalidInput, match="different values in"):
        read({**tensors, "transformer.wte.weight": embeddings, "lm_head.weight": embeddings.half()})


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("model.layers.0.mlp.experts.gate_up_proj", "has a part of .*gate_up_proj twice"),
        ("model.layers.0.mlp.experts.01.up_proj.weight", r"different values in .*\.1\.up_proj\.weight"),
        ("layers.0.mlp.experts.1.up_proj.weight", r"different values in .*\.1\.up_proj\.weight"),
    ],
)
def test_a_part_of_a_weight_in_two_tensors_is_refused(tmp_path, name, says):
    tensors, read = saved("olmoe", tmp_path)
    read(tensors)
    shape = (4, 96, 32) if name.endswith("gate_up_proj") else (48, 32)
    if name.endswith("gate_up_proj"):
        del tensors["model.layers.0.mlp.experts.0.gate_proj.weight"]
    with pytest.raises(InvalidInput, match=says):
        read({**tensors, name: torch.ones(shape)})


def test_experts_that_are_merged_in_a_file_are_read_too():
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert files("olmoe").place(name) == Place(name)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "model.layers.0.mlp.experts.4.up_proj.weight",
            r"is not of an expert of OlmoeForCausalLM: .* is \[4, 96, 32\]",
        ),
        ("model.layers.0.mlp.experts.up_proj.weight", "is not a weight of OlmoeForCausalLM"),
        ("model.layers.9.mlp.experts.0.up_proj.weight", "is not a weight of OlmoeForCausalLM"),
        ("model.layers.0.mlp.experts.0.up_proj.weight_scale_inv", "is not a weight of OlmoeForCausalLM"),
    ],
)
def test_tensors_that_the_model_does_not_have_are_refused(name, says):
    with pytest.raises(InvalidInput, match=says):
        files("olmoe").place(name)


def test_other_operations_are_refused_by_name(monkeypatch):
    gate, up = (f"mlp.experts.*.{each}_proj.weight" for each in ("gate", "up"))
    operations = [MergeModulelist(dim=0), Concatenate(dim=1), Transpose(1, 2)]
    rules = [WeightConverter([gate, up], "mlp.experts.gate_up_proj", operations)]
    monkeypatch.setattr(
        conversion_mapping,
        "get_model_conversion_mapping",
        lambda module, add_legacy=True: [*rules, *get_model_conversion_mapping(module, add_legacy=add_legacy)],
    )
    ours = files("olmoe")
    with pytest.raises(InvalidInput, match=r"for OlmoeForCausalLM by .*, Transpose.*save_original_format=False"):
        ours.place("model.layers.0.mlp.experts.0.up_proj.weight")
    assert ours.place("model.layers.0.mlp.experts.0.down_proj.weight").name.endswith("down_proj")
    merged = "model.layers.0.mlp.experts.gate_up_proj"
    assert ours.place(merged) == Place(merged), "as in the file that the message advises"
