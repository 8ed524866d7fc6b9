"""Alerts: each fires exactly where it should, according to promtool with the chart's rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from monitoring.__main__ import RULES
from monitoring.alerts import ALERTS
from monitoring.promql import grown_from_nothing

from builders.prometheus import needed, promtool
from concertina.diagnosis.problems import Problem

pytestmark = needed

JOB = 'namespace="n", trainingjob="j"'
TRAINS = {'phase{phase="Training"}': "1x300"}
Series = Mapping[str, str]
"""Values for each minute in promtool's notation, by name and labels, without the job's labels, which are added."""


def spent(**classes: float) -> Series:
    """Return series in which these seconds of each minute go to each class of time, for five hours."""
    rest = {"productive": 60 - sum(classes.values()), "waiting": 0, **classes}
    return {f'time_seconds_total{{class="{name}"}}': f"0+{seconds:g}x300" for name, seconds in rest.items()}


@dataclass(frozen=True)
class Case:
    fires: Series
    summary: str
    silent: tuple[Series, ...]
    fires_too: tuple[Series, ...] = ()
    """Times at which the alert also fires, with the same message."""
    at: str = "2h"
    labels: Mapping[str, str] = field(default_factory=lambda: {"namespace": "n", "trainingjob": "j"})


AGES = {
    "checkpoint_waited_seconds": "0+60x300",
    "checkpoint_interval_seconds": "600x300",
}
NO_AGE = {"checkpoint_interval_seconds": "600x300"}
MEMORY = 'worker_resident_memory_bytes{replica="j-0-1"}'
FAILURES = "failures_in_window"
SHIPPED, REFUSED = "checkpoint_shards_shipped_total", "checkpoint_storage_failures_total"


def gpu(number: int) -> str:
    return f'gpu_utilization_ratio{{replica="j-0-{number}", gpu="{number}"}}'


CASES = {
    Problem.LOW_MFU: Case(
        TRAINS | {"mfu_ratio": "0.123x300"},
        "n/j: training uses only 12.3% of the devices' peak arithmetic",
        (
            TRAINS | {"mfu_ratio": "0.2x300"},
            TRAINS | {"mfu_ratio": "0.4x100 0.1x19"},
            {"mfu_ratio": "0.1x300", 'phase{phase="Complete"}': "1x300"},
        ),
    ),
    Problem.LOW_GPU_UTILIZATION: Case(
        TRAINS | {gpu(0): "0.3x300", gpu(1): "0.4x300", gpu(2): "0x300"},
        "n/j: the GPUs run kernels for only 40% of the time",
        (
            TRAINS | {gpu(0): "0x300", gpu(1): "0.9x300"},
            TRAINS | {gpu(0): "0.3x300", "mfu_ratio": "0.3x300"},
            {gpu(0): "0.1x300", 'phase{phase="Complete"}': "1x300"},
        ),
    ),
    Problem.EXPOSED_COMMUNICATION: Case(
        spent(communication=24),
        "n/j: 40% of the training time is spent waiting for collectives",
        (spent(communication=14), spent(communication=24) | {'phase{phase="Suspended"}': "1x300"}),
    ),
    Problem.INPUT_BOTTLENECK: Case(
        spent(input=12),
        "n/j: 20% of the training time is spent waiting for data",
        (spent(input=5), spent(input=2, waiting=35), spent(input=20, waiting=35), spent(input=20, recovery=35)),
    ),
    Problem.STRAGGLER: Case(
        spent(straggler=15),
        "n/j: 25% of the training time is spent waiting for the slowest rank",
        (spent(straggler=5),),
    ),
    Problem.SLOW_CHECKPOINT: Case(
        spent(checkpoint=6),
        "n/j: 10% of the training time is spent waiting for snapshots and checkpoints",
        (spent(checkpoint=2.5),),
    ),
    Problem.CHECKPOINT_OLD: Case(
        TRAINS | AGES,
        "n/j: no checkpoint for 2h 0m 0s of training",
        (
            TRAINS | AGES | {"checkpoint_waited_seconds": "1800x300"},
            TRAINS | {"checkpoint_waited_seconds": "0+60x300"},
            TRAINS | AGES | {"checkpoint_age_seconds": "50000+60x300", "checkpoint_waited_seconds": "60x300"},
            TRAINS | AGES | {'stalled{reason="StorageUnavailable"}': "1x300"},
            AGES | {'phase{phase="Complete"}': "1x300"},
        ),
        fires_too=(TRAINS | NO_AGE | spent(productive=60),),
    ),
    Problem.STORAGE_REFUSES: Case(
        {'stalled{reason="StorageUnavailable"}': "1x300"},
        "n/j: durable storage accepts no checkpoints",
        (
            {'stalled{reason="DataUnavailable"}': "1x300"},
            {'stalled{reason="StorageUnavailable"}': "_x117 1x200"},
            {REFUSED: "0+1x300", SHIPPED: "0+1x300"},
            {REFUSED: "7x300", SHIPPED: "0x300"},
        ),
        fires_too=({REFUSED: "0+1x300", SHIPPED: "5x300"},),
    ),
    Problem.FREQUENT_FAILURES: Case(
        spent(recovery=6, replayed=9),
        "n/j: 25% of the time is spent on recovery and repeated steps",
        (spent(recovery=2, replayed=3), spent(waiting=30), spent(unknown=58, recovery=2)),
    ),
    Problem.HANG: Case(
        {f'{FAILURES}{{reason="Hang"}}': "1x300"},
        "n/j: training hung",
        ({f'{FAILURES}{{reason="WorkerFailed"}}': "1x300"},),
        fires_too=({'stalled{reason="Hang"}': "1x300"}, {f'{FAILURES}{{reason="CollectiveHang"}}': "1x300"}),
    ),
    Problem.RESTARTS_NEARLY_USED: Case(
        {"restarts_remaining": "10x100 1x200", f'{FAILURES}{{reason="OutOfMemory"}}': "9x300"},
        "n/j: the job fails after 1 more failures",
        (
            {"restarts_remaining": "2x300", f'{FAILURES}{{reason="OutOfMemory"}}': "8x300"},
            {"restarts_remaining": "1x300"},
            {"restarts_remaining": "0x300", f'{FAILURES}{{reason="x"}}': "9x300", 'phase{phase="Failed"}': "1x300"},
        ),
    ),
    Problem.WORLD_BELOW_MINIMUM: Case(
        {"ready_replicas": "4x100 1x200", "min_replicas": "2x300"},
        "n/j: only 1 replicas train, fewer than its minimum",
        (
            {"ready_replicas": "2x300", "min_replicas": "2x300"},
            {"ready_replicas": "4x115 0x4 4x200", "min_replicas": "2x300"},
            {"ready_replicas": "0x300", "min_replicas": "2x300", 'phase{phase="Suspended"}': "1x300"},
        ),
    ),
    Problem.LOSS_NAN: Case(
        {'training_loss{replica="j-0-1"}': f"2.5x100 {'NaN ' * 60}"},
        "n/j: the loss is not a number",
        ({'training_loss{replica="j-0-1"}': "2.5x300"}, {f'{FAILURES}{{reason="LossSpike"}}': "1x300"}),
        fires_too=({f'{FAILURES}{{reason="LossNotFinite"}}': "1x300"},),
    ),
    Problem.LOSS_SPIKE: Case(
        TRAINS | {"loss": "2x100 5x200"},
        "n/j: the loss has jumped",
        (TRAINS | {"loss": "2x100 3.9x200"}, TRAINS | {"loss": "10-0.05x199"}, TRAINS | {"loss": "2x108 9x200"}),
        at="1h50m",
        fires_too=({f'{FAILURES}{{reason="LossSpike"}}': "1x300"},),
    ),
    Problem.DATA_DIGEST_MISMATCH: Case(
        {'stalled{reason="DataChanged"}': "1x300", 'phase{phase="Failed"}': "1x300"},
        "n/j: the data differ from those that the saved state was trained on",
        ({'stalled{reason="InvalidInput"}': "1x300"},),
        fires_too=({f'{FAILURES}{{reason="DataChanged"}}': "1x300"},),
    ),
    Problem.CORRUPT_STATE: Case(
        {f'{FAILURES}{{reason="SilentCorruption"}}': "0x100 2x200"},
        "n/j: stored bytes are damaged",
        ({f'{FAILURES}{{reason="NodeLost"}}': "2x300"},),
        fires_too=({'stalled{reason="Damaged"}': "1x300"},),
    ),
    Problem.MEMORY_GROWS: Case(
        {MEMORY: "1073741824+17895697x300"},  # One GiB, and another one within the hour.
        "n/j: the memory of the workers in j-0-1 grows, now 3GiB",
        ({MEMORY: "3000000000x300"}, {MEMORY: "1000000000+100000000x70 8000000000x230"}, {MEMORY: "1e9+1e5x300"}),
        labels={"namespace": "n", "trainingjob": "j", "replica": "j-0-1"},
    ),
    Problem.OPERATOR_ISOLATED: Case(
        {"operator_isolated": "0x100 1x200"},
        "The operator can't reach most agents",
        ({"operator_isolated": "0x300"}, {"operator_isolated": "0x119 1x200"}),
        labels={},
    ),
    Problem.OPERATOR_DOWN: Case(
        {"leader": "0x300"},
        "No operator is active, or Prometheus can't reach any",
        ({"leader": "1x300"}, {"leader": "1x117 0x200"}),
        labels={},
    ),
    Problem.TRACKER_UNREACHABLE: Case(
        {"tracker_unreachable": "0x60 1x240"},
        "n/j: the tracker accepts no records",
        ({"tracker_unreachable": "0x300"}, {"tracker_unreachable": "0x115 1x200"}),
    ),
    Problem.JOB_FAILED: Case(
        {'stalled{reason="ReachedMaxRestarts"}': "1x300", 'phase{phase="Failed"}': "1x300"},
        "n/j has failed: ReachedMaxRestarts",
        (
            {'stalled{reason="Damaged"}': "1x300", 'phase{phase="Failed"}': "1x300"},
            {'stalled{reason="PodRefused"}': "1x300", 'phase{phase="Stalled"}': "1x300"},
        ),
        labels={"namespace": "n", "trainingjob": "j", "reason": "ReachedMaxRestarts"},
    ),
    Problem.JOB_STALLED: Case(
        {'stalled{reason="PodRefused"}': "1x300", 'phase{phase="Stalled"}': "1x300"},
        "n/j needs a person: PodRefused",
        (
            {'stalled{reason="StorageUnavailable"}': "1x300", 'phase{phase="Training"}': "1x300"},
            {'stalled{reason="ReachedMaxRestarts"}': "1x300", 'phase{phase="Failed"}': "1x300"},
            {'stalled{reason="PodRefused"}': "_x117 1x200", 'phase{phase="Stalled"}': "1x300"},
        ),
        labels={"namespace": "n", "trainingjob": "j", "reason": "PodRefused"},
    ),
}
"""Cases of each problem."""


def _named(series: str) -> str:
    """Return the series with its full name, with the job's labels."""
    if series == "leader":
        return 'leader_election_master_status{name="concertina-operator"}'
    if series == "operator_isolated":
        return f"concertina_{series}"
    name, _, labels = series.removesuffix("}").partition("{")
    pods = name.startswith(("gpu_", "training_", "worker_", "checkpoint_sh", "checkpoint_storage"))
    prefix = "concertina_" if pods else "concertina_trainingjob_"
    return f"{prefix}{name}{{{', '.join(filter(None, (JOB, labels)))}}}"


