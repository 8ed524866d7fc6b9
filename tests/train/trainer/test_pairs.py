"""Test five steps in one layout, then five in another.

Losses, samples and weights are those of plain training in one process. Float64 makes a loss of single bits in the saved
state visible.
"""

import pytest

from builders.train.course import HALF, Course

FOUR = {
    "fsdp": {},
    "hsdp": {"shard": 2},
    "fsdp x tensor": {"tensor": 2},
    "fsdp x context": {"context": 2},
    "context x tensor": {"context": 2, "tensor": 2},
    "fsdp x pipeline": {"pipeline": 2},
    "pipeline x tensor": {"pipeline": 2, "tensor": 2},
    "copies x interleaved": {"pipeline": 2, "schedule": "Interleaved1F1B", "shard": 1},
    "fsdp x zero bubble": {"pipeline": 2, "schedule": "InterleavedZeroBubble"},
}
EIGHT = {
    "fsdp x pipeline x tensor": {"pipeline": 2, "tensor": 2},
    "hsdp x context x tensor": {"context": 2, "tensor": 2, "shard": 1},
}
EXPERTS = {
    "fsdp": {},
    "experts": {"expert": 4},
    "experts x fsdp": {"expert": 2},
    "experts x copies": {"expert": 2, "shard": 2},
    "experts x tensor": {"expert": 2, "tensor": 2},
    "experts x pipeline": {"expert": 2, "pipeline": 2},
    "experts x context": {"expert": 4, "context": 2},
}
LAYOUTS = {name: (4, parallelism) for name, parallelism in FOUR.items()}
LAYOUTS |= {name: (8, parallelism) for name, parallelism in EIGHT.items()}
OF_EXPERTS = {name: (4, parallelism) for name, parallelism in EXPERTS.items()}
LAW = "tests/train/trainer/test_pairs.py::test_one_layout_goes_on_from_another"


@pytest.fixture(scope="module")
def course(parent, trainer, folder_of_module):
    """Heads, layers and lengths that all layouts can cut, and otherwise sizes that no world of theirs divides."""
    model = {**trainer["model"], "layers": 4, "heads": 4, "kvHeads": 2, "hiddenDim": 44, "vocabSize": 259}
    changed = {"steps": 2 * HALF, "microBatchSize": 4, "model": model, "snapshot": {"everySteps": HALF}}
    return Course(parent, {**trainer, **changed}, LAYOUTS, folder_of_module)


@pytest.fixture(scope="module")
def halves(course):
    course.halves()


@pytest.fixture(scope="module")
def of_experts(parent, course, folder_of_module):
    experts = {"count": 4, "hiddenDim": 24, "shared": 1, "firstDense": 1, "balanceLoss": 0.5, "biasRate": 0.01}
    changed = {**course.trainer, "model": {**course.trainer["model"], "experts": experts}}
    (folder_of_module / "experts").mkdir()
    found = Course(parent, changed, OF_EXPERTS, folder_of_module / "experts")
    found.halves()
    return found


OPTIMIZERS = [
    *((name, "Float32") for name in ("AdamW", "Adam", "NAdam", "RAdam", "RMSprop", "Adagrad", "SGD")),
    *((name, "BFloat16") for name in ("AdamW", "Adam", "NAdam", "RAdam", "SGD")),
]


def other_optimizer(course, fields, folder):
    """Return a course with an optimizer whose state is re-cut between the layouts."""
    folder.mkdir()
    optimizer = {**course.trainer["optimizer"], **fields}
    return Course(course.parent, {**course.trainer, "optimizer": optimizer}, LAYOUTS, folder)


QWEN3 = {
    "headDim": 8, "qkNorm": True, "ropeScaling": {"type": "Yarn", "factor": 4.0, "originalLength": 8},
}  # fmt: skip
QWEN3_MOE = {"headDim": 8, "qkNorm": True, "experts": {"count": 4, "hiddenDim": 24, "normalizeShares": False}}


def of_family(course, layouts, fields, folder):
    folder.mkdir()
    changed = {**course.trainer, "model": {**course.trainer["model"], **fields}}
    return Course(course.parent, changed, layouts, folder)


@pytest.fixture(scope="module")
def qwen3(course, folder_of_module):
    return of_family(course, LAYOUTS, QWEN3, folder_of_module / "qwen3")


@pytest.fixture(scope="module")
def qwen3_moe(course, folder_of_module):
    return of_family(course, OF_EXPERTS, QWEN3_MOE, folder_of_module / "qwen3-moe")


@pytest.fixture(scope="module")
def halves_of_qwen3(qwen3):
    qwen3.halves()


@pytest.fixture(scope="module")
def halves_of_qwen3_moe(qwen3_moe):
    qwen3_moe.halves()


def test_one_layout_goes_on_from_another(course):
    course.run(4, course.leg("fsdp x tensor"), course.leg("fsdp x pipeline", "fsdp x tensor"))


