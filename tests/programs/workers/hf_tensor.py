"""Program of forked workers that compute the gradients of models of transformers, each whole and then divided.

The gradients are in float64 and computed without FSDP, so that a difference is no rounding. The batch has packed
documents, and a token of padding. Of a model that is refused, the result is the message.
"""

import json
import os

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from concertina_state.errors import InvalidInput
from concertina_trainer.config.parallelism import ParallelismConfig
from concertina_trainer.model import hf
from concertina_trainer.parallel import group
from concertina_trainer.parallel.hf_tensor import DividedModel

DOCUMENTS = torch.tensor([5, 1, 11, 7])


def gradients(model):
    """Return the loss of a batch, and the whole gradient of each parameter."""
    torch.manual_seed(5)
    tokens = torch.randint(model.config.vocab_size, (2, int(DOCUMENTS.sum()) + 1))
    tokens[0, 3] = model.config.pad_token_id
    ids = torch.repeat_interleave(torch.arange(len(DOCUMENTS)), DOCUMENTS).expand(2, -1)
    logits = hf._logits(model, tokens[:, :-1], ids)
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return loss.item(), found


def main() -> int:
    world = group.join(os.environ, ParallelismConfig.model_validate_json(os.environ["CONCERTINA_PARALLELISM"]), False)
    results = {}
    for name, (kind, options) in json.loads(os.environ["MODELS"]).items():
        torch.manual_seed(3)
        config = AutoConfig.for_model(kind, **options)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.05 * torch.randn_like(parameter)  # norms that are not 1, and biases that are not 0
        whole = gradients(model)
        try:
            divided = DividedModel(model, world.meshes.tensor)
            loss, of_ranks = gradients(model)
            divided.check_gradients()
        except InvalidInput as error:
            results[name] = str(error)
            continue
        results[name] = whole, (loss, {key: gradient.full_tensor() for key, gradient in of_ranks.items()})
    if world.rank == 0:
        torch.save(results, os.environ["RESULT"])
    return 0
