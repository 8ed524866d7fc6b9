"""Manifest of a reproduction, and the reasons why its result is not the same to the bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from concertina.reproduction import Beginning, Irreproducible, ReproductionOptions, reproduction, without_checkpoint
from concertina_protocol import SnapshotId
from concertina_state.checkpoints.manifest import VERSION, Code, Manifest
from concertina_state.format.shardfile import Continued
from concertina_state.lineage import Lineage, ParentCheckpoint, TrainedRound

IMAGE = "docker.io/me/trainer@sha256:" + "a" * 64
SPEC: dict[str, Any] = {
    "replicas": 8,
    "elastic": {"minReplicas": 2},
    "suspend": False,
    "workersPerReplica": 2,
    "template": {"spec": {"containers": [{"name": "trainer", "image": "me/trainer:1"}]}},
    "trainer": {
        "steps": 100,
        "determinism": "Bitwise",
        "data": {"uri": "/data"},
        "evaluation": {"everySteps": 5, "stopping": {"patience": 1}},
    },
    "checkpoint": {"uri": "s3://bucket/run", "everySteps": 10, "resumeFrom": "s3://bucket/older"},
}
ROUNDS = (TrainedRound(1, 0, 0, 4, "s"), TrainedRound(2, 25, 800, 6, "s"))
PARENT = ParentCheckpoint("s3://bucket/run/u/round-2/step-40", "u", 2, 40, 1280, "digest")
LINEAGE = Lineage(
    spec=SPEC, parent=PARENT, rounds=ROUNDS, data_sets=("d",), images=(IMAGE,), devices=("H100",)
)  # fmt: skip
BEGINNING = Beginning(40, PARENT.uri, "digest")
WANTED = ReproductionOptions()


def checkpoint(lineage: Lineage = LINEAGE, **changed: Any) -> Manifest:
    manifest = Manifest(
        VERSION, "u", "team/job", SnapshotId(2, 50, "layout", 6), 1600, "config", "d", False, 0.0, (), {"data": 6},
        SPEC["trainer"], Code(), lineage=lineage,
    )  # fmt: skip
    return dataclasses.replace(manifest, **changed)


def spec_with(**changed: Any) -> Lineage:
    spec = {name: value for name, value in {**SPEC, **changed}.items() if value is not None}
    return dataclasses.replace(LINEAGE, spec=spec)


def test_it_is_the_job_as_it_was_from_its_parent_on() -> None:
    made = checkpoint(spec_with(evaluationJob={"podTemplate": "score"}), skipped=((3, 7),))
    reproduced = reproduction(made, "s3://bucket/run/u/round-2/step-50", BEGINNING, WANTED)
    assert reproduced.differences == ()
    assert reproduced.manifest == {
        "apiVersion": "concertina.dev/v1beta1",
        "kind": "TrainingJob",
        "metadata": {
            "name": "job-reproduce-50",
            "namespace": "team",
            "annotations": {"concertina.dev/reproduces": "s3://bucket/run/u/round-2/step-50"},
        },
        "spec": {
            "replicas": 3,
            "workersPerReplica": 2,
            "template": {"spec": {"containers": [{"name": "trainer", "image": IMAGE}]}},
            "trainer": {
                **SPEC["trainer"],
                "evaluation": {"everySteps": 5},
                "reproduction": {"lastStep": 50, "dataDigest": "d", "skippedSamples": [[3, 7]]},
            },
            "checkpoint": {"uri": "s3://bucket/run-reproduce-50", "resumeFrom": PARENT.uri, "everySteps": 10},
        },
    }
    assert SPEC["template"]["spec"]["containers"][0]["image"] == "me/trainer:1", "what was read is left as it is"


def lineage(**changed: Any) -> Lineage:
    return dataclasses.replace(LINEAGE, **changed)


ORDER = spec_with(trainer={**SPEC["trainer"], "determinism": "Order"})
CHANGED = (ROUNDS[0], dataclasses.replace(ROUNDS[1], step=45, setting="t"))
SCRIPT = spec_with(
    trainer=None,
    template={"spec": {"containers": [{"name": "trainer", "image": "i", "command": ["python", "train.py"]}]}},
)


@pytest.mark.parametrize(
    ("made", "beginning", "reason"),
    [
        (ORDER, BEGINNING, "determinism was Order"),
        (ORDER, Beginning(10, "s3://bucket/run/u/round-1/step-10"), "by 4 and 6 ranks in turn"),
        (lineage(rounds=CHANGED), BEGINNING, "were not the same in its rounds 1, 2"),
        (lineage(images=(IMAGE, IMAGE.replace("a", "b"))), BEGINNING, "different images"),
        (lineage(images=("sha256:" + "a" * 64,)), BEGINNING, "digest of its image is not known"),
        (lineage(images=()), BEGINNING, "me/trainer:1 may be another image now"),
        (lineage(devices=("A100", "H100")), BEGINNING, "different devices (A100, H100)"),
        (
            lineage(begun_from="s3://bucket/weights"),
            Beginning(0),
            "the weights in s3://bucket/weights have no digest",
        ),
        (LINEAGE, dataclasses.replace(BEGINNING, digest="other"), "is not the one from which it was trained"),
        (SCRIPT, BEGINNING, "the script decides"),
    ],
)
def test_why_it_is_not_the_same_to_the_bit(made: Lineage, beginning: Beginning, reason: str) -> None:
    reproduced = reproduction(checkpoint(made), "uri", beginning, WANTED)
    assert any(reason in difference for difference in reproduced.differences), reproduced.differences


@pytest.mark.parametrize(
    ("made", "wanted", "said"),
    [
        (lineage(rounds=()), WANTED, "has no lineage"),
        (lineage(spec={}), WANTED, "does not contain the spec of its job"),
        (spec_with(checkpoint=None), WANTED, "name a new folder with --checkpoint-uri"),
        (LINEAGE, ReproductionOptions(checkpoint_uri="s3://bucket/run/"), "is the folder of the job itself"),
        (spec_with(fromTheFuture=1), WANTED, "this version of concertina can't run its spec: spec.fromTheFuture"),
        (spec_with(template={}), WANTED, "can't run its spec: spec.template.spec is missing"),
        (
            spec_with(template={"spec": {**SPEC["template"]["spec"], "initContainers": [{"name": "i", "env": [3]}]}}),
            WANTED,
            "the variables in its spec can't be read",
        ),
        (lineage(rounds=(dataclasses.replace(ROUNDS[1], step=60),)), WANTED, "does not say which rounds"),
        (spec_with(workersPerReplica=4), WANTED, "its 6 ranks are not a whole number of replicas with 4"),
    ],
)
def test_what_is_lacking_is_said(made: Lineage, wanted: ReproductionOptions, said: str) -> None:
    with pytest.raises(Irreproducible, match=said.replace(".", r"\.")):
        reproduction(checkpoint(made), "uri", BEGINNING, wanted)


def test_where_it_begins_when_no_checkpoint_before_it_is_left() -> None:
    assert without_checkpoint(checkpoint()) == Beginning(0)
    another = lineage(rounds=(TrainedRound(1, 30, 900, 4, "s"),), begun_from="s3://bucket/other/v/round-1/step-30")
    continued = checkpoint(another, continued=Continued("v", 1, 30))
    assert without_checkpoint(continued) == Beginning(30, "s3://bucket/other/v/round-1/step-30")
    for cut in (lineage(rounds=ROUNDS[1:]), dataclasses.replace(another, begun_from="")):
        with pytest.raises(Irreproducible, match=r"step 40 in .* no longer exists, no older checkpoint"):
            without_checkpoint(checkpoint(cut, continued=None if cut.rounds[0].round == 2 else continued.continued))


def test_a_long_name_is_cut() -> None:
    name = reproduction(checkpoint(job="n/" + "j" * 50), "uri", BEGINNING, WANTED).manifest["metadata"]["name"]
    assert name == "j" * 37 + "-reproduce-50"
