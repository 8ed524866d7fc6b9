"""The lines of the bundled trainer's log that programs read too (decision "The trainer's log is text").

Any line may come from a user's script, or from a trainer of another version: what is not exactly one of these is none
of them. Standard library only, Python 3.9+."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Optional, Union

from concertina_protocol import RestoreSource

_MOST = 1000
"""Characters of a line: a longer one is not ours."""


@dataclasses.dataclass(frozen=True)
class RoundStarted:
    """Once a round, when its first step is done: the round is at work."""

    round: int
    step: int
    """The one that is done."""
    source: RestoreSource
    restored_step: int
    """Of the state that the round began with."""
    seconds: Mapping[str, float]
    """Where the time of its start went, by part."""
    at: float
    """Unix seconds."""

    @property
    def state(self) -> str:
        """As `memory of step 12`; from the seed it is `fresh of step 0`."""
        return f"{self.source.lower()} of step {self.restored_step}"

    def __str__(self) -> str:
        parts = "  ".join(f"{name} {value:.3f}" for name, value in self.seconds.items())
        return (
            f"round {self.round} is at work: step {self.step}, state from {self.state}; "
            f"seconds: {parts}; at {self.at:.4f}"
        )


@dataclasses.dataclass(frozen=True)
class StepDoneLine:
    step: int
    steps: int
    """Of the whole run."""
    loss: float
    rate: float
    """Learning rate."""
    tokens_per_second: float
    seconds: float
    """That this step took."""

    def __str__(self) -> str:
        return (
            f"step {self.step}/{self.steps}  loss {self.loss:.4f}  rate {self.rate:.2e}  "
            f"{self.tokens_per_second:,.0f} tokens/s  {self.seconds * 1000:.0f} ms"
        )


LogLine = Union[RoundStarted, StepDoneLine]

_RANK = r"(?:\[rank \d+\] )?"
"""Which the agent puts before a line where a replica has several workers."""
_PART = r"\w+ \d+\.\d+"
_NUMBER = r"(-?(?:[\d,.]+(?:e[-+]\d+)?|inf|nan))"
_ROUND = re.compile(
    rf"{_RANK}round (\d+) is at work: step (\d+), state from (\w+) of step (\d+); "
    rf"seconds: ((?:{_PART}(?:  {_PART})*)?); at (\d+\.\d+)",
    re.ASCII,
)
_STEP = re.compile(rf"{_RANK}step (\d+)/(\d+)  loss {_NUMBER}  rate {_NUMBER}  {_NUMBER} tokens/s  (\d+) ms", re.ASCII)


def parse(line: str) -> Optional[LogLine]:
    """What a line says, without its end; None where it is anything else."""
    if len(line) > _MOST:
        return None
    try:
        if found := _ROUND.fullmatch(line):
            return _round(*found.groups())
        if found := _STEP.fullmatch(line):
            return _step(*found.groups())
    except (ValueError, OverflowError):  # 1.2.3, or more digits than a float holds
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
