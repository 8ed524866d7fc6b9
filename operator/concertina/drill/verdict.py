"""From what was seen in a drill to a verdict. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from concertina_protocol.log_lines import RoundStarted


@dataclasses.dataclass(frozen=True)
class Expect:
    """What a scenario promises. `None` where it promises nothing."""

    seconds: float
    """Most seconds from the injection to the first step after it."""
    new_round: bool | None = True
    """Whether a new round is needed; with False the same pods go on, with None either may be."""
    replayed: int | None = None
    """Most steps that are trained again."""
    counted: bool | None = None
    """Whether it counts against failurePolicy.maxRestarts."""
    reasons: tuple[str, ...] = ()
    """Words of which one is said in the cause."""
    checkpoint: bool = False
    """Whether a checkpoint made after the healing is waited for."""
    named: bool = False
    """Whether the victim is to be named as a straggler, instead of a first step."""
    told: tuple[str, ...] = ()
    """Words of the condition Stalled or Degraded, all of which are to be read while the fault lasts, and none in the
    end."""


@dataclasses.dataclass(frozen=True)
class Seconds:
    """From the injection on; None where it was not seen or there was nothing to see."""

    claimed: float | None = None
    """The operator saw it and claimed a round."""
    committed: float | None = None
    """The members of the new round were committed."""
    first_step: float | None = None
    """The end of the first step after the injection."""
    named: float | None = None
    """The status named the victim as a straggler."""
    told: float | None = None
    """The condition Stalled or Degraded told of it."""
    whole: float | None = None
    """As many replicas as before at work again, the healing of the fault included."""
    checkpoint: float | None = None
    """A checkpoint that was made after the healing."""


@dataclasses.dataclass(frozen=True)
class DrillObservation:
    """What was seen. Worlds are replicas at work: before the injection, in the first world after it, at the end."""

    seconds: Seconds
    before: int = 0
    after: int = 0
    end: int = 0
    rounds: int = 0
    """Rounds committed between the injection and the first step after it."""
    rounds_in_all: int = 0
    """Rounds committed between the injection and the end of the drill."""
    replayed: int = 0
    counted: int = 0
    """Failures that used up the budget."""
    cause: str = ""
    """The operator's words."""
    start: RoundStarted | None = None
    """By the trainer's log."""
    same_pods: bool = True
    steps_meanwhile: int = 0
    missing: str = ""
    """What was waited for in vain; empty where all came."""


@dataclasses.dataclass(frozen=True)
class DrillVerdict:
    """What the drill prints."""

    scenario: str
    job: str
    done: str
    """The injection, in a sentence."""
    passed: bool
    reasons: tuple[str, ...]
    """Why it did not pass, a sentence each."""
    positions: str
    seen: DrillObservation


def evaluate(scenario: str, job: str, done: str, expect: Expect, seen: DrillObservation) -> DrillVerdict:
    """PASS where nothing speaks against it."""
    reasons = tuple(_broken(expect, seen))
    return DrillVerdict(scenario, job, done, not reasons, reasons, positions(seen), seen)


def positions(seen: DrillObservation) -> str:
    """Whether samples were skipped: a round must go on with the very step after the one that its state is of."""
    start = seen.start
    if start is None:
        return "not touched: no new round" if seen.same_pods and not seen.rounds else "can't be told: no trainer's log"
    exact = "exact" if start.step == start.restored_step + 1 else "NOT exact"
    return f"{exact}: round {start.round} went on with step {start.step}, its state is the {start.state}"


def _broken(expect: Expect, seen: DrillObservation) -> Iterator[str]:
    if seen.missing:
        yield seen.missing
        return
    first, what = seen.seconds.first_step, "the first step was"
    if expect.named:
        first, what = seen.seconds.named, "the straggler's name was"
    if first is None or first > expect.seconds:
        when = "not seen" if first is None else f"seen after {first:.2f} s"
        yield f"{what} {when}, promised are {expect.seconds:g} s"
    if expect.new_round and not seen.rounds:
        yield "no new round was started"
    if expect.new_round is False and seen.rounds_in_all:
        yield f"{seen.rounds_in_all} new rounds were started, and none was needed: {seen.cause}"
    if expect.new_round is False and not seen.same_pods:
        yield "pods of the job were replaced, and none had to be"
    if expect.replayed is not None and seen.replayed > expect.replayed:
        yield f"{seen.replayed} steps were trained again, at most {expect.replayed} are promised"
    if expect.counted is not None and bool(seen.counted) != expect.counted:
        words = "counted against maxRestarts, though it is not the job's fault" if seen.counted else "was not counted"
        yield f"the failure {words}"
    if expect.reasons and not any(word in seen.cause for word in expect.reasons):
        yield f"the cause should name {' or '.join(expect.reasons)}; the operator says: {seen.cause or 'nothing'}"
    if seen.end < seen.before:
        yield f"the job ended the drill with {seen.end} of {seen.before} replicas"
    if positions(seen).startswith("NOT"):
        yield positions(seen)
