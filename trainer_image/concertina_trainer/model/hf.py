"""Causal language models of transformers (`trainer.model.hf`), as a ModelSpec.

The options of the ModelSpec are the fields of the model's config.json. Code in the model's folder is never run: only
the classes of the installed transformers are used. The models are in eval() mode, so that they draw no random numbers
(dropout), and their results do not depend on the number of ranks. The module `hf_files` contains the names of the
models' tensors in files.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.utils._python_dispatch import _disable_current_modes

from concertina_state.errors import InvalidInput
from concertina_trainer.data.read.batches import Microbatch
from concertina_trainer.format.hf_config import NAME
from concertina_trainer.model.loss import count_correct, summed_cross_entropy
from concertina_trainer.model.spec import DataShape, ModelSpec

OTHER_INPUTS = ("vision_config", "audio_config", "speech_config")
"""Fields of config.json for the parts of a model that compute images or sound."""
CHANGING_POSITIONS = ("dynamic", "longrope")
"""Types of rotary positions whose frequencies depend on the lengths of the documents that are computed together."""
PROBE_LENGTH = 16
SAME = 1e-5
"""Largest change of logits that must not change, relative to the change of logits that must change."""
SAME_OF_EXPERTS = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 3e-2 / 2**3}
"""The limit SAME for models with experts, keyed by dtype.

Products of experts can round differently if other tokens are computed with them. Float16 has three significant bits
more than bfloat16.
"""
_OF_EXPERTS = 3
"""Number of dimensions of a weight that consists of several matrices."""


def build(options: Mapping[str, Any], data: DataShape) -> nn.Module:
    """Build the model, with parameters on the meta device and with the values of buffers on CPU.

    Raises:
        InvalidInput: When transformers is missing, or the model can't be trained.
    """
    if data.widths:
        raise InvalidInput(
            f"the data have the fields {', '.join(data.widths)}, and trainer.model.hf takes tokens only."
        )
    config = _config(options)
    text = config.get_text_config()
    if data.vocab_size > text.vocab_size:
        raise InvalidInput(
            f"the data contain tokens up to {data.vocab_size - 1}, but vocab_size in {NAME} is {text.vocab_size}: "
            "build the data with the tokenizer of the model."
        )
    longest = getattr(text, "max_position_embeddings", None)
    if longest and data.sequence_length > longest:
        raise InvalidInput(
            f"max_position_embeddings in {NAME} is {longest}, and trainer.model.sequenceLength is "
            f"{data.sequence_length}: set sequenceLength to {longest} or less."
        )
    from transformers import AutoModelForCausalLM

    kind = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if kind is None:
        raise InvalidInput(
            f'transformers has no causal language model of model_type "{config.model_type}": trainer.model.hf supports '
            "only models of AutoModelForCausalLM."
        )
    attention = "sdpa" if getattr(kind, "_supports_sdpa", False) else "eager"
    with _parameters_on_meta(), torch.device("cpu"):
        module: Any = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=attention, trust_remote_code=False
        )
    module.eval().concertina_ends_with_product = _ends_with_product(module)
    return cast(nn.Module, module)


def _config(options: Mapping[str, Any]) -> Any:
    """Return the configuration that the fields of a config.json describe.

    Raises:
        InvalidInput: When transformers is missing or can't use the fields, or when the results of the model would
            depend on the number of ranks.
    """
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise InvalidInput(
            f"trainer.model.hf needs transformers ({error}): install it by pip install 'concertina-trainer[hf]', "
            "for a job in the image of the container trainer."
        ) from error
    if options.get("quantization_config"):
        raise InvalidInput(f"quantization_config in {NAME} is set: dequantize the weights first.")
    if parts := [name for name in OTHER_INPUTS if options.get(name)]:
        raise InvalidInput(
            f"{NAME} has {' and '.join(parts)}: trainer.model.hf trains models of text only, and weights that no token "
            "reaches would decay. Use the model of text alone."
        )
    fields = {name: value for name, value in options.items() if name != "auto_map" and not name.startswith("_")}
    fields.pop("attn_implementation", None)  # may name code on the Hugging Face Hub
    kind = fields.pop("model_type", None)
    try:
        config = AutoConfig.for_model(kind, **fields)
    except Exception as error:
        raise InvalidInput(
            f"transformers can't use the {NAME} of trainer.model.hf with model_type {kind!r}: "
            f"{type(error).__name__}: {str(error)[:300]}. Code in the model's folder is never run."
        ) from error
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    for parameters in (rope, *(each for each in rope.values() if isinstance(each, dict))):
        if parameters.get("rope_type") in CHANGING_POSITIONS:
            raise InvalidInput(
                f"rope_type in {NAME} is {parameters['rope_type']}: its positions depend on which documents are "
                "computed together, so the result would depend on the number of workers."
            )
    return config


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Return a context in which modules move their new parameters to the meta device, and keep their buffers."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    with mock.patch.object(nn.Module, "register_parameter", on_meta):
        yield


def blocks(module: Any) -> Iterable[nn.Module]:
    """Return the model's layers. Their classes are those that transformers never splits over devices."""
    kinds = set(module._no_split_modules or ())
    found = {name: part for name, part in module.named_modules() if type(part).__name__ in kinds}
    outermost = [name for name in found if not any(name.startswith(f"{other}.") for other in found)]
    tied = {name.rpartition(".")[0] for name in tied_names(module)}
    return [found[name] for name in outermost if not any(owner.startswith(f"{name}.") for owner in tied)]


