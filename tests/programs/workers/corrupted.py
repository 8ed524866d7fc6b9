"""Worker in whose memory one bit flips (FLIP: kind, rank, step), as in defective memory."""

import os

import torch

from concertina_trainer import worker
from concertina_trainer.training.digests import Digests


def flip(tensor):
    """Flip a bit of the first number in its last byte but one: float32, or bfloat16, as a GPU gathers them."""
    tensor.view(-1)[:1].view(torch.uint8)[-2:-1].bitwise_xor_(1 << 4)


def main():
    kind, rank, step = os.environ["FLIP"].split()
    if os.environ["RANK"] == rank:
        {"resting": at_rest, "gathered": in_gathered_weights}[kind](int(step))
    worker.main()


def at_rest(step):
    rest = Digests.rest

    def then_flip(self, at):
        rest(self, at)
        if at == step:
            flip(self._still[0])

    Digests.rest = then_flip


def in_gathered_weights(step):
    begin, see = Digests.begin, Digests._see

    def note(self, at):
        begin(self, at)
        self.flip = at == step

    def flip_first(self, module, arguments):
        if self.flip:
            owner, name = self._own[module][0]
            flip(getattr(owner, name).detach())
            self.flip = False
        see(self, module, arguments)

    Digests.begin, Digests._see = note, flip_first
