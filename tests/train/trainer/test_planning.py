"""What is planned is what ranks really take and send, at any size."""

import dataclasses
import json
import subprocess
import sys

import pytest

from builders.train.gradients import whole_gradient
from concertina.planning.layout import Layout
from concertina.planning.traffic import traffic
from concertina_state.errors import BadInput
from concertina_trainer.config.parallelism import ParallelismConfig
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.degrees import Degrees
from concertina_trainer.planning import memory as planning
from concertina_trainer.planning.ledger import Kind, Phase

MODEL = {
    "layers": 4, "dim": 128, "heads": 8, "kvHeads": 4, "hiddenDim": 352, "vocabSize": 512, "sequenceLength": 128,
    "tieEmbeddings": False,
}  # fmt: skip
LAYOUTS = {
    "fsdp": {},
    "hsdp": {"shard": 2},
    "tensor": {"tensor": 2},
    "async tensor": {"tensor": 2, "asyncTensor": True},
    "context": {"context": 2},
    "1F1B": {"pipeline": 2},
    "GPipe": {"pipeline": 2, "schedule": "GPipe"},
    "interleaved": {"pipeline": 2, "schedule": "Interleaved1F1B"},
    "zero bubble": {"pipeline": 2, "schedule": "InterleavedZeroBubble"},
    "hybrid": {"shard": 16, "context": 2, "tensor": 4},
    "hybrid with a pipeline": {"shard": 8, "pipeline": 2, "context": 2, "tensor": 2},
}
EXPERTS = {"count": 8, "hiddenDim": 128, "shared": 1, "firstDense": 1, "biasRate": 0.001}
ROUTED = {
    "experts": {"expert": 2},
    "experts x copies": {"expert": 2, "shard": 2},
    "experts gathered": {},
    "experts x context": {"expert": 4, "context": 2},
    "experts x tensor": {"expert": 4, "tensor": 2},
    "experts gathered x pipeline": {"pipeline": 2},
}
"""Of a model with experts."""
MASKLESS = [layout for layout in ROUTED if "context" not in layout]
"""On CPU a context group has a mask of pairs, which is not planned for."""
STATE = (Kind.weights, Kind.moments, Kind.gradients)
FORMULA = 0.02
"""Of the traffic's formulas: norms and the loss's own few numbers are left out."""
REAL = 0.05


def trainer(batch=32, rows=4, precision="float32", memory=None, **model):
    return {
        "data": {"uri": "/none"}, "model": {**MODEL, **model}, "globalBatchSize": batch, "microBatchSize": rows,
        "precision": precision, "memory": memory or {},
    }  # fmt: skip


def config(**fields):
    return TrainerConfig.model_validate(trainer(**fields))


def long_but(first, cases, law):
    law = f"tests/train/trainer/test_planning.py::{law}[{first}]"
    return [case if case == first else pytest.param(case, marks=pytest.mark.long(law=law)) for case in cases]


@pytest.mark.parametrize(
    "layout",
    [
        "fsdp", "hsdp", "tensor", "async tensor", "1F1B", "interleaved",
        *long_but("experts", MASKLESS, "test_four_real_ranks_take_what_is_planned"),
    ],
)  # fmt: skip
def test_four_real_ranks_take_what_is_planned(parent, tmp_path, layout):
    """With experts: of loads that are nearly even, as it is planned."""
    parallelism = (LAYOUTS | ROUTED)[layout]
    model = {"experts": EXPERTS} if layout in ROUTED else {}
    real = whole_gradient(parent, trainer(**model), 4, tmp_path, parallelism=parallelism, program="workers.memory:main")
    planned = planning.memory(config(**model), ParallelismConfig.model_validate(parallelism), 4, 0)
    assert planned.peaks[Phase.update][Kind.weights] == real["weights"]
    assert planned.peaks[Phase.update][Kind.moments] == real["moments"]
    assert planned.peaks[Phase.update][Kind.gradients] == pytest.approx(real["gradients"], rel=0.01)
    assert sum(planned.peak.values()) == pytest.approx(real["peak"], rel=REAL)


@pytest.mark.parametrize(
    "layout",
    [
        "fsdp", "tensor", "interleaved", "GPipe",
        pytest.param(
            "experts x tensor",
            marks=pytest.mark.long(
                law="tests/train/trainer/test_planning.py::test_depth_and_microbatches_are_a_line[tensor]"
            ),
        ),
    ],
)  # fmt: skip
def test_depth_and_microbatches_are_a_line(monkeypatch, layout):
    parallelism = ParallelismConfig.model_validate((LAYOUTS | ROUTED)[layout])
    model = {"experts": EXPERTS} if layout in ROUTED else {}
    deep = config(layers=14, batch=96, memory={"reshardAfterForward": "Always"}, **model)
    by_line = planning.memory(deep, parallelism, 4, 0)
    monkeypatch.setattr(planning, "_axis", lambda target, _: [(target, 1.0)])
    assert by_line == planning.memory(deep, parallelism, 4, 0)