def tied_names(module: nn.Module) -> dict[str, str]:
    """Return the further names of parameters that several modules use, with the parameter's first name."""
    first: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first.setdefault(id(parameter), name)
    every = module.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in every if first[id(parameter)] != name}


def loss(module: Any, batch: Microbatch) -> Tensor:
    """Return the weighted sum of the cross entropies of next tokens. The next token is of the same document."""
    is_fake = isinstance(batch.tokens, FakeTensor)  # `concertina plan`: the mask of documents would read values
    ids = None if is_fake else batch.document_ids
    if not is_fake and not getattr(module, "concertina_is_proved", False):
        module.concertina_is_proved = _prove(module, batch.tokens.device, documents=ids is not None)
    tokens, targets = batch.tokens[:, :-1], batch.tokens[:, 1:]
    if getattr(module, "concertina_ends_with_product", False):
        rows = _before_product(module, lambda: _logits(module, tokens, ids))
        if rows is not None:
            return summed_cross_entropy(rows, module.get_output_embeddings().weight, targets, batch.weights)
        module.concertina_ends_with_product = False
    logits = _logits(module, tokens, ids).flatten(0, 1)
    targets, weights = targets.flatten(), batch.weights.flatten()
    count_correct(logits, targets, weights)
    losses = F.cross_entropy(logits.float(), targets, reduction="none")
    return (losses * weights).sum()


def _logits(module: Any, tokens: Tensor, document_ids: Tensor | None) -> Tensor:
    """Return logits `[rows, length, vocabulary]`.

    transformers separates the documents of a row if the positions begin again at 0 in each document.
    """
    more = {} if document_ids is None else {"position_ids": positions(document_ids)}
    logits: Tensor = module(input_ids=tokens, use_cache=False, return_dict=True, **more).logits
    return logits


def _before_product(module: Any, compute: Callable[[], Tensor]) -> Tensor | None:
    """Return the input of the output layer, `[rows, length, width]`, in a forward pass without the output layer.

    `compute` is a forward pass of the module that returns its logits. The result is None if the logits are not the
    plain product with the output layer's weight, because the model changes them afterwards (by a soft cap or a scale)
    or adds a bias.
    """
    output = module.get_output_embeddings()
    if type(output) is not nn.Linear or output.bias is not None or isinstance(output.weight, DTensor):
        return None
    inputs: list[tuple[Tensor, int]] = []

    def unchanged(x: Tensor) -> Tensor:
        inputs.append((x, x._version))
        return x

    with mock.patch.object(output, "forward", unchanged):
        logits = compute()
    is_plain = len(inputs) == 1 and inputs[0][0] is logits and inputs[0][1] == logits._version
    return logits if is_plain else None


