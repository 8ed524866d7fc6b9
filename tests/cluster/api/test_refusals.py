"""Invalid manifests: the API server itself refuses them with a clear message, and so does the operator's parser."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from builders.cluster.operator_process import JOBS
from builders.launcher_commands import ACCEPTED, REFUSED
from concertina.api.parse import SpecError, parse_spec
from concertina.local.cluster import LocalCluster
from concertina.local.control_plane.api import ControlPlaneError
from concertina.local.errors import LocalClusterError

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))
JOB = yaml.safe_load((ROOT / "examples" / "demo.yaml").read_text())
OWN = yaml.safe_load((ROOT / "examples" / "own-command.yaml").read_text())
pytestmark = pytest.mark.usefixtures("crd")
CONTAINER = "spec.template.spec.containers.0"
LONG = "a" * 51


def changed(job: dict[str, Any], *changes: tuple[str, Any]) -> dict[str, Any]:
    """Return a job with fields set; None removes a field."""
    job = copy.deepcopy(job)
    for path, value in changes:
        *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
        target: Any = job
        for part in parents:
            target = target[part]
        if value is None:
            del target[last]
        else:
            target[last] = value
    return job


def apply(cluster: LocalCluster, namespace: str, job: dict[str, Any], *options: str) -> str:
    return cluster.kubectl("-n", namespace, "apply", *options, "-f", "-", stdin=json.dumps(job))


def stored(cluster: LocalCluster, job: dict[str, Any]) -> dict[str, Any]:
    """Return a new job as the API server would store it. Nothing is stored.

    The request is that of `kubectl apply --dry-run=server`, which is a process that reads the schemas of all kinds
    first.
    """
    path = f"{JOBS.format('default')}?dryRun=All&fieldValidation=Strict"
    answer: dict[str, Any] = cluster.api.call("POST", path, job)
    return answer


def refusal(cluster: LocalCluster, job: dict[str, Any]) -> str:
    """Return the message with which the API server refuses a new job."""
    with pytest.raises(ControlPlaneError) as caught:
        stored(cluster, job)
    return str(json.loads(str(caught.value))["message"])


def refused_by_kubectl(cluster: LocalCluster, namespace: str, manifest: dict[str, Any]) -> str:
    """Return the message of `kubectl apply` about several jobs, or about a change of a job that exists."""
    with pytest.raises(LocalClusterError) as caught:
        apply(cluster, namespace, manifest, "--dry-run=server")
    return str(caught.value)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_accepted_by_both(cluster: LocalCluster, example: Path) -> None:
    (job,) = (item for item in yaml.safe_load_all(example.read_text()) if item["kind"] == "TrainingJob")
    defaulted = stored(cluster, job)
    assert parse_spec(defaulted) == parse_spec(job), "the API server fills in the defaults that the models have"
    assert defaulted["spec"]["template"] == job["spec"]["template"], "nothing is filled into the template"


HEADS = ("spec.trainer.model.heads", 8)
SIX_EXPERTS = ("spec.trainer.model.experts", {"count": 6})
OWN_MODEL = ("spec.trainer.model.entrypoint", "package.module:spec")
UNTIED = ("spec.trainer.model.tieEmbeddings", False)
FEW_HEADS = ("spec.trainer.model.kvHeads", 2)
BITWISE = [("spec.trainer.determinism", "Bitwise")]


def sized(size: str, **fields: Any) -> tuple[str, Any]:
    return "spec.trainer.model", {"size": size, **fields}


def mixture(weight: int) -> dict[str, Any]:
    return {"mixture": [{"uri": "s3://demo/data", "weight": weight}]}


def mount(path: str) -> dict[str, str]:
    return {"name": "v", "mountPath": path}


ALL_REFUSED = [
    ("unknown field", JOB, [("spec.elastic.minReplica", 1)], 'unknown field "spec.elastic.minReplica"'),
    ("unknown trainer field", JOB, [("spec.trainer.epochs", 3)], 'unknown field "spec.trainer.epochs"'),
    ("mistyped field", JOB, [("spec.replicas", "three")], "spec.replicas in body must be of type integer"),
    ("label that is no string", JOB, [("spec.template.metadata", {"labels": {"a": True}})], "must be of type string"),
    ("no replicas", JOB, [("spec.replicas", 0)], "spec.replicas in body should be greater than or equal to 1"),
    ("size below the floor", JOB, [("spec.replicas", 1)], "elastic.minReplicas is larger than replicas: lower it"),
    ("workers", OWN, [("spec.workersPerReplica", "many")], "must be Auto or a number from 1 to 1024"),
    ("no trainer", JOB, [(f"{CONTAINER}.name", "main")], "no container is named trainer: name the container"),
    ("no command", OWN, [(f"{CONTAINER}.command", None)], "the container trainer has no command: set the command"),
    ("empty command", OWN, [(f"{CONTAINER}.command", [])], "the container trainer has no command: set the command"),
    ("trainer and command", JOB, [(f"{CONTAINER}.command", ["x"])], "the container trainer has its own command"),
    ("trainer and args", JOB, [(f"{CONTAINER}.args", ["x"])], "the container trainer has its own command"),
    (
        "betas of SGD",
        JOB,
        [("spec.trainer.optimizer", {"name": "SGD", "betas": [0.9, 0.95]})],
        "optimizer.betas applies to AdamW, Adam, NAdam, RAdam",
    ),
    (
        "Nesterov without momentum",
        JOB,
        [("spec.trainer.optimizer", {"name": "SGD", "momentum": 0, "nesterov": True})],
        "optimizer.nesterov needs momentum",
    ),
    *(
        (
            f"moments that {name} can't round",
            JOB,
            [("spec.trainer.optimizer", {"name": name, "momentsPrecision": "BFloat16", **fields})],
            "optimizer.momentsPrecision BFloat16 needs betas, momentum and alpha of at most 0.984",
        )
        for name, fields in (
            ("AdamW", {"betas": [0.9, 0.999]}),
            ("SGD", {"momentum": 0.99}),
            ("RMSprop", {}),
            ("Adagrad", {}),
        )
    ),
    (
        "an average that is not kept",
        JOB,
        [("spec.trainer.evaluation", {"ema": True})],
        "set optimizer.emaDecay, or remove evaluation.ema",
    ),
    (
        "gradients in bfloat16 and bitwise",
        JOB,
        [("spec.trainer.gradientPrecision", "BFloat16"), *BITWISE],
        "set gradientPrecision to Float32, or determinism to Order",
    ),
    (
        "gradients in bfloat16 in a pipeline",
        JOB,
        [("spec.trainer.gradientPrecision", "BFloat16"), ("spec.parallelism", {"pipeline": 2})],
        "BFloat16 would also round the sums of microbatches in a pipeline",
    ),
    ("no data", JOB, [("spec.trainer.data", None)], "spec.trainer.data: Required value"),
    ("cache", JOB, [("spec.trainer.data.cacheSize", "1Mi")], "cacheSize must be from 16Mi to 16Ti"),
    ("price", JOB, [("spec.price", {"perReplicaHour": "12,3"})], "spec.price.perReplicaHour"),
    ("precision", JOB, [("spec.trainer.precision", "half")], 'supported values: "Auto", "BFloat16", "Float16",'),
    (
        "float8 and adapters",
        JOB,
        [("spec.trainer.precision", "Float8"), ("spec.trainer.model.lora", {})],
        "supports neither lora nor entrypoint",
    ),
    (
        "float8 and a model of transformers",
        JOB,
        [("spec.trainer.precision", "Float8"), ("spec.trainer.model", {"hf": "/models/a"})],
        "supports neither lora nor entrypoint nor hf",
    ),
    (
        "float8 and tensor parallelism",
        JOB,
        [("spec.trainer.precision", "Float8"), ("spec.parallelism", {"tensor": 2})],
        "precision Float8 has a scale for each row of a matrix",
    ),
    (
        "float8 of a width of its own",
        JOB,
        [("spec.trainer.precision", "Float8"), ("spec.trainer.model.hiddenDim", 40)],
        "precision Float8 multiplies matrices whose widths are multiples of 16",
    ),
    (
        "parts of blocks",
        JOB,
        [("spec.trainer.model.lora", {"frozenDtype": "NormalFloat4"}), ("spec.trainer.model.hiddenDim", 96)],
        "a quantized frozenDtype of trainer.model.lora has a scale for each 64 columns",
    ),
    ("heads", JOB, [("spec.trainer.model.heads", 5)], "dim must be an even multiple of heads"),
    (
        "from and entrypoint",
        JOB,
        [("spec.trainer.model", {"from": "/models/a", "entrypoint": "package.module:spec"})],
        "with entrypoint, only options and sequenceLength",
    ),
    (
        "from and size",
        JOB,
        [("spec.trainer.model", {"from": "/models/a", "size": "1B"})],
        "with size, the decoder is a Llama of that size",
    ),
    (
        "rotaryShare of an odd number",
        JOB,
        [("spec.trainer.model.rotaryShare", 0.1)],
        "rotaryShare times the width of a head must be an even number",
    ),
    (
        "ropeScaling without a length",
        JOB,
        [("spec.trainer.model.ropeScaling", {"type": "Llama3", "factor": 8})],
        "ropeScaling needs originalLength if its type is Llama3 or Yarn",
    ),
    (
        "ropeScaling that is upside down",
        JOB,
        [
            (
                "spec.trainer.model.ropeScaling",
                {"type": "Llama3", "factor": 8, "originalLength": 9, "lowFrequencyFactor": 5},
            )
        ],
        "lowFrequencyFactor must be below highFrequencyFactor",
    ),
    ("kvHeads", JOB, [("spec.trainer.model.kvHeads", 3)], "heads must be a multiple of kvHeads"),
    (
        "balance and bitwise",
        JOB,
        [("spec.trainer.data.balance", "Speed"), ("spec.trainer.determinism", "Bitwise")],
        "set balance to Even, or determinism to Order",
    ),
    (
        "balance and buckets",
        JOB,
        [("spec.trainer.data.balance", "Speed"), ("spec.trainer.data.documents", "Bucketed")],
        "set balance to Even, or choose another value of documents",
    ),
    (
        "evaluation at every step 0",
        JOB,
        [("spec.trainer.evaluation", {"everySteps": 0})],
        "spec.trainer.evaluation.everySteps in body should be greater than or equal to 1",
    ),
    (
        "two evaluation sets of one name",
        JOB,
        [("spec.trainer.evaluation", {"sets": [{"name": "a", "uri": "/a"}, {"name": "a", "uri": "/b"}]})],
        "each of evaluation.sets needs a name of its own",
    ),
    (
        "an evaluation set beside its folder",
        JOB,
        [("spec.trainer.evaluation", {"sets": [{"name": "a", "uri": "s3://bucket/a/../b"}]})],
        "a uri ",
    ),
    (
        "the best checkpoint without an evaluation",
        JOB,
        [("spec.checkpoint", {"uri": "s3://bucket/a", "keepBest": True})],
        "set trainer.evaluation, or remove keepBest",
    ),
    (
        "a Job for checkpoints that are not made",
        JOB,
        [("spec.evaluationJob", {"podTemplate": "score"}), ("spec.checkpoint", None)],
        "set checkpoint, or remove evaluationJob",
    ),
    ("tensor and heads", JOB, [("spec.parallelism", {"tensor": 3})], "tensor must divide trainer.model.heads"),
    ("size and layers", JOB, [sized("8B", layers=31)], "size sets the other fields of the decoder"),
    ("size and kvHeads", JOB, [sized("8B", kvHeads=2)], "size sets the other fields of the decoder"),
    (
        "size and experts",
        JOB,
        [sized("8B", experts={"count": 8})],
        "size sets the other fields of the decoder",
    ),
    (
        "size and other experts",
        JOB,
        [sized("8x7B", experts={"count": 4})],
        "size sets the other fields of the decoder",
    ),
    (
        "size and entrypoint",
        JOB,
        [sized("8B", entrypoint="package.module:spec")],
        "with entrypoint, only options and sequenceLength",
    ),
    ("hf and entrypoint", JOB, [("spec.trainer.model", {"hf": "/a", "entrypoint": "a.b:c"})], "with hf, only sequence"),
    ("hf and from", JOB, [("spec.trainer.model", {"hf": "/a", "from": "/b"})], "with hf, only sequenceLength applies"),
    ("hf and layers", JOB, [("spec.trainer.model", {"hf": "/a", "layers": 3})], "with hf, only sequenceLength applies"),
    (
        "hf and pipeline",
        JOB,
        [("spec.trainer.model", {"hf": "/a"}), ("spec.parallelism", {"pipeline": 2})],
        "the model of trainer.model.entrypoint or hf does not support it: remove parallelism.pipeline",
    ),
    (
        "hf and experts",
        JOB,
        [("spec.trainer.model", {"hf": "/a"}), ("spec.parallelism", {"expert": 2})],
        "trainer.model.experts is absent",
    ),
    (
        "hf and asyncTensor",
        JOB,
        [("spec.trainer.model", {"hf": "/a"}), ("spec.parallelism", {"tensor": 2, "asyncTensor": True})],
        "asyncTensor overlaps the matrix products of the bundled decoder only",
    ),
    (
        "adapters of gpt-oss's experts",
        JOB,
        [("spec.trainer.model", {"experts": {"count": 4, "clampedSwiglu": {}}, "lora": {"rank": 8}})],
        "lora does not support experts with clampedSwiglu",
    ),
    (
        "adapters and a router that learns",
        JOB,
        [("spec.trainer.model", {"experts": {"count": 4, "biasRate": 0.1}, "lora": {"rank": 8}})],
        "lora freezes the router and its biases",
    ),
    (
        "adapters of experts and their rank",
        JOB,
        [("spec.trainer.model", {"experts": {"count": 4}, "lora": {"rank": 3}})],
        "lora.rank must be a multiple of 8",
    ),
    (
        "quantized weights of experts",
        JOB,
        [("spec.trainer.model", {"experts": {"count": 4}, "lora": {"rank": 8, "frozenDtype": "Int8"}})],
        "a quantized lora.frozenDtype does not support a model with experts",
    ),
    (
        "gpt-oss's experts and another activation",
        JOB,
        [("spec.trainer.model", {"experts": {"count": 4, "clampedSwiglu": {}}, "activation": "GeluTanh"})],
        "experts.clampedSwiglu replaces the activation function",
    ),
    (
        "gpt-oss's experts and shared ones",
        JOB,
        [("spec.trainer.model", {"experts": {"count": 4, "shared": 1, "clampedSwiglu": {}}})],
        "clampedSwiglu does not apply to shared experts",
    ),
    (
        "a gate of no shared experts",
        JOB,
        [("spec.trainer.model", {"experts": {"count": 4, "sharedGate": True}})],
        "sharedGate multiplies the output of the shared experts",
    ),
    ("size and tensor", JOB, [sized("8B"), ("spec.parallelism", {"tensor": 16})], "divide trainer.model.kvHeads"),
    (
        "size and pipeline",
        JOB,
        [sized("8B"), ("spec.parallelism", {"pipeline": 33})],
        "needs at least one layer of trainer.model.layers for each stage",
    ),
    (
        "size and expert",
        JOB,
        [sized("8x7B"), ("spec.parallelism", {"expert": 3})],
        "divide trainer.model.experts.count",
    ),
    ("size without experts", JOB, [sized("8B"), ("spec.parallelism", {"expert": 2})], "experts is absent"),
    ("tensor and kvHeads", JOB, [FEW_HEADS, ("spec.parallelism", {"tensor": 4})], "divide trainer.model.kvHeads"),
    (
        "tensor and a hiddenDim that is said",
        JOB,
        [("spec.trainer.model.hiddenDim", 36), ("spec.parallelism", {"tensor": 8}), HEADS],
        "tensor must divide trainer.model.hiddenDim",
    ),
    (
        "tensor and a hiddenDim that follows from dim",
        JOB,
        [("spec.trainer.model", {"dim": 128, "heads": 64}), ("spec.parallelism", {"tensor": 64})],
        "tensor must divide trainer.model.hiddenDim",
    ),
    (
        "tensor and the sequence",
        JOB,
        [("spec.trainer.model.sequenceLength", 255), ("spec.parallelism", {"tensor": 2})],
        "tensor must divide trainer.model.sequenceLength / context",
    ),
    (
        "context and the sequence",
        JOB,
        [("spec.trainer.model.sequenceLength", 66), ("spec.parallelism", {"context": 2})],
        "sequenceLength must be a multiple of twice context",
    ),
    (
        "stages and layers",
        JOB,
        [("spec.parallelism", {"pipeline": 513})],
        "pipeline needs at least one layer of trainer.model.layers for each stage",
    ),
    (
        "stages and layers of an interleaved schedule",
        JOB,
        [("spec.trainer.model.layers", 6), ("spec.parallelism", {"pipeline": 4, "schedule": "Interleaved1F1B"})],
        "pipeline needs at least one layer of trainer.model.layers for each stage",
    ),
    (
        "context and buckets",
        JOB,
        [("spec.trainer.data.documents", "Bucketed"), ("spec.parallelism", {"context": 2})],
        "Bucketed makes microbatches of different lengths",
    ),
    (
        "stages and balance",
        JOB,
        [("spec.trainer.data.balance", "Speed"), ("spec.parallelism", {"pipeline": 2})],
        "the workers of a tensor, pipeline or context group compute the same sequences",
    ),
    ("copies and bitwise", JOB, [*BITWISE, ("spec.parallelism", {"shard": 2})], "Bitwise needs one order of summation"),
    ("expert and no experts", JOB, [("spec.parallelism", {"expert": 2})], "trainer.model.experts is absent"),
    (
        "expert and experts",
        JOB,
        [SIX_EXPERTS, ("spec.parallelism", {"expert": 4})],
        "expert must divide trainer.model.experts.count",
    ),
    (
        "expert and copies",
        JOB,
        [SIX_EXPERTS, ("spec.parallelism", {"expert": 2, "shard": 3})],
        "expert must divide shard",
    ),
    (
        "shared experts and tensor",
        JOB,
        [
            ("spec.trainer.model", {"heads": 16, "experts": {"count": 6, "hiddenDim": 24, "shared": 1}}),
            ("spec.parallelism", {"tensor": 16}),
        ],
        "tensor must divide the width of the shared experts",
    ),
    (
        "more experts of a token than there are",
        JOB,
        [("spec.trainer.model.experts", {"count": 2, "activePerToken": 3})],
        "activePerToken must not exceed count",
    ),
    (
        "experts and bitwise",
        JOB,
        [*BITWISE, SIX_EXPERTS],
        "determinism Bitwise does not support experts",
    ),
    ("a model of one's own and layers", JOB, [OWN_MODEL, ("spec.trainer.model.layers", 5)], "with entrypoint, only"),
    ("a model of one's own and tied", JOB, [OWN_MODEL, UNTIED], "with entrypoint, only"),
    ("options of the decoder", JOB, [("spec.trainer.model.options", {"dim": 8})], "options are for the model that"),
    ("a file for a model", JOB, [("spec.trainer.model.entrypoint", "model.py")], "spec.trainer.model.entrypoint"),
    (
        "a model of one's own and stages",
        JOB,
        [OWN_MODEL, ("spec.parallelism", {"pipeline": 2})],
        "does not support it: remove parallelism.pipeline",
    ),
    (
        "overlapped tensor groups over replicas",
        JOB,
        [("spec.workersPerReplica", 3), ("spec.parallelism", {"tensor": 2, "asyncTensor": True})],
        "asyncTensor needs tensor groups within a replica",
    ),
    (
        "overlapped tensor groups in zero bubble",
        JOB,
        [("spec.parallelism", {"pipeline": 2, "schedule": "InterleavedZeroBubble", "asyncTensor": True})],
        "asyncTensor computes the gradients of a product's input and weight together",
    ),
    (
        "torchrun and experts",
        OWN,
        [("spec.launcher", "Torchrun"), ("spec.elastic", {"minReplicas": 1}), ("spec.parallelism", {"expert": 2})],
        "torchrun does not know blocks of ranks",
    ),
    (
        "torchrun and copies",
        OWN,
        [("spec.launcher", "Torchrun"), ("spec.elastic", {"minReplicas": 1}), ("spec.parallelism", {"shard": 2})],
        "torchrun does not know blocks of ranks",
    ),
    (
        "preload for the bundled trainer",
        JOB,
        [("spec.warmStart", {"preload": ["torch"]})],
        "warmStart.preload applies only to your own command under launcher Agent",
    ),
    (
        "preload for torchrun",
        OWN,
        [("spec.launcher", "Torchrun"), ("spec.warmStart", {"preload": ["torch"]})],
        "warmStart.preload applies only to your own command under launcher Agent",
    ),
    (
        "preload of a path",
        OWN,
        [("spec.warmStart", {"preload": ["./a.py"]})],
        "spec.warmStart.preload[0] in body should",
    ),
    ("no share", JOB, [("spec.trainer.data", mixture(0))], "weight in body should be greater than or equal to 1"),
    ("uri and mixture", JOB, [("spec.trainer.data.mixture", mixture(1)["mixture"])], "set either uri or mixture"),
    ("fixed microbatches", JOB, [*BITWISE, ("spec.trainer.globalBatchSize", 4096)], "Bitwise allows at most 16"),
    (
        "fixed shapes",
        JOB,
        [*BITWISE, ("spec.trainer.data.documents", "Bucketed")],
        "Bitwise needs microbatches of one shape",
    ),
    ("ignored NaN", JOB, [("spec.trainer.anomalies", {"nonFinite": "Ignore"})], 'supported values: "Skip"'),
    ("interval", JOB, [("spec.checkpoint.everySeconds", "often")], "must be Auto or a number of seconds from 1 to 315"),
    (
        "two beginnings",
        JOB,
        [("spec.checkpoint.resumeFrom", "s3://demo/a"), ("spec.checkpoint.initFrom", "s3://demo/b")],
        "remove one of them",
    ),
    ("beginning", JOB, [("spec.checkpoint.initFrom", "hf://org/model")], "must be s3://bucket/folder, gs://bucket"),
    ("uri scheme", JOB, [("spec.checkpoint.uri", "ftp://host/run")], "must be s3://bucket/folder, gs://bucket/folder"),
    (
        "uri without bucket",
        JOB,
        [("spec.checkpoint.uri", "s3:///run")],
        "must be s3://bucket/folder, gs://bucket/folder",
    ),
    ("relative uri", JOB, [("spec.checkpoint.uri", "file://run")], "must be s3://bucket/folder, gs://bucket/folder"),
    *(
        (f"dots in {field}", JOB, [(f"spec.{field}", uri)], "has . or .. as a part of its path")
        for field, uri in [
            ("checkpoint.uri", "file:///../../etc"),
            ("checkpoint.uri", "file:///a/%2e%2E/etc"),
            ("checkpoint.resumeFrom", "s3://demo/./run"),
            ("checkpoint.initFrom", "file:///weights/.."),
            ("trainer.data.uri", "/data/../etc"),
            ("trainer.data", {"mixture": [{"uri": "s3://demo/../data", "weight": 1}]}),
        ]
    ),
    *(
        ("name of ours", JOB, [(f"spec.template.{field}", value)], message)
        for field, value, message in [
            ("spec.initContainers", [{"name": "concertina-agent"}], "is the operator's own init container"),
            ("spec.volumes", [{"name": "concertina-identity"}], "are the operator's own volumes"),
            ("spec.containers.0.volumeMounts", [mount("/concertina/")], "mounts volumes of its own"),
            ("spec.containers.0.volumeMounts", [mount("/etc/concertina/x")], "mounts volumes of its own"),
            ("spec.containers.0.env", [{"name": "CONCERTINA_UID"}], "are set by the operator"),
            ("metadata", {"labels": {"concertina.dev/job-uid": "x"}}, "are the operator's own: remove them"),
            ("metadata", {"annotations": {"concertina.dev/avoids": "x"}}, "are the operator's own: remove them"),
        ]
    ),
    ("restartPolicy", JOB, [("spec.template.spec.restartPolicy", "Always")], "must be OnFailure or Never"),
    (
        "no restartPolicy",
        JOB,
        [("spec.template.spec.restartPolicy", "Sometimes")],
        'Unsupported value: "Sometimes": supported values: "Always", "Never", "OnFailure"',
    ),
    ("long name", JOB, [("metadata.name", LONG)], "metadata.name is longer than 50 characters"),
]


@pytest.mark.parametrize(("what", "job", "changes", "message"), ALL_REFUSED, ids=[case[0] for case in ALL_REFUSED])
def test_bad_manifests_are_refused(
    cluster: LocalCluster, what: str, job: dict[str, Any], changes: list[tuple[str, Any]], message: str
) -> None:
    bad = changed(job, *changes)
    assert message in refusal(cluster, bad)
    if what != "long name":  # The name is invalid, not the spec.
        with pytest.raises(SpecError):
            parse_spec(bad)


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("spec.template.spec.nodeSelectorr", {"pool": "spot"}, "spec.template.spec.nodeSelectorr"),
        (f"{CONTAINER}.imagePullPolicyy", "Never", "spec.template.spec.containers[0].imagePullPolicyy"),
        ("spec.template.metadata", {"finalizers": ["a/b"]}, "spec.template.metadata.finalizers"),
    ],
)
def test_a_typo_in_the_template_is_refused_however_it_is_applied(
    cluster: LocalCluster, path: str, value: Any, field: str
) -> None:
    bad = changed(JOB, (path, value))
    assert f'unknown field "{field}"' in refusal(cluster, bad)
    with pytest.raises(LocalClusterError, match="field not declared in schema"):
        apply(cluster, "default", bad, "--dry-run=server", "--server-side")


def test_two_containers_of_one_name(cluster: LocalCluster) -> None:
    containers = OWN["spec"]["template"]["spec"]["containers"]
    twice = changed(OWN, ("spec.template.spec.containers", containers * 2))
    assert "spec.template.spec.containers[1]: Duplicate value" in refusal(cluster, twice)
    with pytest.raises(SpecError, match="named trainer"):
        parse_spec(twice)


TWICE = {
    "spec.template.spec.initContainers": [{"name": "a", "image": "x"}] * 2,
    "spec.template.spec.volumes": [{"name": "v"}] * 2,
    f"{CONTAINER}.volumeMounts": [mount("/data")] * 2,
}


@pytest.mark.parametrize("field", TWICE)
def test_two_of_one_name(cluster: LocalCluster, field: str) -> None:
    """Kubernetes itself refuses such a pod, so the models do not check it."""
    assert "[1]: Duplicate value" in refusal(cluster, changed(JOB, (field, TWICE[field])))


def test_names_that_are_much_like_ours_are_the_users(cluster: LocalCluster) -> None:
    job = changed(
        JOB,
        ("spec.template.metadata", {"labels": {"concertina.dev": "x", "app.kubernetes.io/managed-by": "Helm"}}),
        ("spec.template.spec.volumes", [{"name": "concertina-data", "emptyDir": {}}]),
        ("spec.template.spec.initContainers", [{"name": "agent", "image": "x"}]),
        (f"{CONTAINER}.volumeMounts", [mount("/concertina-data"), mount("/dev/shm"), mount("/etc/concert")]),
        (f"{CONTAINER}.env", [{"name": "CONCERTINA_PYTHON", "value": "/usr/bin/python3"}]),
        ("spec.checkpoint.uri", "file:///a/.b/..c/d."),
    )
    defaulted = stored(cluster, job)
    assert defaulted["spec"]["template"] == job["spec"]["template"]
    assert parse_spec(defaulted) == parse_spec(job)


def test_lists_of_the_template_that_are_null_are_absent(cluster: LocalCluster) -> None:
    """Helm templates produce such lists, and a pod accepts them."""
    job = copy.deepcopy(JOB)
    job["spec"]["template"]["spec"] |= {"volumes": None, "initContainers": None, "restartPolicy": None}
    job["spec"]["template"]["spec"]["containers"][0]["volumeMounts"] = None
    assert parse_spec(stored(cluster, job)) == parse_spec(JOB)


FIXED = [
    ("template", "spec.template.spec.nodeSelector", {"pool": "spot"}),
    ("template", f"{CONTAINER}.image", "other/image"),
    ("template", f"{CONTAINER}.env", [{"name": "A", "value": "b"}]),
    ("trainer", "spec.trainer.steps", 10),
    ("checkpoint", "spec.checkpoint.uri", "s3://demo/elsewhere"),
    ("checkpoint", "spec.checkpoint", None),
    ("workersPerReplica", "spec.workersPerReplica", 2),
]


SAME_RULE = (f"{CONTAINER}.image", f"{CONTAINER}.env")
"""Fields of the template, which one rule compares as a whole."""
CHANGED_LAW = (
    "tests/cluster/api/test_refusals.py::test_what_pods_are_made_of_changes_only_while_suspended"
    "[spec.template.spec.nodeSelector]"
)


@pytest.mark.parametrize(
    ("field", "path", "value"),
    [
        pytest.param(*case, id=case[1], marks=[pytest.mark.long(law=CHANGED_LAW)] if case[1] in SAME_RULE else [])
        for case in FIXED
    ],
)
def test_what_pods_are_made_of_changes_only_while_suspended(
    cluster: LocalCluster, namespace: str, field: str, path: str, value: Any
) -> None:
    apply(cluster, namespace, JOB)
    after = changed(JOB, (path, value))
    assert f"spec.{field}: Invalid value: {field} changes only while the job is suspended" in refused_by_kubectl(
        cluster, namespace, after
    )
    suspended = changed(after, ("spec.suspend", True))
    if field == "template":
        apply(cluster, namespace, suspended)
        apply(cluster, namespace, changed(JOB, ("spec.suspend", True)))
    else:
        assert "changes only while" in refused_by_kubectl(cluster, namespace, suspended)
        apply(cluster, namespace, changed(JOB, ("spec.suspend", True)))
    apply(cluster, namespace, after)  # One write changes the template and resumes the job.
    assert "unchanged" in apply(cluster, namespace, after)


def test_sizes_and_policies_change_at_any_time(cluster: LocalCluster, namespace: str) -> None:
    apply(cluster, namespace, JOB)
    after = changed(JOB, ("spec.replicas", 5), ("spec.elastic", {"minReplicas": 1}), ("spec.suspend", True))
    after["spec"] |= {"failurePolicy": {"maxRestarts": 0}, "ttlSecondsAfterFinished": 5, "activeDeadlineSeconds": 60}
    assert "configured" in apply(cluster, namespace, after)


def test_a_mistyped_field_of_the_template_is_refused(cluster: LocalCluster) -> None:
    """Only the CRD checks this: the operator's own parser leaves a pod's fields to Kubernetes."""
    bad = changed(JOB, ("spec.template.spec.nodeselector", {"a": "b"}), (f"{CONTAINER}.imagePullPolcy", "Always"))
    message = refusal(cluster, bad)
    assert 'unknown field "spec.template.spec.nodeselector"' in message
    assert 'unknown field "spec.template.spec.containers[0].imagePullPolcy"' in message


def test_launchers_in_the_command_are_refused_where_python_refuses_them(cluster: LocalCluster, namespace: str) -> None:
    commands = [(words, True) for words in REFUSED] + [(words, False) for words in ACCEPTED]
    jobs = [
        changed(
            OWN,
            ("metadata.name", f"job-{number}"),
            (f"{CONTAINER}.command", list(words[: 1 + number % len(words)])),
            (f"{CONTAINER}.args", list(words[1 + number % len(words) :])),
        )
        for number, (words, _) in enumerate(commands)
    ]
    message = refused_by_kubectl(cluster, namespace, {"kind": "List", "apiVersion": "v1", "items": jobs})
    for number, (words, refused) in enumerate(commands):
        assert (f'"job-{number}" is invalid' in message) == refused, words
    assert message.count("set launcher: Torchrun") == len(REFUSED)