@pytest.mark.parametrize("activations", ["KeepProducts", "Recompute"])
def test_what_is_sent_while_it_is_multiplied_is_kept_as_products_are(activations):
    parallelism = ParallelismConfig(tensor=2, async_tensor=True)
    small = config(batch=8, precision="bfloat16", memory={"activations": activations})
    counted = sum(size for name, size in planning.memory(small, parallelism, 2, 0).sent.items() if "tensor" in name)
    formula = sum(part.bytes for part in traffic(Layout(small, parallelism, 2, 8)))
    assert formula == pytest.approx(counted, rel=FORMULA)


def test_gradients_wait_whole_only_where_gathered_weights_stay():
    never, always = (
        planning.memory(config(memory={"reshardAfterForward": how}), ParallelismConfig(), 4, 0)
        for how in ("Never", "Always")
    )
    whole = 4 * config().model.weights
    assert never.peak[Kind.gradients] >= whole
    assert always.peak[Kind.gradients] < whole / 2


@pytest.mark.parametrize(
    "layout", ["fsdp", *long_but("hsdp", ("hsdp", "tensor", "1F1B"), "test_a_state_on_the_host_leaves_the_device")]
)
def test_a_state_on_the_host_leaves_the_device(layout):
    """What is left of gradients there are those that wait for others: of copies, and of a pipeline's microbatches."""
    parallelism = ParallelismConfig.model_validate(LAYOUTS[layout])
    without, found = (
        planning.memory(config(layers=6, memory={"reshardAfterForward": "Always", "offload": how}), parallelism, 4, 0)
        for how in ("None", "State")
    )
    state = without.peaks[Phase.update]
    assert not any(without.host.values())
    assert found.host == {kind: state[kind] if kind in STATE else 0 for kind in Kind}
    assert found.peak[Kind.weights] == found.peak[Kind.moments] == 0
    waiting = 0 if layout in ("fsdp", "tensor") else state[Kind.gradients]
    assert found.peaks[Phase.backward][Kind.gradients] >= waiting
    assert sum(found.peak.values()) <= sum(without.peak.values()) - state[Kind.weights] - state[Kind.moments]
    assert found.sent == without.sent


def test_one_device_with_its_state_on_the_host():
    found = planning.memory(
        config(memory={"reshardAfterForward": "Always", "offload": "State"}), ParallelismConfig(), 1, 0
    )
    assert sum(found.host.values()) == 16 * config().model.weights


@pytest.mark.parametrize(
    "layout", [*LAYOUTS, *long_but("experts", ROUTED, "test_512_ranks_are_planned_in_one_process")]
)
def test_512_ranks_are_planned_in_one_process(layout):
    """And send what the formulas say."""
    parallelism = ParallelismConfig.model_validate((LAYOUTS | ROUTED)[layout])
    degrees = Degrees.of(parallelism, 512)
    # Two microbatches at the most, as many as are run; widths are divided by 512 without a rest.
    batch = min(2048, 8 * degrees.data)
    model = {"experts": {**EXPERTS, "count": 512, "hiddenDim": 512}} if layout in ROUTED else {}
    wide = config(
        dim=512, kvHeads=8, hiddenDim=1536, vocabSize=2048, batch=batch, layers=8, precision="bfloat16", **model
    )
    found = planning.memory(wide, parallelism, 512, 0)
    state = wide.model.weights * 4 / 512 * degrees.replicate
    if parallelism.pipeline == 1:
        assert found.peak[Kind.weights] == pytest.approx(state, rel=0.02)
        assert found.peak[Kind.moments] == pytest.approx(2 * state, rel=0.02)
    assert sum(found.peak.values()) > found.peak[Kind.activations] > 0
    if parallelism.pipeline > 1:
        return
    planned = Layout(wide, parallelism, 512, 8)
    counted = dict.fromkeys(planned.groups, 0.0)
    for name, size in found.sent.items():
        group = name.partition(" ")[0].replace("fsdp", "shard")
        if group in counted:  # else of all, or of a sequence's ranks: the loss's own few numbers
            counted[group] += size
    formulas = dict.fromkeys(planned.groups, 0.0)
    for part in traffic(planned):
        formulas[part.dimension] += part.bytes
    for group, size in counted.items():
        assert formulas[group] == pytest.approx(size, rel=FORMULA), group


def test_the_fullest_ranks_of_a_pipeline_are_named():
    parallelism = ParallelismConfig(pipeline=4, tensor=2)
    wide = config(layers=18, vocabSize=65536)
    assert planning.fullest(wide, parallelism, 16) == [0, 2 * _first_of_the_most(wide, parallelism), 6]
    assert planning.fullest(wide, ParallelismConfig(), 16) == [0]


def _first_of_the_most(wide, parallelism):
    counts = [len(part.blocks) for part in planning.stages_of(wide, parallelism)]
    return counts.index(max(counts))


def test_half_a_block_is_refused():
    with pytest.raises(BadInput, match="whole number of blocks"):
        planning.memory(config(), ParallelismConfig(tensor=4), 6, 0)


def test_the_command_measures_in_a_process_of_its_own():
    asked = {"trainer": trainer(), "parallelism": {"tensor": 2}, "size": 4}
    command = [sys.executable, "-m", "concertina_trainer.planning"]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, check=True)
    [found] = json.loads(done.stdout)
    expected = dataclasses.asdict(planning.memory(config(), ParallelismConfig(tensor=2), 4, 0))
    assert found == json.loads(json.dumps(expected))
