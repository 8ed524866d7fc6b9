"""Lines in the log of the bundled trainer that programs parse (decision "The trainer's log is text").

A line can also come from a user's script, or from a trainer of another version. Lines that do not match a format in
this module exactly are therefore ignored. The module uses the standard library only and supports Python 3.9 and later.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Optional, Union

from concertina_protocol import RestoreSource

_MOST = 1000
"""Maximum length of a line in characters. The bundled trainer's lines are shorter."""


@dataclasses.dataclass(frozen=True)
class RoundStarted:
    """Line that the trainer writes when the first step of a round has finished.

    A round is a period in which a fixed set of replicas trains.
    """

    round: int
    step: int
    """Number of the finished step."""
    source: RestoreSource
    restored_step: int
    """Step of the state from which the round began."""
    seconds: Mapping[str, float]
    """Seconds that each part of the round's start took."""
    at: float
    """Time of the line in Unix seconds."""

    @property
    def state(self) -> str:
        """Description of the restored state: `memory of step 12`, or `fresh of step 0` for an initialized state."""
        return f"{self.source.lower()} of step {self.restored_step}"

    def __str__(self) -> str:
        parts = "  ".join(f"{name} {value:.3f}" for name, value in self.seconds.items())
        return (
            f"round {self.round} is at work: step {self.step}, state from {self.state}; "
            f"seconds: {parts}; at {self.at:.4f}"
        )


@dataclasses.dataclass(frozen=True)
class StepDoneLine:
    """Line that the trainer writes after a step."""

    step: int
    steps: int
    """Number of steps in the whole run."""
    loss: float
    rate: float
    """Learning rate of the step."""
    tokens_per_second: float
    seconds: float
    """Duration of the step in seconds."""

    def __str__(self) -> str:
        return (
            f"step {self.step}/{self.steps}  loss {self.loss:.4f}  rate {self.rate:.2e}  "
            f"{self.tokens_per_second:,.0f} tokens/s  {self.seconds * 1000:.0f} ms"
        )


LogLine = Union[RoundStarted, StepDoneLine]

_RANK = r"(?:\[rank \d+\] )?"
"""Regular expression for the prefix of a worker's lines, which the agent adds if a replica has several workers."""
_PART = r"\w+ \d+\.\d+"
_NUMBER = r"(-?(?:[\d,.]+(?:e[-+]\d+)?|inf|nan))"
_ROUND = re.compile(
    rf"{_RANK}round (\d+) is at work: step (\d+), state from (\w+) of step (\d+); "
    rf"seconds: ((?:{_PART}(?:  {_PART})*)?); at (\d+\.\d+)",
    re.ASCII,
)
_STEP = re.compile(rf"{_RANK}step (\d+)/(\d+)  loss {_NUMBER}  rate {_NUMBER}  {_NUMBER} tokens/s  (\d+) ms", re.ASCII)


def parse(line: str) -> Optional[LogLine]:
    """Return the contents of a log line, or None if the line matches none of the formats.

    The line is given without its newline.
    """
    if len(line) > _MOST:
        return None
    try:
        if match := _ROUND.fullmatch(line):
            return _round(*match.groups())
        if match := _STEP.fullmatch(line):
            return _step(*match.groups())
    except (ValueError, OverflowError):  # for example 1.2.3, or more digits than a float can have
        pass
    return None


def _round(number: str, step: str, source: str, restored: str, parts: str, at: str) -> RoundStarted:
    words = parts.split()
    seconds = dict(zip(words[::2], map(float, words[1::2])))
    return RoundStarted(int(number), int(step), RestoreSource(source.capitalize()), int(restored), seconds, float(at))


def _step(step: str, steps: str, loss: str, rate: str, speed: str, milliseconds: str) -> StepDoneLine:
    return StepDoneLine(
        int(step), int(steps), float(loss), float(rate), float(speed.replace(",", "")), int(milliseconds) / 1000
    )
