"""Rule for commit subjects: what it refuses, and when there is nothing to check."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tools import commit_subjects


@pytest.mark.parametrize(
    "subject",
    [
        "api: refuse a spec of more than 10,000 values",
        "agent, protocol: pass the step of a snapshot",
        "tests/gpu: seed the generator",
        "trainer_image: bring pyarrow 22",
        "docs: re-measure recovery",
        "a" * 60 + ": add line",
    ],
)
def test_subjects_in_order(subject: str) -> None:
    assert list(commit_subjects.faults(subject)) == []


@pytest.mark.parametrize(
    ("subject", "fault"),
    [
        ("Mend the queue", "is not of the form"),
        ("fixup! api: refuse a spec", "is not of the form"),
        ("Api: refuse a spec", "is not of the form"),
        ("api:refuse a spec", "is not of the form"),
        ("api: refuse a spec.", "ends with a period"),
        ("api: Refuse a spec", "begins its summary with 'Refuse'"),
        ("api: refuses a spec", "begins its summary with 'refuses'"),
        ("api: refused a spec", "begins its summary with 'refused'"),
        ("api: refusing a spec", "begins its summary with 'refusing'"),
        ("api: what a spec refuses", "begins its summary with 'what'"),
        ("api: 10,000 values", "begins its summary with '10,000'"),
        ("api: " + "refuse " * 10, "has 75 characters, 72 at most"),
    ],
)
def test_subjects_that_are_refused(subject: str, fault: str) -> None:
    assert any(found.startswith(fault) for found in commit_subjects.faults(subject))


def git(root: Path, *arguments: str) -> str:
    author = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(root), *author, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_commits_after_the_baseline_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "-m", "Before the rule.")
    baseline = git(tmp_path, "rev-parse", "HEAD")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "-m", "api: add a field")
    assert commit_subjects.main(tmp_path, baseline) == 0
    git(tmp_path, "commit", "--quiet", "--allow-empty", "-m", "Another field.")
    assert commit_subjects.main(tmp_path, baseline) == 1
    complaint = capsys.readouterr().err
    assert "'Another field.' is not of the form" in complaint
    assert "Before the rule" not in complaint


def test_without_the_history_nothing_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert commit_subjects.main(tmp_path) == 0
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "-m", "All that a shallow clone has.")
    assert commit_subjects.main(tmp_path) == 0
    assert capsys.readouterr().out.count("not checked") == 2
    inner = tmp_path / "unpacked"
    inner.mkdir()
    assert commit_subjects.subjects_since(inner, "HEAD") is None, "the history is another project's"
