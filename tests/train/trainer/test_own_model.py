"""A model of a user's own in the trainer's frame: plain gradients in every world, exact restores, refusals."""

import json
import runpy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml

from builders.programs import AUDIO, AUDIO_FIELDS, CLICKS, EMBEDDINGS, PROGRAMS
from builders.train import node, states
from builders.train.gradients import whole_gradient
from concertina_state.format.read_plan import Box
from concertina_trainer import cli
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.data.read.sequence_reader import Reader
from concertina_trainer.model.initial import usual

REASSOCIATION = 2e-4
"""As in test_resume.py."""


@pytest.fixture(autouse=True)
def programs(monkeypatch):
    monkeypatch.syspath_prepend(str(PROGRAMS))
    monkeypatch.syspath_prepend(str(AUDIO))


@pytest.fixture(scope="module")
def of_tokens(trainer):
    """Return the configuration of a model of tests/programs/workers/own.py."""
    return lambda name="spec", **options: {
        **trainer, "model": {"entrypoint": f"workers.own:{name}", "options": options, "sequenceLength": 32}
    }  # fmt: skip


@pytest.fixture(scope="module")
def features(tmp_path_factory):
    """As the example makes them."""
    folder = tmp_path_factory.mktemp("audio")
    runpy.run_path(str(AUDIO / "make_features.py"))["main"](folder / "features", 30)
    options = [*AUDIO_FIELDS, "--validation", "0.2", "--shard-mebibytes", "0.1", "--processes", "1"]
    assert cli.main(["data", "build", "--out", str(folder / "data"), *options, str(folder / "features")]) == 0
    return folder / "data"


@pytest.fixture(scope="module")
def of_frames(trainer, features):
    """Return the configuration of the example's model."""
    model = {"entrypoint": "audio_model:spec", "options": {"dim": 24, "blocks": 2}, "sequenceLength": 32}
    return {**trainer, "data": {"uri": str(features)}, "model": model}


def filled(model, config):
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(usual(name, p.shape, Box((0,) * p.dim(), tuple(p.shape)), config.seed))
    return model


def plain_tokens(config):
    """Return a model, and its mean loss of a whole batch."""
    from workers.own import Model, logits

    reader = Reader(config.data, 32, config.seed)
    model = filled(Model(reader.vocab_size, **config.model.options), config)
    tokens = torch.from_numpy(reader.read(100, 100 + config.global_batch_size))
    return model, F.cross_entropy(logits(model, tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def plain_frames(config):
    from audio_model import AudioModel

    found = Reader(config.data, 32, config.seed).sequences(np.arange(100, 100 + config.global_batch_size))
    features, targets = torch.from_numpy(found.fields["features"]).float(), torch.from_numpy(found.tokens)
    model = filled(AudioModel(20, 8, **config.model.options), config)
    frames, logits = model(features[:, :-1])
    distance = (frames - features[:, 1:]).abs().mean()
    return model, distance + F.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten())


WORLDS = {"1": (1, {}), "2": (2, {}), "3": (3, {}), "hsdp": (4, {"shard": 2}), "copies": (2, {"shard": 1})}
PLAIN = {"tokens": plain_tokens, "frames": plain_frames}
LAW = "tests/train/trainer/test_own_model.py::test_gradients_are_a_plain_model_s_in_every_world[hsdp-frames]"
GATE = [("hsdp", "frames"), ("1", "tokens")]


@pytest.mark.parametrize(
    ("world", "kind"),
    [
        pytest.param(world, kind, marks=[] if (world, kind) in GATE else [pytest.mark.long(law=LAW)])
        for world in WORLDS
        for kind in PLAIN
    ],
)
def test_gradients_are_a_plain_model_s_in_every_world(parent, of_tokens, of_frames, tmp_path, world, kind):
    trainer = {"tokens": of_tokens(), "frames": of_frames}[kind]
    size, parallelism = WORLDS[world]
    model, loss = PLAIN[kind](TrainerConfig.model_validate(trainer))
    loss.backward()
    found = whole_gradient(parent, trainer, size, tmp_path, parallelism=parallelism)
    expected = {name: p.grad for name, p in model.named_parameters()}
    assert found["gradients"].keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found["gradients"][name], gradient, rtol=1e-4, atol=1e-7)
    assert found["loss"] == pytest.approx(loss.item(), rel=1e-6)
    if kind == "frames":
        assert not found["late"], "the parent has not imported the job's model"


