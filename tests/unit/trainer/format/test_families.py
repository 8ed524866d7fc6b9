"""Models of Hugging Face's families: transformers and the decoder compute the same, there and back."""

import itertools
import json
import re

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch._C._distributed_c10d import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3ForConditionalGeneration

from builders import pages
from builders.train import families, small
from concertina_state.checkpoints.reader import StoredCheckpoint
from concertina_state.errors import InvalidInput
from concertina_state.objects.prefix import ObjectPrefix
from concertina_trainer.config.optimizer_config import OptimizerConfig
from concertina_trainer.config.parallelism import ParallelismConfig
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.export.export import export
from concertina_trainer.format import hf_config
from concertina_trainer.model.decoder import Decoder
from concertina_trainer.model.optimizer import LocalOptimizer, settings
from concertina_trainer.model.stages import Stages
from concertina_trainer.parallel.group import DistContext
from concertina_trainer.parallel.parallelize import parallelized
from concertina_trainer.state.train_state import TrainState
from concertina_trainer.state.weights import SafetensorsFiles

LENGTH = 24
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
ROUNDS = itertools.count(1000)
LAW = "tests/unit/trainer/format/test_families.py::test_logits_are_those_of_transformers[llama 3.1]"
GATE = ("llama 3.1", "qwen2", "qwen3_moe", "gpt_oss")


def config_of(folder):
    """Return the configuration with the model that config.json describes."""
    found = hf_config.read((folder / "config.json").read_bytes(), "config.json")
    model = found.model().model_copy(update={"sequence_length": LENGTH})
    return TrainerConfig.model_validate({"data": {"uri": "/none"}, "model": model.model_dump(by_alias=True)})


def loaded(config, folder, world=1, parallelism=None):
    """Yield what each rank of a layout reads of the folder, as a tensor by chunk."""
    for rank in range(world):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        try:
            given = ParallelismConfig.model_validate(parallelism or {})
            where = torch.device("cpu")
            context = DistContext.of(rank, world, where, given, config.model.experts is not None, next(ROUNDS))
            model = parallelized(config, context)
            state = TrainState(model, config, LocalOptimizer(model, config.optimizer, 0), context)
            state.initialise(config)
            readers, unchecked = SafetensorsFiles(folder.as_uri()).of(config.model)
            assert not unchecked or unchecked.startswith("num_nextn_predict_layers is 1")
            state.load_weights(readers, str(folder))
            yield dict(zip(state.saved.layout.chunks, state.saved.tensors, strict=True))
        finally:
            dist.destroy_process_group()


def decoder_of(config, folder):
    [saved] = loaded(config, folder)
    weights = {chunk.name.removeprefix("model."): tensor for chunk, tensor in saved.items()}
    model = Decoder(config.model)
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            value.copy_(weights[name])
    return model


DECAYED = re.compile(r"(query|key|value|output|gate|up|down|gates|router|head|proj\w*)(\.weight)?$|\.shared")
"""Names of matrices: of attention, feed-forwards, experts, routers, and the output layer."""


@pytest.mark.parametrize("name", families.MODELS)
def test_matrices_decay_and_embeddings_norms_and_biases_do_not(name):
    kind, fields = families.MODELS[name]
    text = json.dumps(AutoConfig.for_model(kind, **{**families.SIZES, **fields}).to_dict()).encode()
    model = hf_config.read(text, "config.json").model()
    with torch.device("meta"):
        stages = Stages([Decoder(model)])
    found = {
        each: settings(OptimizerConfig(), each, parameter, stages.embeddings()).weight_decay
        for each, parameter in stages.named_parameters()
    }
    for each, decay in found.items():
        plain = each == "embedding.weight" or "norm" in each or each.endswith(("bias", ".sinks"))
        assert plain != bool(DECAYED.search(each)), f"{each} is of no known kind"
        assert decay == (0.0 if plain else 0.1), each


def tokens(rows=2):
    return torch.randint(0, 128, (rows, LENGTH), generator=torch.Generator().manual_seed(4))


def check_logits(decoder, model):
    """Compare whole sequences, and documents that share a sequence with others."""
    with torch.no_grad():
        torch.testing.assert_close(decoder(tokens()), model(tokens()).logits, **CLOSE)
        ends = [5, 6, 17, LENGTH]
        documents = torch.repeat_interleave(torch.arange(4), torch.tensor([5, 1, 11, 7]))[None]
        packed = decoder(tokens(1), documents)
        for begin, end in itertools.pairwise([0, *ends]):
            torch.testing.assert_close(packed[:, begin:end], model(tokens(1)[:, begin:end]).logits, **CLOSE)


def cases():
    return [name if name in GATE else pytest.param(name, marks=pytest.mark.long(law=LAW)) for name in families.MODELS]


