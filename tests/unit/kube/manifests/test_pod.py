"""Fields that the operator adds to a pod; everything else stays as the user wrote it."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from builders.manifests import UID, container, environment, job, made
from concertina.api import rules
from concertina.kube.manifests.agent_container import AgentMetrics, PodSettings
from concertina.kube.manifests.names import secret_name
from concertina.kube.manifests.pod import secret_manifest
from concertina.kube.parse.views import job_view
from concertina.plan.actions import CreatePod
from concertina_trainer.config.parallelism import ParallelismConfig

OWN: dict[str, Any] = {
    "template": {"spec": {"containers": [{"name": "trainer", "image": "i", "command": ["python"], "args": ["a.py"]}]}}
}
BUNDLED: dict[str, Any] = {
    "template": {"spec": {"containers": [{"name": "trainer", "image": "i"}]}},
    "trainer": {"steps": 10, "data": {"uri": "/data"}},
    "checkpoint": {"uri": "s3://bucket/run", "secretName": "s3"},
}


def test_identity_and_names() -> None:
    pod = made(job(OWN))
    metadata = pod["metadata"]
    assert metadata["name"] == "j-1-2"
    assert metadata["labels"] == {
        "app.kubernetes.io/managed-by": "concertina",
        "concertina.dev/job": "j",
        "concertina.dev/job-uid": UID,
        "concertina.dev/replica-index": "1",
        "concertina.dev/attempt": "2",
    }
    (owner,) = metadata["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"], owner["controller"]) == ("TrainingJob", "j", UID, True)


def test_a_command_of_ones_own_runs_under_the_agent() -> None:
    trainer = container(made(job(OWN)))
    assert trainer["command"] == ["python3", "/concertina/agent.pyz", "run", "--", "python", "a.py"]
    assert "args" not in trainer


def test_the_bundled_trainer_gets_its_configuration_and_memory() -> None:
    pod = made(job(BUNDLED))
    assert container(pod)["command"] == ["python3", "/concertina/agent.pyz", "run", "--bundled"]
    parsed = json.loads(environment(pod)["CONCERTINA_TRAINER"])
    assert parsed["steps"] == 10
    assert "warmupSteps" not in parsed["optimizer"], "an absent field stays absent"
    assert json.loads(environment(pod)["CONCERTINA_CHECKPOINT"])["uri"] == "s3://bucket/run"
    assert environment(pod)["CONCERTINA_WARM_START"] == "null"
    assert container(pod)["envFrom"] == [{"secretRef": {"name": "s3"}}]
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert volumes["concertina"]["emptyDir"] == {"medium": "Memory"}
    assert volumes["concertina-identity"]["secret"] == {"secretName": "j-concertina-0f1e2d3c"}


def test_the_bundled_trainer_is_told_of_parallelism_where_there_is_any() -> None:
    assert "CONCERTINA_PARALLELISM" not in environment(made(job({**BUNDLED, "parallelism": {"tensor": 1}})))
    assert "CONCERTINA_PARALLELISM" not in environment(made(job({**OWN, "parallelism": {"tensor": 2}})))
    variables = environment(made(job({**BUNDLED, "parallelism": {"tensor": 2, "shard": 2}})))["CONCERTINA_PARALLELISM"]
    assert ParallelismConfig.model_validate_json(variables) == ParallelismConfig(tensor=2, shard=2)


def test_environment_of_the_agent() -> None:
    values = environment(made(job(OWN)))
    assert values["CONCERTINA_JOB"] == "n/j"
    assert values["CONCERTINA_UID"] == UID
    assert values["CONCERTINA_PORT"] == "29400"
    assert values["CONCERTINA_WORKERS"] == "1"
    assert values["CONCERTINA_GRACE_SECONDS"] == "30"
    assert values["CONCERTINA_TRAINER"] == "{}"
    assert values["CONCERTINA_CHECKPOINT"] == "null"
    assert json.loads(values["CONCERTINA_WARM_START"]) == {"enabled": True, "preload": []}
    variables = environment(made(job({**OWN, "warmStart": {"enabled": False, "preload": ["torch"]}})))
    assert json.loads(variables["CONCERTINA_WARM_START"]) == {"enabled": False, "preload": ["torch"]}
    assert "CONCERTINA_STEP_DETECTION" not in values
    off = environment(made(job({**OWN, "stepDetection": {"enabled": False}})))
    assert off["CONCERTINA_STEP_DETECTION"] == "false"
    fields = {name: value["fieldRef"]["fieldPath"] for name, value in values.items() if isinstance(value, dict)}
    assert fields == {
        "CONCERTINA_REPLICA": "metadata.name",
        "CONCERTINA_POD_IP": "status.podIP",
        "CONCERTINA_NODE": "spec.nodeName",
    }


def test_all_else_of_the_template_is_as_the_user_wrote_it() -> None:
    spec: dict[str, Any] = {
        "template": {
            "metadata": {"labels": {"team": "a"}, "annotations": {"note": "b"}},
            "spec": {
                "nodeSelector": {"zone": "x"},
                "tolerations": [{"key": "k", "operator": "Exists"}],
                "restartPolicy": "OnFailure",
                "topologySpreadConstraints": [],
                "initContainers": [{"name": "first", "image": "x"}],
                "volumes": [{"name": "data", "hostPath": {"path": "/data"}}],
                "containers": [
                    {"name": "side", "image": "s", "env": [{"name": "A", "value": "1"}]},
                    {
                        "name": "trainer",
                        "image": "i",
                        "command": ["x"],
                        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                        "resources": {"limits": {"nvidia.com/gpu": "2", "memory": "1Gi"}, "requests": {"cpu": "1"}},
                        "securityContext": {"runAsNonRoot": True},
                    },
                ],
            },
        }
    }
    before = copy.deepcopy(spec)
    pod = made(job(spec))
    template = before["template"]["spec"]
    assert spec == before
    assert pod["metadata"]["annotations"]["note"] == "b"
    assert pod["metadata"]["annotations"]["kubectl.kubernetes.io/default-container"] == "trainer"
    assert pod["metadata"]["labels"]["team"] == "a"
    for field in ("nodeSelector", "tolerations", "restartPolicy", "topologySpreadConstraints"):
        assert pod["spec"][field] == template[field]
    assert container(pod, "side") == template["containers"][0]
    trainer = container(pod)
    assert {key: trainer[key] for key in ("image", "resources", "securityContext")} == {
        key: template["containers"][1][key] for key in ("image", "resources", "securityContext")
    }
    assert trainer["volumeMounts"][0] == {"name": "data", "mountPath": "/data"}
    assert environment(pod)["CONCERTINA_WORKERS"] == "2"
    agent, first = pod["spec"]["initContainers"]
    assert first == template["initContainers"][0]
    assert agent["command"] == ["concertina-agent", "install", "--storage-client", "/concertina"]
    assert agent["image"] == "registry/agent:1"
    # A policy that admits the trainer admits the init container too, which takes no GPU.
    assert agent["securityContext"]["runAsNonRoot"] is True
    assert agent["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert agent["resources"] == {"limits": {"memory": "1Gi"}, "requests": {"cpu": "1"}}


def test_containers_start_again_and_pods_are_spread_where_the_template_does_not_say_otherwise() -> None:
    spec = made(job(OWN))["spec"]
    assert spec["restartPolicy"] == "OnFailure"
    (spread,) = spec["topologySpreadConstraints"]
    assert spread["whenUnsatisfiable"] == "ScheduleAnyway"
    assert spread["labelSelector"] == {"matchLabels": {"concertina.dev/job-uid": UID}}


def test_avoided_nodes_are_a_wish_beside_the_users_affinity() -> None:
    spec = copy.deepcopy(OWN)
    required = {"nodeSelectorTerms": [{"matchExpressions": [{"key": "a", "operator": "Exists"}]}]}
    key = "requiredDuringSchedulingIgnoredDuringExecution"
    spec["template"]["spec"]["affinity"] = {"nodeAffinity": {key: required}, "podAffinity": {}}
    affinity = made(job(spec), CreatePod(0, 0, avoid_nodes=("bad", "worse")))["spec"]["affinity"]
    assert affinity["nodeAffinity"][key] == required
    assert affinity["podAffinity"] == {}
    (wish,) = affinity["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert wish["preference"]["matchFields"] == [
        {"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in ("bad", "worse")
    ]


def test_a_spare_prefers_a_node_without_other_replicas_beside_the_users_affinity() -> None:
    term = {"weight": 1, "podAffinityTerm": {"topologyKey": "zone"}}
    mine = {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [term]}}
    spec = copy.deepcopy(OWN)
    spec["template"]["spec"]["affinity"] = mine
    pod = made(job(spec), CreatePod(3, 0, standby=True))
    wishes = pod["spec"]["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert wishes[0] == term
    selector = wishes[1]["podAffinityTerm"]["labelSelector"]["matchLabels"]
    assert selector["concertina.dev/job-uid"] == pod["metadata"]["labels"]["concertina.dev/job-uid"]
    assert "affinity" not in made(job(OWN), CreatePod(3, 0))["spec"]


def test_pods_of_a_group_wish_to_be_near_each_other_where_domains_are_named() -> None:
    spec = {**copy.deepcopy(OWN), "replicas": 16, "parallelism": {"tensor": 2, "pipeline": 4}}
    assert "affinity" not in made(job(spec), CreatePod(5, 0))["spec"]
    spec["topology"] = {"labels": ["zone", "nvlink"]}
    pod = made(job(spec), CreatePod(5, 0))["spec"]
    affinity = pod["affinity"]
    near, block = affinity["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    alone, apart = affinity["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]

    def said(wish: dict[str, Any]) -> tuple[str, str, list[str]]:
        term = wish["podAffinityTerm"]
        assert term["labelSelector"]["matchLabels"] == {"concertina.dev/job-uid": UID}
        (named,) = term["labelSelector"]["matchExpressions"]
        assert named["key"] == "concertina.dev/replica-index"
        return term["topologyKey"], named["operator"], named["values"]

    assert "topologySpreadConstraints" not in pod, "it would count for as much as all wishes together"
    assert alone["podAffinityTerm"] == {
        "labelSelector": {"matchLabels": {"concertina.dev/job-uid": UID}}, "topologyKey": "kubernetes.io/hostname",
    }  # fmt: skip
    assert near["weight"] > 10 * alone["weight"]
    assert said(near) == ("nvlink", "In", ["4", "5"])
    assert said(apart) == ("nvlink", "NotIn", ["4", "5"])
    assert said(block) == ("zone", "In", [str(each) for each in range(8)])


def test_the_secret_is_the_jobs_and_of_no_other_job_of_that_name() -> None:
    view = job_view(job(OWN))
    manifest = secret_manifest(view, {"ca.crt": "eA=="})
    assert manifest["metadata"]["name"] == secret_name(view) == "j-concertina-0f1e2d3c"
    assert manifest["metadata"]["ownerReferences"][0]["uid"] == UID
    assert manifest["data"] == {"ca.crt": "eA=="}


def test_a_long_name_makes_a_valid_label() -> None:
    pod = made(job(OWN, name="a" * 62 + ".b"))
    assert pod["metadata"]["labels"]["concertina.dev/job"] == "a" * 62


def test_bad_nodes_are_kept_off_by_a_rule_and_a_wish_beside_the_templates_own() -> None:
    spec = copy.deepcopy(OWN)
    own_term = {"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}
    required = {"nodeSelectorTerms": [own_term, {"matchFields": []}]}
    spec["template"]["spec"]["affinity"] = {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required},
        "podAffinity": {},
    }
    pod = made(job(spec), CreatePod(1, 2, avoid_nodes=("n1",), never_nodes=("n2", "n3")))
    of_nodes = pod["spec"]["affinity"]["nodeAffinity"]
    rule = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in ("n2", "n3")]
    assert of_nodes["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"] == [
        {**own_term, "matchFields": rule},
        {"matchFields": rule},
    ]
    (wish,) = of_nodes["preferredDuringSchedulingIgnoredDuringExecution"]
    assert wish["preference"]["matchFields"][0]["values"] == ["n1"]
    assert "podAffinity" in pod["spec"]["affinity"]
    assert pod["metadata"]["annotations"]["concertina.dev/avoids"] == "n2,n3"
    plain = made(job(OWN), CreatePod(1, 2, never_nodes=("n2",)))
    terms = plain["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert terms == {"nodeSelectorTerms": [{"matchFields": rule[:1]}]}


def test_what_is_put_into_pods_is_what_templates_must_not_have() -> None:
    metrics = AgentMetrics(9400, token_secret="mine")
    spec = {**BUNDLED, "tracking": {"backend": "WandB"}, "parallelism": {"tensor": 2}}
    pod = made(job(spec), settings=PodSettings("a", metrics))
    trainer, (installer,) = container(pod), pod["spec"]["initContainers"]
    script = made(job({**OWN, "stepDetection": {"enabled": False}}), settings=PodSettings("a", metrics))
    names = {*environment(pod), *environment(script)}
    assert {name for name in names if name.startswith("CONCERTINA_")} == set(rules.VARIABLES)
    assert installer["name"] == rules.INIT_CONTAINER
    assert {volume["name"] for volume in pod["spec"]["volumes"]} == set(rules.VOLUMES)
    mounts = {f"{mount['mountPath']}/" for mount in trainer["volumeMounts"]}
    assert mounts - {"/dev/shm/"} == set(rules.MOUNTS), "a template may bring its own /dev/shm"
    foreign = {"app.kubernetes.io/managed-by"}
    assert all(label.startswith(rules.PREFIX) for label in pod["metadata"]["labels"].keys() - foreign)


@pytest.mark.parametrize(
    ("template", "policy", "expected"),
    [
        ({}, {}, "none"),
        ({}, {"gpuPreflight": False}, "none"),
        ({"resources": {"limits": {"cpu": "1", "nvidia.com/gpu": 0}}}, {}, "none"),
        ({"resources": {"limits": {"nvidia.com/gpu": 1}}}, {}, None),
        ({"resources": {"limits": {"nvidia.com/mig-1g.10gb": 1}}}, {}, None),
        ({"resources": {"limits": {"nvidia.com/gpu": 1}}}, {"gpuPreflight": False}, "false"),
        ({"resources": {"claims": [{"name": "gpus"}]}}, {}, None),
    ],
)
def test_only_pods_that_request_devices_test_them(
    template: dict[str, Any], policy: dict[str, Any], expected: str | None
) -> None:
    spec = copy.deepcopy(OWN) | {"failurePolicy": policy, "workersPerReplica": 1}
    spec["template"]["spec"]["containers"][0] |= template
    if "claims" in template.get("resources", {}):
        spec["template"]["spec"]["resourceClaims"] = [{"name": "gpus", "resourceClaimTemplateName": "gpu"}]
    assert environment(made(job(spec))).get("CONCERTINA_PREFLIGHT") == expected