def evaluations(outcome):
    return {p.evaluated.step: p.evaluated.loss for p in outcome.progress if p.evaluated}


KILLED = "tests/train/trainer/test_own_model.py::test_killed_in_one_world_it_goes_on_in_another"


def test_killed_in_one_world_it_goes_on_in_another(folder, parent, of_frames):
    example = yaml.safe_load((AUDIO / "audio.yaml").read_text())["spec"]["trainer"]
    transformed = {**of_frames["data"], "transform": example["data"]["transform"]}
    trainer = {**of_frames, "data": transformed, "evaluation": {"everySteps": 4, "sequences": 16}}
    whole = node.Job(folder / "whole", parent, trainer).run(1)
    assert whole.codes == {0: 0}, whole.output
    job = node.Job(folder / "killed", parent, trainer)
    first = job.run(3, script=node.Script(kill=(6, (1,))))
    job.lose(1)
    resumed = job.run(2, job.newest())
    assert set(resumed.codes.values()) == {0}, resumed.output
    assert resumed.progress[-1].restored_from == "Memory"
    assert {**first.losses, **resumed.losses} == pytest.approx(whole.losses, rel=REASSOCIATION)
    assert {**evaluations(first), **evaluations(resumed)} == pytest.approx(evaluations(whole), rel=REASSOCIATION)
    assert list(evaluations(whole)) == [4, 8, 12]
    assert whole.losses[12] < 0.8 * whole.losses[1], "it learns"


def test_the_image_of_the_example_has_the_modules_that_its_job_names():
    example = yaml.safe_load((AUDIO / "audio.yaml").read_text())["spec"]["trainer"]
    modules = {name.partition(":")[0] for name in (example["model"]["entrypoint"], example["data"]["transform"])}
    copied = {line.split()[1] for line in (AUDIO / "Dockerfile").read_text().splitlines() if line.startswith("COPY")}
    assert {name.removesuffix(".py") for name in copied} == modules
    assert all((AUDIO / name).exists() for name in copied)


@pytest.mark.long(law=KILLED)
def test_the_next_event_is_learnt_from_ids_and_times(folder, parent, trainer, tmp_path, monkeypatch):
    """The item after a pause is another one than the item without a pause, so times are needed to predict it."""
    monkeypatch.syspath_prepend(str(CLICKS))
    runpy.run_path(str(CLICKS / "make_clicks.py"))["main"](tmp_path / "clicks.jsonl", 400)
    options = ["--tokens", "item", "--vocab-size", "200", "--field", "time=int64", "--processes", "1"]
    data = tmp_path / "data"
    assert cli.main(["data", "build", "--out", str(data), *options, str(tmp_path / "clicks.jsonl")]) == 0
    assert cli.main(["data", "pack", str(data), "--length", "32"]) == 0
    model = {"entrypoint": "clicks_model:spec", "options": {"dim": 32}, "sequenceLength": 32}
    faster = {"steps": 80, "globalBatchSize": 32, "optimizer": {"learningRate": 0.02, "warmupSteps": 4}}
    job = {**trainer, **faster, "data": {"uri": str(data), "documents": "Bucketed"}, "model": model}
    outcome = node.Job(folder, parent, job).run(2)
    assert set(outcome.codes.values()) == {0}, outcome.output
    uncertain = -0.75 * np.log(0.75) - 0.25 * np.log(0.25)
    print(f"loss {outcome.losses[80]:.3f}, and {uncertain:.3f} without times")
    assert outcome.losses[80] < 0.7 * uncertain


