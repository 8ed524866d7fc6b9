"""What is planned is what ranks really take and send, at any size."""

import collections
import contextlib
import dataclasses
import json
import subprocess
import sys

import pytest
from transformers import AutoConfig

from builders.programs import AUDIO, PROGRAMS
from builders.train.gradients import computed
from concertina.planning import muon
from concertina.planning.hardware import FABRICS, GPUS, FabricName, GpuName
from concertina.planning.layout import OwnDescription, ParallelLayout
from concertina.planning.timing import COUNTED, moved, step_time
from concertina.planning.traffic import traffic
from concertina_data.data_manifest import Field
from concertina_state.errors import InvalidInput
from concertina_trainer.config.model_config import ModelConfig
from concertina_trainer.config.parallelism import ParallelismConfig, PipelineSchedule
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.degrees import Degrees
from concertina_trainer.model.flops import token_flops
from concertina_trainer.planning import memory as planning
from concertina_trainer.planning.described_model import DataDescription, described
from concertina_trainer.planning.ledger import MemoryKind, MemoryPhase

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
SEVERAL = {
    "tensor x context": {"tensor": 2, "context": 2},
    "tensor x pipeline": {"tensor": 2, "pipeline": 2},
    "context x pipeline": {"context": 2, "pipeline": 2},
    "experts x pipeline": {"expert": 2, "pipeline": 2},
    "experts x interleaved": {"expert": 2, "pipeline": 2, "schedule": "Interleaved1F1B"},
    "experts x zero bubble": {"expert": 2, "pipeline": 2, "schedule": "InterleavedZeroBubble"},
    "experts x tensor x pipeline": {"expert": 2, "tensor": 2, "pipeline": 2},
    "experts x context x pipeline": {"expert": 2, "context": 2, "pipeline": 2},
}
"""Of four real ranks."""
EIGHT = {
    "tensor x context x pipeline": {"tensor": 2, "context": 2, "pipeline": 2},
    "experts x tensor x interleaved": {"expert": 4, "tensor": 2, "pipeline": 2, "schedule": "Interleaved1F1B"},
    "copies x experts x pipeline": {"shard": 2, "expert": 2, "pipeline": 2},
}
DEALT_OUT = ["experts", "experts x context", "experts x tensor", "experts x pipeline", "experts x interleaved"]
FOUR = [*(each for each in LAYOUTS if not each.startswith("hybrid")), *ROUTED, *SEVERAL]
ALLOCATING = ("fsdp", "hsdp", "1F1B", "GPipe", "interleaved", "zero bubble", "experts gathered")
"""Where nothing but operations allocates. Gloo's threads keep what other collectives sent for as long as they like."""
STATE = (MemoryKind.weights, MemoryKind.moments, MemoryKind.gradients)
FORMULA = 0.02
"""Of the traffic's formulas: norms and the loss's own few numbers are left out."""
REAL = 0.05
NEAR = {True: 0.002, False: 0.02}
"""By whether nothing but operations allocates; without context groups, which have a mask of pairs on a CPU."""


def trainer(batch=32, rows=4, precision="Float32", memory=None, optimizer=None, gradients="Float32", **model):
    return {
        "data": {"uri": "/none"}, "model": {**MODEL, **model}, "globalBatchSize": batch, "microBatchSize": rows,
        "precision": precision, "memory": memory or {}, "optimizer": optimizer or {}, "gradientPrecision": gradients,
    }  # fmt: skip


def config(**fields):
    return TrainerConfig.model_validate(trainer(**fields))


FILE = "tests/train/trainer/test_planning.py"


def long_but(first, cases, law):
    law = f"{FILE}::{law}[{first}]"
    return [case if case == first else pytest.param(case, marks=pytest.mark.long(law=law)) for case in cases]


def taken_by(parent, tmp_path, asked, parallelism, size, busy=2, width=0):
    """Return the memory that each rank takes, by rank.

    Args:
        busy: Of four choices of a router, the number that fall on the first half of the experts.
        width: Width of frames.
    """
    data = json.dumps({"vocabulary": MODEL["vocabSize"], "width": width})
    return computed(parent, "workers.memory:main", asked, size, tmp_path, parallelism, BUSY=str(busy), DATA=data)


