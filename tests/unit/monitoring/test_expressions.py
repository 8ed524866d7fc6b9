"""Metrics in dashboards and alerts exist, and the files in the chart are those that the code makes."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from monitoring import alerts
from monitoring.__main__ import files
from monitoring.boards import WIDTH, Board, as_json
from monitoring.dashboards import DASHBOARDS
from monitoring.promql import LOST, TIME, TRAINING
from prometheus_client.metrics import MetricWrapperBase

from concertina.api.accounting import SUFFIX, Goodput
from concertina.controller.job_metrics import FAMILIES, JOB_LABELS
from concertina.metrics import REGISTRY
from concertina.plan.facts.decision import Phase
from concertina_agent.metrics import families

NAMES = re.compile(r"\b(?:concertina|controller_runtime|workqueue|rest_client|leader_election|process)_\w+")

SERIES = re.compile(rf"{re.escape(alerts.SPENT)}|ALERTS|{NAMES.pattern}")


def exposed() -> set[str]:
    """Return every name of a series."""
    operator = {(family.name, family.type) for family in REGISTRY.collect()}
    agents = {(each.name.removesuffix("_total"), each.kind.value) for each in families.ALL}
    suffixes = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    names = {f"{name}{suffix}" for name, kind in operator | agents for suffix in suffixes[kind]}
    return names | {each.asked_for for each in FAMILIES} | {alerts.SPENT}


def labels() -> dict[str, set[str]]:
    """Return the names of the labels of each series."""
    found = {name: {*collector._labelnames} for name, collector in REGISTRY._names_to_collectors.items()
             if isinstance(collector, MetricWrapperBase)}  # fmt: skip
    found |= {f"{name}_bucket": {*known, "le"} for name, known in found.items()}
    for family in families.ALL:
        own = {*families.POD_LABELS, *family.labels, families.WORKER_LABEL}
        found |= {family.name: own, f"{family.name}_bucket": {*own, "le"}}
    found |= {family.asked_for: {*JOB_LABELS, *family.labels} for family in FAMILIES}
    return found | {alerts.SPENT: found[TIME], "ALERTS": {*JOB_LABELS, "alertname", "alertstate"}}


def asked_labels(expression: str) -> Iterator[tuple[set[str], set[str]]]:
    """Yield labels by which the expression selects or groups, and the series of which at least one has each label."""
    bare = re.sub(r'"[^"]*"', '""', expression)
    for name, matchers in re.findall(r"([\w:]+)\{([^}]*)\}", bare):
        yield set(re.findall(r"(\w+)\s*[=!]", matchers)), {name}
    for grouping in re.finditer(r"\bby \(([^)]*)\) \(", bare):
        grouped, by = argument(bare[grouping.end() :]), set(re.findall(r"\w+", grouping[1]))
        found = set(SERIES.findall(grouped))
        for series in [found] if " by (" in grouped else [{each} for each in found]:
            yield by, series
        assert found, expression


def argument(text: str) -> str:
    """Return the beginning of a text, up to the parenthesis that closes the one before the text."""
    depths = itertools.accumulate({"(": 1, ")": -1}.get(character, 0) for character in text)
    return text[: next(at for at, depth in enumerate(depths) if depth < 0)]


def expressions() -> Iterator[tuple[str, str]]:
    """Yield the expressions by the name of the panel or rule."""
    for rule in (each for group in alerts.rules()["groups"] for each in group["rules"]):
        yield rule.get("alert", rule.get("record")), rule["expr"]
    for board in DASHBOARDS.values():
        for variable in board.variables:
            yield f"{board.name}: ${variable.name}", variable.series
        for panel in board.panels:
            for query in panel.queries:
                yield f"{board.name}: {panel.title}", query.expression


@pytest.mark.parametrize(("name", "expression"), list(expressions()))
def test_it_asks_for_metrics_that_there_are(name: str, expression: str) -> None:
    asked = set(NAMES.findall(expression.replace(alerts.SPENT, "")))
    assert not asked - exposed(), name


@pytest.mark.parametrize(("name", "expression"), list(expressions()))
def test_it_asks_by_labels_that_these_metrics_have(name: str, expression: str) -> None:
    known = labels()
    for asked, series in asked_labels(expression):
        assert asked <= set().union(*(known[each] for each in series)), (name, series)


def test_every_metric_of_ours_is_on_a_dashboard() -> None:
    """Nobody finds a metric that no dashboard shows."""
    shown = set(NAMES.findall(" ".join(expression for name, expression in expressions() if ": " in name)))
    ours = {name for name in exposed() if name.startswith("concertina_") and not name.endswith(("_sum", "_count"))}
    assert ours - shown == {
        "concertina_trainingjob_condition",  # The phase implies them.
        "concertina_training_samples",  # This is the number of steps times the batch.
        "concertina_training_run_tokens",
        "concertina_training_tokens_total",  # This follows from tokens per second.
        "concertina_training_steps",  # This is the job's own metric, which does not disappear with a pod.
        "concertina_training_validation_step",
        "concertina_training_validation_perplexity",  # This follows from the loss.
        "concertina_training_validation_bits_per_byte",
        "concertina_training_validation_set_bits_per_byte",
        "concertina_training_snapshot_age_seconds",
        "concertina_training_checkpoint_step",
    }


def test_classes_of_time_are_those_of_the_status() -> None:
    known = {name.removesuffix(SUFFIX) for name in Goodput.model_fields if name.endswith(SUFFIX)}
    assert {*TRAINING.split("|"), *LOST.split("|")} < known


def test_phases_are_those_of_jobs() -> None:
    everything = " ".join(expression for _, expression in expressions())
    asked = {word for words in re.findall(r'phase=~?"([\w|]+)"', everything) for word in words.split("|")}
    assert asked
    assert asked <= {phase.value for phase in Phase}


def test_all_ask_by_a_jobs_two_labels() -> None:
    assert JOB_LABELS == families.POD_LABELS[:2] == ("namespace", "trainingjob")


@pytest.mark.parametrize("board", DASHBOARDS.values(), ids=DASHBOARDS)
def test_panels_have_a_place_of_their_own_and_a_number(board: Board) -> None:
    panels = json.loads(as_json(board))["panels"]
    taken: set[tuple[int, int]] = set()
    for place in (panel["gridPos"] for panel in panels):
        columns, rows = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        cells = {(x, y) for x in columns for y in rows}
        assert not cells & taken
        assert columns.stop <= WIDTH
        taken |= cells
    shown = [panel for panel in panels if panel["type"] != "row"]
    assert [panel["title"] for panel in shown] == [panel.title for panel in board.panels]
    assert len({panel["id"] for panel in shown}) == len(shown) == len({panel.title for panel in board.panels})


@pytest.mark.parametrize(("path", "text"), files().items(), ids=[path.name for path in files()])
def test_the_chart_has_what_the_code_makes(path: Path, text: str) -> None:
    assert path.read_text() == text, "run `make monitoring`"
