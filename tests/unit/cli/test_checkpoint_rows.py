"""Output of `concertina checkpoint show` for a manifest."""

from __future__ import annotations

from concertina.cli.checkpoint_rows import rows
from concertina_protocol import SnapshotId
from concertina_state.checkpoints.manifest import Code, Continued, Manifest
from concertina_state.lineage import Lineage, ParentCheckpoint, TrainedRound

BATCH, RANKS, PARENT = 8, 4, 2000


def shown(step: int) -> dict[str, str]:
    """Return the output for a checkpoint of a job that continued from another job's checkpoint of step PARENT."""
    position = PARENT * BATCH
    parent = ParentCheckpoint("s3://b/a/u1/round-1/step-2000", "u1", 1, PARENT, position)
    lineage = Lineage(parent=parent, rounds=(TrainedRound(1, PARENT, position, RANKS, "s1"),))
    manifest = Manifest(
        1, "u2", "team/b", SnapshotId(1, step, "layout", RANKS), step * BATCH, "c", "d", True, 0.0, (), {"data": RANKS},
        {}, Code("", "", "3.11", {}), Continued("u1", 1, PARENT), lineage=lineage,
    )  # fmt: skip
    return {name: value for name, value in rows("s3://b/b/u2/round-1/step-2001", manifest) if name}


def test_what_was_trained_since_its_parent() -> None:
    fields_shown = shown(2001)
    assert fields_shown["Rounds"] == "round 1: steps 2001 to 2001, samples 16000 to 16007, 4 ranks, setting s1"
    assert fields_shown["Samples"] == "16,000 to 16,008, as counted by the script"


def test_a_run_that_was_over_and_is_saved_again_by_another_job_has_no_steps_of_its_own() -> None:
    fields_shown = shown(PARENT)
    assert (fields_shown["Rounds"], fields_shown["Samples"]) == ("no steps since the parent checkpoint", "none")
    assert fields_shown["Trained from"] == "step 2000 in s3://b/a/u1/round-1/step-2000"