@dataclass(frozen=True)
class Question:
    """Question whether one alert fires at one time."""

    problem: Problem
    case: Case
    series: Series
    fires: bool = False

    def test(self) -> dict[str, Any]:
        """Return the question as promtool expects it."""
        alert = next(each for each in ALERTS if each.problem is self.problem)
        annotations = alert.rule()["annotations"] | {"summary": self.case.summary}
        expected = {"exp_labels": {**self.case.labels, **alert.rule()["labels"]}, "exp_annotations": annotations}
        found = {
            "eval_time": self.case.at,
            "alertname": alert.name,
            "exp_alerts": [expected] if self.fires else [],
        }
        return {
            "name": f"{alert.name} {'fires' if self.fires else 'does not fire'}: {dict(self.series)}",
            "interval": "1m",
            "input_series": [{"series": _named(name), "values": values} for name, values in self.series.items()],
            "alert_rule_test": [found],
        }


def check(folder: Path, rules: Path, tests: Sequence[Mapping[str, Any]]) -> None:
    path = folder / "test.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": tests}))
    done = promtool("test", "rules", path)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()


def alone(folder: Path, problem: Problem) -> Path:
    """Return the chart's rules without the other alerts, because evaluating all of them takes ten times as long."""
    rules = yaml.safe_load(RULES.read_text())
    for group in rules["groups"]:
        group["rules"] = [rule for rule in group["rules"] if rule.get("alert", "") in ("", f"Concertina{problem}")]
    path = folder / "rules.yaml"
    path.write_text(yaml.safe_dump(rules))
    return path


