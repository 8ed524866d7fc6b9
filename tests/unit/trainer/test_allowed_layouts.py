"""Layouts that a model and its data allow, and the nearest ones that an error names."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from concertina_trainer import layouts
from concertina_trainer.config.parallelism import ParallelismConfig
from concertina_trainer.config.trainer import TrainerConfig

FREED = {"memory": {"reshardAfterForward": "Always"}}
ZERO_BUBBLE = {"pipeline": 2, "schedule": "InterleavedZeroBubble"}
QUANTIZED = {"model": {"dim": 256, "heads": 4, "hiddenDim": 1024, "lora": {"frozenDtype": "NormalFloat4"}}}
NARROW_QUANTIZED = {"model": {"dim": 96, "heads": 4, "lora": {"frozenDtype": "Int8"}}}
OWN_MODEL = {"model": {"entrypoint": "package.module:spec", "options": {"dim": 8}}}
HF_MODEL = {"model": {"hf": "/models/a", "sequenceLength": 30}}
SIX_EXPERTS = {"model": {"experts": {"count": 6}}}
NARROW_SHARED = {"model": {"heads": 16, "experts": {"count": 6, "hiddenDim": 24, "shared": 1}}}


def config(**fields: Any) -> TrainerConfig:
    return TrainerConfig.model_validate({"data": {"uri": "/data"}, **fields})


def problems(trainer: TrainerConfig, world: int | None = None, **degrees: Any) -> tuple[str, ...]:
    return layouts.problems(trainer, ParallelismConfig(**degrees), world)


def test_sizes_that_are_not_known_yet_allow_every_layout() -> None:
    """Leave the check to the trainer, which reads config.json."""
    described = config(model={"from": "/models/a"})
    known = config(model={**described.model.model_dump(by_alias=True), "from": None})
    for degrees in ({"tensor": 8}, {"pipeline": 8}, {"expert": 8}):
        assert problems(described, **degrees) == ()
        assert len(problems(known, **degrees)) == 1


@pytest.mark.parametrize(
    ("trainer", "degrees", "start", "end"),
    [
        ({"model": {"kvHeads": 1}}, {"tensor": 2}, "parallelism.tensor: ", "tensor is 2: the nearest that fit: 1"),
        ({"model": {"layers": 6}}, {"pipeline": 9}, "parallelism.pipeline: ", "pipeline is 9: the nearest that fit: 6"),
        ({"model": {"layers": 6}}, {"pipeline": 4, "schedule": "Interleaved1F1B"}, "parallelism.pipeline: ", "fit: 3"),
        ({}, {"context": 3}, "parallelism.context: ", "context is 3: the nearest that fit: 2 and 4"),
        ({"model": {"sequenceLength": 254}}, {"tensor": 4}, "parallelism.tensor: ", "the nearest that fit: 2"),
        ({"data": {"uri": "/d", "documents": "Bucketed"}}, {"tensor": 2}, "trainer.data.documents: ", "documents"),
        ({"data": {"uri": "/d", "balance": "Speed"}}, {"context": 2}, "trainer.data.balance: ", "to Even"),
        ({"determinism": "Bitwise"}, {"shard": 2}, "trainer.determinism: ", "remove parallelism"),
        (FREED, ZERO_BUBBLE, "trainer.memory.reshardAfterForward: ", "choose another parallelism.schedule"),
        ({}, {**ZERO_BUBBLE, "tensor": 2, "async_tensor": True}, "parallelism.asyncTensor: ", "or remove asyncTensor"),
        ({}, {"expert": 2}, "parallelism.expert: expert divides the experts", "expert is 2: the nearest that fit: 1"),
        (SIX_EXPERTS, {"expert": 4}, "parallelism.expert: ", "expert is 4: the nearest that fit: 3 and 6"),
        (SIX_EXPERTS, {"expert": 2, "shard": 3}, "parallelism.expert: ", "expert is 2: the nearest that fit: 1 and 3"),
        (NARROW_SHARED, {"tensor": 16}, "parallelism.tensor: ", "tensor is 16: the nearest that fit: 8"),
        ({"model": {**QUANTIZED["model"], "heads": 8}}, {"tensor": 8}, "parallelism.tensor: a quantized", "fit: 4"),
        (NARROW_QUANTIZED, {}, "parallelism.tensor: a quantized frozenDtype", "tensor is 1"),
        ({"precision": "Float8", "model": {"dim": 256, "heads": 4}}, {"tensor": 2}, "trainer.precision: ", "tensor"),
        ({"precision": "Float8", "model": {"dim": 72, "heads": 4}}, {}, "trainer.precision: ", "to BFloat16"),
        (OWN_MODEL, {"tensor": 2}, "parallelism.tensor: tensor divides the bundled decoder", "the nearest that fit: 1"),
        (HF_MODEL, {"expert": 2}, "parallelism.expert: expert divides the experts", "the nearest that fit: 1"),
        (HF_MODEL, {"tensor": 2, "async_tensor": True}, "parallelism.asyncTensor: ", "or trainer.model.hf"),
        (HF_MODEL, {"pipeline": 2}, "parallelism.pipeline: ", "pipeline is 2: the nearest that fit: 1"),
        (OWN_MODEL, {"context": 4}, "parallelism.context: ", "context is 4: the nearest that fit: 1"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_the_nearest_that_does(
    trainer: dict[str, Any], degrees: dict[str, Any], start: str, end: str
) -> None:
    (sentence,) = problems(config(**trainer), **degrees)
    assert sentence.startswith(start)
    assert sentence.endswith(end)


def test_models_of_transformers_are_divided_by_their_own_sizes() -> None:
    """The defaults of the decoder's fields say nothing about such a model, and no group divides its sequences."""
    assert problems(config(**HF_MODEL), tensor=7) == ()


