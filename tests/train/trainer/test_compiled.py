"""Compiled blocks in processes: the gradients of every layout, and rounds without another compilation."""

import json

import pytest
import torch

from builders.train import node
from builders.train.gradients import check, computed, whole_gradient
from concertina_trainer.config.trainer import TrainerConfig
from train.trainer.test_gradients import LAYOUTS, mean_gradient

HERE = "tests/train/trainer/test_compiled.py"
LAW = f"{HERE}::test_code_of_an_earlier_round_has_the_same_gradients[tensor]"
STAYS = f"{HERE}::test_a_survivor_compiles_nothing_in_its_next_rounds[shards]"
WIDE = {"layers": 5, "heads": 4, "kvHeads": 2, "tieEmbeddings": False}


@pytest.mark.long(law=LAW)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_same_gradients(parent, trainer, tmp_path, layout):
    """Compare all gradients with those of one process."""
    world, parallelism = LAYOUTS[layout]
    changed = {**trainer, "compile": "Blocks", "model": {**trainer["model"], **WIDE}}
    found = whole_gradient(
        parent, changed, world, tmp_path, parallelism=parallelism, dtype=torch.float64, COMPILED="aot_eager"
    )
    assert found["graphs"] > 0
    check({**found, "late": ()}, *mean_gradient(TrainerConfig.model_validate(changed), torch.float64))


EXPERTS = {"count": 4, "hiddenDim": 24, "firstDense": 1}
INDUCTOR = {
    "tensor": (2, {"tensor": 2}, {}),
    "context": (2, {"context": 2}, {}),
    "experts": (2, {"expert": 2}, {"experts": EXPERTS}),
    "pipeline": (2, {"pipeline": 2}, {}),
}


@pytest.fixture
def patient(parent):
    """Return the parent of processes that compile code for CPUs, which takes minutes on a busy machine."""
    before = parent.control.gettimeout()
    parent.control.settimeout(600)
    yield parent
    parent.control.settimeout(before)


@pytest.mark.long(law=LAW)
@pytest.mark.parametrize("layout", INDUCTOR)
def test_code_of_torch_s_compiler_has_the_same_gradients(patient, trainer, tmp_path, layout):
    world, parallelism, model = INDUCTOR[layout]
    changed = {**trainer, "compile": "Blocks", "model": {**trainer["model"], **WIDE, **model}}
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled")}
    eager, compiled = (
        whole_gradient(patient, changed, world, tmp_path, parallelism=parallelism, dtype=torch.float64, **variables)
        for variables in ({}, {"COMPILED": "inductor", **cache})
    )
    assert compiled["graphs"] > eager["graphs"] == 0
    check({**compiled, "late": ()}, eager["gradients"], eager["loss"])


ROUNDS = {
    "tensor": ({"tensor": 2}, ((0, 1), (1, 0), (0, 1)), (1, 2, 2)),
    "fsdp x tensor": (
        {"tensor": 2},
        ((0, 1, 2, 3), (2, 3, 0, 1), (0, 1, None, None), (1, 0, None, None)),
        (1, 1, 1, 2),
    ),
    "context": ({"context": 2}, ((0, 1, 2, 3), (3, 2, 1, 0), (1, 0, None, None)), (1, 1, 1)),
    "context x tensor": ({"context": 2, "tensor": 2}, ((0, 1, 2, 3), (2, 3, 0, 1), (1, 0, 3, 2)), (1, 1, 2)),
}
"""Layout, the rank of each process in each round, and the graphs of the first process over those of the first round.

The code of a block is another one only for another position in the tensor group.
"""


@pytest.mark.parametrize(
    "layout", [name if name == "tensor" else pytest.param(name, marks=pytest.mark.long(law=LAW)) for name in ROUNDS]
)
def test_code_of_an_earlier_round_has_the_same_gradients(parent, trainer, tmp_path, layout):
    """Compare the gradients of each round with those of one process.

    Compiled code contains names of groups and positions in meshes. With those of an earlier round, gradients would be
    wrong, and no error would say so. Without the wait in `parallel.tensor`, torch loses the embedding's gradient under
    tensor parallelism, and no error says so either.
    """
    parallelism, ranks, factors = ROUNDS[layout]
    changed = {**trainer, "compile": "Blocks", "model": {**trainer["model"], **WIDE}}
    variables = {"SHARES": "[]", "DTYPE": "float64", "COMPILED": "aot_eager", "ROUNDS": json.dumps(ranks)}
    program = "workers.gradients_of_rounds:main"
    results = computed(parent, program, changed, len(ranks[0]), tmp_path, parallelism, **variables)
    expected = mean_gradient(TrainerConfig.model_validate(changed), torch.float64)
    for result in results:
        check({**result, "late": ()}, *expected)
        assert result["sockets"] == 0, "the compiled code keeps no groups"
    first = results[0]["graphs"]
    assert first > 0
    assert [result["graphs"] for result in results] == [factor * first for factor in factors]