def test_what_begins_within_a_window_has_grown_from_nothing_where_its_job_was_there(tmp_path: Path) -> None:
    """The counter of a job's first recovery by a cause grows from nothing.

    That of a job that was just found does not.
    """
    seconds = "recovery_seconds_total"
    series = {
        "concertina_trainingjob_info{" + JOB + "}": "1x60",
        f'concertina_trainingjob_{seconds}{{{JOB}, cause="first"}}': "_x30 7x30",
        f'concertina_trainingjob_{seconds}{{{JOB}, cause="again"}}': "3x30 5x30",
        'concertina_trainingjob_info{namespace="n", trainingjob="new"}': "_x30 1x30",
        f'concertina_trainingjob_{seconds}{{namespace="n", trainingjob="new", cause="old"}}': "_x30 9x30",
    }
    expression = grown_from_nothing(f"concertina_trainingjob_{seconds}", "cause", window="5m")
    wanted = [
        {"labels": f'{{{JOB}, cause="first"}}', "value": 7},
        {"labels": f'{{{JOB}, cause="again"}}', "value": 2},
    ]
    asked = {"expr": expression, "eval_time": "33m", "exp_samples": wanted}
    given = [{"series": name, "values": values} for name, values in series.items()]
    check(tmp_path, RULES, [{"interval": "1m", "input_series": given, "promql_expr_test": [asked]}])


