"""Dropout masks as functions of sample, position, layer, matrix and column."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from builders.train.routed import Written
from concertina_data.order import key_of
from concertina_trainer.config.memory_config import Activations
from concertina_trainer.config.model_config import Activation, ExpertsConfig, LoraConfig, ModelConfig, Projection
from concertina_trainer.config.parallelism import ParallelismConfig
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.data.read.batch import batch_plan
from concertina_trainer.data.read.batches import Microbatch
from concertina_trainer.model.decoder import Decoder, FeedForward, StageLayers
from concertina_trainer.model.dropout import derived, keep_mask, keys_of_tokens
from concertina_trainer.model.experts import MixtureOfExperts
from concertina_trainer.model.lora import NUMBERS, LoraLinear
from concertina_trainer.model.optimizer import LocalOptimizer
from concertina_trainer.parallel import summing
from concertina_trainer.parallel.group import DistContext
from concertina_trainer.parallel.parallelize import parallelized
from concertina_trainer.training.engine import engine_of

CPU = torch.device("cpu")
SAMPLES, LENGTH, COLUMNS = 8, 128, 512
DEVIATIONS = 5
"""A fair coin leaves this range once in two million experiments, and these are a few dozen, with fixed seeds."""


def keys(seed=7, first=100, rows=SAMPLES, length=LENGTH):
    return keys_of_tokens(range(first, first + rows), seed, rows, length, CPU)


def mask(rate, keys_of=None, layer=0, projection=Projection.query):
    of_layer = derived(keys() if keys_of is None else keys_of, layer)
    return keep_mask(derived(of_layer, NUMBERS[projection]), range(COLUMNS), rate)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
def test_the_rate_is_that_of_all_elements_and_of_each_row_and_column(rate):
    dropped = (~mask(rate)).double()
    for means, count in (
        (dropped.mean(), dropped.numel()),
        (dropped.mean((0, 1)), SAMPLES * LENGTH),
        (dropped.mean(2), COLUMNS),
        (dropped.mean((1, 2)), LENGTH * COLUMNS),
    ):
        assert (means - rate).abs().max() <= DEVIATIONS * math.sqrt(rate * (1 - rate) / count)


def test_masks_of_other_samples_positions_layers_matrices_and_seeds_are_independent():
    """Compare pairs of masks of as many elements. Two independent ones agree in half of them."""
    masks = {
        "as it is": mask(0.5),
        "another seed": mask(0.5, keys(seed=8)),
        "the next samples": mask(0.5, keys(first=100 + SAMPLES)),
        "the next sample": mask(0.5, keys(first=101)),
        "the next position": mask(0.5, keys(length=LENGTH + 1)[:, 1:]),
        "the next column": keep_mask(derived(derived(keys(), 0), 0), range(1, COLUMNS + 1), 0.5),
        **{f"layer {layer}": mask(0.5, layer=layer) for layer in (1, 2, 511)},
        **{projection.value: mask(0.5, projection=projection) for projection in list(Projection)[1:]},
    }
    bound = DEVIATIONS * 0.5 / math.sqrt(SAMPLES * LENGTH * COLUMNS)
    for (name, one), (other_name, other) in itertools.combinations(masks.items(), 2):
        assert abs((one == other).double().mean().item() - 0.5) <= bound, (name, other_name)


def test_a_mask_is_the_written_function_of_plain_integers():
    """It must stay the same in all versions, because a run can go on with another one."""

    def mixed(x):
        x = (x ^ x >> 16) * 0x7FEB352D % 2**32
        x = (x ^ x >> 15) * 0x846CA68B % 2**32
        return x ^ x >> 16

    found = keep_mask(derived(derived(keys(rows=2, length=3), 5), 6), range(4, 9), 0.3)
    for row, position, column in itertools.product(range(2), range(3), range(5)):
        sample = key_of(7, 3, 100 + row)
        key = mixed(mixed(position ^ sample % 2**32) ^ sample // 2**32)
        bits = mixed(mixed(mixed(key ^ 5) ^ 6) ^ mixed(4 + column))
        assert found[row, position, column].item() is (bits >= round(0.3 * 2**32))


def test_padding_and_other_rows_change_no_key():
    whole = keys()
    assert torch.equal(keys_of_tokens([103, 101], 7, 4, LENGTH, CPU)[:2], whole[[3, 1]])
    assert torch.equal(keys_of_tokens([100], 7, 1, 16, CPU), whole[:1, :16]), "a bucket of shorter rows"
    assert keys_of_tokens((), 7, 2, LENGTH, CPU).shape == (2, LENGTH), "a microbatch without samples"
    assert keys_of_tokens([2**62, 2**62 + 2**32], 2**63 - 1, 2, 4, CPU).unique().numel() == 8


def test_a_part_of_the_columns_has_its_part_of_the_mask():
    whole = keep_mask(keys(), range(COLUMNS), 0.5)
    assert torch.equal(keep_mask(keys(), range(384, 512), 0.5), whole[..., 384:])


def random(module, seed=3):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in (*module.parameters(), *module.buffers()):
            value.copy_(0.3 * torch.randn(value.shape, generator=generator))
    return module.double()


def test_a_layer_drops_the_input_of_its_adapter_alone():
    layer = random(LoraLinear(6, 4, LoraConfig(rank=2, alpha=6.0, dropout=0.25), Projection.up, bias=True))
    x = torch.randn(2, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(4), requires_grad=True)
    of_tokens = keys(rows=2, length=3)
    factors = keep_mask(derived(of_tokens, NUMBERS[Projection.up]), range(6), 0.25).double() / 0.75
    assert {0.0, 4 / 3} == set(factors.flatten().tolist())
    expected = F.linear(x, layer.weight, layer.bias) + 3.0 * (x * factors) @ layer.lora_a.T @ layer.lora_b.T
    wanted = torch.autograd.grad(expected.square().sum(), (x, layer.lora_a, layer.lora_b))
    found = layer(x, keys=of_tokens)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad(found.square().sum(), (x, layer.lora_a, layer.lora_b))
    for gradient, value in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, value, rtol=1e-12, atol=1e-12)
    without = LoraConfig(rank=2, alpha=6.0)
    plain = F.linear(x, layer.weight, layer.bias) + without.scale * x @ layer.lora_a.T @ layer.lora_b.T
    torch.testing.assert_close(layer(x), plain, rtol=1e-12, atol=1e-12)


def test_each_expert_has_its_own_masks():
    config = ExpertsConfig(count=4, active_per_token=2, shared=1)
    lora = LoraConfig(rank=8, dropout=0.3)
    shared = FeedForward(16, 24, Activation.silu, lora)
    moe = random(MixtureOfExperts(16, 24, Activation.silu, config, shared, lora))
    x = torch.randn(3, 10, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    of_tokens = keys(rows=3, length=10)
    results, gradients = [], []
    for compute in (moe, Written(moe, config)):
        found = compute(x, torch.ones(3, 10, dtype=torch.float64), of_tokens)
        results.append(found[0] if isinstance(found, tuple) else found)
        trained = [p for name, p in moe.named_parameters() if "lora" in name]
        gradients.append(torch.autograd.grad(results[-1].square().sum(), trained))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-12)
    assert not torch.allclose(results[0], moe(x, None)[0])


MODEL = {"layers": 2, "dim": 32, "heads": 4, "hiddenDim": 48, "vocabSize": 64, "sequenceLength": 16}
ADAPTED = {**MODEL, "lora": {"rank": 8, "dropout": 0.4, "frozenDtype": "Float32"}}


def batch(samples=(40, 41)):
    tokens = torch.randint(64, (len(samples), 17), generator=torch.Generator().manual_seed(5))
    return Microbatch(tokens, torch.full((len(samples), 16), 1 / 32), None, samples)


@pytest.mark.parametrize("stage", [None, StageLayers(range(1, 2), first=False)], ids=["whole", "second stage"])
def test_each_layer_has_its_own_keys(stage):
    """The layers of a pipeline stage have the numbers that they have in the whole model."""
    model = random(Decoder(ModelConfig.model_validate(ADAPTED), part=stage))
    keys_by_layer = {}
    for layer, block in model.blocks.items():
        for each in (block.attention.output, block.feed_forward.down):
            each.register_forward_pre_hook(
                lambda module, inputs, named, layer=layer: keys_by_layer.setdefault(layer, []).append(named["keys"]),
                with_kwargs=True,
            )
    x = batch().tokens[:, :-1] if model.part.first else torch.randn(2, 16, 32, dtype=torch.float64)
    model(x, keys=keys(rows=2, length=16))
    assert keys_by_layer.keys() == model.blocks.keys()
    for layer, given in keys_by_layer.items():
        assert all(torch.equal(each, derived(keys(rows=2, length=16), int(layer))) for each in given)


@pytest.mark.parametrize("experts", [None, {"count": 4, "shared": 1}], ids=["dense", "experts"])
@pytest.mark.parametrize("activations", [Activations.recompute, Activations.products])
def test_what_is_computed_again_drops_the_same(activations, experts):
    gradients = []
    for kind in (Activations.keep, activations):
        model = random(Decoder(ModelConfig.model_validate({**ADAPTED, "experts": experts}), activations=kind))
        tokens = batch().tokens
        loss = model(tokens[:, :-1], None, tokens[:, 1:], batch().weights.double(), keys(rows=2, length=16))
        loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    assert gradients[0]
    for name, gradient in gradients[0].items():
        assert torch.equal(gradients[1][name], gradient), name


def engine(model):
    """Return an engine of one rank, and its model with random weights."""
    config = TrainerConfig.model_validate({"data": {"uri": "/none"}, "seed": 9, "globalBatchSize": 2, "model": model})
    world = DistContext.of(0, 1, CPU, ParallelismConfig(), False)
    stages = parallelized(config, world)
    [part] = stages.parts
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in part.parameters():
            local = parameter.to_local()
            local.copy_(0.3 * torch.randn(local.shape, generator=generator))
    plan = batch_plan(config, world.degrees)
    optimizer = LocalOptimizer(stages, config.optimizer, 0)
    return engine_of(stages, optimizer, summing.sums(config, stages, plan, world), config, plan, world), part


def test_training_drops_by_sample_and_evaluation_does_not():
    """The loss of a microbatch is that of the decoder with the keys of its samples, or without any."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        trained, model = engine(ADAPTED)
        losses = {}
        for samples in ((40, 41), (40 + 1000, 41 + 1000)):
            microbatch = batch(samples)
            inputs, targets = microbatch.tokens[:, :-1], microbatch.tokens[:, 1:]
            with torch.no_grad():
                dropped = keys_of_tokens(samples, 9, 2, 16, CPU)
                expected, plain = (model(inputs, None, targets, microbatch.weights, each) for each in (dropped, None))
                [[evaluated], _] = trained.evaluated([microbatch])
            [losses[samples]] = trained.forward_backward([microbatch])
            assert losses[samples] == expected != plain
            assert evaluated == plain
        assert len(set(map(float, losses.values()))) == 2, "another epoch has other masks"
        without, model = engine({**ADAPTED, "lora": {**ADAPTED["lora"], "dropout": 0.0}})
        [loss] = without.forward_backward([batch()])
        assert loss == plain
    finally:
        dist.destroy_process_group()
