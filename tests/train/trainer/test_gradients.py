"""The gradient means the same in every world (AdamW hides its scale, so losses alone would not show it)."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from builders.train.gradients import check, whole_gradient
from concertina.demo import text
from concertina_data.data_manifest import parse
from concertina_protocol import COMMUNICATION
from concertina_state.format.read_plan import Box
from concertina_state.objects.prefix import ObjectPrefix
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.data.build.build import build
from concertina_trainer.data.packing import pack
from concertina_trainer.data.read.sequence_reader import Reader
from concertina_trainer.model.decoder import Decoder
from concertina_trainer.model.initial import initial_value


def initialised(config, dtype):
    model = Decoder(config.model)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(initial_value(name, p.shape, Box((0,) * p.dim(), tuple(p.shape)), config.model, config.seed))
    return model.to(dtype)


BFLOAT16 = "tests/train/trainer/test_gradients.py::test_gradients_added_up_in_bfloat16_differ_by_their_rounding[shards]"


def mean_gradient(config, dtype=torch.float32, rows=slice(None)):
    """Of one plain model, no sharding, no microbatches: the mean over all tokens of the batch; and the loss."""
    model = initialised(config, dtype)
    reader = Reader(config.data, config.model.sequence_length, config.seed)
    tokens = torch.from_numpy(reader.read(100, 100 + config.global_batch_size))[rows]
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}, loss.item()


@pytest.fixture(scope="module")
def reference(trainer):
    return mean_gradient(TrainerConfig.model_validate(trainer))


MEAN = "tests/train/trainer/test_gradients.py::test_gradients_are_the_mean_over_the_global_batch[3-shares2]"


@pytest.mark.parametrize(
    ("world", "shares"), [(1, ()), pytest.param(2, (), marks=pytest.mark.long(law=MEAN)), (3, ()), (3, (5, 0, 2))]
)
def test_gradients_are_the_mean_over_the_global_batch(parent, trainer, reference, tmp_path, world, shares):
    found = whole_gradient(parent, trainer, world, tmp_path, shares)
    check(found, *reference)


@pytest.mark.parametrize(
    ("world", "parallelism"),
    [
        pytest.param(2, {}, id="shards"),
        pytest.param(4, {"shard": 2}, id="copies", marks=pytest.mark.long(law=BFLOAT16)),
    ],
)
def test_gradients_added_up_in_bfloat16_differ_by_their_rounding(parent, trainer, tmp_path, world, parallelism):
    """Compare sums to which each worker adds the rounded gradient of each microbatch.

    The sums of microbatches are not rounded, so their number does not matter.
    """
    changed = {**trainer, "gradientPrecision": "BFloat16", "globalBatchSize": 32, "microBatchSize": 1}
    config = TrainerConfig.model_validate(changed)
    found = whole_gradient(parent, changed, world, tmp_path, parallelism=parallelism)
    exact, _ = mean_gradient(config)
    parts = [mean_gradient(config, rows=slice(row, row + 1))[0] for row in range(32)]
    unit = torch.finfo(torch.bfloat16).eps / 2
    differs = 0
    for name, gradient in exact.items():
        error = (found["gradients"][name] - gradient).norm()
        squares = torch.stack([part[name] / 32 for part in parts]).norm()
        # Rounding errors of world x 16 numbers are independent. Each is at most a unit of its number; a sum has more.
        assert error < world * unit * squares, name
        differs += (error > 0.05 * unit * squares).item()
    assert differs > len(exact) / 2


LAYOUTS = {
    "hsdp": (4, {"shard": 2}),
    "copies": (2, {"shard": 1}),
    "tensor": (2, {"tensor": 2}),
    "fsdp x tensor": (4, {"tensor": 2}),
    "async tensor": (2, {"tensor": 2, "asyncTensor": True}),
    "fsdp x async tensor": (4, {"tensor": 2, "asyncTensor": True}),
    "context x async tensor": (4, {"context": 2, "tensor": 2, "asyncTensor": True}),
    "pipeline x async tensor": (4, {"pipeline": 2, "tensor": 2, "asyncTensor": True}),
    "context": (2, {"context": 2}),
    "fsdp x context": (4, {"context": 2}),
    "context x tensor": (4, {"context": 2, "tensor": 2}),
    "pipeline": (2, {"pipeline": 2}),
    "GPipe x fsdp": (4, {"pipeline": 2, "schedule": "GPipe"}),
    "pipeline x tensor": (4, {"pipeline": 2, "tensor": 2}),
    "pipeline x context": (4, {"pipeline": 2, "context": 2}),
    "interleaved pipeline x copies": (4, {"pipeline": 2, "schedule": "Interleaved1F1B", "shard": 1}),
    "zero-bubble pipeline": (2, {"pipeline": 2, "schedule": "InterleavedZeroBubble"}),
    "zero-bubble pipeline x copies": (4, {"pipeline": 2, "schedule": "InterleavedZeroBubble", "shard": 1}),
}


LAW = "tests/train/trainer/test_gradients.py::test_every_layout_has_the_same_gradients[tensor-untied]"
MORE = (
    "zero-bubble pipeline x copies", "async tensor", "context x async tensor", "fsdp x async tensor",
    "pipeline x tensor", "pipeline x context", "hsdp", "tensor", "context", "pipeline", "pipeline x async tensor",
)  # fmt: skip
IN_CHUNKS = ("fsdp x tensor", "zero-bubble pipeline")
CHUNKS_LAW = "tests/train/trainer/test_gradients.py::test_a_loss_in_chunks_has_the_same_gradients"
"""Test of the gate that compares all gradients in these layouts, with a loss in chunks."""


def case(layout, tied, gate, dtype=torch.float64):
    id = f"{layout}-{'tied' if tied else 'untied'}{'' if dtype is torch.float64 else '-float32'}"
    law = f"{CHUNKS_LAW}[{layout}]" if layout in IN_CHUNKS else LAW
    return pytest.param(layout, tied, dtype, id=id, marks=[] if gate else [pytest.mark.long(law=law)])


@pytest.mark.parametrize(
    ("layout", "tied", "dtype"),
    [
        *(case(layout, True, gate=layout not in (*MORE, *IN_CHUNKS)) for layout in LAYOUTS),
        *(case(layout, False, gate=layout == "tensor") for layout in LAYOUTS),
        case("pipeline x tensor", True, gate=True, dtype=torch.float32),
        case("fsdp x async tensor", True, gate=False, dtype=torch.float32),
    ],
)
def test_every_layout_has_the_same_gradients(parent, trainer, tmp_path, layout, tied, dtype):
    """Compare gradients in float64, and once in float32.

    Float64 shows errors that float32 hides, such as a factor of 1 + 1e-6 or a sum in float32. Float32 uses other code
    in places: FSDP divides differently, and experts are multiplied together.
    """
    world, parallelism = LAYOUTS[layout]
    model = {**trainer["model"], "layers": 5, "heads": 4, "kvHeads": 2, "tieEmbeddings": tied}
    changed = {**trainer, "model": model}
    found = whole_gradient(parent, changed, world, tmp_path, parallelism=parallelism, dtype=dtype)
    check(found, *mean_gradient(TrainerConfig.model_validate(changed), dtype))
    for dimension in ("tensor", "context"):
        assert (found["seconds"][dimension] > 0) is (parallelism.get(dimension, 1) > 1), "communication is its own part"
    assert all(seconds >= 0 for seconds in found["seconds"].values())
    if "pipeline" not in parallelism:
        communication = sum(found["seconds"][part] for part in COMMUNICATION)
        assert found["waiting"] == pytest.approx(communication), "none is within another"


SWITCHES = {
    "qwen": {
        "headDim": 16, "qkvBias": True, "qkNorm": True, "rotaryShare": 0.5, "rotaryPairs": "Adjacent",
        "ropeScaling": {"type": "Yarn", "factor": 4.0, "originalLength": 8}, "window": {"size": 5, "fullEvery": 2},
    },
    "gemma": {
        "headDim": 16, "qkNorm": True, "window": {"size": 5, "fullEvery": 3, "ropeTheta": 100.0}, "postNorms": True,
        "normOffset": True, "embeddingScale": True, "activation": "GeluTanh", "queryScale": 24, "attentionSoftCap": 0.1,
        "logitSoftCap": 0.2,
    },
    "gpt-oss": {
        "headDim": 16, "qkvBias": True, "outputBias": True, "attentionSinks": True,
        "window": {"size": 5, "fullEvery": 2}, "ropeScaling": {"type": "Yarn", "factor": 4.0, "originalLength": 8},
        "experts": {"count": 4, "hiddenDim": 24, "balanceLoss": 0.0, "clampedSwiglu": {"limit": 0.01}},
    },
}  # fmt: skip
"""What the decoders of other families have.