@pytest.mark.long(law=KILLED)
def test_the_next_embedding_is_learnt_from_vectors_alone(folder, parent, trainer, tmp_path, monkeypatch):
    """Two embeddings before the next one give its place on the circle; the mean alone gives an error of about 0.5."""
    monkeypatch.syspath_prepend(str(EMBEDDINGS))
    runpy.run_path(str(EMBEDDINGS / "make_embeddings.py"))["main"](tmp_path / "tracks.parquet", 300)
    options, data = ["--field", "embedding=float32x16", "--processes", "1"], tmp_path / "data"
    assert cli.main(["data", "build", "--out", str(data), *options, str(tmp_path / "tracks.parquet")]) == 0
    assert cli.main(["data", "pack", str(data), "--length", "32"]) == 0
    model = {"entrypoint": "embeddings_model:spec", "options": {"dim": 32}, "sequenceLength": 32}
    faster = {"steps": 60, "globalBatchSize": 32, "optimizer": {"learningRate": 0.02, "warmupSteps": 4}}
    job = {**trainer, **faster, "data": {"uri": str(data), "documents": "Bucketed"}, "model": model}
    outcome = node.Job(folder, parent, job).run(2)
    assert set(outcome.codes.values()) == {0}, outcome.output
    assert outcome.losses[60] < 0.2 * outcome.losses[1]


@pytest.mark.long(
    law="tests/train/trainer/test_compiled.py::test_a_survivor_compiles_nothing_in_its_next_rounds[shards]"
)
def test_survivors_compile_nothing_again(folder, parent, of_tokens, tmp_path):
    """In another world and with another rank, where the shapes are those of before."""
    job = node.Job(folder, parent, {**of_tokens("compiled", folder=str(tmp_path)), "microBatchSize": 1}, stays=True)
    first = job.run(3, script=node.Script(kill=(4, (2,))))
    second = job.run(2, job.newest(), node.Script(drain=(8, False)))
    third = job.run(2, job.newest())
    assert {*second.pids.values()} == {*third.pids.values()} == {first.pids[0], first.pids[1]}
    assert set(third.codes.values()) == {0}, third.output
    for pid in third.pids.values():
        graphs = {}
        for line in (tmp_path / f"graphs-{pid}").read_text().splitlines():
            round, count = map(int, line.split())
            graphs.setdefault(round, set()).add(count)
        assert graphs[1] > {0}, "they are compiled in the first step"
        assert graphs[2] == graphs[3] == {max(graphs[1])}


@pytest.mark.long(law=KILLED)
def test_a_checkpoint_goes_on_in_another_world_and_begins_another_run(folder, parent, of_frames, tmp_path):
    whole = node.Job(folder / "whole", parent, of_frames).run(2)
    stored = {"uri": f"file://{tmp_path}/checkpoints", "everySteps": 4}
    job = node.Job(folder / "stored", parent, of_frames, stored)
    first = job.run(3, script=node.Script(drain=(5, True)))
    assert set(first.codes.values()) == {0}, first.output
    durable = first.durable[-1]
    job.durable = durable
    resumed = job.run(1, node.Restore("Storage", durable.step, durable=durable))
    assert resumed.codes == {0: 0}, resumed.output
    assert {**first.losses, **resumed.losses} == pytest.approx(whole.losses, rel=REASSOCIATION)
    again = node.Job(folder / "again", parent, of_frames, {"uri": f"file://{tmp_path}/other", "initFrom": durable.uri})
    begun = again.run(2)
    assert set(begun.codes.values()) == {0}, begun.output
    assert begun.losses[1] == pytest.approx(whole.losses[durable.step + 1], rel=0.2)


@pytest.mark.long(law=KILLED)
def test_dropout_is_drawn_again_as_it_was(folder, parent, of_tokens):
    """To the bit, in the same world; and other numbers on each rank, in each step."""
    trainer = of_tokens(dropout=0.3)
    whole = node.Job(folder / "whole", parent, trainer).run(2)
    job = node.Job(folder / "killed", parent, trainer)
    job.run(2, script=node.Script(kill=(5, (0, 1))))
    resumed = job.run(2, job.newest())
    assert set(resumed.codes.values()) == {0}, resumed.output
    for step, loss in resumed.losses.items():
        assert loss == whole.losses[step]
    again = node.Job(folder / "computed again", parent, {**trainer, "memory": {"activations": "Recompute"}}).run(2)
    assert again.losses == whole.losses
    assert node.Job(folder / "other", parent, {**trainer, "seed": 8}).run(2).losses[1] != whole.losses[1]


