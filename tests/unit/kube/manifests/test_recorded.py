"""Spec that is passed on for lineage: complete, but without values of variables."""

from __future__ import annotations

import json
from typing import Any

from builders import manifests
from builders.jobs import spec
from concertina.kube.manifests.recorded import MOST, recorded


def container(**fields: Any) -> dict[str, Any]:
    return {"template": {"spec": {"containers": [{"name": "trainer", "image": "i", **fields}]}}}


def test_names_and_references_stay_and_values_go() -> None:
    reference = {"secretKeyRef": {"name": "s", "key": "k"}}
    probe = {"httpGet": {"path": "/", "port": 80, "httpHeaders": [{"name": "Authorization", "value": "hunter1"}]}}
    env = [{"name": "A", "value": "hunter2"}, {"name": "B", "valueFrom": reference}]
    given = container(env=env, livenessProbe=probe)
    given["template"]["spec"]["initContainers"] = [
        {"name": "i", "image": "j", "env": [{"name": "C", "value": "hunter3"}], "args": ["http://u:hunter4@host/x@y"]}
    ]
    text = recorded(spec(**given))
    assert "hunter" not in text
    parsed = json.loads(text)
    pod = parsed["template"]["spec"]
    assert pod["containers"][0]["env"] == [{"name": "A"}, {"name": "B", "valueFrom": reference}]
    assert pod["containers"][0]["livenessProbe"]["httpGet"]["httpHeaders"] == [{"name": "Authorization"}]
    assert pod["initContainers"] == [{"name": "i", "image": "j", "env": [{"name": "C"}], "args": ["http://host/x@y"]}]
    assert parsed["replicas"] == 3
    assert "trainer" not in parsed, "pods are told it besides"


def test_what_is_too_large_for_a_variable_is_left_out() -> None:
    assert len(recorded(spec(trainer=None, **container(command=["x"], args=["é" * 10])))) > 0
    assert recorded(spec(trainer=None, **container(command=["x"], args=["é" * (MOST // 6)]))) == ""


def test_a_pod_is_told() -> None:
    args = ["--price", "$(HOME)"]
    job = manifests.job({"replicas": 2, **container(args=args, command=["x"])})
    variable = manifests.environment(manifests.made(job))["CONCERTINA_SPEC"]
    assert json.loads(variable.replace("$$", "$"))["template"]["spec"]["containers"][0]["args"] == args
    assert "$$(HOME)" in variable, "Kubernetes would expand it"
