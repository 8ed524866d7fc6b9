"""Steps that a job has trained, from the lines of its trainers' logs. Pure.

The log of a round says where it starts (`round 3 is at work: step 13, state from memory of step 12; ...`), then lists
each of its steps (`step 13/1000000  loss 5.5437 ...`). A step consumes the positions [(step - 1) * batch, step *
batch), so the steps that lead to the final state, round after round, must be 1, 2, ... without a gap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from concertina_protocol import log_lines
from concertina_protocol.log_lines import RoundStarted, StepDoneLine


@dataclass
class Round:
    number: int
    base: int
    """Step of the state that the round began with; 0 for a fresh one."""
    steps: list[tuple[int, float]] = field(default_factory=list)
    """Pairs of step and loss, in order of the log."""

    @property
    def last(self) -> int:
        return self.steps[-1][0] if self.steps else self.base


@dataclass(frozen=True)
class Verdict:
    wrong: tuple[str, ...]
    """Violations of exactly-once training, a sentence each."""
    trained: int
    """Last step."""
    replayed: int
    """Number of steps that were trained again."""
    unheard: int
    """Steps that a later round continued from, but that no log line shows: the last lines of a killed pod."""
    worst_difference: float
    """Largest difference between the losses of a step that was trained twice, relative to the loss. Both saw the same
    samples."""


def rounds(logs: Iterable[Iterable[str]]) -> list[Round]:
    """Return all rounds that the logs tell of, in order of their numbers.

    There is one log for each container. A log that is opened again while its container is being replaced holds the
    lines of the next container. A round that was read twice begins at the same time in both, and counts once. A round
    that two processes trained has the steps of both.
    """
    round_by_start: dict[tuple[int, float], Round] = {}
    for lines in logs:
        read: dict[tuple[int, float], Round] = {}
        current: Round | None = None
        for line in map(log_lines.parse, lines):
            if isinstance(line, RoundStarted):
                current = read.setdefault((line.round, line.at), Round(line.round, line.restored_step))
            elif current is not None and isinstance(line, StepDoneLine):
                current.steps.append((line.step, line.loss))
        for start, part in read.items():
            if start not in round_by_start or len(part.steps) > len(round_by_start[start].steps):
                round_by_start[start] = part
    round_by_number: dict[int, Round] = {}
    for _, part in sorted(round_by_start.items()):
        if (known := round_by_number.setdefault(part.number, part)) is not part:
            known.steps += part.steps
    return list(round_by_number.values())


def judge(found: list[Round], final: int) -> Verdict:
    """Return the verdict on the rounds, given `final`, the step of the durable checkpoint at the end."""
    wrong, replayed, unheard, last = [], 0, 0, 0
    losses: dict[int, list[float]] = defaultdict(list)
    for each in found:
        steps = [step for step, _ in each.steps]
        if steps != list(range(each.base + 1, each.base + 1 + len(steps))):
            wrong.append(f"round {each.number} is based on step {each.base} and trained {_brief(steps)}")
        replayed += max(0, last - each.base)
        unheard += max(0, each.base - last)
        last = each.last
        for step, loss in each.steps:
            losses[step].append(loss)
    if last != final:
        wrong.append(f"the last step in the logs is {last}, the last checkpoint is of step {final}")
    again = [(max(values) - min(values)) / max(values) for values in losses.values() if len(values) > 1]
    return Verdict(tuple(wrong), final, replayed, unheard, max(again, default=0.0))


def _brief(steps: list[int]) -> str:
    return f"{steps[:3]} ... {steps[-3:]}" if len(steps) > 6 else str(steps)