def test_experts_are_dealt_out_within_groups_before_other_sequences_workers() -> None:
    given = {"tensor": 2, "context": 2, "expert": 6}
    assert problems(config(**SIX_EXPERTS), world=12, **given) == ()
    assert ParallelismConfig(**given).expert_shards == 3
    assert ParallelismConfig(**given).block == 12
    (sentence,) = problems(config(**SIX_EXPERTS), world=6, **given)
    assert sentence.endswith("the block of 12 workers: the nearest that fit: 12")


def test_a_world_of_half_a_block_is_refused_with_the_nearest_sizes() -> None:
    assert problems(config(), world=8, tensor=2, shard=2) == ()
    (sentence,) = problems(config(), world=6, tensor=2, shard=2)
    assert (
        sentence == "parallelism: 6 workers are not a multiple of the block of 4 workers: the nearest that fit: 4 and 8"
    )
    assert problems(config(), world=3, tensor=4)[0].endswith("fit: 4")


DEGREES = st.integers(1, 12)
MODELS = st.builds(
    lambda width, kv, group, layers, sequence, hidden: {
        "dim": 8 * width * kv * group,
        "heads": kv * group,
        "kvHeads": kv,
        "layers": layers,
        "sequenceLength": sequence,
        "hiddenDim": hidden,
    },
    st.integers(1, 3), st.integers(1, 6), st.integers(1, 4), st.integers(1, 8), st.integers(2, 96),
    st.none() | st.integers(8, 64),
)  # fmt: skip


@given(MODELS, st.sampled_from(({}, {"determinism": "Bitwise"}, {"data": {"uri": "/data", "balance": "Speed"}})))
def test_without_parallelism_every_configuration_is_valid(model: dict[str, Any], fields: dict[str, Any]) -> None:
    """The API server skips these rules if spec.parallelism is absent."""
    assert problems(config(model=model, **fields)) == ()


@settings(max_examples=40, deadline=None)
@given(MODELS, DEGREES, DEGREES, DEGREES)
def test_what_is_named_instead_is_allowed_and_nothing_nearer_is(
    model: dict[str, Any], tensor: int, pipeline: int, context: int
) -> None:
    trainer = config(model=model)
    degrees: dict[str, Any] = {"tensor": tensor, "pipeline": pipeline, "context": context}
    for sentence in problems(trainer, **degrees):
        field, _, _ = sentence.partition(": ")
        dimension = field.removeprefix("parallelism.")
        asked = [rule for rule in layouts.RULES if rule.field == field]
        allowed = [
            degree
            for degree in range(1, 128)
            if all(rule.holds(trainer, ParallelismConfig(**{**degrees, dimension: degree})) for rule in asked)
        ]
        below = max((degree for degree in allowed if degree < degrees[dimension]), default=None)
        above = min((degree for degree in allowed if degree > degrees[dimension]), default=None)
        near = " and ".join(str(degree) for degree in (below, above) if degree is not None)
        assert sentence.endswith(f": the nearest that fit: {near}" if near else f"is {degrees[dimension]}")
