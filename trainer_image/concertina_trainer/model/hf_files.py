"""Names of the tensors of a transformers model in its safetensors files, and their positions in the model's tensors.

transformers renames tensors when it reads a file, and merges the tensors of a layer's experts. This module applies the
same rules (`transformers.conversion_mapping`) to names and shapes alone, so that each rank reads only its own part.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from concertina_state.errors import InvalidInput
from concertina_state.format.read_plan import Box
from concertina_trainer.format.hf_names import Place
from concertina_trainer.model.hf import tied_names

RENAMINGS = ("WeightRenaming", "PrefixChange")
"""Classes of rules that rename a tensor independently of other tensors."""
STACK, JOIN = ("MergeModulelist", 0), ("Concatenate", 1)
"""Operations of a rule: STACK stacks the tensors of all experts, and JOIN joins the rows of several such stacks.

Each operation is given as the name of a class of transformers, and the dimension on which the class operates.
"""
IN_EACH_EXPERT = "*."
"""Part of a pattern of names that matches the number of an expert, and the dot after it."""


class HfFiles:
    """Mapping between the tensors of a module of transformers and the tensors in files."""

    def __init__(self, module: Any) -> None:
        """Read the rules of transformers for this module, which is neither sharded nor wrapped."""
        from transformers.conversion_mapping import get_model_conversion_mapping

        self._kind, self._prefix = type(module).__name__, module.base_model_prefix
        self._shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict(keep_vars=True).items()}
        self._tied = tied_names(module)
        self._ignored = (*(module._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$")
        self._renamings, self._converters = _divided(get_model_conversion_mapping(module))
        current = _divided(get_model_conversion_mapping(module, add_legacy=False))
        # A prefix that transformers may remove is not written, as by save_pretrained.
        self._written_renamings = [
            rule.reverse_transform() for rule in reversed(current.renamings) if type(rule).__name__ == RENAMINGS[0]
        ]
        self._writing = [rule.reverse_transform() for rule in current.converters if _merges_experts(rule)]

    def place(self, name: str) -> Place | None:
        """Return the Place of a file's tensor in the module, or None if transformers ignores the tensor.

        The names in some files lack the prefix of the base model, or have it although the module has none. This method
        accepts both. For a tied weight, the result is the same under each of its names.

        Raises:
            InvalidInput: When the module has no such tensor and transformers does not ignore it, or when transformers
                converts it in a way that is not supported here.
        """
        from transformers.core_model_loading import rename_source_key

        own, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, self._shapes)
        if own not in self._shapes and name in self._shapes:
            own, pattern = name, None
        if own not in self._shapes:
            if any(re.search(ignored, own) for ignored in self._ignored):
                return None
            raise InvalidInput(
                f"the tensor {name:.100} is not a weight of {self._kind} of transformers: trainer.model.hf reads only "
                "files that transformers reads for this model."
            )
        if pattern is None or own in self._tied:
            self._check_renamings(name)
            return Place(self._tied.get(own, own))
        return self._place_of_expert(name, own, pattern)

    def names(self, own: str) -> list[tuple[str, Place]]:
        """Return the names under which files contain a tensor of the module, each with the file's part of the tensor.

        For tensors that the trainer can also read, these are the names that transformers' `save_pretrained` writes.

        Raises:
            InvalidInput: When transformers would not read the tensor again.
        """
        published = [_renamed(name, self._written_renamings) for name in self._of_experts(own) or [own]]
        for names in (published, [own]):
            places = [(name, place) for name in names if (place := self._place_or_none(name)) and place.name == own]
            if len({place.box for _, place in places}) == len(names):
                return places
        raise InvalidInput(
            f"{own} of {self._kind} can't be exported, because transformers would not read it again under the name "
            f"{published[0]}."
        )

    def _of_experts(self, own: str) -> list[str]:
        """Return the names in files of the tensors of each expert, before renaming.

        Without experts, the result is empty.
        """
        for rule in self._writing:
            name, pattern = rule.rename_source_key(own)
            if pattern is not None:
                first, *_ = patterns = rule.target_patterns
                return [
                    name.replace(first, each, 1).replace("*", str(number))
                    for number in range(self._shapes[own][0])
                    for each in patterns
                ]
        return []

    def _place_or_none(self, name: str) -> Place | None:
        try:
            return self.place(name)
        except InvalidInput:
            return None

    def _place_of_expert(self, name: str, own: str, pattern: str) -> Place:
        """Return the Place of one expert's tensor, or of a part of it, in the tensor of all experts.

        Raises:
            InvalidInput: When transformers converts the tensor in another way, or when it belongs to no expert.
        """
        rule = next(rule for rule in self._converters if pattern in rule.source_patterns)
        if not _merges_experts(rule):
            operations = ", ".join(f"{operation!r:.60}" for operation in rule.operations)
            raise InvalidInput(
                f"transformers converts {name:.100} for {self._kind} by {operations}, and trainer.model.hf supports "
                "only one tensor for each expert: load the model with transformers and save it by "
                "save_pretrained(FOLDER, save_original_format=False)."
            )
        self._check_renamings(name)
        numbered = pattern.replace(IN_EACH_EXPERT, r"(\d{1,9})\.")
        match = re.search(rf"{numbered}(?!\w)", _renamed(name, self._renamings))
        whole, parts = self._shapes[own], rule.source_patterns
        if match is None or int(match[1]) >= whole[0] or whole[1] % len(parts):
            raise InvalidInput(f"the tensor {name:.100} is not of an expert of {self._kind}: {own} is {list(whole)}.")
        rows = whole[1] // len(parts)
        offsets = (int(match[1]), parts.index(pattern) * rows, *(0 for _ in whole[2:]))
        return Place(own, whole, Box(offsets, (1, rows, *whole[2:])))

    def _check_renamings(self, name: str) -> None:
        """Check that the rules that rename a tensor do not depend on other tensors.

        Raises:
            InvalidInput: When a rule may depend on other tensors.
        """
        for rule in self._renamings:
            name, pattern = rule.rename_source_key(name)
            if pattern is not None and type(rule).__name__ not in RENAMINGS:
                raise InvalidInput(
                    f"transformers renames {name:.100} for {self._kind} by {type(rule).__name__}, which "
                    "trainer.model.hf does not support."
                )


class _Rules(NamedTuple):
    renamings: Sequence[Any]
    converters: Sequence[Any]


def _divided(rules: Iterable[Any]) -> _Rules:
    """Return the rules that only rename tensors, and those that convert them."""
    from transformers.core_model_loading import WeightConverter

    every = list(rules)
    return _Rules(
        [rule for rule in every if not isinstance(rule, WeightConverter)],
        [rule for rule in every if isinstance(rule, WeightConverter)],
    )


def _merges_experts(rule: Any) -> bool:
    """Return whether a WeightConverter only puts the tensors of experts next to each other."""
    operations = [(type(operation).__name__, getattr(operation, "dim", None)) for operation in rule.operations]
    patterns = rule.source_patterns
    return (
        operations in ([STACK], [STACK, JOIN])
        and (len(patterns) == 1 or JOIN in operations)
        and len(rule.target_patterns) == 1
        and all(pattern.count(IN_EACH_EXPERT) == 1 for pattern in patterns)
        and not any(getattr(operation, "num_shards_attribute", None) for operation in rule.operations)
    )


def _renamed(name: str, renamings: Iterable[Any]) -> str:
    for rule in renamings:
        name, _ = rule.rename_source_key(name)
    return name
