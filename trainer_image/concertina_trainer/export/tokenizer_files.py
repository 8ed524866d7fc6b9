"""Tokenizer of an exported model, as files that transformers' AutoTokenizer loads.

The exported tokenizer encodes text in the same way as the build of the data did: it adds no special tokens and never
truncates (decision "Exported tokenizers match the training data"). Files and fields are described at
https://huggingface.co/docs/transformers/main_classes/tokenizer

The module does not import torch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from concertina_data import data_manifest as data_manifests
from concertina_data.data_manifest import ChatFacts, DataManifest, TokenizerFacts
from concertina_state.errors import InvalidInput
from concertina_state.objects.prefix import IMPATIENCE, ObjectPrefix, StorageError
from concertina_trainer.config.trainer import TrainerConfig
from concertina_trainer.data.defaults import BYTES, CHAT_TEMPLATE

FILE, CONFIG = "tokenizer.json", CHAT_TEMPLATE
CLASS = "PreTrainedTokenizerFast"


@dataclasses.dataclass(frozen=True)
class ExportedTokenizer:
    """Files of an exported tokenizer. If the tokenizer can't be exported, there are no files."""

    files: Mapping[str, object]
    """Contents of the files as JSON values, keyed by file name."""
    message: str
    """Sentence that says what was exported, or why nothing was exported and what the user can do."""
    facts: TokenizerFacts | None = None

    @property
    def config(self) -> dict[str, object]:
        """Fields about the tokenizer for config.json.

        Without these fields, transformers would use Llama's defaults, which do not fit the bundled trainer's
        tokenizers.
        """
        trained_tokenizer = {"trained_tokenizer": dataclasses.asdict(self.facts)} if self.facts else {}
        return {"bos_token_id": None, "eos_token_id": self.facts and self.facts.separator, **trained_tokenizer}


def exported(trainer: TrainerConfig, digest: str, elsewhere: str = "") -> ExportedTokenizer:
    """Return the tokenizer of the data that a run with this configuration consumed.

    `digest` is the digest of the run's data (`Reader.digest`). `elsewhere` is the present folder of the data, or "" if
    the data were not moved. For a mixture, `elsewhere` is the folder of one of the data sets.
    """
    try:
        folder, manifest = data_of(trainer, digest, elsewhere)
        facts = manifest.tokenizer
        if facts.digest == BYTES:
            return ExportedTokenizer(_bytes(), "The tokenizer is the byte tokenizer.", facts)
        if facts.name.endswith(".json"):
            files = _hugging_face(folder, manifest, trainer.model.sequence_length)
            return ExportedTokenizer(files, f"The tokenizer is {facts.name} from {folder.uri}.", facts)
    except (InvalidInput, StorageError) as error:
        if trainer.model.vocab_size != 256:
            return ExportedTokenizer({}, f"No tokenizer is written: {error}")
        return ExportedTokenizer(_bytes(), f"The byte tokenizer is assumed, because vocabSize is 256: {error}")
    message = (
        f"No tokenizer is written, because transformers has none for {facts.name}: encode with tiktoken, as "
        f"config.json says. Token {facts.separator} ends a document."
    )
    return ExportedTokenizer({}, message, facts)


def data_of(trainer: TrainerConfig, digest: str, elsewhere: str) -> tuple[ObjectPrefix, DataManifest]:
    """Return the folder and the manifest of the data that a run has consumed. See `exported` for the arguments.

    The data sets of a mixture have the same tokenizer. For a mixture, the result is the first data set with a chat
    template, or the first data set if there is no chat template.

    Raises:
        InvalidInput: When the data are missing, or are not those of the run.
    """
    sources = trainer.data.sources
    folders = [
        ObjectPrefix(uri, IMPATIENCE) for uri in ([elsewhere] if elsewhere else [source.uri for source in sources])
    ]
    manifests = [_manifest(folder) for folder in folders]
    if len(manifests) == len(sources):
        digests, weights = [manifest.digest for manifest in manifests], [source.weight for source in sources]
        if data_manifests.digest_of(trainer.data.documents.name, digests, weights) != digest:
            raise InvalidInput(
                f"{folders[0].uri} is not the data of this run: name the folder of the run's data with --data."
            )
    pairs = list(zip(folders, manifests, strict=True))
    return next((pair for pair in pairs if pair[1].chats and pair[1].chats.template), pairs[0])


