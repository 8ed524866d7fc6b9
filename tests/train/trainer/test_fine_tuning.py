"""A model from Hugging Face is fine-tuned on chats, answers as they do, and is exported with its chat template."""

import itertools

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from builders.train import chats, families, node, states
from concertina.cli.main import app
from concertina_state.checkpoints.reader import StoredCheckpoint, resolve
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.generation.generate import Continuation, Sampling, chosen
from concertina_trainer.model.decoder import Decoder

NUMBERS, LENGTH, STEPS = range(4), 80, 40


def generate(*arguments):
    result = CliRunner().invoke(app, ["generate", *map(str, arguments), "--device", "cpu"])
    return result.exit_code, result.output


def train(parent, folder, memory, steps, **model):
    """Train a tiny Qwen 3 on chats in a folder, which gets the model, the data, and the checkpoints of the run."""
    untrained = families.made("qwen3", vocab_size=400, num_hidden_layers=2)
    untrained.save_pretrained(folder / "model")
    file = chats.tokenizer(folder / "model", chats.REASONING)
    records = [chats.chat(number) for number in NUMBERS]
    assert chats.built(folder / "data", file, records, LENGTH) == 0
    trainer = {
        "steps": steps, "globalBatchSize": 4, "data": {"uri": str(folder / "data"), "documents": "Packed"},
        "model": {"from": f"{folder}/model", "sequenceLength": LENGTH, **model},
        "optimizer": {"learningRate": 0.02, "warmupSteps": 5},
    }  # fmt: skip
    checkpoint = {"uri": f"file://{folder}/run", "initFrom": f"{folder}/model"}
    outcome = node.Job(memory, parent, trainer, checkpoint).run(2)
    assert set(outcome.codes.values()) == {0}, outcome.output
    assert outcome.losses[steps] < 1.2 < 3 < outcome.losses[1]
    read = f"qwen3 with 2 layers and {untrained.num_parameters():,} weights"
    assert outcome.progress[-1].settings["model.from"] == read
    return folder


@pytest.fixture(scope="module")
def tuned(parent, tmp_path_factory, folder_of_module):
    return train(parent, tmp_path_factory.mktemp("tuned"), folder_of_module, STEPS)


@pytest.mark.long(law="tests/train/trainer/test_fine_tuning.py::test_a_tuned_model_answers_its_data")
def test_so_does_one_with_tuned_adapters(parent, folder, tmp_path):
    """The output layer is random and frozen, so that no answer can become certain, but it is the most probable one."""
    train(parent, tmp_path, folder, 150, lora={"rank": 16, "alpha": 64.0})
    test_a_tuned_model_answers_its_data(tmp_path)


def test_a_tuned_model_answers_its_data(tuned):
    system = "You name numbers."
    for number in NUMBERS:
        prompt = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{chats.question(number)}<|im_end|>\n"
        found = generate(tuned / "run", "--prompt", f"{prompt}<|im_start|>assistant\n")
        assert found == (0, f"<think>\n\n</think>\n\n{chats.answer(number)}\n")


def test_chat_asks_by_the_template(tuned):
    asked = f"<|im_start|>user\n{chats.question(1)}<|im_end|>\n<|im_start|>assistant\n"
    by_hand, by_template = (
        generate(tuned / "run", "--prompt", *options, "--tokens", 9)
        for options in ((asked,), (chats.question(1), "--chat"))
    )
    assert by_hand == by_template
    assert by_hand[0] == 0


def test_the_exported_model_continues_alike(tuned, tmp_path):
    command = ["checkpoint", "export", str(tuned / "run"), str(tmp_path / "hf")]
    assert CliRunner().invoke(app, command).exit_code == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    messages = chats.chat(2)["messages"][:2]
    asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    written = theirs.generate(torch.tensor([asked]), max_new_tokens=60, do_sample=False)[0, len(asked) :]
    expected = f"<think>\n\n</think>\n\n{chats.answer(2)}"
    assert tokenizer.decode(written, skip_special_tokens=True) == expected
    ours = Continuation(StoredCheckpoint(resolve(str(tuned / "run"))), device="cpu")
    with torch.no_grad():
        logits = theirs(torch.tensor([asked])).logits[0, -1, : ours.vocabulary.size]
    torch.testing.assert_close(ours.logits(asked), logits, rtol=1e-4, atol=1e-4)


def test_a_seed_decides_what_is_sampled(tuned):
    options = (tuned / "run", "--prompt", "It", "--tokens", 12, "--temperature", 1.5)
    once, again, other = (generate(*options, "--seed", seed) for seed in (1, 1, 2))
    assert once == again != other
    assert generate(*options, "--top-p", 1e-6) == generate(*options[:-2]), "the most probable token alone"


def test_a_model_of_bytes_with_experts_continues_as_its_decoder(parent, trainer, folder, tmp_path):
    experts = {"count": 4, "hiddenDim": 24, "biasRate": 0.01}
    changed = {**trainer, "steps": 2, "model": {**trainer["model"], "experts": experts}}
    outcome = node.Job(folder, parent, changed, {"uri": f"file://{tmp_path}/run"}).run(1)
    uri = outcome.durable[-1].uri
    model = Decoder(TrainerConfig.model_validate(changed).model)
    prefix = "model."
    found = states.of_checkpoint(uri).items()
    model.load_state_dict({name.removeprefix(prefix): weight for name, weight in found if name.startswith(prefix)})
    tokens = list(b"The ")
    with torch.no_grad():
        for _ in range(5):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    expected = bytes(tokens[4:]).decode(errors="replace")
    assert generate(uri, "--prompt", "The ", "--tokens", 5) == (0, f"{expected}\n")
    said = "the data of this run have no chat template: leave --chat out.\n"
    assert generate(uri, "--prompt", "The ", "--chat") == (1, said)


@pytest.mark.parametrize(("top_p", "kept"), [(1.0, 4), (0.8, 2), (0.81, 3), (0.1, 1)])
def test_top_p_keeps_the_fewest_tokens_of_this_probability(top_p, kept):
    logits = torch.tensor([0.05, 0.3, 0.5, 0.15]).log()
    generator, sampling = torch.Generator().manual_seed(0), Sampling(temperature=1.0, top_p=top_p)
    counts = torch.zeros(4)
    for token in itertools.islice(iter(lambda: chosen(logits, sampling, generator), None), 1000):
        counts[token] += 1
    order = [2, 1, 3, 0][:kept]
    assert set(counts.nonzero().flatten().tolist()) == set(order)
    chances = logits.exp()[order] / logits.exp()[order].sum()
    torch.testing.assert_close(counts[order] / 1000, chances, rtol=0, atol=0.06)


def test_what_can_not_be_generated_is_said(tuned, tmp_path):
    code, said = generate(tuned / "run", "--prompt", "")
    assert (code, said) == (1, "the prompt is empty: give a text that the model continues.\n")
    code, said = generate(tuned / "run", "--prompt", "a", "--data", tmp_path)
    assert code == 1
    assert "has no manifest.json: name the folder of the run's data with --data" in said
    code, said = generate(tuned / "run", "--prompt", "a", "--step", STEPS - 1)
    assert code == 1
    assert f"of step {STEPS - 1}" in said
