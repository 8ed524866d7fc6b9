"""The same training in plain PyTorch: its own AdamW and clipping, one unsharded model, a whole batch at a time."""

import torch
import torch.nn.functional as F

from concertina_state.format.read_plan import Box
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.data.read.reader import Reader
from concertina_trainer.model.decoder import Decoder
from concertina_trainer.model.initial import initial_value
from concertina_trainer.model.optimizer import learning_rate


def losses(trainer, nudged=False, wrong_at=None):
    """By step. `nudged`: every initial weight is the next float32. `wrong_at`: this step (from 0) has the first sample
    of the next batch in the place of its last."""
    config = TrainerConfig.model_validate(trainer)
    model = Decoder(config.model)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(initial_value(name, p.shape, Box((0,) * p.dim(), tuple(p.shape)), config.model, config.seed))
            if nudged:
                p.copy_(torch.nextafter(p, torch.full_like(p, torch.inf)))
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    reader = Reader(config.data, config.model.sequence_length, config.seed)
    found, size = {}, config.global_batch_size
    for step in range(config.steps):
        tokens = torch.from_numpy(reader.read(size * step, size * (step + 1)))
        if step == wrong_at:
            tokens[-1] = torch.from_numpy(reader.read(size * (step + 1), size * (step + 1) + 1))
        adam.zero_grad()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in adam.param_groups:
            group["lr"] = learning_rate(step, config.steps, config.optimizer)
        adam.step()
        found[step + 1] = loss.item()
    return found


def rounding_bound(trainer):
    """How far losses of two histories may be apart, relatively.

    A loss is a sum of n positive float32 terms: added in two orders, each result is within (n - 1)u of the true one,
    u = 2^-24 (Higham, Accuracy and Stability of Numerical Algorithms, 4.2). Gradients are apart by as little, and each
    update moves weights apart by about a unit in the last place. How training makes that grow is measured: A is the
    greatest difference after moving every initial weight by one such unit. Each step may add as much once more."""
    terms = trainer["globalBatchSize"] * trainer["model"]["sequenceLength"]
    straight, nudged = losses(trainer), losses(trainer, nudged=True)
    growth = max(abs(nudged[step] / straight[step] - 1) for step in straight)
    return 2 * (terms - 1) * 2**-24 + trainer["steps"] * growth


def wrong_sample(trainer):
    """How far one wrong sample in one step moves the losses, relatively: the least of the first, a middle and the last
    step. A bound of rounding has to be below it, or a comparison within it would not see that sample."""
    straight = losses(trainer)
    moved = [losses(trainer, wrong_at=step) for step in (0, trainer["steps"] // 2, trainer["steps"] - 1)]
    return min(max(abs(found[step] / straight[step] - 1) for step in straight) for found in moved)
