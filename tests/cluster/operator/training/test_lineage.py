"""Values that the operator passes to pods for the lineage of checkpoints, and a job that reproduces a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

from builders.cluster.operator_process import Jobs
from builders.train import states
from concertina.cli.main import app
from concertina_state.checkpoints import catalogue
from concertina_state.objects.prefix import ObjectPrefix

pytestmark = pytest.mark.usefixtures("operator")
STEPS = 100
"""Number of steps, so that one of the checkpoints on the way is in storage before the last one replaces it."""


@pytest.mark.long(
    law="tests/train/checkpoints/test_lineage.py::test_a_checkpoint_is_trained_again_from_its_parent_to_the_same_bits"
)
def test_a_checkpoint_is_trained_again_by_the_job_that_concertina_reproduce_writes(
    jobs: Jobs, data: Path, tmp_path: Path
) -> None:
    uri, file = f"file://{tmp_path}/run", tmp_path / "again.yaml"
    model = {"layers": 1, "dim": 32, "heads": 2, "vocabSize": 256, "sequenceLength": 32}
    trainer = {
        "steps": STEPS,
        "model": model,
        "data": {"uri": str(data)},
        "globalBatchSize": 4,
        "determinism": "Bitwise",
    }
    image = "concertina/trainer:test"
    containers = [{"name": "trainer", "image": image, "env": [{"name": "TOKEN", "value": "hunter2"}]}]
    jobs.create(
        "a", replicas=2, pod={"containers": containers}, trainer=trainer, checkpoint={"uri": uri, "everySteps": 3}
    )
    jobs.wait_true("a", "Complete")

    first = catalogue.finished(ObjectPrefix(uri))[0][0]
    assert first.lineage is not None
    assert first.lineage.images == (image,), "the node's kubelet knows no digests"
    assert first.lineage.spec["replicas"] == 2
    assert first.lineage.spec["template"]["spec"]["containers"] == [
        {"name": "trainer", "image": image, "env": [{"name": "TOKEN"}]}
    ]
    assert [(each.round, each.step, each.world) for each in first.lineage.rounds] == [(1, 0, 2)]

    step = first.id.step
    assert step < STEPS
    wanted = ["reproduce", uri, "--step", str(step), "--env", "TOKEN=", "-o", str(file)]
    result = CliRunner().invoke(app, wanted)
    assert result.exit_code == 0, result.output
    assert "the digest of its image is not known" in " ".join(result.output.split())
    name = yaml.safe_load(file.read_text())["metadata"]["name"]
    jobs.cluster.kubectl("apply", "-f", str(file))
    job = jobs.wait_true(name, "Complete")
    assert (job["status"]["progress"]["step"], job["status"]["progress"]["steps"]) == (step, step)
    again = states.of_checkpoint(job["status"]["lastCheckpoint"]["uri"])
    before = states.of_checkpoint(f"{uri}/{first.place.folder}")
    assert again.keys() == before.keys()
    assert all(torch.equal(again[key].view(torch.int32), before[key].view(torch.int32)) for key in before)
