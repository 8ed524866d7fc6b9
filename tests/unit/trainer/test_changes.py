"""Changes of spec.trainer during a run: which are allowed, and which are refused."""

import pytest

from concertina_trainer.config.changes import identity_changes, other_changes
from concertina_trainer.config.trainer import TrainerConfig

BASE = {"data": {"uri": "/data"}, "model": {"layers": 2, "dim": 64, "heads": 4, "kvHeads": 2}}
EXPERTS = {"count": 4, "biasRate": 0.1}
OWN = {"entrypoint": "a.b:spec", "options": {"width": 8, "rate": {"dropout": 0.1}, "note": None}}


def config(trainer=None, model=None):
    return TrainerConfig.model_validate({**BASE, "model": BASE["model"] if model is None else model, **(trainer or {})})


@pytest.mark.parametrize(
    ("saved", "now", "said"),
    [
        ({}, {"heads": 8}, "model.heads 4 -> 8"),
        ({}, {"heads": 2}, "model.heads 4 -> 2"),
        ({}, {"kvHeads": 4}, "model.kvHeads 2 -> 4"),
        ({}, {"ropeTheta": 100.0}, "model.ropeTheta 10000.0 -> 100.0"),
        ({}, {"normEpsilon": 1e-6}, "model.normEpsilon 1e-05 -> 1e-06"),
        ({}, {"tieEmbeddings": False}, "model.tieEmbeddings true -> false"),
        ({}, {"sequenceLength": 512}, "model.sequenceLength 256 -> 512"),
        ({}, {"headDim": 32}, "model.headDim absent -> 32"),
        ({}, {"qkvBias": True}, "model.qkvBias false -> true"),
        ({}, {"postNorms": True}, "model.postNorms false -> true"),
        ({}, {"normOffset": True}, "model.normOffset false -> true"),
        ({}, {"activation": "GeluTanh"}, 'model.activation "Silu" -> "GeluTanh"'),
        ({}, {"attentionSoftCap": 50.0}, "model.attentionSoftCap absent -> 50.0"),
        ({}, {"qkNorm": True}, "model.qkNorm false -> true"),
        ({}, {"rotaryShare": 0.5}, "model.rotaryShare 1.0 -> 0.5"),
        ({}, {"ropeScaling": {"type": "Linear", "factor": 2}}, 'model.ropeScaling.type absent -> "Linear"'),
        ({}, {"window": {"size": 8}}, "model.window.size absent -> 8"),
        ({}, {"layers": 3}, "model.layers 2 -> 3"),
        ({}, {"hiddenDim": 128}, "model.hiddenDim 192 -> 128"),
        ({}, {"lora": {"rank": 4, "targets": ["Query"]}}, "model.lora.rank absent -> 4"),
        ({"lora": {"rank": 4}}, {"lora": {"rank": 4, "alpha": 8.0}}, "model.lora.alpha 32.0 -> 8.0"),
        ({"lora": {"rank": 4}}, {"lora": {"rank": 4, "dropout": 0.1}}, "model.lora.dropout 0.0 -> 0.1"),
        ({"lora": {"rank": 4}}, {}, "model.lora.rank 4 -> absent"),
        ({"experts": EXPERTS}, {"experts": {**EXPERTS, "activePerToken": 1}}, "model.experts.activePerToken 2 -> 1"),
        ({"experts": EXPERTS}, {"experts": {**EXPERTS, "scores": "Sigmoid"}}, 'scores "Softmax" -> "Sigmoid"'),
        ({"experts": EXPERTS}, {"experts": {"count": 4}}, 'model.experts.biasRate "present" -> "absent"'),
    ],
)
def test_another_model_is_refused_by_the_name_of_its_field(saved, now, said):
    changes = identity_changes(config(model={**BASE["model"], **saved}), config(model={**BASE["model"], **now}))
    assert any(said in str(change) for change in changes), list(map(str, changes))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({**OWN["options"], "width": 16}, "model.options.width 8 -> 16"),
        ({**OWN["options"], "rate": {"dropout": 0.2}}, "model.options.rate.dropout 0.1 -> 0.2"),
        ({"width": 8, "rate": {"dropout": 0.1}}, "model.options.note null -> absent"),
    ],
)
def test_so_are_other_options_of_a_model_of_one_s_own(options, said):
    changes = identity_changes(config(model=OWN), config(model={**OWN, "options": options}))
    assert [str(change) for change in changes] == [said]


