"""spec.trainer.data and .evaluation: the data to train on and to evaluate."""

from __future__ import annotations

import enum
from typing import Annotated

from pydantic import Field

from concertina_data.order import GROUPS, MOST_GROUPS
from concertina_protocol.quantities import parse_quantity
from concertina_state.format.shardfile import LONGEST_SET_NAME, MOST_SETS
from concertina_trainer.config.section import ENTRYPOINT, Section, SectionRule

DATA_URI = r"^((s3|gs|az)://.+|file:///.+|/.+)$"
"""Regular expression, for RE2 and Python, of the location of data."""


SET_NAME = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
"""Regular expression, for RE2 and Python, of the name of an evaluation set."""

SIZE = r"^[0-9]{1,18}([.][0-9]{1,3})?([kMGT]|[KMGT]i)?$"
"""Regular expression, for RE2 and Python, of a quantity of bytes."""


class DocumentMode(enum.StrEnum):
    joined = "Joined"
    masked = "Masked"
    packed = "Packed"
    bucketed = "Bucketed"


class Balancing(enum.StrEnum):
    even = "Even"
    speed = "Speed"


class MixtureSource(Section):
    """One of several data sets that a job trains on together, with its weight."""

    uri: str = Field(
        min_length=1,
        max_length=1024,
        pattern=DATA_URI,
        description="Folder with manifest.json and the shards that it lists.",
    )
    weight: int = Field(
        ge=1,
        le=1000,
        description="This data set's share of the sequences is its weight divided by the sum of all weights.",
    )


class DataConfig(Section):
    """Training data: one or more data sets, each of them token shards and a manifest from `concertina data build`."""

    uri: str | None = Field(
        default=None,
        min_length=1,
        max_length=1024,
        pattern=DATA_URI,
        description="Folder that `concertina data build` wrote: an absolute path, file:///folder, "
        "s3://bucket/folder, gs://bucket/folder or az://container/folder. Absent: mixture "
        "lists several data sets.",
    )
    mixture: Annotated[list[MixtureSource], Field(max_length=32)] = Field(
        default=[],
        description="Data sets that are trained on together, in exact proportions. A data set that has "
        "been read to its end starts again in another order.",
    )
    documents: DocumentMode = Field(
        default=DocumentMode.joined,
        description="How documents become sequences. Joined concatenates documents and cuts them. Masked "
        "also hides documents from each other. Packed puts whole documents together. Bucketed gives "
        "each its own sequence. Packed and Bucketed need `concertina data pack`.",
    )
    balance: Balancing = Field(
        default=Balancing.even,
        description="How a batch is divided among workers. Even gives every worker the same number of "
        "sequences. Speed gives slower workers fewer, down to half. Choose Speed if nodes "
        "differ in speed.",
    )
    groups: int = Field(
        default=GROUPS,
        ge=1,
        le=MOST_GROUPS,
        description="Number of groups into which the shards are divided. Each batch has the same number of sequences "
        "of each group, so a node reads only the groups that its workers train on. A run can't change it, because it "
        "determines the order of the data.",
    )
    transform: str | None = Field(
        default=None,
        max_length=256,
        pattern=ENTRYPOINT,
        description="Your own function that transforms each sample, as package.module:function, in the image of the "
        "container trainer (docs/typed-data.md). Absent: samples are not transformed.",
    )
    cache_size: str = Field(
        default="4Gi",
        max_length=24,
        pattern=SIZE,
        description="Largest amount of training data from object stores that a node caches on its disk, "
        "from 16Mi to 16Ti.",
    )

    @property
    def sources(self) -> list[MixtureSource]:
        return [MixtureSource(uri=self.uri, weight=1)] if self.uri is not None else self.mixture

    @property
    def separates_documents(self) -> bool:
        """Whether attention must separate the documents of a sequence."""
        return self.documents in (DocumentMode.masked, DocumentMode.packed)

    @property
    def cache_bytes(self) -> int:
        return int(parse_quantity(self.cache_size))

    RULES = (
        SectionRule(
            "cacheSize",
            "isQuantity(self.cacheSize) && quantity(self.cacheSize).compareTo(quantity('16Mi')) >= 0 && "
            "quantity(self.cacheSize).compareTo(quantity('16Ti')) <= 0",
            lambda data: 16 << 20 <= data.cache_bytes <= 16 << 40,
            "cacheSize must be from 16Mi to 16Ti",
        ),
        SectionRule(
            "uri",
            "has(self.uri) != (has(self.mixture) && size(self.mixture) > 0)",
            lambda data: (data.uri is None) == bool(data.mixture),
            "set either uri or mixture; mixture needs at least one data set",
        ),
    )


class EvaluationSet(Section):
    """A named set of documents on which the loss is measured apart from other sets."""

    name: str = Field(
        min_length=1,
        max_length=LONGEST_SET_NAME,
        pattern=SET_NAME,
        description="Name of the set in the status and in metrics.",
    )
    uri: str = Field(
        min_length=1,
        max_length=1024,
        pattern=DATA_URI,
        description="Folder that `concertina data build` wrote, with the tokenizer of the training data.",
    )


class StoppingConfig(Section):
    """End of a run whose evaluation loss does not improve any more."""

    patience: int = Field(
        ge=1, le=1000, description="Evaluations in a row without an improvement after which the run is complete."
    )
    least_improvement: float = Field(
        default=0.0,
        ge=0,
        le=1000,
        description="An evaluation is an improvement if its loss is lower by more than this than that of the last "
        "improvement.",
    )


class EvaluationConfig(Section):
    """Evaluation of the loss on documents that are not used for training."""

    every_steps: int = Field(
        default=500,
        ge=1,
        le=1000000000,
        description="Steps between evaluations. The last step is always followed by an evaluation.",
    )
    sequences: int = Field(
        default=512,
        ge=1,
        le=16777216,
        description="Number of sequences of each set that an evaluation reads. It always reads the same ones.",
    )
    sets: Annotated[list[EvaluationSet], Field(max_length=MOST_SETS)] = Field(
        default=[],
        description="Sets to evaluate, each with a loss of its own. The loss of the first set is the run's evaluation "
        "loss. Absent: one set of the documents that `concertina data build --validation` set aside.",
    )
    ema: bool = Field(
        default=False,
        description="Evaluates the average of weights that optimizer.emaDecay keeps, not the weights.",
    )
    stopping: StoppingConfig | None = Field(
        default=None,
        description="Ends the run early, as complete, if the evaluation loss does not improve any more. Absent: the "
        "run has all its steps.",
    )

    RULES = (
        SectionRule(
            "sets",
            "!has(self.sets) || self.sets.all(a, self.sets.exists_one(b, b.name == a.name))",
            lambda evaluation: len({one.name for one in evaluation.sets}) == len(evaluation.sets),
            "each of evaluation.sets needs a name of its own",
        ),
    )