def _manifest(folder: ObjectPrefix) -> DataManifest:
    text = folder.get(data_manifests.NAME)
    if text is None:
        raise InvalidInput(f"{folder.uri} has no {data_manifests.NAME}: name the folder of the run's data with --data.")
    return data_manifests.parse(text, folder.uri)


def tokenizer_json(folder: ObjectPrefix, facts: TokenizerFacts) -> bytes:
    """Return the tokenizer.json of a folder of data.

    Raises:
        InvalidInput: When the file is missing, or is not the one that the data were built with.
    """
    return _checked(folder, FILE, facts.digest, f"{facts.name} (digest {facts.digest})")


def template_file(folder: ObjectPrefix, chats: ChatFacts) -> bytes:
    """Return the file of a folder of data that contains the chat template, and the special tokens by name.

    Raises:
        InvalidInput: When the file is missing, or is not the one that the data were built with.
    """
    return _checked(folder, CONFIG, chats.template, f"the one of digest {chats.template}")


def _checked(folder: ObjectPrefix, name: str, digest: str, wanted: str) -> bytes:
    text = folder.get(name)
    if text is None or data_manifests.short_digest(text) != digest:
        raise InvalidInput(
            f"{folder.uri}/{name} is {'missing' if text is None else 'not the one that the data were built with'}: put "
            f"{wanted} there, or into the folder of the exported model."
        )
    return text


def _hugging_face(folder: ObjectPrefix, manifest: DataManifest, length: int) -> dict[str, object]:
    """Return the files of a tokenizer that is a Hugging Face tokenizer.json, with the chat template of the data.

    Raises:
        InvalidInput: When a file is missing, or is not the one that the data were built with.
    """
    content = json.loads(tokenizer_json(folder, manifest.tokenizer))
    plain = {"truncation": None, "padding": None, "post_processor": None}
    has_template = manifest.chats is not None and manifest.chats.template
    more = json.loads(template_file(folder, manifest.chats)) if manifest.chats and has_template else {}
    more["eos_token"] = _text_of(content, manifest.tokenizer.separator)
    return {FILE: {**content, **plain}, CONFIG: _config(length, **more)}


def _text_of(content: Mapping[str, Any], token: int) -> str:
    """Return the text of a token, given its id."""
    added_texts = {token_entry["id"]: token_entry["content"] for token_entry in content["added_tokens"]}
    vocabulary = content["model"]["vocab"]  # the vocabulary maps text to id, or lists pairs of text and score
    texts = enumerate(text for text, _ in vocabulary) if isinstance(vocabulary, list) else _turned(vocabulary)
    return str({**dict(texts), **added_texts}[token])


def _turned(vocabulary: Mapping[str, int]) -> list[tuple[int, str]]:
    return [(number, text) for text, number in vocabulary.items()]


def _config(length: int, **more: object) -> dict[str, object]:
    return {"tokenizer_class": CLASS, "model_max_length": length, "clean_up_tokenization_spaces": False, **more}


def _bytes() -> dict[str, object]:
    """Return a Hugging Face tokenizer whose tokens are bytes. The id of a token is the value of its byte.

    The tokenizer is a byte-level BPE without merges. Such a tokenizer represents each byte as a character. As in the
    tokenizer of GPT-2, a printable byte is represented by itself, and any other byte by a character from 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    vocabulary = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": vocabulary, "merges": []},
    }  # fmt: skip
    return {FILE: tokenizer, CONFIG: _config(10**9)}
