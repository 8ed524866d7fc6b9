"""Evaluation on what was set aside: the same in every world, and nothing of the training changes by it."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from builders.train import chats, node, states
from concertina.demo import text
from concertina_protocol.worker_channel import Done
from concertina_trainer.config.data_config import DataConfig
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.data.build.build import build
from concertina_trainer.data.build.recipe import Recipe
from concertina_trainer.data.read.sequence_reader import Reader
from concertina_trainer.model.decoder import Decoder
from concertina_trainer.training.evaluation import GROUPS, SEED

STEPS, SEQUENCES = 6, 17
"""Sequences: two whole batches of 7, and a part of one."""
LAYOUT = "tests/train/trainer/test_evaluation.py::test_in_any_layout_the_losses_are_those_of_one_worker"


@pytest.fixture(scope="module")
def evaluated(trainer, tmp_path_factory):
    out = str(tmp_path_factory.mktemp("aside"))
    files = text.write(tmp_path_factory.mktemp("text"), 30, 20_000)
    list(build(files, out, 300_000, Recipe(validation=0.3)))
    return {
        **trainer, "steps": STEPS, "data": {"uri": out}, "evaluation": {"everySteps": 4, "sequences": SEQUENCES},
    }  # fmt: skip


def results(outcome):
    assert set(outcome.codes.values()) == {0}, outcome.output
    return {told.evaluated.step: told.evaluated for told in outcome.progress if told.evaluated}


def evaluations(outcome):
    return {step: result.loss for step, result in results(outcome).items()}


def with_sets(config):
    """Return the configuration with two named sets: what was set aside, and the training data."""
    uri = config["data"]["uri"]
    sets = [{"name": "aside", "uri": f"{uri}/validation"}, {"name": "seen", "uri": uri}]
    return {**config, "evaluation": {**config["evaluation"], "sets": sets}}


def bytes_per_token(uri, reader):
    """Return the mean bytes of the evaluated tokens. The tokenizer adds a separator to the bytes of each document."""
    shards = json.loads(Path(uri, "manifest.json").read_text())["shards"]
    assert all(shard["text_bytes"] == shard["tokens"] - shard["documents"] for shard in shards)
    _, read, _ = reader.places(np.arange(SEQUENCES))
    return np.mean([1 - shards[shard]["documents"] / shards[shard]["tokens"] for shard in read])


@pytest.mark.parametrize("ema", [False, True])
def test_the_loss_is_that_of_what_was_set_aside_and_training_goes_on_as_without(folder, parent, evaluated, ema):
    if ema:
        evaluated = {
            **evaluated,
            "evaluation": {**evaluated["evaluation"], "ema": True},
            "optimizer": {**evaluated["optimizer"], "emaDecay": 0.9},
        }
    else:
        evaluated = with_sets(evaluated)
    job = node.Job(folder / "with", parent, evaluated)
    outcome = job.run(2)
    found, figures = evaluations(outcome), results(outcome)
    assert list(found) == [4, 6], "the last step too"
    assert figures[4].perplexity == pytest.approx(math.exp(found[4]))
    assert (
        f"step 4: evaluation loss {found[4]:.4f}, perplexity {figures[4].perplexity:.4g}, token accuracy "
        f"{figures[4].token_accuracy:.4f}, {figures[4].bits_per_byte:.4f} bits per byte (mean of {SEQUENCES * 32} "
        "tokens" in outcome.output
    )
    config = TrainerConfig.model_validate(evaluated)
    model = Decoder(config.model)
    weights = states.whole(job)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[f"{'optimizer.ema' if ema else 'model'}.{name}"])
        expected, accuracies, bits = {}, {}, {}
        for name, uri in (("aside", f"{config.data.uri}/validation"), ("seen", config.data.uri)):
            reader = Reader(DataConfig(uri=uri, groups=GROUPS), 32, SEED)
            tokens = torch.from_numpy(reader.read(0, SEQUENCES))
            logits, targets = model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
            expected[name] = F.cross_entropy(logits, targets).item()
            accuracies[name] = (logits.argmax(1) == targets).double().mean().item()
            bits[name] = expected[name] / math.log(2) / bytes_per_token(uri, reader)
    assert found[6] == pytest.approx(expected["aside"], rel=1e-5)
    assert figures[6].sets == ({} if ema else pytest.approx(expected, rel=1e-5))
    assert 0 < figures[6].token_accuracy < 1
    assert figures[6].token_accuracy == accuracies["aside"]
    assert figures[6].set_token_accuracies == ({} if ema else accuracies)
    assert figures[6].bits_per_byte == pytest.approx(bits["aside"], rel=1e-5)
    assert figures[6].set_bits_per_byte == ({} if ema else pytest.approx(bits, rel=1e-5))
    without = {key: value for key, value in evaluated.items() if key != "evaluation"}
    assert node.Job(folder / "without", parent, without).run(2).losses == outcome.losses
    phases = [told.phase for told in outcome.progress]
    assert phases.index("evaluating") == phases.index("training") + 4


@pytest.fixture(scope="module")
def wide(evaluated):
    """Return a configuration with as many heads and layers as the layouts need."""
    return {**evaluated, "model": {**evaluated["model"], "layers": 4, "heads": 4, "kvHeads": 2}}


@pytest.fixture(scope="module")
def of_one_worker(folder_of_module, parent, wide):
    return results(node.Job(folder_of_module, parent, wide).run(1))


@pytest.mark.parametrize(
    "parallelism",
    [
        {"pipeline": 2},
        pytest.param({"pipeline": 2, "tensor": 2}, marks=pytest.mark.long(law=f"{LAYOUT}[parallelism0]")),
        pytest.param(
            {"pipeline": 2, "schedule": "Interleaved1F1B"}, marks=pytest.mark.long(law=f"{LAYOUT}[parallelism0]")
        ),
        pytest.param({"tensor": 2, "asyncTensor": True}, marks=pytest.mark.long(law=f"{LAYOUT}[parallelism0]")),
        pytest.param({"context": 2, "tensor": 2}, marks=pytest.mark.long(law=f"{LAYOUT}[parallelism0]")),
        {"tensor": 2},
    ],
)
def test_in_any_layout_the_losses_are_those_of_one_worker(folder, parent, wide, of_one_worker, parallelism):
    job = node.Job(folder, parent, wide)
    job.environment["CONCERTINA_PARALLELISM"] = json.dumps(parallelism)
    found = results(job.run(2 * parallelism.get("tensor", 1)))
    assert list(found) == list(of_one_worker) == [4, 6]
    for step, expected in of_one_worker.items():
        assert found[step].loss == pytest.approx(expected.loss, rel=2e-4)
        assert found[step].bits_per_byte == pytest.approx(expected.bits_per_byte, rel=2e-4)
        # a token whose two largest logits are almost equal may differ
        assert found[step].token_accuracy == pytest.approx(expected.token_accuracy, abs=2 / (SEQUENCES * 32))
        assert expected.token_accuracy > 0.05


@pytest.mark.parametrize("steps", [STEPS, 4], ids=["between steps", "after the last"])
def test_a_drain_leaves_an_evaluation_and_who_goes_on_makes_up_for_it(folder, parent, evaluated, steps):
    """Twice: the second time by a round that has not done a step."""
    config = {**evaluated, "steps": steps}
    plain = node.Job(folder / "plain", parent, config).run(2)
    job = node.Job(folder / "drained", parent, config)
    usual, job.worker = job.worker, "workers.drained_evaluation:main"
    script = node.Script(drain_when=lambda outcome: outcome.progress[-1].phase == "evaluating")
    restore, losses = node.FRESH, {}
    for _ in range(2):
        left = job.run(2, restore, script)
        assert evaluations(left) == {}
        assert left.done == dict.fromkeys((0, 1), Done("drained", 4)), left.output
        assert "step 4: the evaluation stopped for a drain, after 1 of 3 batches" in left.output
        losses |= left.losses
        restore = job.newest()
        assert (restore.id.round, restore.step) == (job.number, 4)
    job.worker = usual
    end = job.run(2, restore)
    assert evaluations(end) == evaluations(plain)
    assert losses | end.losses == plain.losses
    assert end.done == plain.done == dict.fromkeys((0, 1), Done("complete", steps))


def test_bitwise_it_is_the_same_bits_in_every_world(folder, parent, evaluated):
    bitwise = with_sets({**evaluated, "determinism": "Bitwise"})
    found = [results(node.Job(folder / str(world), parent, bitwise).run(world)) for world in (1, 3)]
    assert found[0] == found[1]
    assert list(found[0]) == [4, 6]
    assert found[0][6].set_token_accuracies.keys() == found[0][6].set_bits_per_byte.keys() == {"aside", "seen"}


def test_bits_per_byte_are_absent_where_the_bytes_are_not_known(folder, parent, evaluated):
    aside = Path(evaluated["data"]["uri"], "validation")
    copy = shutil.copytree(aside, folder / "unknown")
    manifest = json.loads((copy / "manifest.json").read_text())
    for shard in manifest["shards"]:
        del shard["text_bytes"]
    (copy / "manifest.json").write_text(json.dumps(manifest))
    sets = [{"name": "unknown", "uri": str(copy)}, {"name": "known", "uri": str(aside)}]
    outcome = node.Job(folder / "job", parent, {**evaluated, "steps": 1, "evaluation": {"sets": sets}}).run(1)
    (figures,) = results(outcome).values()
    assert (figures.bits_per_byte, list(figures.set_bits_per_byte)) == (None, ["known"])
    assert list(figures.set_token_accuracies) == ["unknown", "known"]


def test_a_set_of_another_tokenizer_is_refused(folder, parent, evaluated):
    (folder / "text").mkdir()
    files = text.write(folder / "text", 30, 20_000)
    list(build(files, str(folder / "other"), 300_000, Recipe(tokenizer=chats.tokenizer(folder / "model"))))
    sets = [{"name": "other", "uri": str(folder / "other")}]
    outcome = node.Job(folder, parent, {**evaluated, "evaluation": {"sets": sets}}).run(1)
    assert outcome.codes == {0: 78}
    assert "the evaluation set other has the tokenizer" in outcome.faults[0].message


def test_without_a_validation_split_it_is_refused(folder, parent, trainer):
    outcome = node.Job(folder, parent, {**trainer, "evaluation": {}}).run(1)
    assert outcome.codes == {0: 78}
    assert "/validation does not exist" in outcome.faults[0].message
    assert "concertina data build --validation" in outcome.faults[0].message
