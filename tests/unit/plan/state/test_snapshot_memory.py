"""Snapshots that don't fit into memory: they are reported with figures before anything starts."""

import pytest
import torch

from builders import jobs
from concertina.plan.actions import CreatePod
from concertina.plan.plan import plan
from concertina.plan.state.snapshot_memory import HEADER, PROGRAM, needed, offloaded
from concertina_agent.main import install
from concertina_protocol.tracking import spool
from concertina_state.format.shardfile import Chunk, Layout
from concertina_trainer.config.model_config import ModelConfig
from concertina_trainer.model.decoder import Decoder
from concertina_trainer.model.optimizer import is_matrix
from concertina_trainer.model.stages import Stages

LARGE = {"layers": 24, "dim": 1024, "heads": 16, "vocabSize": 32768}


def limited(amount, replicas=4, least=None, model=LARGE, offload=None, **fields):
    container = {"name": "trainer", "image": "x", "resources": {"limits": {"memory": amount}}}
    return jobs.spec(
        replicas=replicas,
        elastic={"minReplicas": least or replicas},
        template={"spec": {"containers": [container]}},
        trainer={"steps": 100, "data": {"uri": "/data"}, "model": model, "memory": {"offload": offload}},
        **fields,
    )


def first(spec):
    return plan(jobs.observed(jobs.job(spec)), jobs.T0 + 1)


def stalled(made):
    return next(condition.message for condition in made.status.conditions if condition.type == "Stalled")


UNEVEN = {"layers": 3, "dim": 64, "heads": 4, "kvHeads": 2, "tieEmbeddings": False, "hiddenDim": 96}


@pytest.mark.parametrize(
    "model",
    [
        {}, LARGE, UNEVEN, {**UNEVEN, "lora": {"rank": 5}}, {**UNEVEN, "lora": {"targets": ["Key", "Down", "Key"]}},
        {**UNEVEN, "qkvBias": True, "outputBias": True, "qkNorm": True, "postNorms": True},
        {**UNEVEN, "experts": {"count": 3, "shared": 2, "firstDense": 1}},
        {**UNEVEN, "experts": {"count": 3, "shared": 1}, "lora": {"rank": 8}},
        {**UNEVEN, "attentionSinks": True, "experts": {"count": 3, "clampedSwiglu": {}}},
    ],
)  # fmt: skip
def test_the_count_of_weights_is_the_model_s(model):
    config = ModelConfig.model_validate(model)
    with torch.device("meta"):
        stages = Stages([Decoder(config)])
    weights = dict(stages.named_parameters())
    assert config.weights == sum(p.numel() for p in weights.values())
    trained = {name: p for name, p in weights.items() if p.requires_grad}
    assert config.trained_weights == sum(p.numel() for p in trained.values())
    matrices = [p for name, p in trained.items() if is_matrix(name, p.dim(), stages.blocks(), stages.embeddings())]
    assert config.matrix_weights == sum(p.numel() for p in matrices)


def test_frozen_weights_that_are_read_from_elsewhere_take_no_room():
    model = ModelConfig.model_validate({**UNEVEN, "lora": {"rank": 5}})
    random, begun = (
        limited("1Gi", 2, model={**UNEVEN, "lora": {"rank": 5}}, checkpoint={"uri": "s3://bucket/run", **begin})
        for begin in ({}, {"initFrom": "s3://bucket/base"})
    )
    copies, frozen_bytes = 6, 2 * (model.weights - model.trained_weights)
    assert needed(random, 2) - needed(begun, 2) == copies * frozen_bytes // 2


def test_a_part_on_its_way_to_storage_takes_room_too():
    spec = limited("1Gi")
    durable = spec.model_copy(update={"checkpoint": jobs.spec(checkpoint={"uri": "s3://bucket/folder"}).checkpoint})
    assert (needed(durable, 4) - PROGRAM) * 5 == (needed(spec, 4) - PROGRAM) * 6


