"""The same training in plain PyTorch: its own optimizer, one unsharded model, a whole batch at a time."""

import dataclasses
import functools
import inspect
import itertools
import json
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch.optim import _muon

from builders.train import routed
from concertina_state.format.read_plan import Box
from concertina_trainer.config.optimizer_config import StatePrecision
from concertina_trainer.config.optimizer_kinds import OptimizerName
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.data.read.sequence_reader import Reader
from concertina_trainer.model.decoder import Decoder
from concertina_trainer.model.dropout import keys_of_tokens
from concertina_trainer.model.initial import initial_value
from concertina_trainer.model.optimizer import learning_rate

BETAS = {"betas": (0.9, 0.95), "eps": 1e-8}
APART = {**BETAS, "decoupled_weight_decay": True}
OPTIMIZERS = {
    "AdamW": (functools.partial(torch.optim.AdamW, **BETAS), 0.1),
    "Adam": (functools.partial(torch.optim.Adam, **BETAS), 0.0),
    "NAdam": (functools.partial(torch.optim.NAdam, **APART), 0.1),
    "RAdam": (functools.partial(torch.optim.RAdam, **APART), 0.1),
    "RMSprop": (functools.partial(torch.optim.RMSprop, alpha=0.99, eps=1e-8), 0.0),
    "Adagrad": (functools.partial(torch.optim.Adagrad, eps=1e-10), 0.0),
    "SGD": (functools.partial(torch.optim.SGD, momentum=0.9), 0.0),
}
"""The classes with the defaults of spec.trainer.optimizer, and the decay of those that decay, by name."""


class Muon:
    """torch.optim.Muon for some parameters, in the dtype of the weights, and AdamW for the others.

    A parameter of three dimensions is a batch of matrices.
    """

    def __init__(self, parameters, groups, **hyperparameters):
        """Take the parameters of Muon, and groups of the other parameters for AdamW."""
        self._batches = {p: [torch.nn.Parameter(each) for each in _matrices(p.detach())] for p in parameters}
        matrices = list(itertools.chain(*self._batches.values()))
        given = {"weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw", **hyperparameters}
        self._optimizers = [torch.optim.Muon(matrices, **given)]
        self._optimizers += [torch.optim.AdamW(groups, **BETAS)] if groups else []
        self.param_groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]

    @property
    def state(self):
        return {p: state for optimizer in self._optimizers for p, state in optimizer.state.items()}

    def zero_grad(self):
        for parameter in self._batches:
            parameter.grad = None
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def step(self):
        for batch, matrices in self._batches.items():
            for matrix, gradient in zip(matrices, _matrices(batch.grad), strict=True):
                matrix.grad = gradient
        with mock.patch.object(_muon, "_zeropower_via_newtonschulz", _unrounded()):
            for optimizer in self._optimizers:
                optimizer.step()


def _matrices(batch):
    return batch.reshape(-1, *batch.shape[-2:]).unbind()


@functools.cache
def _unrounded():
    """Return torch's own function without its rounding to bfloat16."""
    source = inspect.getsource(_muon._zeropower_via_newtonschulz)
    assert source.count("torch.bfloat16") == 1
    names = {"Tensor": torch.Tensor, "torch": torch}
    exec(source.replace("torch.bfloat16", "grad.dtype"), names)
    return names["_zeropower_via_newtonschulz"]


@dataclasses.dataclass(frozen=True)
class Trained:
    losses: dict[int, float]
    """Losses by step."""
    weights: dict[str, torch.Tensor]
    """Weights after the last step."""


def trained(trainer, dtype=torch.float32, nudged=False, wrong_at=None):
    """Train and return the result.

    With `nudged`, every initial weight is moved to the next floating-point number. With `wrong_at`, that step (from 0)
    has the first sample of the next batch in the place of its last one. Several bounds need the same run, which is
    trained once.
    """
    return _trained(json.dumps(trainer, sort_keys=True), dtype, nudged, wrong_at)


