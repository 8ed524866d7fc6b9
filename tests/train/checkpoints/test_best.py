"""The checkpoint with the lowest evaluation loss: marked with LATEST, kept, and found again."""

import math

import pytest
from typer.testing import CliRunner

from builders.train.published import publish
from concertina.cli.checkpoint import app
from concertina_protocol import Undone
from concertina_state.checkpoints.catalogue import to_prune
from concertina_state.checkpoints.latest import read_latest
from concertina_state.checkpoints.manifest import CheckpointKey
from concertina_state.checkpoints.reader import StoredCheckpoint, resolve
from concertina_state.checkpoints.retention import found
from concertina_state.checkpoints.rollback import undo
from concertina_state.errors import InvalidInput
from concertina_state.format.shardfile import Continued
from concertina_state.objects.prefix import ObjectPrefix
from concertina_trainer.state.weights import is_checkpoint


@pytest.fixture
def uri(tmp_path):
    return f"file://{tmp_path}/run"


@pytest.fixture
def save(uri, tmp_path):
    """Publish a checkpoint of a step with an evaluation loss, and return the best one that LATEST then names."""

    def saved(step, loss, round=1, keep_best=True, **named):
        answer = publish(uri, tmp_path, round, step, loss=loss, keep_best=keep_best, **named)
        assert answer.durable is not None, answer.error
        assert answer.durable == read_latest(ObjectPrefix(uri))
        return answer.durable.best and (answer.durable.best.step, answer.durable.best.loss)

    return saved


def steps(uri):
    return {key.step for key in found(ObjectPrefix(uri).entries())[1]}


def test_the_best_stays_beside_the_newest_until_there_is_a_better_one(uri, save):
    assert save(10, 3.0) == (10, 3.0)
    assert save(20, 2.0) == (20, 2.0)
    assert save(30, math.nan) == (20, 2.0), "a loss that is not finite is never the best"
    assert save(40, 2.5) == save(50, None) == save(60, 2.0) == (20, 2.0), "the first of equal ones"
    assert steps(uri) == {20, 50, 60}
    assert [key.step for key in to_prune(ObjectPrefix(uri), 1, None)] == [50]
    assert StoredCheckpoint(resolve(f"{uri}/BEST")).manifest.evaluation.loss == 2.0
    assert save(70, 1.5) == (70, 1.5)
    assert steps(uri) == {60, 70}
    assert save(80, 1.6, keep_best=False) is None


def test_losses_of_other_documents_are_not_compared(uri, save):
    assert save(10, 1.0) == (10, 1.0)
    assert save(20, None) == (10, 1.0)
    assert save(30, 4.0, of="others") == (30, 4.0)


def test_one_from_before_keep_best_was_set_is_found(uri, save):
    assert save(10, 1.0, keep_best=False) is save(20, 2.0, keep_best=False) is None
    assert resolve(f"{uri}/BEST").endswith("/step-10")
    assert save(30, 3.0) == (10, 1.0)
    assert steps(uri) == {10, 20, 30}


def test_a_rollback_takes_the_mark_back(uri, save):
    save(10, 3.0), save(20, 2.0), save(30, 1.0)
    durable = undo(ObjectPrefix(uri), "u1", Undone(1, 25))
    assert (durable.step, durable.best.step) == (20, 20)
    assert save(30, 1.5, round=2) == (30, 1.5)


def test_a_job_that_goes_on_keeps_the_best_of_the_one_before_and_later_deletes_it(uri, save):
    save(10, 1.0), save(20, 2.0)
    ours = Continued("u1", 1, 20)
    assert save(30, 3.0, uid="u2", continued=ours) == (10, 1.0)
    third = Continued("u2", 1, 30)
    for step in (40, 50, 60):
        assert save(step, 3.0, uid="u3", continued=third) == (10, 1.0)
    assert steps(uri) == {10, 50, 60}
    assert save(70, 0.5, uid="u3", continued=third) == (70, 0.5)
    assert {key.uid for key in found(ObjectPrefix(uri).entries())[0]} == {"u3"}


def test_the_command_line_shows_and_finds_it(uri, save):
    save(10, 1.0), save(20, math.nan)
    listed = CliRunner().invoke(app, ["list", uri], env={"COLUMNS": "200"}).stdout.splitlines()
    rows = {line.split()[0]: line for line in listed if line.strip()[:1].isdigit()}
    assert "BEST" in rows["10"]
    assert "BEST" not in rows["20"]
    assert "not finite" in rows["20"]
    shown = CliRunner().invoke(app, ["show", f"{uri}/BEST"]).stdout
    assert CheckpointKey("u1", 1, 10).folder in shown
    assert "loss 1" in shown


def test_without_any_loss_there_is_none(uri, save):
    save(10, None)
    with pytest.raises(InvalidInput, match="no checkpoint of a step that was evaluated"):
        resolve(f"{uri}/BEST")


def test_a_folder_of_weights_may_have_the_same_name(uri, save, tmp_path):
    save(10, 1.0)
    weights = tmp_path / "models" / "BEST"
    weights.mkdir(parents=True)
    assert is_checkpoint(f"{uri}/BEST")
    assert not is_checkpoint(f"file://{weights}"), "its parent is no run"
    with pytest.raises(InvalidInput, match="neither a checkpoint"):
        resolve(f"file://{weights}")
