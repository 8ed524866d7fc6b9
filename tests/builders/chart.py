"""The chart, as Helm renders it for a release `x` in the namespace `sys`."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path
from typing import Any

import yaml

from concertina.local.binaries import programs

CHART = Path(__file__).resolve().parents[2] / "charts" / "concertina"
Objects = dict[tuple[str, str, str], dict[str, Any]]
"""Objects by kind, namespace and name."""


WITH_CRD = "crds.enabled=true"
"""Setting to render the CRD, which is the chart's default. Only tests of the CRD render it, because it is large."""


def helm(*settings: str) -> subprocess.CompletedProcess[str]:
    """Render with these settings, as NAME=VALUE, or NAME:=JSON."""
    command = [str(programs.helm(print)), "template", "x", str(CHART), "--namespace=sys", "--set=crds.enabled=false"]
    for setting in settings:
        name, json_follows, value = setting.partition(":=")
        command += [f"--set-json={name}={value}" if json_follows else f"--set={setting}"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@functools.cache
def rendered(*settings: str) -> Objects:
    """Return the objects that the chart makes, without the pod of `helm test`."""
    return {name: each for name, each in everything(*settings).items() if name[0] != "Pod"}


@functools.cache
def everything(*settings: str) -> Objects:
    """Return the objects that the chart makes."""
    done = helm(*settings)
    assert done.returncode == 0, done.stderr
    objects = [each for each in yaml.load_all(done.stdout, yaml.CSafeLoader) if each]
    named = {(each["kind"], each["metadata"].get("namespace", ""), each["metadata"]["name"]): each for each in objects}
    assert len(named) == len(objects)
    return named
