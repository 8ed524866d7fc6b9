"""Files that `concertina diagnose` reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from concertina.api.status import JobStatus, rfc3339
from concertina.cli import collect_evidence as evidence
from concertina.cli.collect_evidence import EvidenceRecord, read
from concertina.cli.diagnose import as_object, judge
from concertina.diagnosis.diagnose import diagnose
from concertina.diagnosis.evidence import AgentFigures, StepLine
from concertina.terminal.cluster_connection import UserError

T0 = 1_800_000_000.0
JOB = {
    "apiVersion": "concertina.dev/v1beta1",
    "kind": "TrainingJob",
    "metadata": {"namespace": "team", "name": "a", "creationTimestamp": rfc3339(T0)},
    "spec": {"template": {"spec": {"containers": [{"name": "trainer", "command": ["x"]}]}}},
    "status": JobStatus().manifest(),
}


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    """A loss that is not finite is written and read too."""
    record = EvidenceRecord(
        job=JOB,
        at=T0,
        earlier=JOB,
        agents=(AgentFigures(replica="a-0-0", at=T0, finite_loss=False),),
        steps=(StepLine(step=1, seconds=0.5, loss=2.0), StepLine(step=2, seconds=0.5)),
        unseen=("nothing",),
    )
    file = tmp_path / "a.json"
    file.write_text(json.dumps(as_object(record, diagnose(record.evidence()))))
    assert read(file) == record
    assert record.evidence().spec is not None


def test_a_job_that_this_version_can_t_read_is_diagnosed_by_its_status(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps({**JOB, "spec": {"replicas": "many"}}))
    assert read(file).evidence().spec is None


@pytest.mark.parametrize(
    "text",
    [
        "", "a: [", "[]", "kind: TrainingJob", '{"record": {"job": 1}}', "{", "a: &a [*a]",
        "kind: TrainingJob\nmetadata: x", "kind: TrainingJob\nmetadata: {name: a}\nstatus: x",
        '{"record": {"at": 1, "job": {"metadata": "x"}}}',
        '{"record": {"at": 1, "job": {}, "earlier": {"status": ["x"]}}}',
    ],
)  # fmt: skip
def test_what_is_no_job_is_refused_in_a_sentence(text: str, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=r"a\.yaml (is neither|is not output of|holds no TrainingJob)"):
        read(file)


@pytest.mark.parametrize(
    "wrong",
    [{"metadata": {"name": "a", "creationTimestamp": "soon"}}, {"status": {"goodput": {"at": "soon"}}}],
    ids=["created", "counted"],
)
def test_a_time_that_is_none_is_said(wrong: dict[str, object], tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps({**JOB, **wrong}))
    with pytest.raises(UserError, match="has a time that can't be read"):
        judge(read(file))


@pytest.mark.parametrize("at", [1e30, -1e11, float("nan")])
def test_a_record_of_no_time_is_refused_in_a_sentence(at: float, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"record": {"job": JOB, "at": at}}))
    with pytest.raises(UserError, match="has a time that can't be read"):
        judge(read(file))


def test_no_more_is_read_than_a_status_can_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "LARGEST_FILE", 100)
    file = tmp_path / "a.json"
    file.write_text(json.dumps(JOB))
    with pytest.raises(UserError, match="is neither YAML nor JSON"):
        read(file)
