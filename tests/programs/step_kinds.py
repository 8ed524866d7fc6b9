"""Loops that step optimizers in several ways. After each, the script prints the number of counted steps as JSON.

The script starts as a worker does, with the hook's folder on PYTHONPATH and CONCERTINA_STEP_FILE set.
"""

import json
import os
import struct

import torch


def counted() -> int:
    with open(os.environ["CONCERTINA_STEP_FILE"], "rb") as file:
        return struct.unpack_from("<q", file.read())[0]


alive = []
"""Optimizers of all loops. A new optimizer at the address of a deleted one would be taken for that one."""


def linear(kind, **options):
    model = torch.nn.Linear(4, 1)
    alive.append(kind(model.parameters(), lr=0.01, **options))
    return model, alive[-1]


def loop(kind, **options):
    model, optimizer = linear(kind, **options)
    for _ in range(5):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def gan():
    (generator, first), (critic, second) = linear(torch.optim.Adam), linear(torch.optim.Adam)
    for _ in range(5):
        critic(torch.ones(2, 4)).sum().backward()
        second.step()
        generator(torch.ones(2, 4)).sum().backward()
        first.step()


def critics():
    (generator, first), (critic, second) = linear(torch.optim.Adam), linear(torch.optim.RMSprop)
    for _ in range(2):
        for _ in range(5):
            critic(torch.ones(2, 4)).sum().backward()
            second.step()
        generator(torch.ones(2, 4)).sum().backward()
        first.step()


def accumulation():
    model, optimizer = linear(torch.optim.AdamW)
    for micro in range(12):
        model(torch.ones(2, 4)).sum().backward()
        if micro % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()


def scaler():
    """Train with a scaler that skips two of the six steps, whose gradients are not finite."""
    model, optimizer = linear(torch.optim.SGD)
    scaled = torch.amp.GradScaler("cpu")
    for step in range(6):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).sum() * (float("inf") if step in (1, 3) else 1.0)
        scaled.scale(loss).backward()
        scaled.step(optimizer)
        scaled.update()


def lbfgs():
    model, optimizer = linear(torch.optim.LBFGS)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        return loss

    for _ in range(5):
        optimizer.step(closure)


def compiled():
    model, optimizer = linear(torch.optim.AdamW)
    step = torch.compile(optimizer.step, backend="eager")
    for _ in range(5):
        model(torch.ones(2, 4)).sum().backward()
        step()


def one_for_each_parameter():
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    optimizers = [torch.optim.SGD([parameter], lr=0.01) for parameter in model.parameters()]
    alive.extend(optimizers)
    for optimizer, parameter in zip(optimizers, model.parameters(), strict=True):
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    for _ in range(5):
        model(torch.ones(2, 4)).sum().backward()


kinds = {
    "loop": lambda: loop(torch.optim.SGD, momentum=0.9),
    "fused": lambda: loop(torch.optim.AdamW, fused=True),
    "gan": gan, "critics": critics, "accumulation": accumulation, "scaler": scaler, "lbfgs": lbfgs,
    "one for each parameter": one_for_each_parameter, "compiled": compiled,
}  # fmt: skip
loop(torch.optim.SGD)
result = {}
for name, train in kinds.items():
    before = counted()
    train()
    result[name] = counted() - before
print(json.dumps(result))