@pytest.mark.long(law="tests/train/trainer/test_pairs.py::test_one_layout_goes_on_from_another")
def test_qwen_3_goes_on_in_another_layout(qwen3):
    qwen3.run(4, qwen3.leg("fsdp x tensor"), qwen3.leg("fsdp x pipeline", "fsdp x tensor"))


def test_nadam_with_moments_in_bfloat16_goes_on_in_another_layout(course, tmp_path):
    """The product of momentums of NAdam is not saved: it follows from the step."""
    nadam = other_optimizer(course, {"name": "NAdam", "momentsPrecision": "BFloat16"}, tmp_path / "nadam")
    nadam.run(4, nadam.leg("fsdp x tensor"), nadam.leg("fsdp x pipeline", "fsdp x tensor"))


@pytest.fixture(scope="module")
def muon(course, folder_of_module):
    """Of matrices with uneven parts; of three experts' router, one of four ranks has no rows."""
    experts = {"count": 3, "hiddenDim": 24, "shared": 1, "firstDense": 1}
    return with_muon(course, LAYOUTS, {"hiddenDim": 42, "experts": experts}, folder_of_module / "muon")


def with_muon(course, layouts, model, folder, **optimizer):
    folder.mkdir()
    trainer = {**course.trainer, "model": {**course.trainer["model"], **model}}
    trainer["optimizer"] = {**trainer["optimizer"], "name": "Muon", **optimizer}
    return Course(course.parent, trainer, layouts, folder)


def test_muon_goes_on_in_another_layout(muon):
    """Ranks gather each matrix, or each expert's."""
    muon.run(4, muon.leg("fsdp"), muon.leg("fsdp x tensor", "fsdp"))


OF_MUON = "tests/train/trainer/test_pairs.py::test_muon_goes_on_in_another_layout"


@pytest.mark.long(law=OF_MUON)
def test_muon_goes_on_in_every_layout(muon):
    muon.halves()
    names = list(LAYOUTS)
    for layout, before in zip(names, names[1:] + names[:1], strict=True):
        muon.run(LAYOUTS[layout][0], muon.leg(layout, before))


@pytest.mark.long(law=OF_MUON)
@pytest.mark.parametrize("model", [{"hiddenDim": 42}, {"lora": {"rank": 3, "frozenDtype": "Float32"}}])
@pytest.mark.parametrize("optimizer", [{}, {"momentsPrecision": "BFloat16"}, {"nesterov": False, "momentum": 0.8}])
def test_so_it_does_with_other_matrices_and_settings(course, tmp_path, model, optimizer):
    found = with_muon(course, LAYOUTS, model, tmp_path / "muon", **optimizer)
    found.run(4, found.leg("hsdp"), found.leg("fsdp"))
    found.run(4, found.leg("pipeline x tensor", "hsdp"), found.leg("hsdp", "fsdp"))


@pytest.mark.long(law=OF_MUON)
def test_so_it_does_with_experts_that_are_distributed(course, tmp_path):
    experts = {"count": 4, "hiddenDim": 24, "shared": 1, "firstDense": 1, "balanceLoss": 0.5, "biasRate": 0.01}
    layouts = {**OF_EXPERTS, "experts x tensor": (4, {"expert": 2, "tensor": 2})}
    layouts["experts of eight"] = (8, {"expert": 2})
    found = with_muon(course, layouts, {"experts": experts}, tmp_path / "muon")
    found.halves()
    names = list(layouts)
    for layout, before in zip(names, names[1:] + names[:1], strict=True):
        found.run(layouts[layout][0], found.leg(layout, before))


@pytest.mark.long(
    law="tests/train/trainer/test_pairs.py::test_nadam_with_moments_in_bfloat16_goes_on_in_another_layout"
)
@pytest.mark.parametrize(("name", "precision"), OPTIMIZERS)
def test_every_optimizer_goes_on_in_another_layout(course, tmp_path, name, precision):
    found = other_optimizer(course, {"name": name, "momentsPrecision": precision}, tmp_path / "legs")
    found.run(4, found.leg("fsdp"), found.leg("pipeline x tensor", "fsdp"))


@pytest.mark.long(law="tests/train/trainer/test_pairs.py::test_one_layout_goes_on_from_another")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_qwen_3_goes_on_in_every_layout(qwen3, halves_of_qwen3, layout):
    qwen3.ends(layout)


@pytest.mark.long(law="tests/train/trainer/test_experts.py::test_killed_it_goes_on_in_another_layout")
@pytest.mark.parametrize("layout", OF_EXPERTS)
def test_qwen_3_with_experts_goes_on_in_every_layout(qwen3_moe, halves_of_qwen3_moe, layout):
    qwen3_moe.ends(layout)


@pytest.mark.long(law=LAW)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_goes_on_from_every_other(course, halves, layout):
    course.ends(layout)


@pytest.mark.long(law=LAW)
@pytest.mark.parametrize("layout", OF_EXPERTS)
def test_so_do_layouts_of_experts(of_experts, layout):
    of_experts.ends(layout)
