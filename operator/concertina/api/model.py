"""Base classes of the API's models: camelCase names in manifests, snake_case names in Python, immutable objects."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class Model(BaseModel):
    """Base class for parts of the spec. An unknown field is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=to_camel, populate_by_name=True)


class StatusModel(BaseModel):
    """Base class for parts of the status. Unknown fields, which a newer operator may have written, are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, alias_generator=to_camel, populate_by_name=True)

    def manifest(self) -> dict[str, Any]:
        """Return the manifest for the API server. Fields with their default value are left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)


class Verbatim(BaseModel):
    """Base class for parts of a Kubernetes object. Fields that the class does not define are kept unchanged."""

    model_config = ConfigDict(extra="allow", frozen=True)

    def manifest(self) -> dict[str, Any]:
        """Return the manifest with only the fields that the user wrote."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)
