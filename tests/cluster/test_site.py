"""The site's manifests and the commands of its first pages, on a real control plane."""

from __future__ import annotations

import base64
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from builders import pages
from builders.cluster.cli import DEMO, Cli, status
from builders.cluster.dry_run import refused
from concertina.local.binaries import programs
from concertina.local.cluster import LocalCluster

BASES = [pages.ROOT / "examples" / name for name in ("minimal.yaml", "own-command.yaml")]
"""Jobs into which a part of a manifest is merged; it must fit into one of them."""
NOT_SERVED = ("ClusterQueue", "LocalQueue", "PodMonitor", "ResourceFlavor", "WorkloadPriorityClass")
"""Kinds of manifests whose CRDs the local cluster lacks. tests/cluster/operator/quota has those of Kueue, and
test_chart.py compares the PodMonitor with the chart's."""
OTHER_FILES = {"integrations"}
"""Fields by which files that are not objects are recognised: Kueue's configuration."""
KEY = "k" * 64
LAW = "tests/unit/repository/test_site.py::test_commands_have_the_options_that_there_are"
MANIFESTS = [(block, document) for block in pages.all_blocks() for document in block.manifests]


@pytest.mark.parametrize(
    ("block", "document"), MANIFESTS, ids=[f"{n}-{block.name}" for n, (block, _) in enumerate(MANIFESTS)]
)
def test_manifests_pass_a_server_side_dry_run(
    cluster: LocalCluster, namespace: str, crd: None, block: pages.Block, document: dict[str, Any]
) -> None:
    """A part of a manifest, such as one field of spec, is merged into a whole job."""
    if document.get("kind") in NOT_SERVED or document.keys() & OTHER_FILES:
        pytest.skip("the local cluster has no CRD for it")
    if not document.keys() & {"kind", "metadata", "spec"}:
        document = {"spec": document}
    whole = (
        [document] if "kind" in document else [_merged(yaml.safe_load(path.read_text()), document) for path in BASES]
    )
    refusals = [refusal for manifest in whole if (refusal := refused(cluster, namespace, manifest))]
    assert len(refusals) < len(whole), refusals


def _merged(base: Any, part: Any) -> Any:
    """Return `base` with the fields of `part`; a list replaces a list, and a mixture of data the one URI."""
    if not (isinstance(base, dict) and isinstance(part, dict)):
        return part
    if "mixture" in part:
        base = {name: value for name, value in base.items() if name != "uri"}
    return base | {name: _merged(base[name], value) if name in base else value for name, value in part.items()}


def _program(name: str) -> str:
    bundle = programs.HELM if name == "helm" else programs.CONTROL_PLANE
    return str(programs.ready(bundle)[name])


def _path() -> str:
    tools = ":".join(str(Path(path).parent) for path in (sys.executable, _program("kubectl"), _program("helm")))
    return f"{tools}:{os.environ['PATH']}"


@pytest.mark.parametrize("name", sorted(pages.ON_API_SERVER))
def test_commands_run_on_an_api_server(
    cluster: LocalCluster, namespace: str, crd: None, tmp_path: Path, name: str
) -> None:
    """Run a page's commands in a namespace with a job, a master key and the operator's Deployment."""
    _prepare(Cli(cluster, namespace))
    shutil.copy(cluster.kubeconfig, tmp_path / "kubeconfig")
    environment = os.environ | {"KUBECONFIG": str(tmp_path / "kubeconfig"), "PATH": _path()}
    script = [f"kubectl config set-context --current --namespace={namespace}"]
    for block in pages.beginning_with(name, pages.ON_API_SERVER[name]):
        text = re.sub(r"\b(team-a|concertina-system)\b", namespace, block.text)
        text = text.replace("concertina dashboard", "concertina dashboard --port 0")
        # A command that runs until Ctrl-C is stopped, which is no failure.
        script += [
            f"timeout 5 {line.partition('#')[0]} || test $? = 124" if "until Ctrl-C" in line else line
            for line in text.replace("\\\n", "").splitlines()
            if line
        ]
    command = ["bash", "-e", "-o", "pipefail", "-c", "\n".join(script)]
    done = subprocess.run(
        command, cwd=pages.ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"{command[-1]}\n{done.stdout}\n{done.stderr}"
    if name == "tracing.md":
        assert re.fullmatch(r"[0-9a-f]{32}", done.stdout.split()[-1])
    if name == "master-key.md":
        kept = cluster.kubectl("-n", namespace, "get", "secret/concertina-master-key", "-o", "jsonpath={.data.key-old}")
        assert base64.b64decode(kept) == KEY.encode()
    if name == "metrics.md":
        cluster.kubectl("delete", "clusterrolebinding", "prometheus-concertina")


def _prepare(cli: Cli) -> None:
    cli.kubectl("apply", "-f", str(DEMO))
    cli.write("demo", status("Training", "3 of 3 replicas train", "Running"))
    cli.kubectl("create", "secret", "generic", "concertina-master-key", f"--from-literal=key={KEY}")
    cli.kubectl("create", "deployment", "concertina", "--image=none", "--replicas=0")


@pytest.mark.long(law=LAW)
@pytest.mark.timeout(1200)
def test_the_first_pages_work_as_they_are_written(tmp_path: Path) -> None:
    """All commands of Get started run in one shell on a cluster of their own, as a new user runs them."""
    script = ["set -e -x -o pipefail"]
    for name in pages.GET_STARTED:
        for block in pages.blocks(pages.DOCS / "get-started" / name):
            if block.title:
                script.append(f"cat > {block.title} <<'END_OF_FILE'\n{block.text}END_OF_FILE")
            elif block.language == "bash" and not block.needs and "concertina local down" not in block.text:
                script.append(block.text)
    try:
        _run_as_a_new_user("\n".join(script))
    finally:
        subprocess.run(["concertina", "local", "down"], cwd=pages.ROOT, env=_new_environment(), check=False)


@pytest.mark.long(law=LAW)
@pytest.mark.timeout(1200)
def test_the_demo_of_get_started_runs() -> None:
    (block,) = pages.beginning_with("get-started/index.md", "make demo")
    _run_as_a_new_user(block.text)


def _run_as_a_new_user(script: str) -> None:
    done = subprocess.run(
        ["bash", "-c", script], cwd=pages.ROOT, env=_new_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"


def _new_environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("KUBECONFIG", "MAKEFLAGS")}
    return {**kept, "PATH": _path()}
