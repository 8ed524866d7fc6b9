"""Optimizers of the registry on shards: the same numbers as torch's on whole tensors, however the tensors are cut."""

import itertools

import pytest
import torch

from builders.train.plain import OPTIMIZERS as PLAIN
from concertina_state.errors import InvalidInput
from concertina_trainer.config.optimizer_config import OptimizerConfig
from concertina_trainer.config.optimizer_kinds import OPTIMIZERS
from concertina_trainer.model.optimizer import LocalOptimizer, check_groups

SIZE, STEPS = 1003, 12
CUTS = [[], [7, 130, 517], list(itertools.accumulate(range(1, 45)))[:-1]]
SETTINGS = {
    name.value: {"name": name.value, "weightDecay": 0.1} for name, kind in OPTIMIZERS.items() if kind.others is None
}
SETTINGS |= {
    "SGD without momentum": {"name": "SGD", "momentum": 0.0},
    "SGD of Nesterov": {"name": "SGD", "nesterov": True},
    "RMSprop with momentum": {"name": "RMSprop", "momentum": 0.9},
    "AdamW in BFloat16": {"name": "AdamW", "momentsPrecision": "BFloat16"},
    "AdamW with averages": {"name": "AdamW", "emaDecay": 0.9},
    "SGD in BFloat16": {"name": "SGD", "momentsPrecision": "BFloat16"},
}