COMPILES = "has compiled graphs"


def rounds(folder, parent, trainer, worlds, parallelism):
    """Run rounds of one job, whose processes stay, and return their outcomes and the log of the first processes.

    The processes of the last replica have the first ranks of the next round. Within a replica, the order is the same.
    """
    job = node.Job(folder, parent, trainer, stays=True)
    job.worker = "workers.compiled:main"
    job.environment = {"CONCERTINA_PARALLELISM": json.dumps(parallelism)}
    size = parallelism.get("tensor", 1)
    outcomes, restore = [], node.FRESH
    for i, world in enumerate(worlds):
        last = i == len(worlds) - 1
        script = node.Script() if last else node.Script(drain=(3 * (i + 1), False))
        outcomes.append(job.run(world, restore, script))
        assert set(outcomes[-1].codes.values()) == {0}, outcomes[-1].output
        restore = job.newest()
        # The next round takes its processes from the end of the list.
        replicas = [job.survivors[first : first + size] for first in range(0, len(job.survivors), size)]
        job.survivors = [survivor for replica in replicas for survivor in reversed(replica)]
    return outcomes, (folder / "round-1.log").read_text()


SURVIVORS = {"shards": ({}, (3, 3, 2)), "tensor": ({"tensor": 2}, (4, 4, 2)), "context": ({"context": 2}, (4, 4, 2))}
"""Layout, and the number of ranks in each round: after all have changed places, a replica is gone."""


@pytest.mark.parametrize(
    "layout",
    [name if name == "shards" else pytest.param(name, marks=pytest.mark.long(law=STAYS)) for name in SURVIVORS],
)
def test_a_survivor_compiles_nothing_in_its_next_rounds(folder, parent, trainer, layout):
    parallelism, worlds = SURVIVORS[layout]
    model = {**trainer["model"], "kvHeads": 2}
    trainer = {**trainer, "steps": 9, "globalBatchSize": 12, "compile": "Blocks", "model": model}
    outcomes, log = rounds(folder, parent, trainer, worlds, parallelism)
    assert [line for line in log.splitlines() if COMPILES in line] == [f"step 1 {COMPILES}: 1"], log
    assert ["compile" in outcome.progress[-1].timeline for outcome in outcomes] == [True, False, False]
    plain = node.Job(folder / "plain", parent, {**trainer, "compile": "Never"}).run(1)
    losses = {step: loss for outcome in outcomes for step, loss in outcome.losses.items()}
    assert losses == pytest.approx(plain.losses, rel=2e-4)


@pytest.mark.long(law=STAYS)
def test_a_new_process_of_a_later_round_finds_its_code_in_the_cache(folder, parent, trainer, tmp_path, monkeypatch):
    """Compile code that contains the names of a tensor group and its mesh, in two processes."""
    monkeypatch.setattr(node, "GIVE_UP", 600)  # on a busy machine, a compiler for CPUs takes minutes
    model = {**trainer["model"], "kvHeads": 2}
    trainer = {**trainer, "steps": 2, "globalBatchSize": 4, "compile": "Blocks", "model": model}
    for number, expected in ((0, "cache: 0 hits, 2 misses"), (3, "cache: 2 hits, 0 misses")):
        job = node.Job(folder / str(number), parent, trainer)
        job.worker, job.number = "workers.cached:main", number
        job.environment = {
            "CONCERTINA_PARALLELISM": json.dumps({"tensor": 2}),
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled"),
        }
        outcome = job.run(2)
        assert set(outcome.codes.values()) == {0}, outcome.output
        assert outcome.output.count(expected) == 2, outcome.output
