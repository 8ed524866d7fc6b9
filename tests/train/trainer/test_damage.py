"""A damaged newest checkpoint under `checkpoint.onDamage: UsePrevious`, with real workers and a flipped byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from builders.train import node
from builders.train.published import flip_a_byte
from concertina_protocol import Durable, Restore, RestoreSource, Undone
from concertina_protocol.worker_channel import Probe, Undo
from concertina_state.checkpoints.latest import read_latest
from concertina_state.checkpoints.reader import StoredCheckpoint
from concertina_state.objects.prefix import ObjectPrefix
from concertina_state.uploader import Destination, answer

REASSOCIATION = 2e-4
"""As in test_resume: most that a loss may differ between runs."""
BATCH = 7


def durable_of(job: node.Job, restore: Restore, drain_at: int) -> Durable:
    """Return the checkpoint of a round that ends with a drain at this step."""
    outcome = job.run(2, restore, node.Script(drain=(drain_at, True)))
    assert set(outcome.codes.values()) == {0}, outcome.output
    return outcome.durable[-1]


ITSELF = "tests/train/trainer/test_damage.py::test_a_run_goes_on_from_the_checkpoint_before_the_damaged_one[itself]"


@pytest.mark.parametrize(
    "uid", ["u1", pytest.param("u2", marks=pytest.mark.long(law=ITSELF))], ids=["itself", "made again"]
)
def test_a_run_goes_on_from_the_checkpoint_before_the_damaged_one(
    folder: Path, parent: node.Parent, trainer: dict[str, Any], tmp_path: Path, uid: str
) -> None:
    uri = (tmp_path / "durable").as_uri()
    first = node.Job(folder, parent, trainer, {"uri": uri, "everySteps": 100, "keep": 5})
    older = durable_of(first, node.FRESH, 4)
    newest = durable_of(first, Restore(RestoreSource.STORAGE, older.step, durable=older), 8)
    assert older.step < newest.step
    flip_a_byte(newest.uri, shard=1)

    again = node.Job(folder, parent, trainer, {**first.checkpoint, "onDamage": "UsePrevious"}, uid)
    again.number = first.number if uid == first.uid else 0
    answer(Probe(living=()), Destination(uri=uri), uid)  # as each agent does in its first round: it owns the folder now
    damaged = again.run(2, Restore(RestoreSource.STORAGE, newest.step, durable=newest))
    assert damaged.faults[1].reason == "Damaged", damaged.output
    assert damaged.codes[1] == 1, "78 would end the job"
    back = damaged.faults[1].rollback
    assert back is not None
    assert back.damaged is not None
    assert (back.step, back.damaged.uri, back.damaged.step) == (older.step, newest.uri, newest.step)
    assert 0 not in damaged.faults, "its shard is whole"

    undone = Undone(again.number, back.step) if back.undoes(uid) else None
    if undone:
        answer(Undo(undone), Destination(uri=uri), uid)
        named = read_latest(ObjectPrefix(uri))
        assert named is not None
        assert named.step == older.step
    restore = Restore(RestoreSource.STORAGE, back.step, durable=newest, undone=undone, damaged=(newest.uri,))
    last = again.run(2, restore)
    assert set(last.codes.values()) == {0}, last.output
    assert last.progress[-1].restored_step == older.step
    undisturbed = node.Job(folder / "undisturbed", parent, trainer).run(2).losses
    assert last.losses == pytest.approx({s: x for s, x in undisturbed.items() if s > older.step}, rel=REASSOCIATION)
    assert last.progress[-1].position == BATCH * 12

    lineage = StoredCheckpoint(last.durable[0].uri).manifest.lineage
    assert lineage is not None
    assert lineage.parent is not None
    assert (lineage.parent.uid, lineage.parent.step) == ("u1", older.step)
    assert Path(older.uri.removeprefix("file://"), "manifest.json").exists()
