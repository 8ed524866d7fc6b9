"""Invariants of training that was undone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from concertina.api.status import JobStatus
from concertina_protocol import Undone
from concertina_protocol.messages.ranges import Ranges, united
from simulation.parts.clock import Violation
from simulation.parts.lineage import Lineage, check_lineage

if TYPE_CHECKING:
    from simulation.runs.world import World


class Rollbacks:
    def __init__(self, world: World) -> None:
        self.world = world
        self.recorded: list[Undone] = []
        """Rollbacks as the API server accepted them."""
        self.flips: dict[str, int] = {}
        """Number of times that digests have rightly named a replica, by replica."""
        self._corruptions = 0

    def found(self, replica: str) -> None:
        """Check that digests name a replica only if its bits were flipped."""
        self.flips[replica] = self.flips.get(replica, 0) + 1

    def status_written(self, old: JobStatus, new: JobStatus) -> None:
        """Check that undone states and skipped samples stay so, and that a rollback skips its cause and so ends.

        Raises:
            Violation: If it does not hold.
        """
        before, after = left_out(old), left_out(new)
        if united(before, after) != after:
            raise Violation(f"samples that were left out are not any more: {before}, then {after}")
        back = new.rollback
        if (back and back.round) == (old.rollback and old.rollback.round):
            return
        if back is None:
            raise Violation(f"it is forgotten that {old.rollback} was undone")
        corrupted = back.reason in ("SilentCorruption", "RolledBack")
        if before == after and not corrupted:
            raise Violation(f"training is undone for {back.reason}, and would come to the same again")
        if corrupted and sum(self.flips.values()) < self._corruptions + 1:
            raise Violation(f"training is undone for bits that nobody has flipped: {back}")
        self._corruptions += corrupted
        self.recorded.append(Undone(back.round, back.step))

    def restored(self, round: int, lineage: Lineage) -> None:
        """Check that no round continues from an undone state, and that each begins at the next sample not skipped.

        Raises:
            Violation: If it does not hold.
        """
        for undone in self.recorded:
            if round > undone.round and lineage.comes_from(undone):
                raise Violation(f"round {round} continues from a state that was undone ({undone}): {lineage}")

    def over(self, lineage: Lineage) -> None:
        """Check the run's last state.

        Raises:
            Violation: If it does not hold.
        """
        for undone in self.recorded:
            if lineage.comes_from(undone):
                raise Violation(f"complete with what was undone ({undone}): {lineage}")
        # A member that was unreachable until the end has not told the operator which samples it skipped.
        check_lineage(lineage, united(left_out(self.world.status), lineage.skipped))


def left_out(status: JobStatus) -> Ranges:
    return tuple((some.begin, some.end) for some in status.skipped)
