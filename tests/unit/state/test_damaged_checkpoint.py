"""A damaged newest checkpoint: which one to use instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from builders.train.published import publish
from concertina_state.checkpoints.catalogue import instead_of
from concertina_state.checkpoints.reader import StoredCheckpoint
from concertina_state.errors import BadInput, DamagedInput


def test_a_damaged_checkpoint_names_the_newest_other_one_and_how_to_use_it(tmp_path: Path) -> None:
    run, scratch = tmp_path / "run", tmp_path / "scratch"
    scratch.mkdir()
    for step in (40, 60):
        assert publish(run.as_uri(), scratch, 1, step).durable
    newest, older = (run / "u1" / "round-1" / f"step-{step}" for step in (60, 40))
    (newest / "manifest.json").write_bytes((newest / "manifest.json").read_bytes()[:100])
    with pytest.raises(DamagedInput) as damaged:
        StoredCheckpoint(newest.as_uri())
    assert instead_of(damaged.value) == (
        " The newest other one is of step 40. To go on from it, create the job again with checkpoint.resumeFrom: "
        f"{older.as_uri()} and another, empty folder in checkpoint.uri."
    )
    (older / "manifest.json").unlink()
    assert instead_of(damaged.value) == f" {run.as_uri()} has no other finished checkpoint."
    assert instead_of(DamagedInput("a shard of data is damaged")) == ""
    assert instead_of(BadInput("the data are not there")) == ""
