"""Evaluation of a drill's observations: whether the job has recovered as expected. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from concertina_protocol.log_lines import RoundStarted


@dataclasses.dataclass(frozen=True)
class Expect:
    """Recovery that a scenario expects of the job. A field that is None is not checked."""

    seconds: float
    """Maximum number of seconds from the injection to the next finished step."""
    new_round: bool | None = True
    """True if a new round must follow. If False, the same pods must continue. If None, both are allowed."""
    replayed: int | None = None
    """Maximum number of steps that may be repeated."""
    counted: bool | None = None
    """True if the failure must count against failurePolicy.maxRestarts."""
    reasons: tuple[str, ...] = ()
    """Possible causes of the failure. The cause that the operator reports must contain one of these texts."""
    checkpoint: bool = False
    """True if a new checkpoint must follow after the fault is reverted."""
    named: bool = False
    """True if the status must report the affected replica as a straggler.

    The first step after the injection is not checked then.
    """
    told: tuple[str, ...] = ()
    """Texts that the condition Stalled or Degraded must contain during the fault, and must not contain at the end."""


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Seconds from the injection of the fault to each event.

    A field is None if its event was not observed or not expected.
    """

    claimed: float | None = None
    """Seconds until the operator began a new round because of the fault."""
    committed: float | None = None
    """Seconds until the operator had chosen the members of the new round."""
    first_step: float | None = None
    """Seconds until the end of the first step after the injection."""
    named: float | None = None
    """Seconds until the status reported the affected replica as a straggler."""
    told: float | None = None
    """Seconds until the condition Stalled or Degraded reported the fault."""
    whole: float | None = None
    """Seconds until as many replicas trained as before the fault.

    They include the time before the fault was reverted.
    """
    checkpoint: float | None = None
    """Seconds until the first checkpoint after the fault was reverted."""


@dataclasses.dataclass(frozen=True)
class DrillObservation:
    """Observations of a drill.

    `before`, `after` and `end` are numbers of replicas that train: before the injection, in the first round after it,
    and at the end.

    A round is a period in which a fixed set of replicas trains.
    """

    seconds: Seconds
    before: int = 0
    after: int = 0
    end: int = 0
    rounds: int = 0
    """Number of rounds that began between the injection and the first step after it."""
    rounds_in_all: int = 0
    """Number of rounds that began between the injection and the end of the drill."""
    replayed: int = 0
    counted: int = 0
    """Number of new failures that count against failurePolicy.maxRestarts."""
    cause: str = ""
    """Cause of the new round or failure, as the operator reports it."""
    start: RoundStarted | None = None
    """Line about the first step of the new round in the trainer's log, or None if there is none."""
    same_pods: bool = True
    steps_meanwhile: int = 0
    missing: str = ""
    """Sentence about an expected event that did not happen in time. Empty if all of them happened."""


@dataclasses.dataclass(frozen=True)
class DrillVerdict:
    """Result of a drill: whether the job recovered as expected, with the observations."""

    scenario: str
    job: str
    done: str
    """Description of the injected fault."""
    passed: bool
    reasons: tuple[str, ...]
    """Sentences with the reasons why the drill failed."""
    positions: str
    seen: DrillObservation


def evaluate(scenario: str, job: str, done: str, expect: Expect, observation: DrillObservation) -> DrillVerdict:
    """Return the verdict. The drill passes if all expectations are met.

    Args:
        scenario: Name of the drill's scenario.
        job: Name of the job.
        done: Description of the injected fault.
        expect: Recovery that the scenario expects.
        observation: Observations of the drill.
    """
    reasons = tuple(_broken_promises(expect, observation))
    return DrillVerdict(scenario, job, done, not reasons, reasons, positions(observation), observation)


def positions(observation: DrillObservation) -> str:
    """Return a sentence that says whether samples were skipped or repeated.

    The first step of a round must be the step after the restored state's step.
    """
    start = observation.start
    if start is None:
        untouched = observation.same_pods and not observation.rounds
        return "not touched: no new round" if untouched else "unknown: there is no log of a trainer"
    exact = "exact" if start.step == start.restored_step + 1 else "NOT exact"
    return f"{exact}: round {start.round} continued with step {start.step} from the {start.state}"


def _broken_promises(expect: Expect, observation: DrillObservation) -> Iterator[str]:
    if observation.missing:
        yield observation.missing
        return
    seconds, subject = observation.seconds.first_step, "the first step was"
    if expect.named:
        seconds, subject = observation.seconds.named, "the straggler's name was"
    if seconds is None or seconds > expect.seconds:
        timing = "not seen" if seconds is None else f"seen after {seconds:.2f} s"
        yield f"{subject} {timing}, promised are {expect.seconds:g} s"
    if expect.new_round and not observation.rounds:
        yield "no new round was started"
    if expect.new_round is False and observation.rounds_in_all:
        yield f"{observation.rounds_in_all} new rounds were started, but none was needed: {observation.cause}"
    if expect.new_round is False and not observation.same_pods:
        yield "pods of the job were replaced, but none had to be"
    if expect.replayed is not None and observation.replayed > expect.replayed:
        yield f"{observation.replayed} steps were trained again, but at most {expect.replayed} are allowed"
    if expect.counted is not None and bool(observation.counted) != expect.counted:
        words = (
            "counted against maxRestarts, though it is not the job's fault"
            if observation.counted
            else "was not counted"
        )
        yield f"the failure {words}"
    if expect.reasons and not any(word in observation.cause for word in expect.reasons):
        cause = observation.cause or "nothing"
        yield f"the cause should contain {' or '.join(expect.reasons)}, and the operator reports: {cause}"
    if observation.end < observation.before:
        yield f"the job ended the drill with {observation.end} of {observation.before} replicas"
    if positions(observation).startswith("NOT"):
        yield positions(observation)