Caps and limits are so low that they bend the values of an untrained model.
"""
SWITCHES_LAW = "tests/train/trainer/test_gradients.py::test_so_have_the_layouts_of_other_families[qwen-fsdp x tensor]"
IN_GATE = (("qwen", "fsdp x tensor"), ("gemma", "pipeline x tensor"), ("gpt-oss", "async tensor"))
OF_EXPERTS = {
    "ep 2 x tensor": (4, {"expert": 2, "tensor": 2}),
    "ep 4 x context": (4, {"expert": 4, "context": 2}),
    "ep 2 x pipeline": (4, {"expert": 2, "pipeline": 2}),
}


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(*case, id="-".join(case), marks=[] if case in IN_GATE else [pytest.mark.long(law=SWITCHES_LAW)])
        for case in (*itertools.product(SWITCHES, LAYOUTS), *itertools.product(["gpt-oss"], OF_EXPERTS))
    ],
)
def test_so_have_the_layouts_of_other_families(parent, trainer, tmp_path, family, layout):
    world, parallelism = (LAYOUTS | OF_EXPERTS)[layout]
    changed = {**trainer, "model": {**trainer["model"], "layers": 5, "heads": 4, "kvHeads": 2, **SWITCHES[family]}}
    found = whole_gradient(parent, changed, world, tmp_path, parallelism=parallelism, dtype=torch.float64)
    check(found, *mean_gradient(TrainerConfig.model_validate(changed), torch.float64))


@pytest.mark.parametrize("layout", IN_CHUNKS)
def test_a_loss_in_chunks_has_the_same_gradients(parent, trainer, tmp_path, layout):
    """In chunks of three rows, the last of which has fewer."""
    world, parallelism = LAYOUTS[layout]
    changed = {**trainer, "model": {**trainer["model"], "layers": 5, "heads": 4, "kvHeads": 2}}
    config = TrainerConfig.model_validate(changed)
    logits = 3 * config.model.vocab_size // parallelism.get("tensor", 1)
    found = whole_gradient(
        parent, changed, world, tmp_path, parallelism=parallelism, dtype=torch.float64, CHUNK_LOGITS=str(logits)
    )
    check(found, *mean_gradient(config, torch.float64))


CUT = "tests/train/trainer/test_gradients.py::test_gradients_are_the_same_whenever_they_are_cut[Always]"


@pytest.mark.parametrize("how", ["Always", pytest.param("Never", marks=pytest.mark.long(law=CUT))])
def test_gradients_are_the_same_whenever_they_are_cut(parent, trainer, tmp_path, how):
    changed = {**trainer, "microBatchSize": 1, "memory": {"reshardAfterForward": how}}
    found = whole_gradient(parent, changed, 4, tmp_path, parallelism={"shard": 2}, dtype=torch.float64)
    check(found, *mean_gradient(TrainerConfig.model_validate(changed), torch.float64))


AGAIN = "tests/train/trainer/test_gradients.py::test_what_is_computed_again_is_the_same[fsdp x tensor-Recompute]"


@pytest.mark.parametrize(
    ("layout", "activations"),
    [
        ("fsdp x tensor", "Recompute"),
        ("pipeline", "KeepProducts"),
        pytest.param("fsdp x async tensor", "KeepProducts", marks=pytest.mark.long(law=AGAIN)),
        pytest.param("fsdp x async tensor", "Recompute", marks=pytest.mark.long(law=AGAIN)),
        pytest.param("pipeline x async tensor", "Recompute", marks=pytest.mark.long(law=AGAIN)),
        pytest.param("fsdp x tensor", "KeepProducts", marks=pytest.mark.long(law=AGAIN)),
        pytest.param("pipeline", "Recompute", marks=pytest.mark.long(law=AGAIN)),
        pytest.param("context", "Recompute", marks=pytest.mark.long(law=AGAIN)),
    ],
)
def test_what_is_computed_again_is_the_same(parent, trainer, tmp_path, layout, activations):
    world, parallelism = LAYOUTS[layout]
    model = {**trainer["model"], "heads": 4, "kvHeads": 2}
    found = [
        whole_gradient(parent, {**trainer, "model": model, "memory": memory}, world, tmp_path, parallelism=parallelism)
        for memory in ({}, {"activations": activations})
    ]
    for name, gradient in found[0]["gradients"].items():
        assert torch.equal(found[1]["gradients"][name], gradient)
    assert not found[1]["late"], "imported after the fork: add it to preload"


@pytest.fixture(scope="module")
def packed_data(tmp_path_factory):
    """Many short documents, and one that is longer than a sequence."""
    folder = tmp_path_factory.mktemp("packed")
    [source] = text.write(tmp_path_factory.mktemp("text"), 1, 10_000)
    words = source.read_text().split()
    for i in range(200):
        (folder / f"{i:03}.txt").write_text(" ".join(words[i : i + (100 if i == 7 else i % 9 + 1)]))
    list(build(sorted(folder.glob("*.txt")), str(folder / "data"), shard_bytes=1500))
    out = ObjectPrefix(str(folder / "data"))
    list(pack(out, parse(out.get("manifest.json"), ""), 32, 2))
    return str(folder / "data")


@pytest.mark.parametrize(("documents", "world"), [("Masked", 1), ("Packed", 2), ("Bucketed", 2)])
def test_documents_don_t_see_each_other(parent, trainer, packed_data, tmp_path, documents, world):
    """Compare the gradient with that of each document alone, over its real tokens.

    The comparison is in float32, like the tables of rotary positions. Alone, a document begins at another row of these
    tables.
    """
    changed = {**trainer, "data": {"uri": packed_data, "documents": documents}}
    config = TrainerConfig.model_validate(changed)
    reader = Reader(config.data, 32, config.seed)
    found = reader.sequences(np.arange(100, 107))
    model = initialised(config, torch.float32)
    total, count = 0.0, 0
    for tokens, owners, predicted in zip(found.tokens, found.document_ids, found.predicted, strict=True):
        for owner in np.unique(owners[predicted]):
            mine = np.flatnonzero((owners == owner) & predicted)
            alone = torch.from_numpy(tokens[mine[0] : mine[-1] + 2])[None]
            total = total + F.cross_entropy(model(alone[:, :-1])[0], alone[0, 1:], reduction="sum")
            count += len(mine)
    assert count == reader.predicted(100, 107).sum()
    loss = total / count
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    check(whole_gradient(parent, changed, world, tmp_path), gradients, loss.item())
