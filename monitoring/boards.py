"""Content of a dashboard in Python, and its conversion to Grafana's JSON."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator
from dataclasses import dataclass

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import prometheus as prometheus_models

SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
TAG = "concertina"
WIDTH, HEIGHT, STAT_HEIGHT = 24, 8, 4
Builder = stat.Panel | table.Panel | timeseries.Panel


class Kind(enum.Enum):
    LINES = enum.auto()
    STACKED = enum.auto()
    STAT = enum.auto()
    TABLE = enum.auto()
    """Table of the values at one time: a row for each set of labels, and a column for each query, named by its
    legend."""


class Unit(enum.StrEnum):
    """Units of values, by Grafana's names for them."""

    NUMBER = "short"
    RATIO = "percentunit"
    SECONDS = "s"
    BYTES = "bytes"
    BYTES_PER_SECOND = "Bps"
    PER_SECOND = "ops"
    HERTZ = "hertz"
    CELSIUS = "celsius"
    WATTS = "watt"


@dataclass(frozen=True)
class Query:
    expression: str
    legend: str
    """Legend, with labels as {{label}}."""


@dataclass(frozen=True)
class Panel:
    title: str
    """Title, by which runbooks name the panel."""
    description: str
    queries: tuple[Query, ...]
    unit: Unit = Unit.NUMBER
    kind: Kind = Kind.LINES
    width: int = 8
    """Width, of 24 columns."""


@dataclass(frozen=True)
class Section:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Variable:
    """Variable of a dashboard, with which the user chooses one value of a label that the given series have."""

    name: str
    series: str
    several: bool = False


@dataclass(frozen=True)
class Board:
    name: str
    description: str
    variables: tuple[Variable, ...]
    sections: tuple[Section, ...]

    @property
    def panels(self) -> Iterator[Panel]:
        for section in self.sections:
            yield from section.panels


def as_json(board: Board) -> str:
    """Return the dashboard as JSON. The same dashboard always gives the same bytes."""
    made = (
        dashboard.Dashboard(f"Concertina / {board.name}")
        .uid(f"concertina-{board.name}")
        .description(board.description)
        .tags([TAG])
        .timezone("browser")
        .time("now-3h", "now")
        .refresh("30s")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .link(
            dashboard.DashboardLink("Concertina").type(models.DashboardLinkType.DASHBOARDS).tags([TAG]).keep_time(True)
        )
        .with_variable(dashboard.DatasourceVariable("datasource").type("prometheus").label("Prometheus"))
    )
    for variable in board.variables:
        made = made.with_variable(_variable(variable))
    number = 0
    for section in board.sections:
        made = made.with_row(dashboard.Row(section.title))
        for panel in section.panels:
            number += 1
            made = made.with_panel(_panel(panel).id(number))
    return json.dumps(made.build(), cls=JSONEncoder, indent=1) + "\n"


def _variable(variable: Variable) -> dashboard.QueryVariable:
    made = (
        dashboard.QueryVariable(variable.name)
        .query(f"label_values({variable.series}, {variable.name})")
        .datasource(SOURCE)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
    )
    return made.multi(True).include_all(True).all_value(".+") if variable.several else made


def _panel(panel: Panel) -> Builder:
    made: Builder
    if panel.kind is Kind.STAT:
        made = stat.Panel().height(STAT_HEIGHT).graph_mode(common_models.BigValueGraphMode.NONE)
    elif panel.kind is Kind.TABLE:
        made = _as_columns(table.Panel().height(HEIGHT), panel)
    else:
        made = timeseries.Panel().height(HEIGHT).fill_opacity(10).show_points(common_models.VisibilityMode.NEVER)
        if panel.kind is Kind.STACKED:
            made = made.fill_opacity(60).stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL))
    made = made.title(panel.title).description(panel.description).datasource(SOURCE).span(panel.width).unit(panel.unit)
    for number, query in enumerate(panel.queries):
        made = made.with_target(_target(query, panel.kind).ref_id(_letter(number)))
    return made


def _target(query: Query, kind: Kind) -> prometheus.Dataquery:
    made = prometheus.Dataquery().expr(query.expression).legend_format(query.legend)
    if kind is Kind.TABLE:
        return made.instant().format(prometheus_models.PromQueryFormat.TABLE)
    return made.instant() if kind is Kind.STAT else made.range()


def _as_columns(made: table.Panel, panel: Panel) -> table.Panel:
    """Return the panel as one table with the results of all its queries as columns.

    The legends of the queries are the column names.
    """
    several = len(panel.queries) > 1
    names = {f"Value #{_letter(n)}" if several else "Value": query.legend for n, query in enumerate(panel.queries)}
    organized = {"excludeByName": {"Time": True, "__name__": True}, "renameByName": names}
    return made.with_transformation(models.DataTransformerConfig("merge", options={})).with_transformation(
        models.DataTransformerConfig("organize", options=organized)
    )


def _letter(number: int) -> str:
    return chr(ord("A") + number)
