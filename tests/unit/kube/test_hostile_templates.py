"""Arbitrary JSON in fields for which the CRD has no types.

The job is read or reports an error, is planned, and gets its pods or reports an error. The operator continues with
other jobs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import jobs
from concertina.controller.cache.cluster_cache import ClusterCache
from concertina.kube.manifests.agent_container import AgentMetrics, PodSettings
from concertina.kube.manifests.pod import pod_manifest, rendezvous_manifest
from concertina.kube.resources import Raw
from concertina.plan.actions import CreatePod, CreateRendezvous, Rendezvous
from concertina.plan.observed import JobView
from concertina.plan.plan import plan

HERE = "tests/unit/kube/test_hostile_templates.py"
SETTINGS = PodSettings("agent", AgentMetrics(9400, annotated=True, token_secret="s"))
CONTAINER: Raw = {"name": "trainer", "image": "i"}
BUNDLED: Raw = {
    "replicas": 2,
    "parallelism": {"tensor": 2, "asyncTensor": True},
    "trainer": {"steps": 10, "data": {"uri": "/data"}},
}
SPECS: tuple[Raw, ...] = (BUNDLED, {"replicas": 2}, {"replicas": 2, "launcher": "Torchrun"})
GPU = "nvidia.com/gpu"
WISHED, REQUIRED = ("preferredDuringSchedulingIgnoredDuringExecution", "requiredDuringSchedulingIgnoredDuringExecution")
OF_CONTAINER = (
    ("resources",),
    *(("resources", kind, *rest) for kind in ("limits", "requests") for rest in ((), (GPU,), ("memory",))),
    ("ports",), ("ports", 0), ("ports", 0, "containerPort"),
    ("envFrom",), ("securityContext",), ("securityContext", "runAsUser"), ("image",), ("lifecycle",),
)  # fmt: skip
AFFINITIES = ("nodeAffinity", "podAffinity", "podAntiAffinity")
OF_POD = (
    ("affinity",),
    *(("affinity", kind, *rest) for kind in AFFINITIES for rest in ((), (WISHED,), (REQUIRED,))),
    *(("affinity", "nodeAffinity", REQUIRED, "nodeSelectorTerms", *rest) for rest in ((), (0,), (0, "matchFields"))),
    ("hostNetwork",), ("hostIPC",), ("topologySpreadConstraints",), ("terminationGracePeriodSeconds",),
    ("initContainers", 0, "ports"), ("initContainers", 0, "resources"), ("securityContext",), ("tolerations",),
)  # fmt: skip
TEXTS = st.sampled_from(("x", "", "²", "٣", "4", "4Gi", "9" * 5000, "1e99Ei", "-1", "runAsUser", "limits"))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | TEXTS | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(("limits", GPU, "name", "a")), inner),
    max_leaves=8,
)


def at(path: tuple[str | int, ...], value: Any) -> Any:
    """Return the value within objects and lists, so that the path leads to it."""
    for part in reversed(path):
        value = [value] if isinstance(part, int) else {part: value}
    return value


def manifest(spec: Raw, path: tuple[str | int, ...], value: Any) -> Raw:
    command = {} if "trainer" in spec else {"command": ["x"]}
    container = {**CONTAINER, **command, **(at(path, value) if path in OF_CONTAINER else {})}
    pod = {"containers": [container], **(at(path, value) if path in OF_POD else {})}
    for each in pod.get("initContainers", ()):
        each["name"] = "before"
    metadata = {
        "name": "demo",
        "namespace": "default",
        "uid": "0f1e2d3c-aaaa-bbbb-cccc-000000000000",
        "generation": 1,
        "resourceVersion": "5",
        "creationTimestamp": "2027-01-15T08:00:00Z",
    }
    return {"metadata": metadata, "spec": {**spec, "template": {"spec": pod}}}


def planned(obj: Raw) -> JobView:
    """Plan the job as the operator does, up to its pods."""
    cache = ClusterCache(lambda uid: None, lambda uid: {})
    cache.on_job(obj)
    observed = cache.observe(obj["metadata"]["uid"])
    assert observed is not None
    view = observed.job
    assert bool(view.spec) != bool(view.spec_error)
    actions = plan(observed, jobs.T0).actions
    for action in actions if view.spec else ():
        if isinstance(action, CreateRendezvous):
            rendezvous_manifest(view, view.spec, action)
            member = CreatePod(0, 0, rendezvous=Rendezvous("h:29400", 1, 2))
            pod_manifest(view, view.spec, member, SETTINGS)
        elif isinstance(action, CreatePod):
            pod_manifest(view, view.spec, replace(action, avoid_nodes=("a",), never_nodes=("b",)), SETTINGS)
    return view


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("resources",), "x", 'containers[0].resources must be a mapping of fields, not "x"'),
        (("resources", "limits"), "x", 'containers[0].resources.limits must be a mapping, not "x"'),
        (("resources", "requests"), 5, "containers[0].resources.requests must be a mapping, not 5"),
        (("resources", "limits", GPU), True, f"containers[0].resources.limits.{GPU} must be an amount, such as 2 or"),
        (("ports",), {"a": 1}, 'containers[0].ports must be a list, not {"a": 1}'),
        (("ports", 0), 80, "containers[0].ports[0] must be a mapping of fields, not 80"),
        (("ports", 0, "containerPort"), [80], "containers[0].ports[0].containerPort must be a whole number, not [80]"),
        (("affinity", "nodeAffinity"), "x", 'affinity.nodeAffinity must be a mapping of fields, not "x"'),
    ],
)
@pytest.mark.parametrize("spec", SPECS, ids=("bundled", "command", "torchrun"))
def test_what_is_of_the_wrong_kind_is_named(spec: Raw, path: tuple[str | int, ...], value: Any, says: str) -> None:
    view = planned(manifest(spec, path, value))
    assert view.spec is None
    assert f"spec.template.spec.{says}" in view.spec_error


@pytest.mark.parametrize("empty", [None, {}, {"limits": None}, {"limits": {GPU: None}}, {"limits": {GPU: "²"}}])
def test_what_pods_may_have_is_taken_and_says_of_no_gpus(empty: Any) -> None:
    view = planned(manifest(SPECS[1], ("resources",), empty))
    assert view.spec is not None
    assert view.spec.workers == 1


PLACES = st.sampled_from((*OF_CONTAINER, *OF_POD))


@given(spec=st.sampled_from(SPECS), path=PLACES, value=JSON)
@settings(max_examples=300, deadline=None)
def test_any_json_where_no_type_is_known_is_read_or_named(spec: Raw, path: tuple[str | int, ...], value: Any) -> None:
    planned(manifest(spec, path, value))


@pytest.mark.long(law=f"{HERE}::test_any_json_where_no_type_is_known_is_read_or_named")
@pytest.mark.timeout(1200)
@given(spec=st.sampled_from(SPECS), path=PLACES, value=JSON)
@settings(max_examples=5_000, deadline=None)
def test_so_is_much_more(spec: Raw, path: tuple[str | int, ...], value: Any) -> None:
    planned(manifest(spec, path, value))