@pytest.mark.parametrize("name", cases())
def test_logits_are_those_of_transformers(tmp_path, monkeypatch, name):
    """Compare both with the weights of a folder of several files, then with its export, and what they generate."""
    model = families.made(name)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    config = config_of(tmp_path / "theirs")
    decoder = decoder_of(config, tmp_path / "theirs")
    assert sum(p.numel() for p in decoder.parameters()) == config.model.weights
    check_logits(decoder, model)
    again = exported(decoder, config, tmp_path, monkeypatch)
    assert again.config.model_type == families.exported_as(name)
    check_logits(decoder, again)
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(again.generate(tokens(), **settings), model.generate(tokens(), **settings))


def test_the_text_of_gemma_3_with_images_is_saved_as_the_page_says(tmp_path):
    fields = {**families.SIZES, **families.GEMMA3}
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 16, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    images = {"boi_token_index": 125, "eoi_token_index": 126, "image_token_index": 127, "mm_tokens_per_image": 4}
    torch.manual_seed(3)
    config = AutoConfig.for_model("gemma3", text_config=fields, vision_config=vision, **images)
    whole = Gemma3ForConditionalGeneration(config).eval()
    whole.to(torch.bfloat16).save_pretrained(tmp_path / "whole")
    with pytest.raises(InvalidInput, match='model_type is "gemma3"'):
        config_of(tmp_path / "whole")
    [block] = pages.beginning_with("models.md", "from transformers import AutoTokenizer, Gemma3ForCausalLM")
    *lines, tokenizer = block.text.replace("google/gemma-3-4b-pt", str(tmp_path / "whole")).splitlines()
    assert tokenizer.startswith("AutoTokenizer")
    exec("\n".join(lines).replace("gemma-3-4b-text", str(tmp_path / "text")), {})
    decoder = decoder_of(config_of(tmp_path / "text"), tmp_path / "text")
    check_logits(
        decoder, Gemma3ForConditionalGeneration.from_pretrained(tmp_path / "whole", dtype=torch.float32).eval()
    )


ALL = ["Query", "Key", "Value", "Output", "Gate", "Up", "Down"]
ADAPTED = {
    "phi3": (3, ["Query", "Value", "Up"]), "qwen2": (3, ["Query", "Value", "Up"]),
    "qwen3_moe": (8, ALL), "glm4_moe": (8, ALL), "gpt_oss": (8, ALL[:4]), "qwen2_moe": (8, ALL),
}  # fmt: skip


@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_are_added_to_the_weights_of_their_tensor(tmp_path, monkeypatch, name):
    """Phi 3 has one tensor for several weights, Qwen 2 biases beside them, and Qwen 3 MoE a tensor for each expert."""
    families.made(name).save_pretrained(tmp_path / "theirs")
    plain = config_of(tmp_path / "theirs").model_dump(by_alias=True)
    rank, targets = ADAPTED[name]
    lora = {"rank": rank, "alpha": 6.0, "targets": targets, "frozenDtype": "Float32"}
    config = TrainerConfig.model_validate({**plain, "model": {**plain["model"], "lora": lora}})
    decoder = decoder_of(config, tmp_path / "theirs")
    assert sum(p.numel() for p in decoder.parameters()) == config.model.weights
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    check_logits(decoder, exported(decoder, config, tmp_path, monkeypatch))


def exported(decoder, config, folder, monkeypatch):
    monkeypatch.setenv("CONCERTINA_TRAINER", config.model_dump_json(by_alias=True))
    weights = {name: value.detach().numpy() for name, value in (*decoder.named_parameters(), *decoder.named_buffers())}
    durable = small.publish(f"file://{folder}/run", folder, weights=weights)
    export(StoredCheckpoint(durable.uri)).write(ObjectPrefix(str(folder / "hf"), create=True))
    return AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe"])