def test_so_is_another_order_of_the_data():
    assert [str(change) for change in identity_changes(config(), config({"seed": 1}))] == ["seed 0 -> 1"]
    grouped = config({"data": {**BASE["data"], "groups": 8}})
    assert [str(change) for change in identity_changes(config(), grouped)] == ["data.groups 16 -> 8"]


@pytest.mark.parametrize(
    ("saved", "now", "said"),
    [
        ({}, {"name": "Adam"}, ['optimizer.name "AdamW" -> "Adam"']),
        ({}, {"momentsPrecision": "BFloat16"}, ['optimizer.momentsPrecision "Float32" -> "BFloat16"']),
        ({"name": "SGD"}, {"name": "SGD", "momentum": 0.0}, ['optimizer.momentum "above 0" -> "0"']),
        ({"name": "SGD"}, {"name": "SGD", "momentum": 0.5}, []),
        ({}, {"emaDecay": 0.999}, ['optimizer.emaDecay "absent" -> "present"']),
    ],
)
def test_so_is_an_optimizer_with_another_state(saved, now, said):
    """Adam's moments have the names and shapes of AdamW's."""
    changes = identity_changes(config({"optimizer": saved}), config({"optimizer": now}))
    assert [str(change) for change in changes] == said


@pytest.mark.parametrize(
    ("trainer", "said"),
    [
        ({"steps": 2000}, "steps 1000 -> 2000"),
        ({"optimizer": {"learningRate": 0.001}}, "optimizer.learningRate 0.0003 -> 0.001"),
        ({"optimizer": {"warmupSteps": 5}}, "optimizer.warmupSteps absent -> 5"),
        ({"optimizer": {"betas": [0.9, 0.99]}}, "optimizer.betas absent -> [0.9, 0.99]"),
        (
            {"optimizer": {"groups": [{"names": ["head.*"], "weightDecay": 0.0}]}},
            'optimizer.groups [] -> [{"names": ["head.*"], "weightDecay": 0.0, "learningRateFactor": 1.0}]',
        ),
        ({"globalBatchSize": 64}, "globalBatchSize 32 -> 64"),
        ({"microBatchSize": 4}, "microBatchSize absent -> 4"),
        ({"memory": {"activations": "Recompute"}}, 'memory.activations absent -> "Recompute"'),
        ({"snapshot": {"everySteps": 4}}, "snapshot.everySteps 1 -> 4"),
        ({"precision": "Float32"}, 'precision "Auto" -> "Float32"'),
        ({"determinism": "Bitwise"}, 'determinism "Order" -> "Bitwise"'),
        ({"evaluation": {"sequences": 8}}, "evaluation.sequences absent -> 8"),
        ({"anomalies": {"spike": "Skip"}}, 'anomalies.spike "Ignore" -> "Skip"'),
        ({"data": {"uri": "/elsewhere"}}, 'data.uri "/data" -> "/elsewhere"'),
    ],
)
def test_how_it_is_trained_may_change_and_is_said(trainer, said):
    assert identity_changes(config(), config(trainer)) == []
    assert said in [str(change) for change in other_changes(config(), config(trainer))]


def test_how_experts_are_balanced_may_change_and_is_said():
    saved = config(model={**BASE["model"], "experts": EXPERTS})
    now = config(model={**BASE["model"], "experts": {**EXPERTS, "biasRate": 0.2, "balanceLoss": 0.0}})
    assert identity_changes(saved, now) == []
    said = ["model.experts.balanceLoss 0.01 -> 0.0", "model.experts.biasRate 0.1 -> 0.2"]
    assert [str(change) for change in other_changes(saved, now)] == said


@pytest.mark.parametrize(
    "model",
    [{**BASE["model"], "hiddenDim": 192}, {**BASE["model"], "options": None}],
)
def test_what_is_only_said_otherwise_has_not_changed(model):
    assert identity_changes(config(), config(model=model)) == other_changes(config(), config(model=model)) == []


def test_a_reproduction_is_the_same_run():
    again = config({"reproduction": {"lastStep": 5}})
    assert identity_changes(config(), again) == other_changes(config(), again) == []


def test_every_field_is_one_or_the_other():
    """A new field is refused if it belongs to the model, and reported otherwise."""
    before, now = config(), config({"steps": 5, "seed": 2, "globalBatchSize": 1}, {**BASE["model"], "heads": 2})
    refused = {change.field for change in identity_changes(before, now)}
    changed_fields = {change.field for change in other_changes(before, now)}
    assert (refused, changed_fields) == ({"model.heads", "seed"}, {"steps", "globalBatchSize"})
