"""Base class of the sections of `spec.trainer`.

Sections have camelCase names and reject unknown names. The API server and the trainer both check the rules of a
section.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic.alias_generators import to_camel

ENTRYPOINT = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"
"""Regular expression, for RE2 and Python, of the name of an object in Python code, as package.module:name."""


@dataclasses.dataclass(frozen=True)
class SectionRule:
    """Rule on several fields of a section, stated in CEL for the API server and in Python for the trainer."""

    field: str
    """Field that the API server's error message names."""
    cel: str
    holds: Callable[[Any], bool]
    message: str


class Section(BaseModel):
    """Section of `spec.trainer`."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        alias_generator=to_camel,
        populate_by_name=True,
        use_enum_values=False,
        json_schema_extra=lambda schema, section: section.add_rules(schema),
    )
    RULES: ClassVar[tuple[SectionRule, ...]] = ()

    @classmethod
    def add_rules(cls, schema: dict[str, Any]) -> None:
        """Add the section's rules to its schema for the CRD."""
        rules = [{"rule": rule.cel, "message": rule.message, "fieldPath": f".{rule.field}"} for rule in cls.RULES]
        if rules:
            schema["x-kubernetes-validations"] = rules

    @model_validator(mode="after")
    def _obeys(self) -> Self:
        for rule in self.RULES:
            if not rule.holds(self):
                raise ValueError(rule.message)
        return self
