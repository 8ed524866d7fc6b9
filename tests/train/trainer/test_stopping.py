"""Early stopping and the best checkpoint of a run, over failures and in other worlds."""

import pytest

from builders.train import node
from concertina.demo import text
from concertina_protocol import Restore
from concertina_protocol.worker_channel import Done
from concertina_state.checkpoints.latest import read_latest
from concertina_state.checkpoints.reader import StoredCheckpoint, resolve
from concertina_state.objects.prefix import ObjectPrefix
from concertina_trainer.data.build.build import build
from concertina_trainer.data.build.recipe import Recipe


@pytest.fixture(scope="module")
def worsening(trainer, tmp_path_factory):
    """Return a run whose evaluation loss falls at first and then rises, because the learning rate rises."""
    out = str(tmp_path_factory.mktemp("aside"))
    files = text.write(tmp_path_factory.mktemp("text"), 30, 20_000)
    list(build(files, out, 300_000, Recipe(validation=0.3)))
    return {
        **trainer, "steps": 20, "data": {"uri": out, "groups": 1}, "determinism": "Bitwise",
        "evaluation": {"everySteps": 2, "sequences": 14, "stopping": {"patience": 3}},
        "optimizer": {"learningRate": 2.0, "warmupSteps": 20},
    }  # fmt: skip


def evaluated(outcome):
    assert set(outcome.codes.values()) == {0}, outcome.output
    return {told.evaluated.step: told.evaluated for told in outcome.progress if told.evaluated}


def test_a_run_stops_at_the_same_step_in_any_world_and_over_an_interruption(folder, parent, worsening, tmp_path):
    whole = node.Job(folder / "whole", parent, worsening).run(2)
    results = evaluated(whole)
    losses = {step: result.loss for step, result in results.items()}
    assert whole.done == dict.fromkeys((0, 1), Done("complete", 8)), "three evaluations after that of step 2"
    assert list(losses) == [2, 4, 6, 8]
    assert min(losses, key=losses.get) == 2
    assert [results[step].without_improvement for step in losses] == [0, 1, 2, 3]
    assert [bool(results[step].stop_reason) for step in losses] == [False, False, False, True]
    assert "training stopped early after step 8" in whole.output

    job = node.Job(folder / "cut", parent, worsening, {"uri": f"file://{tmp_path}/run", "keep": 1, "keepBest": True})
    drain = node.Script(drain_when=lambda outcome: outcome.progress[-1].step == 5)
    first = job.run(3, script=drain)
    left = next(iter(first.done.values()))
    assert (left.outcome, left.step in (5, 6, 7)) == ("drained", True), "after one or two without an improvement"
    second = job.run(2, job.newest())
    assert second.done == dict.fromkeys((0, 1), Done("complete", 8))
    assert evaluated(first) | evaluated(second) == results, "the same bits, and the count goes on"

    storage = ObjectPrefix(f"file://{tmp_path}/run")
    latest = read_latest(storage)
    assert (latest.step, latest.complete, latest.best.step, latest.best.loss) == (8, True, 2, losses[2])
    assert StoredCheckpoint(resolve(f"{storage.uri}/BEST")).manifest.evaluation.loss == losses[2]

    again = job.run(1, Restore("Storage", 8, durable=latest))
    assert again.done == {0: Done("complete", 8)}, "it has stopped"
    assert again.progress[-1].evaluated == results[8]
    assert again.losses == {}
    job.trainer = {**worsening, "steps": 10, "evaluation": {**worsening["evaluation"], "stopping": {"patience": 9}}}
    onward = job.run(1, Restore("Storage", 8, durable=read_latest(storage)))
    assert onward.done == {0: Done("complete", 10)}, "with more patience, it goes on"
    assert read_latest(storage).best == latest.best
