"""All jobs in one table: those first that somebody should look at. Pure."""

from __future__ import annotations

import enum
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
"""By which Kueue knows the queue of any object."""


NO_GROUP = "(none)"
COLUMNS = (
    "Name", "Status", "World", "Progress", "ETA", "Loss", "Tokens/s", "Goodput", "Waited", "Cost", "Failures", "Age",
)  # fmt: skip


class AttentionLevel(enum.IntEnum):
    """What a job needs, the most first."""

    STALLED = 0
    """A person has to act."""
    WAITING = 1
    SLOW = 2
    """It trains, and too little of its time goes into new steps."""
    TRAINING = 3
    SUSPENDED = 4
    ENDED = 5


class RowOrder(enum.StrEnum):
    """Of the rows."""

    ATTENTION = "attention"
    GOODPUT = "goodput"
    COST = "cost"
    NAME = "name"


@dataclass(frozen=True)
class JobRow:
    """What is shown of one job."""

    namespace: str
    name: str
    labels: Mapping[str, str]
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
    """Percent, or None while it is unknown."""
    counted: bool
    """Whether the operator has counted the job's time."""
    waiting_seconds: float
    cost: float | None
    currency: str
    failures: int
    created: float
    """Unix seconds."""


def row(job: Raw) -> JobRow:
    status, meta = status_of(job), job["metadata"]
    progress, cost, attention = status.progress, status.cost, _attention(status)
    pace = (
        progress if attention in (AttentionLevel.SLOW, AttentionLevel.TRAINING) else None
    )  # who does not train has none
    return JobRow(
        namespace=meta["namespace"],
        name=meta["name"],
        labels=meta.get("labels") or {},
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
    """What its group is called. `by`: namespace, queue, or a label's key; empty: there are no groups."""
    return row.namespace if by == "namespace" else row.labels.get(QUEUE_LABEL if by == "queue" else by, "")


def _attention(status: JobStatus) -> AttentionLevel:
    if any(map(status.is_true, ENDED)):
        return AttentionLevel.ENDED
    if status.trouble:
        return AttentionLevel.STALLED
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
    """Within their groups, by name."""
    return sorted(rows, key=lambda row: (group(row, by), *_KEYS[order](row), row.namespace, row.name))


def as_json(row: JobRow, by: str = "") -> dict[str, JsonValue]:
    return {
        "namespace": row.namespace, "name": row.name, "group": group(row, by),
        "attention": row.attention.name.capitalize(), "status": row.word, "world": row.world,
        "replicas": row.replicas, "step": row.step, "percent": row.percent,
        "etaSeconds": row.eta_seconds, "loss": row.loss, "tokensPerSecond": row.tokens_per_second,
        "goodputPercent": row.goodput, "waitingSeconds": row.waiting_seconds, "cost": row.cost,
        "currency": row.currency, "failures": row.failures,
    }  # fmt: skip


def screen(
    rows: Sequence[JobRow], now: float, with_namespace: bool, by: str, height: int | None = None, trouble: str = ""
) -> RenderableType:
    """`rows` in their order. `now`: Unix seconds. `height`: lines that there are; what does not fit is counted.
    `trouble`: why they may be out of date."""
    table = Table(
        *([by.capitalize()] if by else []), *(["Namespace"] if with_namespace else []), *COLUMNS,
        box=None, header_style="bold", padding=(0, 2, 0, 0),
    )  # fmt: skip
    warning = [Text(f"Out of date, perhaps: {' '.join(trouble.split())}", style="red")] if trouble else []
    shown = rows if height is None else rows[: max(1, height - 3 - len(warning))]
    before: str | None = None
    for row in shown:
        here = group(row, by)
        first = [here or NO_GROUP if here != before else ""] if by else []
        table.add_row(*first, *([row.namespace] if with_namespace else []), *cells(row, now))
        before = here
    more = len(rows) - len(shown)
    return Group(Text(summary(rows), style="bold"), *warning, table, *([Text(f"and {more} more")] if more else []))


def cells(row: JobRow, now: float) -> list[str | Text]:
    """As COLUMNS names them. `now`: Unix seconds."""
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
    told = ", ".join(f"{count} {kind.name.lower()}" for kind, count in counts.items() if count)
    costs: dict[str, float] = {}
    for row in rows:
        if row.cost is not None:
            costs[row.currency] = costs.get(row.currency, 0.0) + row.cost
    money = "".join(f", {total:,.2f} {currency}".rstrip() for currency, total in sorted(costs.items()))
    return f"{amount(len(rows), 'job')}: {told}; {amount(sum(row.replicas for row in rows), 'replica')}{money}"