@pytest.mark.long(law=KILLED)
def test_bitwise_has_the_same_bits_in_every_world_dropout_and_all(folder, parent, of_tokens):
    trainer = {**of_tokens(dropout=0.3), "determinism": "Bitwise", "steps": 4}
    losses = [node.Job(folder / str(world), parent, trainer).run(world).losses for world in (1, 3)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4


@pytest.mark.long(law="tests/train/trainer/test_pairs.py::test_one_layout_goes_on_from_another")
def test_frozen_weights_stay_and_have_no_moments(folder, parent, of_tokens):
    trainer = of_tokens("frozen")
    whole = node.Job(folder / "whole", parent, trainer).run(1)
    job = node.Job(folder / "killed", parent, trainer)
    first = job.run(3, script=node.Script(kill=(6, (1,))))
    resumed = job.run(2, job.newest())
    assert set(resumed.codes.values()) == {0}, resumed.output
    assert {**first.losses, **resumed.losses} == pytest.approx(whole.losses, rel=REASSOCIATION)
    found = states.whole(job)
    moments = {name.removeprefix("optimizer.exp_avg.") for name in found if name.startswith("optimizer.exp_avg.")}
    frozen = {name.removeprefix("model.") for name in found if name.startswith("model.")} - moments
    assert frozen == {
        "embedding.weight",
        *(f"mixers.0.{of}" for of in ("mix.bias", "mix.weight", "norm.bias", "norm.weight")),
    }
    for name in frozen:
        shape = found[f"model.{name}"].shape
        assert torch.equal(
            found[f"model.{name}"], usual(name, shape, Box((0,) * len(shape), tuple(shape)), trainer["seed"])
        )


REFUSED = "tests/train/trainer/test_own_model.py::test_what_is_refused_ends_the_round_with_a_sentence[mean]"
WEIGHTS = "the sum of each prediction's loss times its weight"
MISTAKES = {
    "mean": WEIGHTS,
    "regularised": WEIGHTS,
    "raises": "raised KeyError",
    "counting": "writes into its buffers",
    "no_scalar": "must be a scalar tensor",
    "half": "is float16, in which a loss times the loss scale overflows",
    "uncovered": "returns a NoneType for temperature",
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "mean" else [pytest.mark.long(law=REFUSED)]) for name in MISTAKES],
)
def test_what_is_refused_ends_the_round_with_a_sentence(folder, parent, of_tokens, name):
    outcome = node.Job(folder, parent, of_tokens(name)).run(1)
    assert outcome.codes == {0: 78}, outcome.output
    assert MISTAKES[name] in outcome.faults[0].message
    assert outcome.faults[0].reason == "InvalidInput"


@pytest.mark.long(law=REFUSED)
def test_what_can_t_be_imported_the_worker_refuses_and_the_parent_survives(folder, trainer):
    changed = {**trainer, "model": {"entrypoint": "workers.no_import:spec"}}
    parent = node.Parent(CONCERTINA_TRAINER=json.dumps(changed))
    try:
        outcome = node.Job(folder, parent, changed).run(1)
    finally:
        parent.close()
    assert outcome.codes == {0: 78}, outcome.output
    assert "can't be imported (RuntimeError: no GPU in this module): the image" in outcome.faults[0].message


@pytest.mark.long(law=REFUSED)
def test_constants_are_filled_and_a_decoder_reads_no_frames(folder, parent, of_tokens, of_frames):
    assert node.Job(folder / "a", parent, of_tokens("constant")).run(2).codes == {0: 0, 1: 0}
    outcome = node.Job(folder / "b", parent, {**of_frames, "model": {"sequenceLength": 32}}).run(1)
    assert "the data hold frames (float16 x 20 with 8 targets)" in outcome.faults[0].message
