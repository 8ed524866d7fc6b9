"""Differences between two consecutive reports of one agent, which are sent instead of whole reports.

The size of a difference depends only on the changes, and not on the number of members. A coordinator of a thousand
members therefore sends only a few hundred bytes per second (decision "Reports contain all fields").

The coordinator is the agent of rank 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Optional, Union

from concertina_protocol.codec.typed_json import ProtocolError
from concertina_protocol.messages.reports import MemberState, Progress, Report


@dataclasses.dataclass(frozen=True)
class ReportChange:
    """Difference between a report and the previous one.

    The operator's message Watch asks an agent for a stream of Reports. If its field `changes` is set, the agent sends
    the first Report whole, and then only differences. `report` is the new report, except that its field `members`
    contains only the changed members.
    """

    report: Report


def change(before: Report, after: Report) -> Union[Report, ReportChange]:
    """Return the difference from `before` to `after`.

    If the reports are of different rounds, return the whole report `after`.
    """
    members_before = before.members
    if _identity(before) != _identity(after) or members_before.keys() != after.members.keys():
        return after
    if members_before is after.members:
        return ReportChange(dataclasses.replace(after, members={}))
    members = {name: member for name, member in after.members.items() if members_before[name] != member}
    return ReportChange(dataclasses.replace(after, members=members))


def changed(before: Report, line: ReportChange) -> Report:
    """Return the report that follows `before`, after applying the difference `line`.

    Raises:
        ProtocolError: If the difference names a member or a round that is not in `before`.
    """
    after = line.report
    if _identity(before) != _identity(after) or not after.members.keys() <= before.members.keys():
        raise ProtocolError("a change that does not follow the previous report")
    members = {**before.members, **after.members} if after.members else before.members
    return dataclasses.replace(after, members=members)


def _identity(report: Report) -> object:
    return report.replica, report.instance, report.round, report.claim


def only_numbers(before: Report, after: Report) -> bool:
    """Return whether two reports differ only in numbers: those of the progress, and the steps of members.

    A report with only such differences need not be sent at once.
    """
    return (
        _urgent_part(before.progress) == _urgent_part(after.progress)
        and _same_members(before.members, after.members)
        and before == dataclasses.replace(after, progress=before.progress, members=before.members, busy=before.busy)
    )


def _urgent_part(progress: Optional[Progress]) -> object:
    """Return the values of `progress` that must be sent to the operator as soon as they change."""
    if progress is None:
        return None
    ends = progress.steps is not None and progress.step >= progress.steps
    return progress.phase, progress.first_step_at, ends


def _same_members(before: Mapping[str, MemberState], after: Mapping[str, MemberState]) -> bool:
    """Return whether the members in two reports are equal, apart from the steps that older agents report by member."""
    if before is after:
        return True
    return before.keys() == after.keys() and all(
        (old.instance, old.state, old.failure, old.notice, old.silent)
        == (new.instance, new.state, new.failure, new.notice, new.silent)
        for old, new in ((before[name], after[name]) for name in after)
    )
