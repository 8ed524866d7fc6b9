"""Estimate of a layout, without torch and without running anything."""

from __future__ import annotations

import dataclasses
from typing import Any
from xml.etree import ElementTree as xml

import pytest

from builders.jobs import spec
from concertina.planning import search
from concertina.planning.hardware import FABRICS, GPUS, HOST_MEMORY_RATE, FabricName, GpuName
from concertina.planning.layout import DerivedGroup, OwnDescription, ParallelLayout, of
from concertina.planning.outlook import RankMemoryEstimate, as_object, bottleneck, outlook
from concertina.planning.timing import bubble_share, step_time
from concertina.planning.traffic import batch, host_bytes, traffic
from concertina.report.ranks import picture
from concertina_trainer.config.memory_config import Activations, MemoryConfig
from concertina_trainer.config.parallelism import ParallelismConfig
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.degrees import Dimension
from concertina_trainer.model.flops import recomputed_flops

H100, NETWORK = GPUS[GpuName.h100], FabricName.infiniband400
MODEL = {
    "layers": 32, "dim": 4096, "heads": 32, "kvHeads": 8, "hiddenDim": 14336, "vocabSize": 128256,
    "sequenceLength": 8192, "tieEmbeddings": False,
}  # fmt: skip


RECOMPUTED = MemoryConfig(activations=Activations.recompute)


def job(**fields: Any) -> Any:
    trainer = {"steps": 100, "data": {"uri": "/data"}, "model": MODEL, "globalBatchSize": 512, "microBatchSize": 1}
    return spec(**{"replicas": 8, "elastic": None, "workersPerReplica": 8, "trainer": trainer, **fields})


EXPERTS = {"count": 64, "activePerToken": 6, "hiddenDim": 1408, "shared": 2, "firstDense": 1}


def layout(size: int = 64, batch: int = 512, experts: Any = None, **parallelism: Any) -> ParallelLayout:
    model = {**MODEL, "experts": experts}
    trainer = TrainerConfig.model_validate(
        {"data": {"uri": "/data"}, "model": model, "globalBatchSize": batch, "microBatchSize": 1}
    )
    return ParallelLayout(trainer, ParallelismConfig.model_validate(parallelism), size, 8)


def test_ranks_lie_in_blocks_the_tensor_group_innermost() -> None:
    here = layout(tensor=4, context=2, pipeline=2, shard=2)
    assert list(here.degrees) == [2, 2, 2, 2, 4]
    assert here.degrees.place(0b1010_11) == (1, 0, 1, 0, 3)
    assert [str(each) for each in Dimension if here.crosses(each)] == ["replicate", "shard", "pipeline"]
    assert here.on_node(Dimension.tensor) == 4


