"""spec.trainer.data and .evaluation: what it is trained on, and measured by."""

from __future__ import annotations

import enum
from typing import Annotated

from pydantic import Field

from concertina_trainer.config.section import Rule, Section

DATA_URI = r"^((s3|gs|az)://.+|file:///.+|/.+)$"
"""Where data can be: a regular expression of RE2 and of Python."""


class DocumentMode(enum.StrEnum):
    joined = "joined"
    masked = "masked"
    packed = "packed"
    bucketed = "bucketed"


class Balancing(enum.StrEnum):
    even = "even"
    speed = "speed"


class MixtureSource(Section):
    """One of several data sets that are trained on together."""

    uri: str = Field(
        min_length=1, max_length=1024, pattern=DATA_URI, description="Folder of manifest.json and its shards."
    )
    weight: int = Field(
        ge=1, le=1000, description="Its share of the sequences is this number over the sum of all weights."
    )


class DataConfig(Section):
    """Token shards and their manifest, as `concertina data build` writes them: of one folder, or of a mixture."""

    uri: str | None = Field(
        default=None,
        min_length=1,
        max_length=1024,
        pattern=DATA_URI,
        description="Folder that `concertina data build` wrote: an absolute path, file:///folder, "
        "s3://bucket/folder, gs://bucket/folder or az://container/folder. Absent: mixture names several.",
    )
    mixture: Annotated[list[MixtureSource], Field(max_length=32)] = Field(
        default=[],
        description="Several data sets that are trained on together, in exact proportions. One that is used up "
        "begins anew, in another order.",
    )
    documents: DocumentMode = Field(
        default=DocumentMode.joined,
        description="How documents become sequences: joined cuts through them, masked too but keeps them from seeing "
        "each other, packed puts whole ones together, bucketed gives each a sequence of its own. The "
        "last two need `concertina data pack`.",
    )
    balance: Balancing = Field(
        default=Balancing.even,
        description="even gives every worker the same part of a batch; speed gives slower ones less, down to half. "
        "Set speed where nodes differ.",
    )
    cache_mebibytes: int = Field(
        default=4096,
        ge=16,
        le=16777216,
        description="Most MiB of training data from object stores that a node keeps on its disk.",
    )

    @property
    def sources(self) -> list[MixtureSource]:
        return [MixtureSource(uri=self.uri, weight=1)] if self.uri is not None else self.mixture

    RULES = (
        Rule(
            "uri",
            "has(self.uri) != (has(self.mixture) && size(self.mixture) > 0)",
            lambda data: (data.uri is None) == bool(data.mixture),
            "give either uri, or mixture with one data set or more",
        ),
    )


class EvaluationConfig(Section):
    """The loss on documents that were set aside: those of `concertina data build --validation`."""

    every_steps: int = Field(
        default=500, ge=1, le=1000000000, description="Steps between evaluations; the last step is evaluated too."
    )
    sequences: int = Field(
        default=512,
        ge=1,
        le=16777216,
        description="How many of the sequences that were set aside are evaluated, always the same ones.",
    )
