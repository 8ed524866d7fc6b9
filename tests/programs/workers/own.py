"""Custom models for token data: one that is right, and others with one mistake each."""

import dataclasses
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from concertina_trainer.config.model_config import ModelConfig
from concertina_trainer.model.decoder import Decoder
from concertina_trainer.model.initial import usual
from concertina_trainer.model.spec import ModelSpec


class Mixer(nn.Module):
    def __init__(self, dim, dropout):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mix = nn.Conv1d(dim, dim, 3)
        self.dropout = dropout

    def forward(self, x):
        mixed = self.mix(F.pad(self.norm(x).transpose(1, 2), (2, 0))).transpose(1, 2)
        return x + F.dropout(F.gelu(mixed), self.dropout, self.training)


class Model(nn.Module):
    def __init__(self, vocab, dim=24, layers=2, dropout=0.0):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.mixers = nn.ModuleList(Mixer(dim, dropout) for _ in range(layers))
        self.temperature = nn.Parameter(torch.empty(1))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for mixer in self.mixers:
            x = mixer(x)
        return x


def logits(module, tokens):
    """Return the logits, with weights of the root module outside of its forward."""
    return F.linear(module(tokens), module.embedding.weight) * module.temperature


def loss(module, batch):
    targets = batch.tokens[:, 1:]
    losses = F.cross_entropy(logits(module, batch.tokens[:, :-1]).transpose(1, 2), targets, reduction="none")
    return (losses * batch.weights).sum()


def loss_summed_in_half(module, batch):
    """Return a loss in float32 whose sum is in float16, as in code that was written for another precision."""
    targets = batch.tokens[:, 1:]
    losses = F.cross_entropy(logits(module, batch.tokens[:, :-1]).transpose(1, 2), targets, reduction="none")
    return (losses * batch.weights.to(losses.dtype)).sum().float()


def build(options, data):
    return Model(data.vocab_size, **options)


class Tied(Model):
    def __init__(self, vocab):
        super().__init__(vocab)
        self.head = nn.Linear(24, vocab, bias=False)
        self.head.weight = self.embedding.weight


class Frozen(Model):
    """Model whose parameters are frozen, except those of its mixers."""

    def __init__(self, vocab):
        super().__init__(vocab)
        self.embedding.requires_grad_(False)
        self.mixers[0].requires_grad_(False)


class Still(Model):
    """Model whose first mixer stays in eval(), without dropout."""

    def __init__(self, vocab):
        super().__init__(vocab, dropout=0.5)
        self.mixers[0].requires_grad_(False)
        self.mixers[0].eval()


class CompiledMixer(Mixer):
    forward = torch.compile(Mixer.forward, backend="aot_eager")


class Compiled(Model):
    """With blocks that are compiled, and a file for each process with the round and number of graphs in each step."""

    def __init__(self, vocab, folder):
        super().__init__(vocab)
        self.mixers = nn.ModuleList(CompiledMixer(24, 0.0) for _ in range(2))
        self.folder = Path(folder)

    def forward(self, tokens):
        with (self.folder / f"graphs-{os.getpid()}").open("a") as file:
            print(os.environ["CONCERTINA_ROUND"], counters["stats"]["unique_graphs"], file=file)
        return super().forward(tokens)


class Constant(Model):
    def __init__(self, vocab):
        super().__init__(vocab)
        self.register_buffer("scale", torch.ones(24))

    def forward(self, tokens):
        return super().forward(tokens) * self.scale


class Counting(Constant):
    def forward(self, tokens):
        self.scale.mul_(1.0)
        return super().forward(tokens)


def with_ones(name, whole, box, seed):
    return torch.ones(box.shape) if name == "scale" else usual(name, whole, box, seed)


spec = ModelSpec(build, loss, blocks=lambda module: module.mixers, flops=lambda options, data: 1e6)


def decoder(options, data):
    shape = {"vocabSize": data.vocab_size, "sequenceLength": data.sequence_length}
    return Decoder(ModelConfig.model_validate({**options, **shape}))


def loss_of_decoder(module, batch):
    return module(batch.tokens[:, :-1], None, batch.tokens[:, 1:], batch.weights)


bundled = ModelSpec(decoder, loss_of_decoder, blocks=lambda module: module.blocks.values())
"""The trainer's own decoder as a custom model."""


def loss_of_whole_logits(module, batch):
    logits = module(batch.tokens[:, :-1]).flatten(0, 1)
    losses = F.cross_entropy(logits.float(), batch.tokens[:, 1:].flatten(), reduction="none")
    return (losses.view_as(batch.weights) * batch.weights).sum()


whole_logits = dataclasses.replace(bundled, loss=loss_of_whole_logits)


def other(**changed):
    return dataclasses.replace(spec, **changed)


compiled = other(build=lambda options, data: Compiled(data.vocab_size, **options))
constant = other(build=lambda options, data: Constant(data.vocab_size), initial=with_ones)
frozen = other(build=lambda options, data: Frozen(data.vocab_size))
still = other(build=lambda options, data: Still(data.vocab_size))
mean = other(loss=lambda module, batch: logits(module, batch.tokens[:, :-1]).logsumexp(-1).mean())
regularised = other(loss=lambda module, batch: loss(module, batch) + module.temperature.square().sum())
half = other(loss=lambda module, batch: loss(module, batch).half())
half_sum = other(loss=loss_summed_in_half)
looking = other(loss=lambda module, batch: loss(module, batch) if batch.weights.sum().item() else None)
no_scalar = other(loss=lambda module, batch: batch.weights)
no_module = other(build=lambda options, data: None)
raises = other(build=lambda options, data: options["missing"])
tied = other(build=lambda options, data: Tied(data.vocab_size))
buffered = other(build=lambda options, data: Constant(data.vocab_size))
counting = other(build=lambda options, data: Counting(data.vocab_size), initial=with_ones)
double = other(build=lambda options, data: Model(data.vocab_size).double())
no_part = other(blocks=lambda module: [nn.Linear(2, 2)])
no_blocks = other(blocks=lambda module: ())
uncovered = other(initial=lambda name, *about: None if name == "temperature" else usual(name, *about))
no_spec = spec.build
