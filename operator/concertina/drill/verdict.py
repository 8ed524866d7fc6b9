"""Verdict on the observations of a drill. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from concertina_protocol.log_lines import RoundStarted


@dataclasses.dataclass(frozen=True)
class Expect:
    """Promises of a scenario. None where it promises nothing."""

    seconds: float
    """Maximum time from the injection to the first step after it, in seconds."""
    new_round: bool | None = True
    """Whether a new round is needed. If False, the same pods continue. If None, both are allowed."""
    replayed: int | None = None
    """Maximum number of steps that are trained again."""
    counted: bool | None = None
    """Whether the failure counts against failurePolicy.maxRestarts."""
    reasons: tuple[str, ...] = ()
    """Words of which the cause must contain one."""
    checkpoint: bool = False
    """Whether to wait for a checkpoint after the fault is reverted."""
    named: bool = False
    """Whether the status must name the victim as a straggler, instead of reporting a first step."""
    told: tuple[str, ...] = ()
    """Words that the condition Stalled or Degraded must contain while the fault lasts, and no longer at the end."""


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Times since the injection, in seconds. None if the event was not observed or not expected."""

    claimed: float | None = None
    """Time until the operator noticed the fault and claimed a round."""
    committed: float | None = None
    """Time until the members of the new round were committed."""
    first_step: float | None = None
    """Time until the end of the first step after the injection."""
    named: float | None = None
    """Time until the status named the victim as a straggler."""
    told: float | None = None
    """Time until the condition Stalled or Degraded reported the fault."""
    whole: float | None = None
    """Time until the number of replicas from before the fault trained again, including the revert of the fault."""
    checkpoint: float | None = None
    """Time until a checkpoint that was made after the revert."""


@dataclasses.dataclass(frozen=True)
class DrillObservation:
    """Observations of a drill.

    `before`, `after` and `end` count the replicas that train: before the injection, in the first world after it, and at
    the end.
    """

    seconds: Seconds
    before: int = 0
    after: int = 0
    end: int = 0
    rounds: int = 0
    """Number of rounds committed between the injection and the first step after it."""
    rounds_in_all: int = 0
    """Number of rounds committed between the injection and the end of the drill."""
    replayed: int = 0
    counted: int = 0
    """Number of failures that count against failurePolicy.maxRestarts."""
    cause: str = ""
    """Cause as the operator reports it."""
    start: RoundStarted | None = None
    """Line about the first step of the new round in the trainer's log, or None."""
    same_pods: bool = True
    steps_meanwhile: int = 0
    missing: str = ""
    """Event that did not come in time, in a sentence. Empty if all events came."""


@dataclasses.dataclass(frozen=True)
class DrillVerdict:
    """Verdict that the drill prints."""

    scenario: str
    job: str
    done: str
    """The injection in a sentence."""
    passed: bool
    reasons: tuple[str, ...]
    """Reasons why the job did not pass, a sentence each."""
    positions: str
    seen: DrillObservation


def evaluate(scenario: str, job: str, done: str, expect: Expect, observation: DrillObservation) -> DrillVerdict:
    """Return the verdict. It is PASS if no promise is broken."""
    reasons = tuple(_broken_promises(expect, observation))
    return DrillVerdict(scenario, job, done, not reasons, reasons, positions(observation), observation)


def positions(observation: DrillObservation) -> str:
    """Return a sentence that says whether samples were skipped.

    A round must continue with the step that follows the step of its state.
    """
    start = observation.start
    if start is None:
        untouched = observation.same_pods and not observation.rounds
        return "not touched: no new round" if untouched else "can't be told: no trainer's log"
    exact = "exact" if start.step == start.restored_step + 1 else "NOT exact"
    return f"{exact}: round {start.round} went on with step {start.step}, its state is the {start.state}"


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
        yield f"{observation.rounds_in_all} new rounds were started, and none was needed: {observation.cause}"
    if expect.new_round is False and not observation.same_pods:
        yield "pods of the job were replaced, and none had to be"
    if expect.replayed is not None and observation.replayed > expect.replayed:
        yield f"{observation.replayed} steps were trained again, at most {expect.replayed} are promised"
    if expect.counted is not None and bool(observation.counted) != expect.counted:
        words = (
            "counted against maxRestarts, though it is not the job's fault"
            if observation.counted
            else "was not counted"
        )
        yield f"the failure {words}"
    if expect.reasons and not any(word in observation.cause for word in expect.reasons):
        cause = observation.cause or "nothing"
        yield f"the cause should name {' or '.join(expect.reasons)}; the operator says: {cause}"
    if observation.end < observation.before:
        yield f"the job ended the drill with {observation.end} of {observation.before} replicas"
    if positions(observation).startswith("NOT"):
        yield positions(observation)