def test_waiting_in_a_pipeline_by_schedule() -> None:
    shares = {
        name: bubble_share(layout(pipeline=4, schedule=name), 8)
        for name in ("OneForwardOneBackward", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble")
    }
    assert shares["OneForwardOneBackward"] == shares["GPipe"] == pytest.approx(3 / 8)
    assert shares["Interleaved1F1B"] == pytest.approx(3 / 16)
    assert shares["InterleavedZeroBubble"] == pytest.approx(1 / 16)


def test_a_group_that_leaves_its_node_is_slower() -> None:
    near, far = (step_time(layout(tensor=degree), H100, FABRICS[NETWORK]) for degree in (8, 16))
    assert far.communication[Dimension.tensor] > 2 * near.communication[Dimension.tensor]


def test_tensor_groups_that_send_while_they_multiply_wait_less_and_send_more() -> None:
    apart, together = (layout(tensor=8, asyncTensor=overlapped) for overlapped in (False, True))
    sent = [
        sum(part.sent for part in traffic(each) if part.dimension is Dimension.tensor) for each in (apart, together)
    ]
    assert 1 < sent[1] / sent[0] < 5 / 4
    ends = sum(part.sent for part in traffic(together) if part.dimension is Dimension.tensor and part.exposed)
    assert 0 < ends < 0.1 * sent[0]

    def waits(overlapped: bool, degree: int) -> float:
        times = step_time(layout(tensor=degree, asyncTensor=overlapped), H100, FABRICS[NETWORK])
        return times.communication[Dimension.tensor]

    assert waits(True, 2) < waits(False, 2) / 20, "products hide nearly all but the ends"
    # Computed by hand: a gathering takes 193 us, of which products of attention hide 83 and 55, and the other products
    # all.
    left = (193 - 83) + (2 * 193 - 83) + 2 * (193 - 55)
    assert waits(True, 8) == pytest.approx(waits(False, 8) * (32 * left / 193 + 4) / (32 * 8 + 4), rel=0.01)
    assert waits(False, 16) / 2 < waits(True, 16) < waits(False, 16), "and little of what goes between nodes"


def test_what_is_sent_grows_with_what_is_cut() -> None:
    assert traffic(layout(size=1)) == []
    parts = {part.dimension for part in traffic(layout(tensor=2, context=2, pipeline=2, shard=2))}
    assert parts == set(Dimension)


def test_experts_are_on_neighbours_as_far_as_they_share_sequences() -> None:
    here = layout(experts=EXPERTS, expert=8, tensor=2, context=2, pipeline=2)
    assert [here.expert_place(rank) for rank in range(4)] == [0, 1, 2, 3]
    assert [here.expert_place(rank) for rank in (4, 8, 16)] == [0, 4, 0], "of the next stage, and of the next sequences"
    assert here.on_node(DerivedGroup.expert) == 4
    assert here.crosses(DerivedGroup.expert)
    assert not layout(experts=EXPERTS, expert=8).crosses(DerivedGroup.expert)
    assert as_object(outlook(job(), here, H100, NETWORK))["degrees"]["expert"] == 8


def test_tokens_to_experts_take_longer_between_nodes() -> None:
    near, far = (layout(experts=EXPERTS, expert=degree) for degree in (8, 64))
    sent = [next(part.sent for part in traffic(each) if part.dimension is DerivedGroup.expert) for each in (near, far)]
    assert sent[1] == pytest.approx(sent[0] * (63 / 64) / (7 / 8)), "the same rows, fewer of them stay"
    seconds = [step_time(each, H100, FABRICS[NETWORK]).communication[DerivedGroup.expert] for each in (near, far)]
    assert seconds[1] > 2 * seconds[0]
    assert bottleneck(outlook(job(), far, H100, NETWORK)).startswith("Experts: ")


def test_the_first_bottleneck_is_named_with_what_to_try() -> None:
    seen = outlook(job(), of(job(), 8), H100, NETWORK)
    assert bottleneck(seen).startswith("Computation: ")
    tight = [RankMemoryEstimate(3, "forward", {"weights": 1 << 30, "activations": 90 << 30})]
    full = outlook(job(), of(job(), 8), H100, NETWORK, tight)
    assert full.fits is False
    assert bottleneck(full).startswith("Memory: rank 3 needs 91.0 GiB of the 72.7 GiB")
    assert "set trainer.memory.activations to Recompute" in bottleneck(full)
    few = outlook(job(), layout(batch=64, pipeline=16), H100, NETWORK)
    assert bottleneck(few).startswith("Pipeline: ranks wait ")


def test_a_state_in_host_memory_is_copied_and_updated_there() -> None:
    plain = layout(batch=128)
    memory = {"offload": "State", "reshardAfterForward": "Always"}
    trainer = plain.trainer.model_copy(update={"memory": MemoryConfig.model_validate(memory)})
    here = dataclasses.replace(plain, trainer=trainer)
    held = trainer.model.weights / 64
    # There are two microbatches: blocks are gathered twice for each, the ends once, and all are reduced for each.
    ends = 2 * MODEL["vocabSize"] * MODEL["dim"] / 64
    assert host_bytes(plain) == 0
    assert host_bytes(here) == pytest.approx(4 * (4 * (held - ends) + 2 * ends + 2 * held), rel=1e-3)
    times = [step_time(each, H100, FABRICS[NETWORK]) for each in (plain, here)]
    assert times[0].host == 0 < times[1].host
    assert times[1].optimizer == pytest.approx(times[0].optimizer * H100.memory_rate / HOST_MEMORY_RATE)
    assert search.least_memory(here) < search.least_memory(plain)
    tight = [RankMemoryEstimate(0, "update", {"weights": 90 << 30})]
    assert "set memory.offload to State" in bottleneck(outlook(job(), plain, H100, NETWORK, tight))
    offloaded = outlook(job(trainer=trainer.model_dump(mode="json", by_alias=True)), here, H100, NETWORK)
    assert as_object(offloaded)["offloadedBytes"] == 16 * trainer.model.weights // 8


def test_a_budget_has_days_and_a_cost() -> None:
    priced = job(price={"perReplicaHour": "10.0"})
    seen = outlook(priced, of(priced, 8), H100, NETWORK, tokens=1e12)
    assert seen.budget is not None
    assert seen.budget.seconds == pytest.approx(1e12 / seen.tokens_per_second)
    assert seen.budget.cost == pytest.approx(seen.budget.seconds / 3600 * 8 * 10)
    printed = as_object(seen)
    assert printed["budget"]["days"] == pytest.approx(seen.budget.seconds / 86400)
    assert 0 < printed["mfu"] == printed["hfu"] < H100.kernels
    assert printed["degrees"]["shard"] == 64


def test_the_utilization_of_the_hardware_counts_what_is_computed_again() -> None:
    plain = layout()
    again = dataclasses.replace(plain, trainer=plain.trainer.model_copy(update={"memory": RECOMPUTED}))
    printed = as_object(outlook(job(), again, H100, NETWORK))
    repeated = recomputed_flops(plain.trainer.model, Activations.recompute)
    assert printed["hfu"] == pytest.approx(printed["mfu"] * (1 + repeated / printed["flopsPerToken"]))
    assert 0.2 < repeated / printed["flopsPerToken"] < 1 / 3


def test_a_search_gives_only_what_runs_the_fastest_first() -> None:
    here = layout()
    candidates = search.candidates(here.trainer, H100, FABRICS[NETWORK], 64, 8)
    seconds = [step_time(each, H100, FABRICS[NETWORK]).total for each in candidates]
    assert len(candidates) > 20
    assert seconds == sorted(seconds)
    assert all(each.size % each.parallelism.block == 0 and 32 % each.parallelism.tensor == 0 for each in candidates)
    assert all(search.least_memory(each) < H100.memory for each in candidates)
    assert {each.parallelism.tensor for each in candidates} > {1, 2}


def test_a_search_tries_to_deal_experts_out() -> None:
    candidates = search.candidates(layout(experts=EXPERTS).trainer, H100, FABRICS[NETWORK], 64, 8)
    assert {each.parallelism.expert for each in candidates} > {1, 8}


def own_model(**changes: Any) -> OwnDescription:
    facts = {"weights": 10**9, "trained": 10**9, "blocks": 10, "in_blocks": 9 * 10**8, "flops": 6e9, "counted": True}
    facts |= {"matrices": 9 * 10**8, "orthogonalized": 1e13}
    frames = {"name": "features", "type": "float16", "width": 80}
    return OwnDescription(**{**facts, "moved": 1e7, "data": {"vocab_size": 8, "fields": [frames]}, **changes})


def own_layout(own: OwnDescription, activations: str = "Keep", **parallelism: Any) -> ParallelLayout:
    model = {"entrypoint": "audio_model:spec", "sequenceLength": 1000}
    memory = {"activations": activations}
    trainer = {"data": {"uri": "/data"}, "model": model, "globalBatchSize": 256, "microBatchSize": 2, "memory": memory}
    return ParallelLayout(
        TrainerConfig.model_validate(trainer), ParallelismConfig.model_validate(parallelism), 64, 8, own=own
    )


def test_a_model_of_one_s_own_is_searched_for_among_copies_and_ways_to_keep_activations() -> None:
    for blocks, kept in ((10, {"Keep", "KeepProducts", "Recompute"}), (0, {"Keep"})):
        here = own_layout(own_model(blocks=blocks, in_blocks=blocks and 9 * 10**8))
        candidates = search.candidates(here.trainer, H100, FABRICS[NETWORK], 64, 8, here.own)
        assert {each.parallelism.shard for each in candidates} == {None, 8}, "64 is all of them"
        assert all(each.parallelism.group == each.parallelism.expert == 1 for each in candidates)
        assert {str(each.trainer.memory.activations) for each in candidates} == kept
    huge = own_layout(own_model(weights=10**12, trained=10**12))
    assert search.candidates(huge.trainer, H100, FABRICS[NETWORK], 64, 8, huge.own) == []


def test_gradients_that_are_added_up_after_each_microbatch_are_parts_also_before_the_search() -> None:
    """Blocks of models with more than 100 million parameters free their weights."""
    huge = own_model(weights=2 * 10**10, trained=2 * 10**10, blocks=40, in_blocks=194 * 10**8)
    here = own_layout(huge, activations="Recompute")
    assert batch(here).microbatches > 1
    assert search.least_memory(here) == pytest.approx((4 + 8 + 4) * 2e10 / 64)
    assert search.candidates(here.trainer, H100, FABRICS[NETWORK], 64, 8, huge)


def test_what_a_model_of_one_s_own_sends_and_takes() -> None:
    here = own_layout(own_model(trained=5 * 10**8), shard=8)
    parts = {(part.dimension, part.name.partition(" ")[0]): part.bytes for part in traffic(here)}
    # There are two microbatches: blocks are gathered twice for each, in bfloat16. Half of the weights have gradients.
    assert parts == {
        (Dimension.shard, "all-gather"): 2 * 2 * (2 * 9 * 10**8 + 10**8),
        (Dimension.shard, "reduce-scatter"): 4 * 2 * 5 * 10**8,
        (Dimension.replicate, "all-reduce"): 4 * 5 * 10**8 / 8,
    }
    printed = as_object(outlook(job(), here, H100, NETWORK))
    assert (printed["parameters"], printed["trainedParameters"], printed["flopsCounted"]) == (10**9, 5 * 10**8, True)
    assert printed["flopsPerToken"] == 6e9
    assert printed["hfu"] == printed["mfu"]
    recomputing = own_layout(own_model(), activations="Recompute")
    assert as_object(outlook(job(), recomputing, H100, NETWORK))["hfu"] is None, "nobody has counted what is repeated"
    assert printed["mfu"] == pytest.approx(6e9 * 256 * 1000 / (printed["stepSeconds"] * 64 * H100.flops))


@pytest.mark.parametrize(
    ("kind", "changes", "activations", "advice"),
    [
        ("activations", {}, "Keep", "set trainer.memory.activations to Recompute, or lower microBatchSize"),
        ("activations", {}, "Recompute", "lower microBatchSize"),
        ("activations", {"blocks": 0}, "Keep", "give ModelSpec.blocks the parts of the model"),
        ("moments", {}, "Keep", "have more replicas, or set memory.offload to State"),
        ("gathered", {}, "Keep", "give ModelSpec.blocks smaller parts"),
    ],
)
def test_what_a_model_of_one_s_own_may_do_without_memory(
    kind: str, changes: dict[str, Any], activations: str, advice: str
) -> None:
    tight = [RankMemoryEstimate(0, "forward", {kind: 90 << 30})]
    seen = outlook(job(), own_layout(own_model(**changes), activations), H100, NETWORK, tight)
    assert bottleneck(seen).partition("): ")[2].startswith(advice)


def test_the_picture_has_each_rank_on_its_node() -> None:
    drawn = xml.fromstring(picture("<demo>", layout(size=16, experts=EXPERTS, expert=4, tensor=2, pipeline=2)))
    titles = [each.text or "" for each in drawn.iter("{http://www.w3.org/2000/svg}title")]
    [fifth] = [title for title in titles if title.startswith("rank 5:")]
    assert fifth == "rank 5: shard 1, pipeline 0, tensor 1, expert 3"
    assert len([title for title in titles if title.startswith("rank ")]) == 16
    frames = [each for each in drawn.iter("{http://www.w3.org/2000/svg}rect") if each.get("fill") == "none"]
    assert len(frames) == 2
    many = picture("demo", layout(size=4096))
    assert "448 more nodes" in many
    assert "http" not in many.replace("http://www.w3.org/2000/svg", "")
