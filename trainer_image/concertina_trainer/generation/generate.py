"""Continuation of a prompt by the model of a checkpoint, in one process.

Each token is computed from the whole text before it. Keys and values are not cached, so the time to compute a token
grows with the length of the text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from concertina_state.checkpoints.reader import StoredCheckpoint
from concertina_state.errors import InvalidInput
from concertina_state.format.read_plan import reads
from concertina_trainer.config.model_config import ModelConfig
from concertina_trainer.config.trainer import Precision, TrainerConfig
from concertina_trainer.export.export import TORCH_NAMES, content_of, shards_of, trainer_of, whole_chunks
from concertina_trainer.export.tokenizer_files import data_of
from concertina_trainer.format.adapters import matrices
from concertina_trainer.format.hf_names import MODEL
from concertina_trainer.generation.vocabulary import Vocabulary, read_vocabulary
from concertina_trainer.model import hf
from concertina_trainer.model.decoder import Decoder
from concertina_trainer.model.quantized import dequantized, quantized
from concertina_trainer.model.spec import DataShape
from concertina_trainer.parallel.shard import HALF

_MULTIPLE = 64
"""Multiple of tokens to which texts are padded, so that kernels are compiled for few lengths."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Settings for the choice of each next token."""

    tokens: int = 256
    """Maximum number of tokens to generate."""
    temperature: float = 0.0
    """Divisor of the logits. With 0, the most probable token is chosen."""
    top_p: float = 1.0
    """Total probability of the tokens to choose from: the fewest most probable tokens that reach it together."""
    seed: int = 0


class Continuation:
    """Model and tokenizer of a checkpoint."""

    def __init__(self, checkpoint: StoredCheckpoint, data: str = "", device: str = "") -> None:
        """Load the model and the tokenizer.

        Args:
            checkpoint: Checkpoint to load.
            data: Present folder of the run's data, or "" if the data have not been moved.
            device: Device of the model. Default: a GPU if there is one.

        Raises:
            InvalidInput: When the checkpoint or its tokenizer can't be used.
            StorageError: When storage can't be read.
        """
        trainer = trainer_of(checkpoint)
        if trainer.model.entrypoint:
            raise InvalidInput(
                f"{checkpoint.uri} is of {trainer.model.named}: only the bundled decoder and models of "
                "trainer.model.hf generate texts."
            )
        self.vocabulary: Vocabulary = read_vocabulary(*data_of(trainer, checkpoint.manifest.data, data))
        self._device = _device(device)
        self._model = load(checkpoint, trainer.model)
        dtype = _dtype(trainer, self._device)
        if isinstance(self._model, Decoder):
            self._model.to(dtype)
        else:  # transformers keeps the precision of buffers, as in training
            for parameter in self._model.parameters():
                parameter.data = parameter.data.to(dtype)
        self._model.to(self._device)

    @torch.no_grad()
    def text(self, prompt: str, chat: bool = False, sampling: Sampling = Sampling()) -> str:
        """Return the text that the model writes after a prompt.

        The text ends before the first end token (the token that separates documents or turns in the run's data), or
        after `sampling.tokens` tokens. If `chat` is set, the prompt is the user's message in a chat, and the result is
        the assistant's answer.

        Raises:
            InvalidInput: When the prompt is empty, or the data have no chat template.
        """
        if chat and self.vocabulary.chat is None:
            raise InvalidInput("the data of this run have no chat template: leave --chat out.")
        tokens = self.vocabulary.encode(self.vocabulary.chat(prompt) if chat and self.vocabulary.chat else prompt)
        if not tokens:
            raise InvalidInput("the prompt is empty: give a text that the model continues.")
        generator, begin = torch.Generator().manual_seed(sampling.seed), len(tokens)
        while len(tokens) - begin < sampling.tokens:
            token = chosen(self.logits(tokens), sampling, generator)
            if token in self.vocabulary.ends:
                break
            tokens.append(token)
        return self.vocabulary.decode(tokens[begin:])

    @torch.no_grad()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Return the logits for the token that follows `tokens`, as float32 `[vocabulary]`.

        Raises:
            InvalidInput: When a model of transformers has no positions for so many tokens.
        """
        if not isinstance(self._model, Decoder):
            return hf.next_logits(self._model, tokens, self._device)[: self.vocabulary.size].float().cpu()
        filled = torch.zeros(1, -(-len(tokens) // _MULTIPLE) * _MULTIPLE, dtype=torch.int64)
        filled[0, : len(tokens)] = torch.tensor(tokens)  # no token attends to what follows it
        norm = self._model.norm
        assert norm is not None
        last = slice(len(tokens) - 1, len(tokens))
        hook = norm.register_forward_hook(lambda module, inputs, output: output[:, last])
        with hook:
            found: Tensor = self._model(filled.to(self._device))
        return found[0, 0, : self.vocabulary.size].float().cpu()


def chosen(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Return the next token, given the logits of all tokens `[vocabulary]`."""
    if not sampling.temperature:
        return int(logits.argmax())
    chances, tokens = torch.softmax(logits.double() / sampling.temperature, 0).sort(descending=True, stable=True)
    kept = chances * (chances.cumsum(0) - chances < sampling.top_p)
    return int(tokens[torch.multinomial(kept, 1, generator=generator)])


def load(checkpoint: StoredCheckpoint, config: ModelConfig) -> nn.Module:
    """Return the model of a checkpoint, on the CPU.

    Raises:
        InvalidInput: When the checkpoint has other weights than the model, or transformers can't build the model.
        StorageError: When storage can't be read.
    """
    shards = shards_of(checkpoint, config)
    chunks = {name.removeprefix(MODEL): chunk for name, chunk in whole_chunks(shards, config).items()}
    plan = reads({number: shard.header for number, shard in enumerate(shards)}, list(chunks.values()))
    plan.require(checkpoint.uri)
    model = _empty(config)
    weights = {}
    for name, chunk in chunks.items():
        flat = torch.frombuffer(content_of(chunk, shards, plan), dtype=getattr(torch, TORCH_NAMES[chunk.dtype]))
        weights[name] = flat.reshape(chunk.shape)
        if config.lora and config.lora.frozen_dtype.quantized and matrices(name)[0] in chunks:
            weights[name] = dequantized(*quantized(weights[name], config.lora.frozen_dtype), torch.float32)
    if config.hf:
        weights |= {name: weights[first] for name, first in hf.tied_names(model).items() if first in weights}
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise InvalidInput(f"{checkpoint.uri} has other weights than its model: {str(error)[:500]}.") from error
    return model


def _empty(config: ModelConfig) -> nn.Module:
    """Return the model without allocated weights: its parameters are on the meta device."""
    if config.hf:
        return hf.build(config.options or {}, DataShape(1, 0))
    with torch.device("meta"):
        return Decoder(config)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        raise InvalidInput(f"the device {name} can't be used: {str(error).splitlines()[0]}.") from error
    return device


def _dtype(trainer: TrainerConfig, device: torch.device) -> torch.dtype:
    """Return the precision of training on this device."""
    if trainer.precision is Precision.auto and device.type == "cuda":
        return torch.bfloat16
    return HALF.get(trainer.precision, torch.float32)
