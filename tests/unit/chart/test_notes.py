"""NOTES.txt: the commands with which a release is uninstalled, and the page that explains them."""

from __future__ import annotations

import subprocess

import pytest

from builders import pages
from builders.chart import CHART
from concertina.local.binaries import programs


def without_comments(text: str) -> list[str]:
    return [line.partition("#")[0].strip() for line in text.splitlines()]


def uninstalling(*settings: str) -> list[str]:
    """Return the commands that NOTES.txt prints last, for the release of the page."""
    options = ("--namespace=concertina-system", "--dry-run=client", *(f"--set={setting}" for setting in settings))
    command = [str(programs.helm(print)), "install", "concertina", str(CHART), *options]
    done = subprocess.run(
        command, env={"KUBECONFIG": "/nonexistent"}, capture_output=True, text=True, check=True, timeout=60
    )
    notes = done.stdout.partition("\nNOTES:\n")[2].partition("To uninstall")[2]
    return without_comments("\n".join(line for line in notes.splitlines() if line.startswith("  ")))


def test_the_page_and_the_notes_uninstall_alike() -> None:
    (block,) = pages.beginning_with("install.md", "kubectl delete trainingjobs")
    assert uninstalling() == without_comments(block.text)
    assert "docs/install.md" in (CHART / "templates" / "NOTES.txt").read_text()


def test_jobs_go_before_the_operator_and_what_it_writes_after_it() -> None:
    words = [command.split()[:3] for command in uninstalling()]
    assert [each[1:] for each in words] == [
        ["delete", "trainingjobs"],
        ["get", "pods"],
        ["get", "workloads"],
        ["uninstall", "concertina"],
        ["delete", "pod"],
        ["delete", "lease"],
        ["delete", "secret"],
        ["delete", "crd"],
    ]


@pytest.mark.parametrize(
    ("setting", "served"),
    [
        ("watchNamespaces={a,b}", ["--namespace a", "--namespace b"]),
        ("namespaceSelector=serve=true", ["--namespace NAMESPACE"]),
    ],
)
def test_jobs_of_other_releases_stay(setting: str, served: list[str]) -> None:
    commands = uninstalling(setting, "crds.enabled=false", "masterKey.existingSecret=mine")
    assert commands == [
        *(f"kubectl delete trainingjobs --all {where}" for where in served),
        *(f"kubectl get pods {where} -l concertina.dev/job" for where in served),
        *(f"kubectl get workloads {where} -l concertina.dev/job-uid" for where in served),
        "helm uninstall concertina --namespace concertina-system --wait --cascade foreground",
        "kubectl delete pod concertina-test --namespace concertina-system --ignore-not-found",
        "kubectl delete lease concertina-operator --namespace concertina-system",
    ]
