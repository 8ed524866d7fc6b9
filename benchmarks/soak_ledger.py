"""Check of the steps that a job has trained, from its trainers' logs. Pure.

The log of a round contains its start (`round 3 is at work: step 13, state from memory of step 12; ...`), and then each
of its steps (`step 13/1000000 loss 5.5437 ...`). A step consumes the positions from (step - 1) * batch up to, but not
including, step * batch. The steps that lead to the final state over all rounds must therefore be 1, 2, ... without a
gap.
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
    """Step of the state from which the round started, or 0 for a new state."""
    steps: list[tuple[int, float]] = field(default_factory=list)
    """Steps with their losses, in the order of the log."""

    @property
    def last(self) -> int:
        return self.steps[-1][0] if self.steps else self.base


@dataclass(frozen=True)
class Verdict:
    wrong: tuple[str, ...]
    """Sentences about violations of exactly-once training."""
    trained: int
    """Last step."""
    replayed: int
    """Number of repeated steps."""
    unheard: int
    """Number of steps that are in no log, although a later round continued from them.

    A killed pod may lose its last lines.
    """
    worst_difference: float
    """Largest relative difference between the losses of a repeated step. Both losses are for the same samples."""


def rounds(logs: Iterable[Iterable[str]]) -> list[Round]:
    """Return all rounds in the logs, in order of their numbers.

    There is one log per container. A log that is reopened while its container is replaced contains the lines of the
    next container. A round that was read twice has the same start time in both logs and counts once. If two processes
    trained a round, it contains the steps of both.
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
    """Return the verdict on the rounds. `final` is the step of the durable checkpoint at the end."""
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