def test_promtool_finds_the_rules_in_order() -> None:
    done = promtool("check", "rules", "--lint=all", "--lint-fatal", RULES)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()


def test_every_alert_has_a_case() -> None:
    assert CASES.keys() == set(Problem)


@pytest.mark.parametrize("problem", CASES)
def test_it_fires_where_it_should_and_not_where_it_should_not(problem: Problem, tmp_path: Path) -> None:
    case = CASES[problem]
    asked = [Question(problem, case, series, fires=True) for series in (case.fires, *case.fires_too)]
    asked += [Question(problem, case, series) for series in case.silent]
    check(tmp_path, alone(tmp_path, problem), [question.test() for question in asked])


def test_a_healthy_run_raises_none(tmp_path: Path) -> None:
    series = TRAINS | spent(communication=6, input=1, checkpoint=1, straggler=1, evaluation=2, recovery=0.5)
    series |= {"mfu_ratio": "0.42x300", "loss": "10-0.02x300", "restarts_remaining": "10x300", "leader": "1x300"}
    series |= {"ready_replicas": "4x300", "min_replicas": "2x300", "operator_isolated": "0x300", MEMORY: "3e9x300"}
    series |= {"checkpoint_waited_seconds": "300x300", "checkpoint_interval_seconds": "600x300"}
    asked = [Question(problem, case, series).test() for problem, case in CASES.items()]
    check(tmp_path, RULES, [asked[0] | {"alert_rule_test": [each for one in asked for each in one["alert_rule_test"]]}])