def _ends_with_product(module: Any) -> bool:
    """Return whether the loss can be computed from the input of the output layer (see `_before_product`).

    To find out, the function runs a forward pass of a short sequence on the meta device, where tensors have no values.
    If the forward pass reads values, it fails, and the result is False.
    """
    tensors = [*module.named_parameters(), *module.named_buffers()]
    with (
        _disable_current_modes(),
        FakeTensorMode(),
        torch.no_grad(),
        torch.device("cpu"),
        contextlib.suppress(Exception),
    ):
        state = {
            name: torch.empty(tensor.shape, dtype=torch.bfloat16 if tensor.requires_grad else tensor.dtype)
            for name, tensor in tensors
        }
        tokens = torch.zeros(1, PROBE_LENGTH, dtype=torch.int64)
        inputs = {"input_ids": tokens, "use_cache": False, "return_dict": True}
        return _before_product(module, lambda: functional_call(module, state, (), inputs).logits) is not None
    return False


@torch.no_grad()
def next_logits(module: Any, tokens: Sequence[int], device: torch.device) -> Tensor:
    """Return the logits of the token that follows `tokens`, `[vocabulary]`.

    Raises:
        InvalidInput: When the model has no positions for so many tokens.
    """
    longest = getattr(module.config.get_text_config(), "max_position_embeddings", None)
    if longest and len(tokens) > longest:
        raise InvalidInput(
            f"the text has {len(tokens)} tokens, and max_position_embeddings of the model is {longest}: give a "
            "shorter prompt, or generate fewer tokens."
        )
    return _logits(module, torch.tensor([tokens], device=device), None)[0, -1]


def positions(document_ids: Tensor) -> Tensor:
    """Return the position of each token within its document, int64 `[rows, length]`."""
    places = torch.arange(document_ids.size(1), device=document_ids.device).expand_as(document_ids)
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return places - places.where(begins, 0).cummax(1).values


@torch.no_grad()
def _prove(module: Any, device: torch.device, documents: bool) -> bool:
    """Check that no token depends on a later token or, with `documents`, on a token of another document.

    Return False if the logits are not finite, so that nothing can be checked.

    Some models of transformers have attention in both directions, and some ignore where a document begins. All ranks
    must run this check, because FSDP gathers weights for it.

    Raises:
        InvalidInput: When the check fails.
    """
    half = PROBE_LENGTH // 2
    vocabulary = module.config.get_text_config().vocab_size
    tokens = torch.arange(1, PROBE_LENGTH + 1, device=device)[None] % vocabulary
    name = type(module).__name__
    has_experts = any(parameter.dim() >= _OF_EXPERTS for parameter in module.parameters())

    def depends(changed: slice, on: slice, ids: Tensor | None) -> bool | None:
        """Return whether the logits of the tokens `on` depend on the tokens `changed`.

        None: some logits are not finite.
        """
        others = tokens.clone()
        others[:, changed] = (3 * others[:, changed] + 7) % vocabulary
        logits = _logits(module, tokens, ids)
        difference = (logits - _logits(module, others, ids)).float().abs()
        if not bool(difference.isfinite().all()):
            return None
        same = SAME_OF_EXPERTS[logits.dtype] if has_experts else SAME
        return not bool(difference[:, on].max() <= same * difference[:, changed].max())

    later = depends(slice(half, None), slice(0, half), None)
    if later is None:
        return False  # the loss shows that values are not finite
    if later:
        raise InvalidInput(
            f"{name} of transformers is not causal: its predictions depend on later tokens, so it can't be trained by "
            "trainer.model.hf."
        )
    if documents:
        ids = torch.zeros_like(tokens)
        ids[:, half:] = 1
        try:
            separate = depends(slice(0, half), slice(half, None), ids) is False
        except TypeError:  # the model takes no positions
            separate = False
        if not separate:
            raise InvalidInput(
                f"{name} of transformers does not separate the documents of a sequence: set trainer.data.documents to "
                "Joined or Bucketed."
            )
    return True


def left_out(module: Any) -> str:
    """Return the name of a layer after the last one that transformers does not load from files, or ""."""
    layers = module.config.get_text_config().num_hidden_layers
    further = f"model.layers.{layers}.mlp"  # predicts further tokens
    ignored = module._keys_to_ignore_on_load_unexpected or ()
    return f"layer {layers} of the files" if any(re.search(pattern, further) for pattern in ignored) else ""


spec = ModelSpec(build, loss, blocks)
