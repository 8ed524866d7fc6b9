"""Base classes of the API's models: camelCase in manifests, snake_case in Python, immutable."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class Model(BaseModel):
    """A part of the spec: a field that is not here is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=to_camel, populate_by_name=True)


class StatusModel(BaseModel):
    """A part of the status: a field that a newer operator wrote is ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, alias_generator=to_camel, populate_by_name=True)

    def manifest(self) -> dict[str, Any]:
        """Return the manifest for the API server, without fields that have their default: absence means the default."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)


class Verbatim(BaseModel):
    """A part of a Kubernetes object of which only some fields matter here: all others are kept as they are."""

    model_config = ConfigDict(extra="allow", frozen=True)

    def manifest(self) -> dict[str, Any]:
        """Return the manifest as it was written."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)
