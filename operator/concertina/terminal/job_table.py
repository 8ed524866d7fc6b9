"""Table of several jobs, in which jobs that need attention come first. Pure."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import JsonValue
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from concertina.amounts import amount
from concertina.api.status import ENDED, ConditionType, JobStatus, unix_seconds
from concertina.durations import duration
from concertina.kube.parse.views import status_of
from concertina.kube.resources import Raw
from concertina.terminal import advice
from concertina.terminal.show import COLOURS, word

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""Label that names the Kueue queue of an object."""


QUEUED = "Queued"
"""Text for the phase of a job that waits for quota. Such a job has the same conditions as a suspended job."""
NO_GROUP = "(none)"
WAITS_FOR = "Waits for"
"""Header of the column that is added when jobs are grouped by queue."""
COLUMNS = (
    "Name", "Status", "World", "Progress", "ETA", "Loss", "Tokens/s", "Goodput", "Waited", "Cost", "Failures", "Age",
)  # fmt: skip


class AttentionLevel(enum.IntEnum):
    """Levels of how urgently a job needs attention. Smaller values are more urgent."""

    STALLED = 0
    """The job waits for action by a person."""
    WAITING = 1
    SLOW = 2
    """The job trains, but its goodput (the share of time in which it makes new steps) is low."""
    TRAINING = 3
    SUSPENDED = 4
    ENDED = 5


class RowOrder(enum.StrEnum):
    """Orders in which the rows of the table of jobs can be sorted."""

    ATTENTION = "attention"
    GOODPUT = "goodput"
    COST = "cost"
    NAME = "name"


@dataclass(frozen=True)
class JobRow:
    """Values that the table shows for one job."""

    namespace: str
    name: str
    labels: Mapping[str, str]
    queue: str
    """Kueue LocalQueue that admits the job's pods. If there is none yet, the queue in the job's label; otherwise empty.
    """
    waits_for: str
    """Reason why the queue admits fewer replicas than the job requests. Empty if the queue admits all of them."""
    attention: AttentionLevel
    word: str
    world: str
    replicas: int
    step: int | None
    percent: float | None
    eta_seconds: float | None
    loss: float | None
    tokens_per_second: float | None
    goodput: float | None
    """Goodput (share of time in which the job makes new steps) in percent, or None if it is unknown."""
    counted: bool
    """True if the operator has written a goodput into the job's status."""
    waiting_seconds: float
    cost: float | None
    currency: str
    failures: int
    created: float
    """Unix time of the job's creation in seconds."""


def row(job: Raw) -> JobRow:
    status, meta = status_of(job).counted_until(time.time()), job["metadata"]
    progress, cost, attention = status.progress, status.cost, _attention(status)
    # A job that does not train has no speed.
    pace = progress if attention in (AttentionLevel.SLOW, AttentionLevel.TRAINING) else None
    return JobRow(
        namespace=meta["namespace"],
        name=meta["name"],
        labels=meta.get("labels") or {},
        queue=status.queue.name if status.queue else (meta.get("labels") or {}).get(QUEUE_LABEL, ""),
        waits_for=status.queue.message if status.queue else "",
        attention=attention,
        word=word(status),
        world=status.world.size,
        replicas=status.replicas,
        step=progress.step if progress else None,
        percent=progress.percent if progress else None,
        eta_seconds=pace.eta_seconds if pace else None,
        loss=progress.loss if progress else None,
        tokens_per_second=pace.tokens_per_second if pace else None,
        goodput=status.goodput.percent,
        counted=status.goodput.at is not None,
        waiting_seconds=status.goodput.waiting_seconds + status.goodput.stalled_seconds,
        cost=cost.total if cost else None,
        currency=cost.currency if cost else "",
        failures=status.restarts.total,
        created=unix_seconds(meta["creationTimestamp"]),
    )


def group(row: JobRow, by: str) -> str:
    """Return the name of the group to which a job belongs, or an empty string if it belongs to none.

    Args:
        row: Row of the job.
        by: `namespace`, `queue`, or the key of a label. Empty for no groups.
    """
    match by:
        case "namespace":
            return row.namespace
        case "queue":
            return row.queue
        case _:
            return row.labels.get(by, "")


def _attention(status: JobStatus) -> AttentionLevel:
    if any(map(status.is_true, ENDED)):
        return AttentionLevel.ENDED
    if status.trouble:
        return AttentionLevel.STALLED
    if status.phase == QUEUED:
        return AttentionLevel.WAITING
    if status.is_true(ConditionType.SUSPENDED):
        return AttentionLevel.SUSPENDED
    if not status.is_true(ConditionType.RUNNING):
        return AttentionLevel.WAITING
    return AttentionLevel.SLOW if advice.is_slow(status) else AttentionLevel.TRAINING


