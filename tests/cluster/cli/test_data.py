"""`concertina data build --cluster`: an Indexed Job writes the same bytes as one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from concertina.local.cluster import LocalCluster
from concertina_trainer.data.build.build import build
from concertina_trainer.data.build.find import find
from concertina_trainer.data.build.recipe import Recipe

COMMAND = [str(Path(sys.executable).parent / "concertina"), "data", "build", "--cluster"]
SHARD_BYTES = int(0.01 * 2**20)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    lines = "".join(json.dumps({"text": f"document {i} " * (i % 40 + 1)}) + "\n" for i in range(600))
    (tmp_path / "a.jsonl").write_text(lines)
    return tmp_path / "a.jsonl"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def built(cluster: LocalCluster, namespace: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"KUBECONFIG": str(cluster.kubeconfig)}
    options = ["-n", namespace, "--image", "concertina/trainer:test", "--cpus", "1", "--memory", "500Mi"]
    return subprocess.run(
        [*COMMAND, *options, *arguments], env=environment, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip


def test_pods_build_the_same_bytes(cluster: LocalCluster, namespace: str, source: Path, tmp_path: Path) -> None:
    options = ["--shard-mebibytes", "0.01", "--validation", "0.1", "--pods", "2", "--out"]
    done = built(cluster, namespace, *options, str(tmp_path / "pods"), str(source))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 shares done" in done.stdout
    assert "600 documents" in done.stdout or "digest" in done.stdout
    assert done.stdout.count("taken: 1 file (1 .jsonl)") == 1
    list(build(find([str(source)]), str(tmp_path / "alone"), SHARD_BYTES, Recipe(validation=0.1)))
    assert contents(tmp_path / "pods") == contents(tmp_path / "alone")
    assert len(contents(tmp_path / "alone")) > 20


def test_what_can_t_be_built_fails_at_once_and_says_why(
    cluster: LocalCluster, namespace: str, source: Path, tmp_path: Path
) -> None:
    done = built(cluster, namespace, "--pods", "1", "--column", "body", "--out", str(tmp_path / "out"), str(source))
    assert done.returncode == 1
    assert "a.jsonl, line 1 has no body, but text: name the column with --column" in done.stdout
    assert "failed" in done.stderr


def test_pods_refuse_to_leave_data_out_unless_told_to(
    cluster: LocalCluster, namespace: str, source: Path, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    source.rename(tmp_path / "in" / "a.jsonl")
    (tmp_path / "in" / "b.csv").write_text("a,b\n")
    options = ["--pods", "1", "--out", str(tmp_path / "out"), str(tmp_path / "in")]
    done = built(cluster, namespace, *options)
    assert done.returncode == 1
    assert "in/b.csv (CSV and TSV are not supported)" in done.stdout
    assert not (tmp_path / "out").exists()
    done = built(cluster, namespace, "--allow-left-out", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "left out: 1 (CSV and TSV are not supported)" in done.stdout


def test_the_manifest_is_printed(source: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "--dry-run", "--claim", "corpus=/data", "--secret", "s3", "--out", "s3://b/$(x)", "/data"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "claimName: corpus" in done.stdout
    assert "$$(x)" in done.stdout
    hopeless = yaml.safe_load(done.stdout)["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"]
    mistyped = [sys.executable, "-m", "concertina_trainer.cli", "data", "build", "--tokeniser", "bytes"]
    assert subprocess.run(mistyped, capture_output=True).returncode in hopeless
    refused = subprocess.run([*COMMAND, "--claim", "corpus", "--out", "/x", "/y"], capture_output=True, text=True)
    assert (refused.returncode, "give it as NAME=PATH" in refused.stderr) == (1, True)