def test_each_rank_reads_only_the_bytes_that_it_keeps(tmp_path, monkeypatch, name):
    """Count the bytes of each request. Rows of which a rank keeps some columns are read whole (tensor groups)."""
    families.made(name).save_pretrained(tmp_path)
    config, counted, read = config_of(tmp_path), [], ObjectPrefix.get_ranges

    def get_ranges(prefix, key, ranges):
        counted.extend(end - begin for begin, end in ranges)
        return read(prefix, key, ranges)

    monkeypatch.setattr(ObjectPrefix, "get_ranges", get_ranges)
    header = 8 + int.from_bytes((tmp_path / "model.safetensors").read_bytes()[:8], "little")
    for world, parallelism in ((4, {}), (4, {"tensor": 2})):
        for saved in loaded(config, tmp_path, world, parallelism):
            kept = rows = 0
            for chunk, tensor in saved.items():
                if chunk.name.startswith("model."):
                    kept += tensor.nbytes
                    divided = len(chunk.shape) > 1 and chunk.shape[-1] < chunk.global_shape[-1]
                    rows += tensor.nbytes * (chunk.global_shape[-1] // chunk.shape[-1] if divided else 1)
            assert (rows == kept) == (not parallelism)
            assert sum(counted) - header == rows
            counted.clear()


def test_the_head_of_a_tied_model_is_passed_over(tmp_path):
    families.made("qwen2, tied").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}, file)
    config = config_of(tmp_path)
    decoder_of(config, tmp_path)
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"] + 1}, file)
    files = SafetensorsFiles(tmp_path.as_uri())
    files.of(config.model)
    with pytest.raises(InvalidInput, match=r"different values in lm_head\.weight and model\.embed_tokens\.weight"):
        files.check_copies(0, 1)
    (tmp_path / "config.json").unlink()
    with pytest.raises(InvalidInput, match=r"has lm_head\.weight, and this model uses its embeddings"):
        SafetensorsFiles(tmp_path.as_uri()).of(config.model)


def test_layers_that_predict_further_tokens_are_left_out_and_named(tmp_path):
    """Load GLM 4.5 with a fourth layer of three, which transformers does not load either."""
    model = families.made("glm4_moe", num_nextn_predict_layers=1)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    more = {f"model.layers.3.{name}": torch.ones(8) for name in ("eh_proj.weight", "input_layernorm.weight")}
    save_file({**load_file(file), **more}, file)
    config = config_of(tmp_path)
    _, remark = SafetensorsFiles(tmp_path.as_uri()).of(config.model)
    assert remark.startswith("num_nextn_predict_layers is 1: the layers that predict further tokens are neither")
    decoder = decoder_of(config, tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(decoder(tokens()), model(tokens()).logits, **CLOSE)
    text = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**text, "num_nextn_predict_layers": 0}))
    with pytest.raises(InvalidInput, match=r"contains the tensor model\.layers\.3\.eh_proj\.weight"):
        SafetensorsFiles(tmp_path.as_uri()).of(config.model)


LAYOUTS = {
    "fsdp": (3, {}),
    "fsdp x tensor": (4, {"tensor": 2}),
    "pipeline": (3, {"pipeline": 3}),
}
OF_EXPERTS = {
    "fsdp": (4, {}),
    "expert x fsdp": (4, {"expert": 2}),
    "expert x pipeline": (6, {"expert": 2, "pipeline": 3}),
    "expert x tensor": (4, {"expert": 2, "tensor": 2}),
}


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe", "gpt_oss"])
def test_each_rank_reads_its_own_part(tmp_path, name):
    families.made(name).save_pretrained(tmp_path, max_shard_size="20KB")
    config = config_of(tmp_path)
    [whole] = loaded(config, tmp_path)
    values = {chunk.name: tensor for chunk, tensor in whole.items()}
    for world, parallelism in (OF_EXPERTS if config.model.experts else LAYOUTS).values():
        read = {name: torch.full_like(value, torch.nan) for name, value in values.items()}
        for saved in loaded(config, tmp_path, world, parallelism):
            for chunk, tensor in saved.items():
                place = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.shape, strict=True))
                read[chunk.name][place] = tensor
        for name_of_weight, value in values.items():
            assert torch.equal(read[name_of_weight], value), (parallelism, name_of_weight)


@pytest.mark.parametrize("layout", OF_EXPERTS.values(), ids=OF_EXPERTS)
def test_only_adapters_are_trained_beside_experts(layout):
    """Routers, experts and norms stay frozen, although layouts replace their parameters."""
    world, parallelism = layout
    model = {"layers": 3, "dim": 32, "experts": {"count": 4}, "lora": {"rank": 8}, "vocabSize": 128}
    config = TrainerConfig.model_validate({"data": {"uri": "/none"}, "model": model})
    given = ParallelismConfig.model_validate(parallelism)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        context = DistContext.of(0, world, torch.device("cpu"), given, True, next(ROUNDS))
        trained = {name for name, p in parallelized(config, context).named_parameters() if p.requires_grad}
    finally:
        dist.destroy_process_group()
    assert trained
    assert all("lora_" in name for name in trained)
    assert {"router", "shared"}.isdisjoint(part for name in trained for part in name.split("."))
    assert any("experts.gate_lora_a" in name for name in trained)


@pytest.mark.parametrize("name", families.MODELS)
def test_a_config_comes_back_as_it_was(name):
    config = json.loads(families.made(name).config.to_json_string())
    model = hf_config.described(config).model()
    again = hf_config.described(hf_config.config_json(model))
    assert again.kind == families.exported_as(name)
    assert again.model() == model