_KEYS: dict[RowOrder, Callable[[JobRow], tuple[Any, ...]]] = {
    RowOrder.ATTENTION: lambda r: (r.attention, _least(r.goodput), -(r.cost or 0.0)),
    RowOrder.GOODPUT: lambda r: (_least(r.goodput),),
    RowOrder.COST: lambda r: (-(r.cost or 0.0),),
    RowOrder.NAME: lambda r: (),
}


def _least(goodput: float | None) -> float:
    return 100.0 if goodput is None else goodput


def ordered(rows: Iterable[JobRow], order: RowOrder, by: str = "") -> list[JobRow]:
    """Return the rows sorted by group, then by the given order, then by namespace and name."""
    return sorted(rows, key=lambda row: (group(row, by), *_KEYS[order](row), row.namespace, row.name))


def as_json(row: JobRow, by: str = "") -> dict[str, JsonValue]:
    return {
        "namespace": row.namespace, "name": row.name, "group": group(row, by),
        "attention": row.attention.name.capitalize(), "status": row.word, "world": row.world,
        "replicas": row.replicas, "step": row.step, "percent": row.percent,
        "etaSeconds": row.eta_seconds, "loss": row.loss, "tokensPerSecond": row.tokens_per_second,
        "goodputPercent": row.goodput, "waitingSeconds": row.waiting_seconds, "cost": row.cost,
        "currency": row.currency, "failures": row.failures, "queue": row.queue, "waitsFor": row.waits_for,
    }  # fmt: skip


def screen(
    rows: Sequence[JobRow], now: float, with_namespace: bool, by: str, height: int | None = None, trouble: str = ""
) -> RenderableType:
    """Return the table of jobs with a summary above it.

    Args:
        rows: Sorted rows.
        now: Unix time in seconds.
        with_namespace: Whether to show the namespaces.
        by: Grouping of the rows, as in `group`.
        height: Number of lines on the screen. Of the rows that don't fit, only the number is shown.
        trouble: Reason why the rows may be out of date. Empty if they are current.
    """
    table = Table(
        *([by.capitalize()] if by else []), *(["Namespace"] if with_namespace else []), *COLUMNS,
        *([WAITS_FOR] if by == "queue" else []),
        box=None, header_style="bold", padding=(0, 2, 0, 0),
    )  # fmt: skip
    warning = [Text(f"Out of date, perhaps: {' '.join(trouble.split())}", style="red")] if trouble else []
    shown = rows if height is None else rows[: max(1, height - 3 - len(warning))]
    previous_group: str | None = None
    for row in shown:
        row_group = group(row, by)
        first = [row_group or NO_GROUP if row_group != previous_group else ""] if by else []
        last = [row.waits_for] if by == "queue" else []
        table.add_row(*first, *([row.namespace] if with_namespace else []), *cells(row, now), *last)
        previous_group = row_group
    hidden_count = len(rows) - len(shown)
    return Group(
        Text(summary(rows), style="bold"),
        *warning,
        table,
        *([Text(f"and {hidden_count} more")] if hidden_count else []),
    )


def cells(row: JobRow, now: float) -> list[str | Text]:
    """Return the cells of a row, in the order of COLUMNS.

    Args:
        row: Row of the job.
        now: Unix time in seconds.
    """
    return [
        row.name,
        Text(row.word, style=COLOURS.get(row.word, "yellow")),
        row.world,
        f"{row.percent:.0f}%" if row.percent is not None else "" if row.step is None else f"step {row.step}",
        duration(row.eta_seconds) if row.eta_seconds is not None else "",
        f"{row.loss:.4g}" if row.loss is not None else "",
        f"{row.tokens_per_second:,.0f}" if row.tokens_per_second else "",
        _goodput(row),
        duration(row.waiting_seconds) if row.waiting_seconds >= 1 else "",
        f"{row.cost:,.2f} {row.currency}".strip() if row.cost is not None else "",
        str(row.failures),
        duration(now - row.created),
    ]


def _goodput(row: JobRow) -> str | Text:
    if row.goodput is None:
        return "unknown" if row.counted else ""
    return Text(f"{row.goodput:.0f}%", style="yellow" if row.attention is AttentionLevel.SLOW else "")


def summary(rows: Sequence[JobRow]) -> str:
    counts = {kind: sum(row.attention is kind for row in rows) for kind in AttentionLevel}
    levels = ", ".join(f"{count} {kind.name.lower()}" for kind, count in counts.items() if count)
    costs: dict[str, float] = {}
    for row in rows:
        if row.cost is not None:
            costs[row.currency] = costs.get(row.currency, 0.0) + row.cost
    money = "".join(f", {total:,.2f} {currency}".rstrip() for currency, total in sorted(costs.items()))
    return f"{amount(len(rows), 'job')}: {levels}; {amount(sum(row.replicas for row in rows), 'replica')}{money}"
