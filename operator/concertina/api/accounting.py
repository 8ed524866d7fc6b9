"""Status classes for accounting: the job's time by class, the cost of each incident, and the total cost."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from concertina.api.model import StatusModel

Timestamp = Annotated[str, Field(max_length=40, json_schema_extra={"format": "date-time"})]
Name = Annotated[str, Field(max_length=253)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]
Word = Annotated[str, Field(max_length=128)]
Money = Annotated[float, Field(ge=0)]

MOST_CAUSES, MOST_INCIDENTS = 32, 20


class RecoveryTime(StatusModel):
    """Part of recoverySeconds that one cause took."""

    cause: Word = Field(
        description="Reason in one word, as in the condition Ready and in events. Other adds up all rarer reasons."
    )
    times: Count = Field(default=0, description="Number of incidents.")
    seconds: Seconds = Field(
        default=0.0,
        description="Seconds of recoverySeconds. A lower bound for a script that reports no steps: its recovery counts "
        "until its workers run.",
    )


class Goodput(StatusModel):
    """Time since the job's creation, by class.

    Each second is in exactly one class: the classes add up to the time between metadata.creationTimestamp and `at`.
    """

    percent: float | None = Field(
        default=None,
        ge=0,
        le=100,
        description="The goodput: productive and communication time as a percentage of all time except suspended and "
        "unknown time. Absent while the goodput is unknown: workers have run, and no step was reported.",
    )
    productive_seconds: Seconds = Field(default=0.0, description="Computing on samples for the first time.")
    communication_seconds: Seconds = Field(
        default=0.0, description="Training waited for collectives that no computation hid."
    )
    straggler_seconds: Seconds = Field(default=0.0, description="Ranks waited for the slowest of them.")
    input_seconds: Seconds = Field(default=0.0, description="Training waited for data.")
    checkpoint_seconds: Seconds = Field(default=0.0, description="Training waited for snapshots and checkpoints.")
    evaluation_seconds: Seconds = Field(default=0.0, description="Evaluating.")
    compile_seconds: Seconds = Field(default=0.0, description="Compiling the model.")
    unknown_seconds: Seconds = Field(
        default=0.0,
        description="Workers of a script run, and the script has not reported a step.",
    )
    startup_seconds: Seconds = Field(
        default=0.0,
        description="From the time when all pods run to the first step, in the first round and after a suspension.",
    )
    recovery_seconds: Seconds = Field(
        default=0.0, description="From a failure or a change of members to the next step, by cause in `recovery`."
    )
    replayed_seconds: Seconds = Field(default=0.0, description="Training again the steps whose result was lost.")
    waiting_seconds: Seconds = Field(default=0.0, description="Waiting for pods, nodes or quota.")
    stalled_seconds: Seconds = Field(default=0.0, description="Waiting for you to act.")
    suspended_seconds: Seconds = Field(default=0.0, description="The job is suspended or is being suspended.")
    tokens_per_second: Seconds | None = Field(
        default=None,
        description="Useful tokens per second: tokens that this job has trained on, each counted once, divided by all "
        "its time except suspensions. Absent: tokens are not known.",
    )
    recovery: tuple[RecoveryTime, ...] = Field(
        default=(), max_length=MOST_CAUSES, description="recoverySeconds by cause."
    )
    at: Timestamp | None = Field(default=None, description="Counted up to this time.")

    @property
    def by_class(self) -> dict[str, float]:
        """Seconds of each class of time, keyed by the name of the class, such as `productive`."""
        return {name.removesuffix(SUFFIX): getattr(self, name) for name in CLASSES}

    def with_more(self, name: str, seconds: float) -> Goodput:
        """Return the same time with more seconds of the class `name`, such as `waiting_seconds`."""
        spent = self.model_copy(update={name: getattr(self, name) + seconds})
        before, after = (sum(part.by_class.values()) - part.suspended_seconds for part in (self, spent))
        percent = self.percent if self.percent is None or not after else self.percent * before / after
        return spent.model_copy(update={"percent": percent})


SUFFIX = "_seconds"
CLASSES = tuple(name for name in Goodput.model_fields if name.endswith(SUFFIX))
"""Fields of Goodput that each contain the seconds of one class of time."""


class Incident(StatusModel):
    """A time without training that began with a failure or a planned change, and its cost."""

    at: Timestamp = Field(description="When training stopped.")
    round: Count = Field(default=0, description="The round that it ended.")
    cause: Word = Field(description="In one word.")
    replica: Name = Field(
        default="", description="The replica that failed or leaves; empty if no single replica caused it."
    )
    node: Name = Field(default="", description="Its node.")
    seconds: Seconds = Field(default=0.0, description="Seconds until the next step, including the wait for capacity.")
    at_least: bool = Field(
        default=False,
        description="Whether `seconds` and `cost` are lower bounds: the script reports no steps, so `seconds` ends "
        "when its workers run, before the next step.",
    )
    steps_replayed: Count = Field(default=0, description="Steps that were trained again.")
    replayed_seconds: Seconds = Field(default=0.0, description="Seconds that these steps took the first time.")
    cost: Money | None = Field(default=None, description="Cost of both for all replicas at that time, by spec.price.")


class Cost(StatusModel):
    """Cost of the job, computed with the value of spec.price at each time."""

    currency: Word = Field(default="", description="As in spec.price.")
    total: Money = Field(default=0.0, description="So far.")
    replica_hours: Money = Field(
        default=0.0, description="Hours during which replicas had a node, including standby replicas."
    )
    spot_replica_hours: Money = Field(
        default=0.0, description="The part of these hours on nodes that are labelled as spot nodes."
    )
    per_million_tokens: Money | None = Field(
        default=None,
        description="Cost of a million tokens, each counted once. Absent: the number of tokens is not known.",
    )


class RoundWaits(StatusModel):
    """Waiting times that the workers of the current round had reported when the job's time was last counted."""

    round: Count = Field(default=0, description="Round that is counted.")
    checkpoint_seconds: Seconds = Field(default=0.0, description="As in goodput.")
    stalled_seconds: Seconds = Field(default=0.0, description="For data.")
    evaluation_seconds: Seconds = Field(default=0.0, description="As in goodput.")
    compile_seconds: Seconds = Field(default=0.0, description="As in goodput.")
    communication_seconds: Seconds = Field(default=0.0, description="As in goodput.")
    straggler_seconds: Seconds = Field(default=0.0, description="As in goodput.")
