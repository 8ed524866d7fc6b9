"""Muon: orthogonal matrices, torch's own update in the precision of the weights, and which parameters are matrices."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from builders.train import plain
from concertina_state.errors import InvalidInput
from concertina_trainer.config.optimizer_config import OptimizerConfig
from concertina_trainer.model.flops import orthogonalization_flops
from concertina_trainer.model.muon import direction, orthogonalized
from concertina_trainer.model.optimizer import LocalOptimizer, is_matrix

SHAPES = [(48, 64), (64, 48), (40, 40), (1, 64), (3, 40, 24), (2, 24, 40)]
STEPS, RATE = 6, 0.02


@pytest.fixture
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES)
def test_an_orthogonalized_matrix_has_the_same_singular_vectors_and_singular_values_near_1(shape):
    left, _, right = torch.linalg.svd(random(*shape), full_matrices=False)
    values = torch.linspace(0.1, 1.0, left.size(-1))
    found = orthogonalized(3e-4 * left * values @ right)
    between = left.mT @ found @ right.mT
    diagonal = between.diagonal(dim1=-2, dim2=-1)
    assert 0.65 < diagonal.min() <= diagonal.max() < 1.25
    assert (between - torch.diag_embed(diagonal)).abs().max() < 1e-4
    assert found.shape == shape


def test_a_matrix_of_zeros_stays_one():
    assert not orthogonalized(torch.zeros(3, 8, 5)).any()
    assert orthogonalized(torch.zeros(0, 8, 5)).shape == (0, 8, 5)


def test_experts_are_orthogonalized_one_by_one_in_pieces(monkeypatch):
    batch = random(5, 16, 8)
    each = torch.stack([orthogonalized(matrix) for matrix in batch])
    monkeypatch.setattr("concertina_trainer.model.muon.PIECE", 2 * 16 * 8)
    torch.testing.assert_close(orthogonalized(batch), each, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_change_in_the_last_bit_changes_little(shape):
    """In bfloat16, the change would be 1 %, and layouts would train different models."""
    matrix = random(*shape)
    noise = 1 + 2.0**-24 * random(*shape, seed=1).sign()
    assert (orthogonalized(matrix * noise) - orthogonalized(matrix)).norm() < 1e-4 * orthogonalized(matrix).norm()


def test_products_are_not_rounded_to_tf32():
    torch.set_float32_matmul_precision("medium")
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "concertina_trainer.model.muon.orthogonalized",
            lambda matrix: seen.append(torch.get_float32_matmul_precision()) or matrix,
        )
        direction(random(4, 4), random(4, 4))
    assert (seen, torch.get_float32_matmul_precision()) == (["highest"], "medium")
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("shape", [(48, 64), (64, 48), (40, 40)])
def test_its_operations_are_counted(shape):
    with FlopCounterMode(display=False) as counter:
        orthogonalized(random(*shape))
    assert counter.get_total_flops() == orthogonalization_flops(*shape)


PARAMETERS = {
    "embedding.weight": (11, 8),
    "blocks.0.attention.query.weight": (12, 8),
    "blocks.0.norm.weight": (8,),
    "blocks.0.feed_forward.experts.up": (3, 6, 8),
    "blocks.0.feed_forward.experts.down_bias": (3, 8),
    "head.weight": (11, 8),
}


class Small:
    """Parameters of a decoder with one block, which has experts."""

    def __init__(self):
        self.parameters = {name: torch.nn.Parameter(random(*shape)) for name, shape in PARAMETERS.items()}

    def named_parameters(self):
        return self.parameters.items()

    def embeddings(self):
        return {"embedding.weight"}

    def blocks(self):
        return {"blocks"}

    def counts(self, name, parameter):
        return True

    def backward(self, step):
        for number, parameter in enumerate(self.parameters.values()):
            parameter.grad = random(*parameter.shape, seed=100 * step + number)

    def weights(self):
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}


MATRICES = ("blocks.0.attention.query.weight", "blocks.0.feed_forward.experts.up")


def muon(**fields):
    return OptimizerConfig.model_validate({"name": "Muon", **fields})


def trained(model, config, steps=range(STEPS), exact=True):
    optimizer = LocalOptimizer(model, config, steps.start, exact=exact)
    for step in steps:
        model.backward(step)
        optimizer.update(RATE, 0.5)
    return optimizer


@pytest.mark.parametrize("given", [{}, {"nesterov": False}, {"momentum": 0.0}, {"momentum": 0.8}])
@pytest.mark.parametrize("exact", [True, False])
def test_it_is_torch_s_own_update(double, given, exact):
    """In the dtype of the weights; with the learning rate by which an update is as large as one of AdamW."""
    found, expected = Small(), Small()
    trained(found, muon(**given), exact=exact)
    hidden = [expected.parameters[name] for name in MATRICES]
    groups = [
        {"params": [expected.parameters["head.weight"]], "weight_decay": 0.1},
        {
            "params": [p for name, p in expected.parameters.items() if name not in (*MATRICES, "head.weight")],
            "weight_decay": 0.0,
        },
    ]
    optimizer = plain.Muon(hidden, groups, **given)
    for step in range(STEPS):
        expected.backward(step)
        for parameter in expected.parameters.values():
            parameter.grad *= 0.5
        for group in optimizer.param_groups:
            group["lr"] = RATE
        optimizer.step()
    for name, weight in expected.weights().items():
        torch.testing.assert_close(found.parameters[name].detach(), weight, rtol=0, atol=1e-12, msg=name)
    moved = found.parameters[MATRICES[0]].detach() - Small().parameters[MATRICES[0]].detach()
    assert moved.square().mean().sqrt() > 0.2 * RATE


def test_torch_s_update_in_bfloat16_differs_by_rounding():
    found = Small()
    optimizer = LocalOptimizer(found, muon(weightDecay=0.0), 0)
    found.backward(0)
    weight = Small().parameters[MATRICES[0]]
    weight.grad = found.parameters[MATRICES[0]].grad.clone()
    torch.optim.Muon([weight], lr=RATE, weight_decay=0.0, adjust_lr_fn="match_rms_adamw").step()
    optimizer.update(RATE, 1.0)
    begin = random(*weight.shape)
    difference = found.parameters[MATRICES[0]].detach() - weight.detach()
    assert 0 < difference.norm() < 0.03 * (weight.detach() - begin).norm()


@pytest.mark.parametrize("given", [{}, {"momentsPrecision": "BFloat16"}, {"emaDecay": 0.9}])
def test_it_goes_on_from_its_moments_and_the_number_of_steps(given):
    whole, half, config = Small(), Small(), muon(**given)
    trained(whole, config)
    before = trained(half, config, range(3))
    after, second = Small(), None
    with torch.no_grad():
        for name, weight in half.weights().items():
            after.parameters[name].copy_(weight)
    second = LocalOptimizer(after, config, 3, exact=True)
    for kind, of_kind in before.moments().items():
        for name, moment in of_kind.items():
            second.moments()[kind][name].copy_(moment)
    for step in range(3, STEPS):
        after.backward(step)
        second.update(RATE, 0.5)
    assert all(torch.equal(after.weights()[name], weight) for name, weight in whole.weights().items())


@pytest.mark.parametrize("given", [{}, {"momentsPrecision": "BFloat16"}, {"emaDecay": 0.9}])
def test_matrices_have_a_momentum_and_the_other_parameters_have_adamw_s_moments(given):
    config = muon(**given)
    model, optimizer = Small(), LocalOptimizer(Small(), config, 0)
    moments = optimizer.moments()
    others = PARAMETERS.keys() - set(MATRICES)
    assert {kind: set(of_kind) for kind, of_kind in moments.items() if kind != "ema"} == {
        "momentum_buffer": set(MATRICES), "exp_avg": others, "exp_avg_sq": others,
    }  # fmt: skip
    for name, shape in PARAMETERS.items():
        kinds = optimizer.kinds(name, len(shape))
        assert kinds == {kind: of_kind[name].dtype for kind, of_kind in moments.items() if name in of_kind}
    count = {name: p.numel() for name, p in model.named_parameters()}
    of_matrices = sum(count[name] for name in MATRICES)
    assert sum(each.nbytes for of_kind in moments.values() for each in of_kind.values()) == config.state_bytes(
        sum(count.values()), of_matrices
    )


def test_groups_change_the_rate_and_the_decay_of_matrices():
    def step(**fields):
        model, optimizer = Small(), None
        optimizer = LocalOptimizer(model, muon(groups=[{"names": ["*.query.*"], **fields}]), 0)
        model.backward(0)
        optimizer.update(RATE, 1.0)
        return model.parameters[MATRICES[0]].detach()

    begin = random(*PARAMETERS[MATRICES[0]])
    undecayed = step(weightDecay=0.0)
    torch.testing.assert_close(step(weightDecay=0.5), undecayed - 0.5 * RATE * begin)
    torch.testing.assert_close(step(weightDecay=0.0, learningRateFactor=0.25) - begin, 0.25 * (undecayed - begin))


@pytest.mark.parametrize(
    ("name", "dimensions", "expected"),
    [
        ("layers.0.proj.weight", 2, True),
        ("layers.0.mlp.experts.gate_up_proj", 3, True),
        ("layers.0.mlp.experts.gate_up_proj_bias", 2, False),
        ("layers.0.norm.weight", 1, False),
        ("layers.0.conv.weight", 3, False),
        ("layers.0.positions.weight", 2, False),
        ("layers.01.proj.weight", 2, False),
        ("lm_head.weight", 2, False),
    ],
)
def test_matrices_are_those_of_blocks(name, dimensions, expected):
    assert is_matrix(name, dimensions, {"layers.0", "layers.1"}, {"layers.0.positions.weight"}) is expected


def test_a_model_without_matrices_in_blocks_is_refused():
    model = Small()
    model.blocks = lambda: ()
    with pytest.raises(InvalidInput, match=r"Muon updates the matrices of blocks, .* ModelSpec\.blocks"):
        LocalOptimizer(model, muon(), 0)


def test_a_step_without_a_gradient_of_a_matrix_leaves_the_matrix():
    """As torch's optimizers do with any parameter."""
    model = Small()
    optimizer = LocalOptimizer(model, muon(), 0)
    model.backward(0)
    model.parameters[MATRICES[0]].grad = None
    optimizer.update(RATE, 1.0)
    assert torch.equal(model.weights()[MATRICES[0]], random(*PARAMETERS[MATRICES[0]]))
    assert not torch.equal(model.weights()[MATRICES[1]], random(*PARAMETERS[MATRICES[1]]))


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"momentsPrecision": "BFloat16", "momentum": 0.99}, "momentsPrecision BFloat16 needs"),
        ({"momentum": 0.0, "nesterov": True}, "optimizer.nesterov needs momentum"),
        ({"alpha": 0.9}, "optimizer.alpha applies to RMSprop"),
    ],
)
def test_settings_that_do_not_belong_together_are_refused(said, problem):
    with pytest.raises(ValueError, match=problem):
        muon(**said)