class Parts:
    """Rows of one matrix, as parameters of a model."""

    def __init__(self, cuts, dtype=torch.float32, size=SIZE):
        self.edges = list(itertools.pairwise([0, *cuts, size]))
        whole = torch.randn(size, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
        self.parameters = {f"part{a}": torch.nn.Parameter(whole[a:b].clone()) for a, b in self.edges}

    def named_parameters(self):
        return self.parameters.items()

    def embeddings(self):
        return ()

    def blocks(self):
        return ()

    def counts(self, name, parameter):
        return True

    def backward(self, step):
        generator = torch.Generator().manual_seed(1 + step)
        last = self.edges[-1][1]
        gradient = torch.randn(last, 3, generator=generator) * torch.rand(last, 3, generator=generator) ** 4
        for parameter, (a, b) in zip(self.parameters.values(), self.edges, strict=True):
            parameter.grad = gradient[a:b].to(parameter.dtype)

    def whole(self):
        return torch.cat([p.detach() for p in self.parameters.values()])


def trained(said, cuts, steps=STEPS, exact=True, dtype=torch.float32):
    model = Parts(cuts, dtype)
    optimizer = LocalOptimizer(model, OptimizerConfig.model_validate(said), 0, exact=exact)
    for step in range(steps):
        model.backward(step)
        optimizer.update(0.01, 1.0)
    moments = {kind: torch.cat(list(of_kind.values())) for kind, of_kind in optimizer.moments().items()}
    return {"weights": model.whole(), **moments}


@pytest.mark.parametrize("said", SETTINGS.values(), ids=SETTINGS)
def test_the_bits_do_not_depend_on_how_a_tensor_is_cut(said):
    whole, *others = (trained(said, cuts) for cuts in CUTS)
    for other in others:
        assert other.keys() == whole.keys()
        for name, value in whole.items():
            assert torch.equal(other[name], value), name


def of_torch(name, dtype, steps):
    """Return the weights after a plain loop of torch's own optimizer on the whole matrix."""
    model = Parts([], dtype)
    optimizer = PLAIN[name][0](model.parameters.values(), weight_decay=0.1)
    for step in range(steps):
        model.backward(step)
        for group in optimizer.param_groups:
            group["lr"] = 0.01
        optimizer.step()
    return model.whole()


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("exact", [True, False])
def test_it_is_torch_s_own_update(name, exact):
    """Fused and foreach kernels order the same operations in other ways: each step rounds a few times otherwise."""
    found, expected = trained(SETTINGS[name], CUTS[1], exact=exact)["weights"], of_torch(name, torch.float32, STEPS)
    precise = of_torch(name, torch.float64, STEPS)
    # 1 / sqrt(v) is as ill-conditioned as the gradient is small, so the bound is measured at float64's loop.
    bound = 4 * (expected.double() - precise).abs().max().item() + STEPS * torch.finfo(torch.float32).eps
    torch.testing.assert_close(found, expected, rtol=0, atol=bound)
    moved = (expected - Parts([]).whole()).abs().max().item()
    assert bound < 1e-3 * moved


@pytest.mark.parametrize("said", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("cuts", CUTS[:2])
def test_it_goes_on_from_its_moments_and_the_number_of_steps(said, cuts):
    """Nothing else is saved: steps and NAdam's product of momentums follow from the number."""
    first, config = Parts(CUTS[1]), OptimizerConfig.model_validate(said)
    before = LocalOptimizer(first, config, 0, exact=True)
    for step in range(5):
        first.backward(step)
        before.update(0.01, 1.0)
    second = Parts(cuts)
    after = LocalOptimizer(second, config, 0, exact=True)
    with torch.no_grad():
        for (a, b), (name, parameter) in zip(second.edges, second.parameters.items(), strict=True):
            parameter.copy_(first.whole()[a:b])
            for kind, of_kind in before.moments().items():
                after.moments()[kind][name].copy_(torch.cat(list(of_kind.values()))[a:b])
    after.set_step(5)
    for step in range(5, STEPS):
        second.backward(step)
        after.update(0.01, 1.0)
    assert torch.equal(second.whole(), trained(said, CUTS[1])["weights"])


@pytest.mark.parametrize("said", SETTINGS.values(), ids=SETTINGS)
def test_the_registry_counts_the_bytes_of_the_moments(said):
    config = OptimizerConfig.model_validate(said)
    moments = LocalOptimizer(Parts([]), config, 0).moments()
    assert [kind for kind in moments if kind != "ema"] == config.moments(of_matrix=False)
    assert sum(tensor.nbytes for of_kind in moments.values() for tensor in of_kind.values()) == (
        config.state_bytes(SIZE * 3, of_matrices=0)
    )


def test_moments_in_bfloat16_are_as_far_off_as_rounding_allows():
    """A step rounds a moment by a unit u of itself, and keeps b of the error before: together u / (1 - b), at most."""
    betas, rate, steps = (0.9, 0.95), 0.01, 200
    models = {precision: Parts([]) for precision in ("Float32", "BFloat16")}
    found = {
        precision: LocalOptimizer(model, OptimizerConfig.model_validate({"momentsPrecision": precision}), 0)
        for precision, model in models.items()
    }
    largest = {kind: torch.zeros(SIZE, 3) for kind in ("exp_avg", "exp_avg_sq")}
    path = torch.zeros(SIZE, 3)
    unit = torch.finfo(torch.bfloat16).eps / 2
    for step in range(steps):
        before = models["Float32"].whole()
        for precision, model in models.items():
            model.backward(step)
            found[precision].update(rate, 1.0)
        path += (models["Float32"].whole() - before).abs()
        for beta, (kind, most) in zip(betas, largest.items(), strict=True):
            exact, rounded = (found[precision].moments()[kind]["part0"] for precision in models)
            most.copy_(torch.maximum(most, exact.abs()))
            assert rounded.dtype == torch.bfloat16
            # An error makes the numbers that are rounded larger by as much.
            bound = unit / (1 - beta)
            assert ((rounded.float() - exact).abs() <= bound * (1 + 2 * bound) * most).all(), kind
    apart = (models["BFloat16"].whole() - models["Float32"].whole()).abs()
    assert (apart.norm() / path.norm()).item() < unit / (1 - betas[0]) + unit / (1 - betas[1]) / 2
    assert apart.max() > 0


@pytest.mark.parametrize(("beta", "falls"), [(0.984, True), (0.999, False)])
def test_without_the_limit_a_second_moment_in_bfloat16_would_never_fall(beta, falls):
    fields = OptimizerConfig.model_validate({"momentsPrecision": "BFloat16"}).model_dump()
    config = OptimizerConfig.model_construct(**{**fields, "betas": [0.9, beta]})
    model = Parts([])
    optimizer = LocalOptimizer(model, config, 0)
    for step in range(400):
        for parameter in model.parameters.values():
            parameter.grad = torch.full_like(parameter, float(step == 0))
        optimizer.update(0.0, 1.0)
        if step == 0:
            first = optimizer.moments()["exp_avg_sq"]["part0"].clone()
    last = optimizer.moments()["exp_avg_sq"]["part0"]
    assert (last < 0.01 * first).all() if falls else torch.equal(last, first)


def test_averages_follow_the_weights_and_take_their_place():
    model = Parts(CUTS[1])
    optimizer = LocalOptimizer(model, OptimizerConfig.model_validate({"emaDecay": 0.5}), 0)
    optimizer.begin_averages()
    average = model.whole().double()
    for step in range(STEPS):
        model.backward(step)
        optimizer.update(0.01, 1.0)
        decay = min(0.5, (1 + step) / (10 + step))
        average = decay * average + (1 - decay) * model.whole().double()
    weights, averages = model.whole(), torch.cat(list(optimizer.moments()["ema"].values()))
    torch.testing.assert_close(averages.double(), average, rtol=0, atol=STEPS * torch.finfo(torch.float32).eps * 4)
    with optimizer.averaged():
        assert torch.equal(model.whole(), averages)
    assert torch.equal(model.whole(), weights)
    assert not torch.equal(weights, averages)


class Named(Parts):
    """A few parameters with names of a decoder."""

    def __init__(self):
        shapes = {"embedding.weight": (4, 2), "blocks.0.norm.weight": (2,), "blocks.0.up.weight": (2, 2)}
        self.parameters = {name: torch.nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}

    def embeddings(self):
        return {"embedding.weight"}


def decays(groups):
    """Return what a step without a gradient and with the rate 1 leaves of each weight."""
    model = Named()
    optimizer = LocalOptimizer(model, OptimizerConfig.model_validate({"weightDecay": 0.1, "groups": groups}), 0)
    for parameter in model.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.update(1.0, 1.0)
    return [round(parameter.flatten()[0].item(), 6) for parameter in model.parameters.values()]


@pytest.mark.parametrize(
    ("groups", "left"),
    [
        ([], [1.0, 1.0, 0.9]),
        ([{"names": ["*.norm.*"], "weightDecay": 0.2}], [1.0, 0.8, 0.9]),
        ([{"names": ["embedding.*", "*.up.*"], "weightDecay": 0.3}], [0.7, 1.0, 0.7]),
        ([{"names": ["*.up.*"], "learningRateFactor": 0.5}], [1.0, 1.0, 0.95]),
        ([{"names": ["*.up.*"], "weightDecay": 0.0}, {"names": ["*"], "weightDecay": 0.5}], [0.5, 0.5, 1.0]),
    ],
)
def test_a_parameter_has_the_settings_of_the_first_group_that_matches(groups, left):
    assert decays(groups) == left


def test_a_pattern_that_matches_nothing_is_refused():
    config = OptimizerConfig.model_validate({"groups": [{"names": ["*"]}, {"names": ["embedding.*", "*.nrom.*"]}]})
    check_groups(config, ["embedding.weight", "a.nrom.weight"])
    with pytest.raises(InvalidInput, match=r"groups\[1\].names has \*\.nrom\.\*.*embedding.weight"):
        check_groups(config, ["embedding.weight", "a.norm.weight"])


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"name": "SGD", "betas": [0.9, 0.95]}, "optimizer.betas applies to AdamW, Adam, NAdam, RAdam"),
        ({"momentum": 0.9}, "optimizer.momentum applies to RMSprop, SGD"),
        ({"name": "SGD", "momentum": 0.0, "nesterov": True}, "optimizer.nesterov needs momentum"),
        ({"momentsPrecision": "BFloat16", "betas": [0.9, 0.999]}, "momentsPrecision BFloat16 needs"),
        ({"momentsPrecision": "BFloat16", "name": "Adagrad"}, "momentsPrecision BFloat16 needs"),
        ({"momentsPrecision": "BFloat16", "name": "RMSprop"}, "momentsPrecision BFloat16 needs"),
        ({"name": "Adafactor"}, "'AdamW', 'Adam', "),
    ],
)
def test_settings_that_do_not_belong_together_are_refused(said, problem):
    with pytest.raises(ValueError, match=problem):
        OptimizerConfig.model_validate(said)
