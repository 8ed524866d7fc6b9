"""Training in float16, bfloat16 and float8: the losses of float32, in every world."""

import pytest

from builders.train import node
from concertina_state.format.shardfile import header_length, parse_header

BOUND = (2 * 39 + 10) * 2.0**-11
"""Relative error of a loss, as in tests/unit/trainer/training/test_loss_scaling.py, for two blocks."""
LAW = "tests/train/trainer/test_precisions.py::test_an_overflow_repeats_its_step_in_every_world"


def metadata(job):
    content = job.find(job.newest().id, 0).read_bytes()
    return parse_header(content[8 : header_length(content[:8])]).metadata


def check(parent, trainer, folder, layouts):
    """Check a run whose scale grows in each step until gradients overflow, in one world after another."""
    sgd = {"name": "SGD", "learningRate": 0.1, "warmupSteps": 1}  # AdamW would hide a scale of gradients
    configured = {**trainer, "steps": 4 * len(layouts) + 2, "precision": "Float16", "optimizer": sgd}
    plain = node.Job(folder / "plain", parent, {**configured, "precision": "Float32"}).run(1)
    job = node.Job(folder / "half", parent, configured)
    job.worker = "workers.eager_scaling:main"
    losses, repeated = {}, 0
    for number, (size, parallelism) in enumerate(layouts, 1):
        job.environment = {"CONCERTINA_PARALLELISM": parallelism}
        before = metadata(job) if number > 1 else None
        script = node.Script(drain=(4 * number, False)) if number < len(layouts) else node.Script()
        found = job.run(size, *([job.newest()] if before else []), script=script)
        assert found.losses, found.output
        losses |= found.losses
        repeated += found.output.count("is computed again with loss scale")
        if before:
            assert found.progress[-1].metrics["recomputed_steps"] >= before.loss_scale.recomputed
        assert metadata(job).loss_scale.recomputed == repeated
    assert repeated > 0, "no gradient overflowed"
    assert metadata(job).position == configured["steps"] * configured["globalBatchSize"]
    assert losses == pytest.approx(plain.losses, rel=BOUND)


def test_an_overflow_repeats_its_step_in_every_world(parent, trainer, folder):
    check(parent, trainer, folder, [(2, "{}"), (1, "{}")])


@pytest.mark.long(law=LAW)
def test_so_it_does_in_every_layout(parent, trainer, folder):
    model = {**trainer["model"], "heads": 4, "kvHeads": 2}
    layouts = [(4, '{"tensor": 2}'), (2, '{"pipeline": 2}'), (2, '{"context": 2}'), (3, "{}")]
    check(parent, {**trainer, "model": model}, folder, layouts)


def test_a_custom_model_may_add_up_its_losses_in_float16(parent, trainer, folder):
    """The scale falls until the sum is in range, and no sample is left out."""
    sgd = {"name": "SGD", "learningRate": 0.1, "warmupSteps": 1}
    model = {"entrypoint": "workers.own:half_sum", "sequenceLength": 32}
    configured = {**trainer, "steps": 4, "optimizer": sgd, "model": model}
    plain = node.Job(folder / "plain", parent, {**configured, "precision": "Float32"}).run(1)
    job = node.Job(folder / "half", parent, {**configured, "precision": "Float16"})
    found = job.run(2)
    assert set(found.codes.values()) == {0}, found.output
    assert "is computed again with loss scale 32768: the loss overflowed" in found.output
    assert found.losses == pytest.approx(plain.losses, rel=BOUND)
    assert metadata(job).position == configured["steps"] * configured["globalBatchSize"]


ROUNDING = {"Float8": 2.0**-4, "BFloat16": 2.0**-8}
"""Relative error of an element, by precision. A loss is a mean over tokens, whose errors mostly cancel."""
NARROW = "tests/train/trainer/test_precisions.py::test_a_run_in_few_bits_goes_on_in_another_world[Float8]"


@pytest.mark.parametrize("precision", ["Float8", pytest.param("BFloat16", marks=pytest.mark.long(law=NARROW))])
def test_a_run_in_few_bits_goes_on_in_another_world(parent, trainer, folder, precision):
    """A token is rounded alike in every world, and so the run is nearer to itself than to float32."""
    model = {**trainer["model"], "dim": 64, "heads": 4, "kvHeads": 2, "hiddenDim": 64}
    configured = {**trainer, "steps": 8, "model": model, "precision": precision}
    plain = node.Job(folder / "plain", parent, {**configured, "precision": "Float32"}).run(1)
    alone = node.Job(folder / "alone", parent, configured).run(1)
    assert set(alone.codes.values()) == {0}, alone.output
    job = node.Job(folder / "resumed", parent, configured)
    first = job.run(2, script=node.Script(drain=(4, False)))
    job.environment = {"CONCERTINA_PARALLELISM": '{"pipeline": 2}'}
    second = job.run(2, job.newest())
    losses = first.losses | second.losses
    assert losses == pytest.approx(plain.losses, rel=ROUNDING[precision])

    def farthest(found):
        return max(abs(found[step] - alone.losses[step]) for step in alone.losses)

    print(
        precision, "farthest from itself in another world, and from float32:", farthest(losses), farthest(plain.losses)
    )
    assert losses.keys() == alone.losses.keys()
    assert farthest(losses) < farthest(plain.losses) / 2