def parts(kinds):
    """Return the memory by kind, with all kinds that a computation needs added up.

    If a computation needs the same memory at two moments, chance decides which of them is the maximum, and so the
    kinds.
    """
    computed = (MemoryKind.activations, MemoryKind.routed, MemoryKind.temporary, MemoryKind.communication)
    others = {kind: kinds[kind] for kind in MemoryKind if kind not in computed}
    return {"computed": sum(kinds[kind] for kind in computed), **others}


@pytest.fixture
def norms_of_cpu(monkeypatch):
    """Plan for the norms of a CPU, which keep more than CUDA's. Real ranks run here on CPUs."""
    monkeypatch.setattr(planning, "norms_of_cuda", contextlib.nullcontext)


REAL_LAW = "test_real_ranks_take_what_is_planned"


@pytest.mark.parametrize(
    ("layout", "size"),
    [
        ("1F1B", 4),
        *(
            pytest.param(layout, size, marks=pytest.mark.long(law=f"{FILE}::{REAL_LAW}[1F1B-4]"))
            for layouts, size in ((FOUR, 4), (EIGHT, 8))
            for layout in layouts if layout != "1F1B"
        ),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("norms_of_cpu")
def test_real_ranks_take_what_is_planned(parent, tmp_path, layout, size):
    """In each part of a step, by kind; with experts of even loads."""
    given = (LAYOUTS | ROUTED | SEVERAL | EIGHT)[layout]
    parallelism, model = ParallelismConfig.model_validate(given), {"experts": EXPERTS} if "experts" in layout else {}
    real = taken_by(parent, tmp_path, trainer(**model), given, size)
    found = config(**model)
    for rank in planning.fullest(found, parallelism, size):
        planned, taken = planning.memory(found, parallelism, size, rank), real[rank]["peaks"]
        total = max(sum(kinds.values()) for kinds in taken.values())
        error = sum(planned.peak.values()) / total - 1
        print(f"{layout}, rank {rank} of {size}: {total / 2**20:.1f} MiB, planned {error:+.1%}")
        assert abs(error) < (REAL if "context" in layout else NEAR[layout in ALLOCATING])
        for phase, kinds in planned.peaks.items():
            there = parts(taken[phase])
            assert parts(kinds) == pytest.approx(there, rel=REAL, abs=0.02 * total), phase
        state = [planned.peaks[MemoryPhase.update][kind] for kind in (MemoryKind.weights, MemoryKind.moments)]
        assert state == [taken["update"][kind] for kind in (MemoryKind.weights, MemoryKind.moments)], "the same bytes"
        if layout in ALLOCATING:
            # What is on its way to another stage stays for as long as that takes: some per cent on a busy machine.
            above = REAL if parallelism.pipeline > 1 else 0.001
            assert 0.999 * total < real[rank]["allocated"] < (1 + above) * total, "the ledger counts what is allocated"
        else:
            assert real[rank]["allocated"] > (1 - NEAR[False]) * total


ROUNDED = "AdamW, all rounded, with averages"
OPTIMIZERS = {
    ROUNDED: {"momentsPrecision": "BFloat16", "emaDecay": 0.99},
    **{name: {"name": name} for name in ("Adam", "NAdam", "RAdam", "RMSprop", "Adagrad", "SGD", "Muon")},
}


@pytest.mark.parametrize("name", long_but(ROUNDED, OPTIMIZERS, "test_real_ranks_take_what_is_planned_of_an_optimizer"))
@pytest.mark.usefixtures("norms_of_cpu")
def test_real_ranks_take_what_is_planned_of_an_optimizer(parent, tmp_path, name):
    fields = {"optimizer": OPTIMIZERS[name], "gradients": "BFloat16" if name == ROUNDED else "Float32"}
    real = taken_by(parent, tmp_path, trainer(**fields), {}, 2)[0]
    planned = planning.memory(config(**fields), ParallelismConfig(), 2, 0)
    total = max(sum(kinds.values()) for kinds in real["peaks"].values())
    assert sum(planned.peak.values()) == pytest.approx(total, rel=NEAR[True])
    for phase, kinds in planned.peaks.items():
        assert parts(kinds) == pytest.approx(parts(real["peaks"][phase]), rel=REAL, abs=0.02 * total), phase
    update = planned.peaks[MemoryPhase.update]
    model = config().model
    moments = config(**fields).optimizer.state_bytes(model.weights, model.matrix_weights) / (4 * model.weights)
    assert update[MemoryKind.moments] == pytest.approx(moments * update[MemoryKind.weights], rel=1e-6)
    # Gloo has buffers of its own for sums in bfloat16; without gradientPrecision, the bound is that of the others.
    above = REAL if name == ROUNDED else 0.001
    assert 0.999 * total < real["allocated"] < (1 + above) * total, "the ledger counts what is allocated"


WIDTH = 20
TOKENS, FRAMES = (
    DataDescription(MODEL["vocabSize"], fields) for fields in ((), (Field("features", "float16", WIDTH),))
)  # fmt: skip
OWN = {
    "tokens": ("workers.own:spec", {"dim": 96, "layers": 6, "dropout": 0.1}, TOKENS),
    "frozen": ("workers.own:frozen", {}, TOKENS),
    "frames": ("audio_model:spec", {"dim": 96, "blocks": 4}, FRAMES),
}
"""Models of tests/programs/workers/own.py, and the example's."""
OWN_LAW = "test_real_ranks_take_what_is_planned_of_a_model_of_one_s_own"


def own_model(kind, batch=32, precision="Float32", **memory):
    """Return the configuration of a worker with a custom model, and the data."""
    entrypoint, options, data = OWN[kind]
    model = {"entrypoint": entrypoint, "options": options, "sequenceLength": 128}
    asked = trainer(batch=batch, precision=precision, memory=memory)
    return {**asked, "model": model}, data


@pytest.fixture
def programs(monkeypatch):
    for folder in (PROGRAMS, AUDIO):
        monkeypatch.syspath_prepend(str(folder))


@pytest.mark.parametrize(
    ("kind", "activations", "layout"),
    [
        ("frames", "Recompute", "hsdp"),
        *(
            pytest.param(*case, marks=pytest.mark.long(law=f"{FILE}::{OWN_LAW}[frames-Recompute-hsdp]"))
            for case in [
                ("frames", "Keep", "fsdp"), ("tokens", "Keep", "hsdp"), ("tokens", "KeepProducts", "fsdp"),
                ("tokens", "Recompute", "fsdp"), ("frozen", "Keep", "fsdp"),
            ]
        ),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("norms_of_cpu")
def test_real_ranks_take_what_is_planned_of_a_model_of_one_s_own(parent, programs, tmp_path, kind, activations, layout):
    asked, data = own_model(kind, activations=activations)
    width = WIDTH if data.fields else 0
    real = taken_by(parent, tmp_path, asked, LAYOUTS[layout], 4, width=width)[0]
    found = TrainerConfig.model_validate(asked)
    planned = planning.memory(found, ParallelismConfig.model_validate(LAYOUTS[layout]), 4, 0, data)
    total = max(sum(kinds.values()) for kinds in real["peaks"].values())
    error = sum(planned.peak.values()) / total - 1
    print(f"{kind}, {activations}, {layout}: {total / 2**20:.1f} MiB, planned {error:+.1%}")
    assert abs(error) < NEAR[True]
    for phase, kinds in planned.peaks.items():
        assert parts(kinds) == pytest.approx(parts(real["peaks"][phase]), rel=REAL, abs=0.02 * total), phase
    state = [planned.peaks[MemoryPhase.update][kind] for kind in (MemoryKind.weights, MemoryKind.moments)]
    assert state == [real["peaks"]["update"][kind] for kind in (MemoryKind.weights, MemoryKind.moments)], (
        "the same bytes"
    )
    # Convolutions on a CPU copy what they take, each thread as much as it has to do.
    assert real["allocated"] > (1 - NEAR[False]) * total


OF_TRANSFORMERS = {
    "qwen3": {
        "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
        "intermediate_size": 352, "vocab_size": MODEL["vocabSize"], "head_dim": 16, "pad_token_id": 0,
    },
    "gpt2": {"n_embd": 128, "n_layer": 4, "n_head": 8, "n_positions": 128, "vocab_size": MODEL["vocabSize"]},
}  # fmt: skip


@pytest.mark.long(law=f"{FILE}::{OWN_LAW}[frames-Recompute-hsdp]")
@pytest.mark.parametrize("activations", ["Keep", "Recompute"])
@pytest.mark.parametrize(("kind", "layout"), [("qwen3", "tensor"), ("qwen3", "fsdp"), ("gpt2", "fsdp")])
def test_real_ranks_take_what_is_planned_of_a_model_of_transformers(parent, tmp_path, kind, layout, activations):
    options = {**AutoConfig.for_model(kind, **OF_TRANSFORMERS[kind]).to_dict(), "model_type": kind}
    asked = trainer(batch=16, memory={"activations": activations})
    asked["model"] = {"hf": "/none", "options": options, "sequenceLength": 128}
    real = taken_by(parent, tmp_path, asked, LAYOUTS[layout], 4)[0]
    found = TrainerConfig.model_validate(asked)
    planned = planning.memory(found, ParallelismConfig.model_validate(LAYOUTS[layout]), 4, 0, TOKENS)
    total = max(sum(kinds.values()) for kinds in real["peaks"].values())
    error = sum(planned.peak.values()) / total - 1
    print(f"{kind}, {layout}, {activations}: {total / 2**20:.1f} MiB, planned {error:+.1%}")
    assert abs(error) < NEAR[True]
    assert real["allocated"] > (1 - NEAR[False]) * total


SENT_LAW = "test_512_ranks_send_what_is_planned_of_a_model_of_one_s_own"


@pytest.mark.parametrize(
    ("free", "layout"),
    [
        ("Always", "hsdp"),
        *(
            pytest.param(*case, marks=pytest.mark.long(law=f"{FILE}::{SENT_LAW}[Always-hsdp]"))
            for case in [("Always", "fsdp"), ("Never", "fsdp"), ("Never", "hsdp")]
        ),
    ],
)
def test_512_ranks_send_what_is_planned_of_a_model_of_one_s_own(programs, layout, free):
    asked, data = own_model("tokens", batch=4096, precision="BFloat16", reshardAfterForward=free)
    asked["model"]["options"] = {"dim": 512, "layers": 4}
    found, parallelism = TrainerConfig.model_validate(asked), ParallelismConfig.model_validate(LAYOUTS[layout])
    planned = planning.memory(found, parallelism, 512, 0, data)
    told = described(found, data)
    assert told.weights == MODEL["vocabSize"] * 512 + 1 + told.in_blocks
    assert told.in_blocks == 4 * (3 * 512 * 512 + 3 * 512)
    assert told.matrices == told.orthogonalized == 0, "its blocks have convolutions and norms"
    here = ParallelLayout(found, parallelism, 512, 8, OwnDescription(**dataclasses.asdict(told), data={"fields": []}))
    counted = collections.Counter()
    for name, size in planned.sent.items():
        counted[name.partition(" ")[0].replace("fsdp", "shard")] += size
    formulas = collections.Counter()
    for part in traffic(here):
        formulas[str(part.dimension)] += part.bytes
    assert formulas.keys() == {"fsdp": {"shard"}, "hsdp": {"shard", "replicate"}}[layout]
    for dimension, size in formulas.items():
        assert size == pytest.approx(counted[dimension], rel=FORMULA), dimension


@pytest.fixture
def as_own(programs):
    """Return a function that makes a configuration of a custom model, its data, and one of the bundled decoder."""

    def made(spec="bundled", **model):
        decoder = config(precision="BFloat16", memory={"reshardAfterForward": "Always"}, **model)
        options = {**MODEL, **model}
        own = {
            "entrypoint": f"workers.own:{spec}", "sequenceLength": options.pop("sequenceLength"), "options": options,
        }  # fmt: skip
        data = DataDescription(options.pop("vocabSize"))
        return decoder.model_copy(update={"model": ModelConfig.model_validate(own)}), data, decoder

    return made


@pytest.mark.long(
    law="tests/train/trainer/test_planning.py::test_real_ranks_take_what_is_planned_of_a_model_of_one_s_own[frames-Recompute-hsdp]"
)
def test_the_decoder_as_a_model_of_one_s_own_takes_what_it_takes(as_own):
    """But for the gradients by which its loss is proved."""
    own, data, decoder = as_own(layers=3)
    for parallelism in (ParallelismConfig(), ParallelismConfig(shard=2)):
        found = planning.memory(own, parallelism, 4, 0, data)
        expected = planning.memory(decoder, parallelism, 4, 0)
        assert found.sent == expected.sent
        proved = 4 * 4 * 128
        for phase, kinds in expected.peaks.items():
            for kind, size in kinds.items():
                assert size <= found.peaks[phase][kind] <= size + 2 * proved, (phase, kind)


@pytest.mark.long(
    law="tests/train/trainer/test_planning.py::test_512_ranks_send_what_is_planned_of_a_model_of_one_s_own"
)
def test_what_is_counted_is_scaled_to_what_published_runs_set(as_own):
    """Of their decoder of 8 billion weights, whose logits were whole."""
    own, data, decoder = as_own(
        "whole_logits", layers=32, dim=4096, heads=32, kvHeads=8, hiddenDim=14336, vocabSize=128256, sequenceLength=8192
    )
    told = described(own, data)
    assert told.weights == decoder.model.weights
    facts = OwnDescription(**dataclasses.asdict(told), data={"fields": []})
    seconds = [
        step_time(
            ParallelLayout(each, ParallelismConfig(), 64, 8, of), GPUS[GpuName.h100], FABRICS[FabricName.infiniband400]
        )
        for each, of in ((own, facts), (decoder, None))
    ]
    whole = token_flops(decoder.model, full_attention=True) / token_flops(decoder.model)
    assert seconds[0].compute == pytest.approx(seconds[1].compute * whole, rel=0.02), "attention counts whole"
    assert COUNTED * told.moved == pytest.approx(
        moved(ParallelLayout(decoder, ParallelismConfig(), 64, 8), 1.0), rel=0.02
    )


@pytest.mark.parametrize("activations", ["Keep", "Recompute"])
def test_operations_of_a_model_of_one_s_own_are_counted(programs, monkeypatch, activations):
    """By hand: 6 a weight of a convolution and the output, which is the embedding; whatever is computed again."""
    import workers.own

    monkeypatch.setattr(workers.own, "untold", workers.own.other(flops=None), raising=False)
    asked, data = own_model("tokens", activations=activations)
    asked["model"] |= {"entrypoint": "workers.own:untold", "options": {"dim": 64, "layers": 2}}
    told = described(TrainerConfig.model_validate(asked), data)
    assert told.counted
    # The convolution computes two elements more of each sequence than there are.
    assert told.flops == pytest.approx(6 * (2 * 3 * 64 * 64 + MODEL["vocabSize"] * 64), rel=0.02)
    assert not described(TrainerConfig.model_validate(own_model("tokens")[0]), data).counted


@pytest.mark.long(law="tests/train/trainer/test_planning.py::test_real_ranks_take_what_is_planned[1F1B-4]")
@pytest.mark.usefixtures("norms_of_cpu")
def test_real_ranks_take_what_is_planned_where_sums_are_bitwise(parent, tmp_path):
    asked = {**trainer(), "determinism": "Bitwise"}
    real = taken_by(parent, tmp_path, asked, {}, 4)[0]["peaks"]
    planned = planning.memory(TrainerConfig.model_validate(asked), ParallelismConfig(), 4, 0)
    assert planned.peaks.keys() == real.keys()
    for phase, kinds in planned.peaks.items():
        total, there = sum(kinds.values()), sum(real[phase].values())
        print(f"bitwise, {phase}: {there / 2**20:.1f} MiB, planned {total / there - 1:+.1%}")
        assert total == pytest.approx(there, rel=NEAR[False]), phase


@pytest.mark.parametrize("layout", long_but("experts x pipeline", DEALT_OUT, "test_what_is_routed_grows_with_the_load"))
@pytest.mark.usefixtures("norms_of_cpu")
def test_what_is_routed_grows_with_the_load(parent, tmp_path, layout):
    """Of a rank whose experts have half as many tokens again."""
    parallelism = ParallelismConfig.model_validate((ROUTED | SEVERAL)[layout])
    real = taken_by(parent, tmp_path, trainer(experts=EXPERTS), (ROUTED | SEVERAL)[layout], 4, busy=3)
    planned = planning.memory(config(experts=EXPERTS), parallelism, 4, 0)
    total = max(sum(kinds.values()) for kinds in real[0]["peaks"].values())
    busy = max(sum(kinds.values()) + kinds[MemoryKind.routed] / 2 for kinds in planned.peaks.values())
    even = sum(planned.peak.values())
    print(f"{layout}: {total / 2**20:.1f} MiB, planned {busy / total - 1:+.1%}; as if even {even / total - 1:+.1%}")
    assert busy == pytest.approx(total, rel=REAL)
    assert even < 0.96 * total


@pytest.mark.parametrize(
    "layout",
    long_but(
        "fsdp", ["fsdp", "GPipe", "tensor", "interleaved", "experts x tensor"], "test_depth_and_microbatches_are_a_line"
    ),
)
def test_depth_and_microbatches_are_a_line(monkeypatch, layout):
    parallelism = ParallelismConfig.model_validate((LAYOUTS | ROUTED)[layout])
    model = {"experts": EXPERTS} if layout in ROUTED else {}
    layers = 14 if parallelism.pipeline > 1 else 8  # a stage with more than are run
    deep = config(layers=layers, batch=96, memory={"reshardAfterForward": "Always"}, **model)
    by_line = planning.memory(deep, parallelism, 4, 0)
    if layout == "interleaved":
        # Which of a rank's stages is computed at the peak depends on how many microbatches there are.
        monkeypatch.setattr(planning, "_points", lambda depth, microbatches, _: {(depth, microbatches): 1.0})
        run = planning.memory(deep, parallelism, 4, 0)
        assert by_line.sent == run.sent
        assert sum(by_line.peak.values()) == pytest.approx(sum(run.peak.values()), rel=0.005)
    else:
        monkeypatch.setattr(planning, "_axis", lambda target, _: {target: 1.0})
        assert by_line == planning.memory(deep, parallelism, 4, 0)


@pytest.mark.long(law=f"{FILE}::test_512_ranks_are_planned_in_one_process")
def test_depth_is_a_line_where_the_backward_s_buffers_are_most_of_what_is_left(monkeypatch):
    """Gradients of two blocks are on their way while a third one's are computed: none before has as many."""
    deep = config(layers=14, batch=16, memory={"reshardAfterForward": "Always", "activations": "Recompute"})
    by_line = planning.memory(deep, ParallelismConfig(), 4, 0)
    monkeypatch.setattr(planning, "_axis", lambda target, _: {target: 1.0})
    assert by_line == planning.memory(deep, ParallelismConfig(), 4, 0)


@pytest.mark.parametrize(
    "activations",
    long_but(
        "Recompute", ["KeepProducts", "Recompute"], "test_what_is_sent_while_it_is_multiplied_is_kept_as_products_are"
    ),
)
def test_what_is_sent_while_it_is_multiplied_is_kept_as_products_are(activations):
    parallelism = ParallelismConfig(tensor=2, async_tensor=True)
    small = config(batch=8, precision="BFloat16", memory={"activations": activations})
    counted = sum(size for name, size in planning.memory(small, parallelism, 2, 0).sent.items() if "tensor" in name)
    formula = sum(part.bytes for part in traffic(ParallelLayout(small, parallelism, 2, 8)))
    assert formula == pytest.approx(counted, rel=FORMULA)


@pytest.mark.long(law="tests/train/trainer/test_planning.py::test_real_ranks_take_what_is_planned[1F1B-4]")
def test_gradients_wait_whole_only_where_gathered_weights_stay():
    never, always = (
        planning.memory(config(memory={"reshardAfterForward": how}), ParallelismConfig(), 4, 0)
        for how in ("Never", "Always")
    )
    whole = 4 * config().model.weights
    assert never.peak[MemoryKind.gradients] >= whole
    assert always.peak[MemoryKind.gradients] < whole / 2


@pytest.mark.parametrize(
    "layout", long_but("hsdp", ("fsdp", "hsdp", "tensor", "1F1B"), "test_a_state_on_the_host_leaves_the_device")
)
def test_a_state_on_the_host_leaves_the_device(layout):
    """What is left of gradients there are those that wait for others: of copies, and of a pipeline's microbatches."""
    parallelism = ParallelismConfig.model_validate(LAYOUTS[layout])
    without, found = (
        planning.memory(config(memory={"reshardAfterForward": "Always", "offload": how}), parallelism, 4, 0)
        for how in (None, "State")
    )
    state = without.peaks[MemoryPhase.update]
    assert not any(without.host.values())
    assert found.host == {kind: state[kind] if kind in STATE else 0 for kind in MemoryKind}
    assert found.peak[MemoryKind.weights] == found.peak[MemoryKind.moments] == 0
    waiting = 0 if layout in ("fsdp", "tensor") else state[MemoryKind.gradients]
    assert found.peaks[MemoryPhase.backward][MemoryKind.gradients] >= waiting
    assert (
        sum(found.peak.values()) <= sum(without.peak.values()) - state[MemoryKind.weights] - state[MemoryKind.moments]
    )
    assert found.sent == without.sent


def test_one_device_with_its_state_on_the_host():
    """Plan a model of more layers than are run."""
    deep = config(layers=6, memory={"reshardAfterForward": "Always", "offload": "State"})
    found = planning.memory(deep, ParallelismConfig(), 1, 0)
    assert sum(found.host.values()) == 16 * deep.model.weights


@pytest.mark.parametrize(
    "layout",
    long_but("hybrid with a pipeline", (*LAYOUTS, *ROUTED), "test_512_ranks_are_planned_in_one_process"),
)
def test_512_ranks_are_planned_in_one_process(layout):
    """And send what the formulas say."""
    parallelism = ParallelismConfig.model_validate((LAYOUTS | ROUTED)[layout])
    degrees = Degrees.of(parallelism, 512)
    # Two microbatches at the most, as many as are run; widths are divided by 512 without a rest.
    batch = min(2048, 8 * degrees.data)
    model = {"experts": {**EXPERTS, "count": 512, "hiddenDim": 512}} if layout in ROUTED else {}
    wide = config(
        dim=512, kvHeads=8, hiddenDim=1536, vocabSize=2048, batch=batch, layers=8, precision="BFloat16", **model
    )
    found = planning.memory(wide, parallelism, 512, 0)
    state = wide.model.weights * 4 / 512 * degrees.replicate
    if parallelism.pipeline == 1:
        assert found.peak[MemoryKind.weights] == pytest.approx(state, rel=0.02)
        assert found.peak[MemoryKind.moments] == pytest.approx(2 * state, rel=0.02)
    assert sum(found.peak.values()) > found.peak[MemoryKind.activations] > 0
    if parallelism.pipeline > 1:
        return
    planned = ParallelLayout(wide, parallelism, 512, 8)
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


MUON = {"name": "Muon"}
OF_MUON = [name for name, parallelism in (LAYOUTS | ROUTED).items() if "pipeline" not in parallelism]


@pytest.mark.long(law=f"{FILE}::test_512_ranks_are_planned_in_one_process[hybrid with a pipeline]")
@pytest.mark.parametrize("layout", OF_MUON)
def test_512_ranks_gather_for_muon_what_the_formulas_say(layout):
    """Beside what they send with any optimizer."""
    parallelism = ParallelismConfig.model_validate((LAYOUTS | ROUTED)[layout])
    model = {"experts": {**EXPERTS, "count": 512, "hiddenDim": 512}} if layout in ROUTED else {}
    sizes = {"dim": 512, "kvHeads": 8, "hiddenDim": 1536, "batch": 8 * Degrees.of(parallelism, 512).data, "layers": 4}
    wide = config(**sizes, precision="BFloat16", optimizer=MUON, **model)
    without = config(**sizes, precision="BFloat16", **model)
    counted = collections.Counter()
    for found, sign in ((wide, 1), (without, -1)):
        for name, size in planning.memory(found, parallelism, 512, 0).sent.items():
            counted[name.partition(" ")[0].replace("fsdp", "shard")] += sign * size
    formulas = collections.Counter()
    for part in muon.traffic(ParallelLayout(wide, parallelism, 512, 8)):
        formulas[str(part.dimension)] += part.bytes
    counted = {name: size for name, size in counted.items() if size}
    assert counted == pytest.approx(formulas, rel=FORMULA)


@pytest.mark.long(law=f"{FILE}::test_a_state_on_the_host_leaves_the_device[hsdp]")
def test_muon_s_whole_matrices_are_on_the_device_though_the_state_is_on_the_host():
    fields = {"memory": {"reshardAfterForward": "Always", "offload": "State"}}
    found = planning.memory(config(**fields, optimizer=MUON), ParallelismConfig(), 4, 0)
    without = planning.memory(config(**fields), ParallelismConfig(), 4, 0)
    largest = 4 * MODEL["dim"] * MODEL["hiddenDim"]
    gathered, nothing = (each.peaks[MemoryPhase.update][MemoryKind.temporary] for each in (found, without))
    gathered -= nothing
    assert 2 * largest < gathered < 8 * largest
    assert found.host[MemoryKind.temporary] < largest


ZERO_BUBBLE = PipelineSchedule.zero_bubble.value
ONE_BY_ONE = PipelineSchedule.one_f_one_b.value
FULLEST_LAW = "test_the_fullest_ranks_are_among_those_tried"


@pytest.mark.parametrize(
    ("schedule", "layers", "width"),
    [
        (ONE_BY_ONE, 9, 704),
        *(
            pytest.param(*case, width, marks=pytest.mark.long(law=f"{FILE}::{FULLEST_LAW}[{ONE_BY_ONE}-9-704]"))
            for width in (96, 704)
            for case in [
                (ONE_BY_ONE, 7), (ONE_BY_ONE, 8), (ONE_BY_ONE, 9), ("GPipe", 9), ("Interleaved1F1B", 9),
                (ZERO_BUBBLE, 9),
            ]
            if (*case, width) != (ONE_BY_ONE, 9, 704)
        ),
    ],
)  # fmt: skip
def test_the_fullest_ranks_are_among_those_tried(schedule, layers, width):
    """Of a model whose first layer is plain, and wider than those with experts; or narrower."""
    parallelism = ParallelismConfig(pipeline=4, schedule=schedule)
    batch = 8 if schedule == ONE_BY_ONE else 32  # 1F1B holds four microbatches, of as many as there are
    uneven = config(layers=layers, batch=batch, rows=2, hiddenDim=width, experts=EXPERTS)
    peaks = [sum(planning.memory(uneven, parallelism, 4, rank).peak.values()) for rank in range(4)]
    assert max(peaks[rank] for rank in planning.fullest(uneven, parallelism, 4)) == max(peaks)


def test_ranks_that_others_cover_are_not_tried():
    even = config(layers=32, vocabSize=128)
    assert planning.fullest(even, ParallelismConfig(pipeline=8, tensor=2), 16) == [0, 14]
    assert planning.fullest(even, ParallelismConfig(), 16) == [0]


def test_half_a_block_is_refused():
    with pytest.raises(InvalidInput, match="multiple of the block"):
        planning.memory(config(), ParallelismConfig(tensor=4), 6, 0)


@pytest.mark.long(
    law="tests/unit/cli/test_plan.py::test_json_has_names_that_stay_and_memory_as_the_trainers_image_measures_it"
)
def test_the_command_measures_in_a_process_of_its_own():
    asked = {"trainer": trainer(), "parallelism": {"tensor": 2}, "size": 4}
    command = [sys.executable, "-m", "concertina_trainer.planning"]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, check=True)
    [found] = json.loads(done.stdout)
    expected = dataclasses.asdict(planning.memory(config(), ParallelismConfig(tensor=2), 4, 0))
    assert found == json.loads(json.dumps(expected))


def test_a_loss_that_looks_at_values_is_refused_with_a_sentence(programs):
    asked, data = own_model("tokens")
    asked["model"]["entrypoint"] = "workers.own:looking"
    with pytest.raises(
        InvalidInput, match=r"the loss of workers\.own:looking can't be planned, because it raised DataDependent"
    ):
        described(TrainerConfig.model_validate(asked), data)
