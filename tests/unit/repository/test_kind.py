"""`make kind` on a machine without a container engine, and with stand-ins of its programs that record their calls."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from builders.cluster import images, kind, tour

STAND_IN = """#!{python}
import json, sys
with open({calls!r}, "a") as calls:
    given = sys.stdin.read() if "--config" in sys.argv else ""
    print(json.dumps([{name!r}, sys.argv[1:], given]), file=calls)
sys.exit(1 if {fails!r} and {fails!r} in sys.argv else 0)
"""


class Machine:
    """A folder of programs that record how they were called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls = folder / "calls"

    def program(self, name: str, fails: str = "") -> Path:
        path = self.folder / name
        path.write_text(STAND_IN.format(python=sys.executable, calls=str(self.calls), name=name, fails=fails))
        path.chmod(0o755)
        return path

    def called(self) -> list[tuple[str, list[str], str]]:
        lines = self.calls.read_text().splitlines() if self.calls.exists() else []
        return [(name, arguments, given) for name, arguments, given in map(json.loads, lines)]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("KEEP", raising=False)
    return Machine(tmp_path)


def test_without_an_engine_it_says_so(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert kind.main() == kind.NO_ENGINE
    machine.program("docker", fails="info")  # The client exists, but its daemon does not run.
    assert kind.main() == kind.NO_ENGINE
    assert capsys.readouterr().out.count("needs a container engine that runs: none of docker, podman") == 2
    assert machine.called() == [("docker", ["info"], "")]


def test_it_builds_creates_tours_and_deletes(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.program("docker", fails="info")
    machine.program("podman")
    program = machine.program("kind")
    toured: list[list[str]] = []
    monkeypatch.setattr(kind.programs, "find", lambda bundle, say: {"kind": program})
    monkeypatch.setattr(kind, "TRAINER_BYTES", 1 << 62)
    monkeypatch.setattr(kind, "tour", lambda kubeconfig, shared, command, names: toured.append(names) or 1)
    assert kind.main() == 1, "what the tour says"
    assert toured == [["operator", "agent"]], "there is no room for the trainer"
    calls = [(name, arguments[0]) for name, arguments, _ in machine.called()]
    assert calls == [
        ("docker", "info"), ("podman", "info"), ("podman", "build"), ("podman", "build"), ("kind", "create"),
        ("kind", "delete"),
    ]  # fmt: skip
    created = yaml.safe_load(machine.called()[4][2])
    assert [node["role"] for node in created["nodes"]] == ["control-plane", "worker"]
    (patch,) = created["nodes"][0]["kubeadmConfigPatches"]
    assert yaml.safe_load(patch)["nodeRegistration"]["taints"] == [], "pods run on both nodes"
    assert len({node["extraMounts"][0]["containerPath"] for node in created["nodes"]}) == 1


def test_a_cluster_that_was_asked_for_stays(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.program("docker")
    program = machine.program("kind", fails="create")
    monkeypatch.setattr(kind.programs, "find", lambda bundle, say: {"kind": program})
    monkeypatch.setenv("KEEP", "1")
    with pytest.raises(subprocess.CalledProcessError):
        kind.main()
    assert ("kind", "delete") not in [(name, arguments[0]) for name, arguments, _ in machine.called()]


def test_images_are_loaded_by_the_command_of_the_environment(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    named = ["registry:5000/concertina/operator:1", "registry:5000/concertina/agent@sha256:12"]
    monkeypatch.delenv(images.VARIABLE, raising=False)
    assert images.load(named) == [], "the cluster pulls its images"
    load = machine.program("load")
    monkeypatch.setenv(images.VARIABLE, f"{load} --cluster 'my own' out/{{name}}.tar {{image}}")
    images.load([*named, named[0]])
    assert [arguments for _, arguments, _ in machine.called()] == [
        ["--cluster", "my own", "out/operator.tar", named[0]], ["--cluster", "my own", "out/agent.tar", named[1]],
    ]  # fmt: skip
    monkeypatch.setenv(images.VARIABLE, f"{machine.program('load', fails=named[0])} {{image}}")
    with pytest.raises(subprocess.CalledProcessError):
        images.load(named)


@pytest.mark.parametrize("trainer", ["", "registry/trainer:1"])
def test_the_tours_job_may_lose_a_replica(trainer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONCERTINA_E2E_TRAINER_IMAGE", trainer)
    spec = tour.job("demo", 300, "/shared")["spec"]
    assert (spec["replicas"], spec["elastic"]["minReplicas"]) == (3, 2)
    assert ("trainer" in spec) == bool(trainer)
    volumes = [volume["hostPath"]["path"] for volume in spec["template"]["spec"]["volumes"]]
    assert volumes == (["/shared"] if trainer else [])


def test_the_tour_needs_a_cluster_and_for_the_trainer_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    with pytest.raises(SystemExit, match="set KUBECONFIG"):
        tour.main()
    monkeypatch.setenv("KUBECONFIG", "somewhere")
    monkeypatch.setenv("CONCERTINA_E2E_TRAINER_IMAGE", "registry/trainer:1")
    monkeypatch.setenv("CONCERTINA_E2E_SHARED", "")
    with pytest.raises(SystemExit, match="CONCERTINA_E2E_SHARED"):
        tour.main()