def test_what_the_init_container_writes_has_room_beside_them(tmp_path):
    install(tmp_path)
    written = sum(path.lstat().st_blocks * 512 for path in tmp_path.rglob("*"))
    assert written <= PROGRAM * 3 // 4, "marks, heartbeats and the names of what was imported come later"


def test_a_shard_s_header_has_room_beside_the_tensors():
    """The model is as large as any: each weight has two moments, and a rank has a part of each."""
    attention = ("attention.query", "attention.key", "attention.value", "attention.output", "attention_norm")
    names = (*attention, "feed_forward.gate", "feed_forward.up", "feed_forward.down", "feed_forward_norm")
    layers, whole, part, place = 126, (53248, 16384), (3328, 16384), (49920, 0)
    chunks = [
        Chunk(f"{kind}.layers.{layer}.{name}.weight", "F32", place, part, whole)
        for kind in ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
        for layer in range(layers)
        for name in names
    ]
    assert Layout(chunks).data_begin <= HEADER


def test_each_worker_s_shards_have_headers_of_their_own():
    spec = limited("8Gi")
    assert needed(spec.model_copy(update={"workers_per_replica": 8}), 4) - needed(spec, 4) == 5 * 7 * HEADER


def test_what_waits_for_a_tracker_takes_room_too():
    spec = limited("1Gi")
    tracked = jobs.spec(tracking={"backend": "MLflow", "uri": "http://mlflow:5000"}).tracking
    assert needed(spec.model_copy(update={"tracking": tracked}), 4) - needed(spec, 4) == spool.MOST_BYTES


def test_a_job_whose_snapshots_fit_at_no_size_is_not_started():
    need = needed(limited("1Gi"), 4)
    assert need - PROGRAM == 5 * (12 * ModelConfig.model_validate(LARGE).weights // 4 + HEADER)
    made = first(limited("4Gi"))
    assert not made.actions, "no pod is made"
    assert "with 4 replicas the snapshots of each replica take 4," in stalled(made)
    assert "3,686 MiB, are available. Raise resources.limits.memory" in stalled(made)
    assert first(limited("8Gi")).actions


def test_a_job_that_would_not_fit_once_it_shrinks_is_warned_of_it():
    made = first(limited("8Gi", least=2))
    assert made.actions
    (event,) = (event for event in made.events if event.reason == "MemoryTight")
    assert "with 2 replicas the snapshots of each replica take 9,655 MiB (of 3,859 MiB of state" in event.message


def test_a_job_of_no_valid_size_is_told_of_that():
    made = first(limited("8Gi", parallelism={"tensor": 8}))
    assert "a multiple of 8" in stalled(made)
    assert first(limited("8Gi", parallelism={"tensor": 8}, suspend=True)).status.conditions


def test_one_replica_has_no_copies_of_another_and_no_limit_is_no_worry():
    assert needed(limited("1Gi"), 1) - PROGRAM == 3 * (12 * ModelConfig.model_validate(LARGE).weights + HEADER)
    assert first(jobs.spec()).actions


def test_a_state_in_host_memory_takes_room_beside_its_snapshots():
    weights = ModelConfig.model_validate(LARGE).weights
    assert offloaded(limited("8Gi"), 4) == 0
    assert offloaded(limited("8Gi", offload="State"), 4) == 16 * weights // 4
    assert offloaded(limited("8Gi", offload="State", parallelism={"shard": 2}), 4) == 2 * 16 * weights // 4
    made = first(limited("6Gi", offload="State"))
    assert first(limited("6Gi")).actions
    assert not made.actions
    assert "its offloaded state 1,286 MiB, but only nine tenths of the memory limit, 5,530 MiB" in stalled(made)
    assert first(limited("8Gi", offload="State")).actions


def test_pods_are_made_with_the_room_that_was_counted_on():
    pods = [action for action in first(limited("8Gi")).actions if isinstance(action, CreatePod)]
    assert [pod.snapshot_memory for pod in pods] == [8 * 2**30 * 9 // 10] * 4