@functools.cache
def _trained(trainer, dtype, nudged, wrong_at):
    config = TrainerConfig.model_validate(json.loads(trainer))
    model = Decoder(config.model)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(initial_value(name, p.shape, Box((0,) * p.dim(), tuple(p.shape)), config.model, config.seed))
        for p in model.to(dtype).parameters():
            if nudged:
                p.copy_(torch.nextafter(p, torch.full_like(p, torch.inf)))
        for bias in model.buffers():
            bias.zero_()
    layers = routed.write_out(model, config.model)
    weights = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for name, p in model.named_parameters() if p.requires_grad and p.dim() > 1 and "embed" not in name]
    others = [p for p in weights if all(p is not other for other in decayed)]
    hidden = []
    if config.optimizer.name is OptimizerName.muon:
        of_blocks = [p for name, p in model.named_parameters() if name.startswith("blocks.")]
        hidden = [p for p in of_blocks if p.requires_grad and p.dim() > 1]
        decayed = [p for p in decayed if all(p is not other for other in hidden)]
    chosen = {name: config.optimizer.hyperparameters.get(name) for name in ("momentum", "nesterov")}
    make, decay = OPTIMIZERS.get(config.optimizer.name.value, (functools.partial(Muon, hidden, **chosen), 0.1))
    groups = [{"params": decayed, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = make([group for group in groups if group["params"]])
    rounded = config.optimizer.moments_precision is StatePrecision.bfloat16
    reader = Reader(config.data, config.model.sequence_length, config.seed)
    losses, size = {}, config.global_batch_size
    for step in range(config.steps):
        samples = np.arange(size * step, size * (step + 1))
        if step == wrong_at:
            samples[-1] = size * (step + 1)
        tokens, document_ids, weights_of_tokens = batch(reader, samples, dtype)
        optimizer.zero_grad()
        logits = model(tokens[:, :-1], document_ids, weights=weights_of_tokens, keys=keys(config, reader, samples))
        losses_of_tokens = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        loss = losses_of_tokens @ weights_of_tokens.flatten()
        (loss + sum(layer.loss for layer in layers)).backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in weights])
        for p in weights:  # torch's clip_grad_norm_ adds 1e-6 to the norm
            p.grad.mul_(min(1.0, 1.0 / norm.item()))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config.steps, config.optimizer)
        optimizer.step()
        for state in optimizer.state.values() if rounded else ():
            state.update({kind: moment.bfloat16().to(dtype) for kind, moment in state.items() if moment.dim()})
        for layer in layers:
            layer.even_out()
        losses[step + 1] = loss.item()
    return Trained(
        losses, {name: p.detach() for name, p in routed.names(model).items() if isinstance(p, torch.nn.Parameter)}
    )


def keys(config, reader, samples):
    """Return the keys of dropout of these samples' tokens, or None without dropout."""
    if config.model.lora is None or not config.model.lora.dropout:
        return None
    shape = len(samples), config.model.sequence_length
    return keys_of_tokens(reader.positions(samples).tolist(), config.seed, *shape, torch.device("cpu"))


def batch(reader, samples, dtype):
    """Return tokens, documents and weights of samples. The weights are those of a mean over the trained tokens."""
    found = reader.sequences(samples)
    weights = next(w for w in (found.weights, found.predicted, np.ones_like(found.tokens[:, 1:])) if w is not None)
    ids = None if found.document_ids is None else torch.from_numpy(np.ascontiguousarray(found.document_ids))
    return torch.from_numpy(found.tokens), ids, torch.from_numpy(weights / weights.sum()).to(dtype)


def losses(trainer):
    """Return the losses by step."""
    return trained(trainer).losses


def apart(one, other):
    """Return the greatest relative difference of two runs' losses."""
    return max(abs(one.losses[step] / other.losses[step] - 1) for step in other.losses)


def weights_apart(one, other):
    """Return the greatest difference of two runs' weights."""
    return max((one.weights[name] - weight).abs().max().item() for name, weight in other.weights.items())


@dataclasses.dataclass(frozen=True)
class Bound:
    """Bound of the differences between two runs that only rounding causes."""

    losses: float
    """Maximum relative difference of losses."""
    weights: float
    """Maximum difference of each weight."""


def bound(trainer, dtype):
    """Return the bound for two runs.

    A loss is a sum of n positive terms. Added in two orders, each result is within (n - 1)u of the true one, where u is
    half the distance from 1 to the next number (Higham, Accuracy and Stability of Numerical Algorithms, 4.2). Gradients
    differ by as little, and each update moves weights apart by about a unit in the last place. The growth of such
    differences in training is measured: it is the greatest difference after every initial weight was moved by one such
    unit. Each step may add as much once more.
    """
    terms = trainer["globalBatchSize"] * trainer["model"]["sequenceLength"]
    straight, nudged = trained(trainer, dtype), trained(trainer, dtype, nudged=True)
    return Bound(
        (terms - 1) * torch.finfo(dtype).eps + trainer["steps"] * apart(nudged, straight),
        trainer["steps"] * weights_apart(nudged, straight),
    )


def rounding_bound(trainer):
    """Return the maximum relative difference of the losses of two runs in float32."""
    return bound(trainer, torch.float32).losses


def wrong_sample(trainer, dtype=torch.float32):
    """Return the relative difference of the losses that one wrong sample in one step makes.

    The result is the least one of the first, a middle and the last step. A bound of rounding has to be below it,
    because a comparison within the bound would otherwise not detect the wrong sample.
    """
    straight = trained(trainer, dtype)
    steps = (0, trainer["steps"] // 2, trainer["steps"] - 1)
    return min(apart(trained(trainer, dtype, wrong_at=step), straight) for step in steps)
