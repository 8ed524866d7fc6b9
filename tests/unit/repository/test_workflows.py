"""Workflows: they are valid, refer to existing files and targets, and name every action by a commit."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from builders.pythons import OLDEST_VARIABLE
from concertina.local.host.linux_namespaces import FORBIDDEN

ROOT = Path(__file__).resolve().parents[3]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


workflow_lint, release = tool("workflow_lint"), tool("release")
DIGEST = "sha256:" + "b" * 64


def steps(workflow: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    return [step for job in jobs for step in job["steps"]]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_to_commits_of_named_releases(workflow: Path) -> None:
    pins = re.findall(r"uses: (\S+)(.*)", workflow.read_text())
    assert pins
    assert not [pin for pin, _ in pins if not re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", pin)]
    assert not [pin for pin, comment in pins if not re.fullmatch(r" # v\d+\.\d+\.\d+", comment)]


def test_an_action_has_one_version() -> None:
    versions: dict[str, set[str]] = {}
    for workflow in WORKFLOWS:
        for name, commit in re.findall(r"uses: ([^@\s]+)@(\S+)", workflow.read_text()):
            versions.setdefault(name, set()).add(commit)
    assert not {name: commits for name, commits in versions.items() if len(commits) > 1}


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_what_a_workflow_calls_is_there(workflow: Path) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for step in steps(workflow):
        for line in step.get("run", "").splitlines():
            if line.startswith("make "):
                assert set(line.split()[1:]) <= targets
        for path in re.findall(r"(?:tools|requirements|charts)/[\w./-]+", step.get("run", "")):
            assert (ROOT / path).exists(), path


def ci(job: str) -> list[str]:
    """Return the lines that the steps of this job of ci.yml run."""
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    return [line for step in jobs[job]["steps"] for line in step.get("run", "").splitlines()]


def test_ci_may_make_user_namespaces_before_the_gate_runs() -> None:
    """Ubuntu forbids users to make the namespaces of a local cluster, unless root sets what the error names."""
    allow = "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
    assert f"`{allow}` (Ubuntu" in FORBIDDEN
    lines = ci("test")
    assert lines.index(allow) < lines.index("make test")


def test_ci_names_the_oldest_python_of_scripts() -> None:
    """The tests of the SDK then fail without it, instead of being skipped."""
    found = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["test"]["steps"]
    (gate,) = (step for step in found if step.get("run") == "make test")
    (oldest,) = (step for step in found if step.get("id") == "oldest")
    assert gate["env"] == {OLDEST_VARIABLE: "${{ steps.oldest.outputs.python-path }}"}
    assert oldest["with"] == {"python-version": "3.9", "update-environment": False}


def test_ci_builds_the_site_strictly() -> None:
    called = {target for line in ci("docs") if line.startswith("make ") for target in line.split()[1:]}
    assert called == {"check-docs", "docs"}
    assert re.search(r"^docs:.*(?:\n\t.*)*mkdocs build --strict", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_images_are_built_from_a_base_that_the_workflow_resolves() -> None:
    """The step `Resolve the digest of the base image` reads the Dockerfiles in this way."""
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    rows = jobs["image"]["strategy"]["matrix"]["include"]
    assert {row["image"] for row in rows} == {"operator", "agent", "trainer"}
    for row in rows:
        text = (ROOT / row["file"]).read_text()
        (name,) = re.findall(r"^ARG BASE=(\S+)$", text, re.MULTILINE)
        assert "@" not in name
        assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) <= {"${BASE}", "source", "compiled"}
        assert not row["target"] or re.search(rf" AS {row['target']}$", text, re.MULTILINE)


LABELS = {
    "title": "concertina {image}",
    "description": None,
    "licenses": "Apache-2.0",
    "source": "$SOURCE",
    "version": "$VERSION",
    "revision": "$COMMIT",
}
"""Labels of each image. The description differs."""


def test_images_have_labels_that_a_release_fills() -> None:
    job = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]["image"]
    (build,) = (step["with"] for step in job["steps"] if step.get("id") == "build")
    given = {line.partition("=")[0] for line in build["build-args"].splitlines()}
    for row in job["strategy"]["matrix"]["include"]:
        text = (ROOT / row["file"]).read_text().replace("\\\n", "")
        parts = re.split(r"^FROM \S+(?: AS (\S+))?\n", text, flags=re.MULTILINE)
        own = dict(zip(parts[1::2], parts[2::2], strict=True))[row["target"] or None]
        found = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]*)"', own))
        description = found.pop("description")
        assert description
        wanted = {name: value.format(image=row["image"]) for name, value in LABELS.items() if value}
        assert found == wanted
        variables = {value[1:] for value in found.values() if value.startswith("$")}
        assert variables <= set(re.findall(r"^ARG (\w+)=", own, re.MULTILINE)) & given
        assert not [name for name in LABELS if f"image.{name}=" in build["labels"]], "a label has one source"


@pytest.mark.skipif(
    set(workflow_lint.LINTERS) - workflow_lint.linters().keys() != set(),
    reason="there are no linters of workflows here: `make workflow-linters` provides them, once",
)
def test_the_linters_find_what_is_wrong(tmp_path: Path) -> None:
    bad = tmp_path / ".github" / "workflows" / "bad.yml"
    bad.parent.mkdir(parents=True)
    bad.write_text(
        "on: pull_request_target\njobs:\n  a:\n    runs-on: ubuntu-24.04\n    steps:\n"
        "    - uses: actions/checkout@v4\n    - run: echo ${{ github.event.issue.title }}\n"
    )
    said = [
        subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        for command in workflow_lint.commands(workflow_lint.linters(), [bad])
    ]
    assert "potentially untrusted" in said[0].stdout
    for rule in ("unpinned-uses", "template-injection", "dangerous-triggers"):
        assert rule in said[1].stdout


@pytest.mark.parametrize("missing", workflow_lint.LINTERS)
@pytest.mark.parametrize(("ci", "found", "code"), [("", "true", 0), ("", "false", 1), ("true", "true", 1)])
def test_without_one_linter_the_other_runs_and_ci_fails(
    missing: str, ci: str, found: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (other,) = set(workflow_lint.LINTERS) - {missing}
    monkeypatch.setattr(workflow_lint, "linters", lambda: {other: found})
    monkeypatch.setenv("CI", ci)
    assert workflow_lint.main() == code
    assert f"workflows are not checked by {missing}: run `make workflow-linters`" in capsys.readouterr().out


def test_a_tag_must_be_the_version_of_all_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "versions", lambda: {"a": "1.2.0", "b": "1.2.0"})
    release.check("v1.2.0")
    with pytest.raises(ValueError, match=r"v1\.3\.0, but a says '1\.2\.0'"):
        release.check("v1.3.0")


def test_the_files_agree_on_the_next_version() -> None:
    numbers = {version.removesuffix(" (unreleased)") for version in release.versions().values()}
    assert len(numbers) == 1, release.versions()
    assert re.fullmatch(r"\d+\.\d+\.\d+", numbers.pop())


def test_a_released_chart_names_its_images_by_digest(tmp_path: Path) -> None:
    for name in ("operator", "agent", "trainer"):
        (tmp_path / f"{name}.digest").write_text(f"ghcr.io/o/concertina-{name}@{DIGEST}\n")
    published = release.records(tmp_path)
    before = (ROOT / "charts/concertina/values.yaml").read_text()
    text = release.with_images(before, published)
    values = yaml.safe_load(text)
    for name, key in release.IMAGES.items():
        assert values[key]["repository"] == f"ghcr.io/o/concertina-{name}"
        assert values[key]["digest"] == DIGEST
    changed = [line for line, old in zip(text.splitlines(), before.splitlines(), strict=True) if line != old]
    assert len(changed) == 4, "nothing else is changed"
    assert f"| trainer | `ghcr.io/o/concertina-trainer@{DIGEST}` |" in release.notes(published)


def test_a_record_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "agent.digest").write_text("ghcr.io/o/agent@sha256:\n")
    with pytest.raises(ValueError, match="is not REPOSITORY@sha256:HEX"):
        release.records(tmp_path)
    with pytest.raises(ValueError, match="the image operator is not recorded"):
        release.with_images("", {})
