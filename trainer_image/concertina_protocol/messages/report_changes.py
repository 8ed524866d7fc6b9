"""What has changed between two reports of one agent, so that a line costs what has happened and not what there is: a
coordinator of a thousand members says a few hundred bytes a second (decision "Reports are whole")."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Optional, Union

from concertina_protocol.codec.typed_json import ProtocolError
from concertina_protocol.messages.reports import MemberState, Progress, Report


@dataclasses.dataclass(frozen=True)
class ReportChange:
    """After a Report, on a Watch that asked for changes: `report` is the agent's next one, but its `members` are only
    those that are other than on the line before; the rest of them are as they were."""

    report: Report


def change(before: Report, after: Report) -> Union[Report, ReportChange]:
    """The line that tells `after` to who knows `before`; whole where the two are not of the same round."""
    known = before.members
    if _whose(before) != _whose(after) or known.keys() != after.members.keys():
        return after
    if known is after.members:
        return ReportChange(dataclasses.replace(after, members={}))
    members = {name: member for name, member in after.members.items() if known[name] != member}
    return ReportChange(dataclasses.replace(after, members=members))


def changed(before: Report, line: ReportChange) -> Report:
    """The report after that line. Raises ProtocolError where it speaks of what `before` does not know."""
    after = line.report
    if _whose(before) != _whose(after) or not after.members.keys() <= before.members.keys():
        raise ProtocolError("a change of another report than the one before")
    members = {**before.members, **after.members} if after.members else before.members
    return dataclasses.replace(after, members=members)


def _whose(report: Report) -> object:
    return report.replica, report.instance, report.round, report.claim


def only_numbers(before: Report, after: Report) -> bool:
    """Whether nothing has changed but numbers of progress and steps of members: news that can wait for a moment."""
    return (
        _outline(before.progress) == _outline(after.progress)
        and _same_members(before.members, after.members)
        and before == dataclasses.replace(after, progress=before.progress, members=before.members, busy=before.busy)
    )


def _outline(progress: Optional[Progress]) -> object:
    """What of it matters at once."""
    if progress is None:
        return None
    ends = progress.steps is not None and progress.step >= progress.steps
    return progress.phase, progress.first_step_at, ends


def _same_members(before: Mapping[str, MemberState], after: Mapping[str, MemberState]) -> bool:
    """But for their steps, of which older agents tell each."""
    if before is after:
        return True
    return before.keys() == after.keys() and all(
        (old.instance, old.state, old.failure, old.notice) == (new.instance, new.state, new.failure, new.notice)
        for old, new in ((before[name], after[name]) for name in after)
    )
