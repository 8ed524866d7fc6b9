"""Series of each job, as Prometheus reads them: they follow from its status alone, and disappear with the job."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from concertina.api.accounting import Goodput
from concertina.api.status import JobStatus, rfc3339
from concertina.controller import serving
from concertina.controller.job_metrics import MOST_REASONS, JobCollector
from concertina.controller.settings import from_environment
from concertina.kube.parse.views import job_view
from concertina.local.host import processes
from concertina.plan.observed import JobView

NOW = 1_700_000_000.0
SPEC: dict[str, Any] = {
    "replicas": 8,
    "elastic": {"minReplicas": 2},
    "template": {"spec": {"containers": [{"name": "trainer", "image": "i", "command": ["x"]}]}},
}


def at(seconds: float) -> str:
    return rfc3339(NOW - seconds)


STATUS: dict[str, Any] = {
    "conditions": [
        {"type": "Ready", "status": "True", "reason": "Training", "lastTransitionTime": at(9)},
        {"type": "Stalled", "status": "False", "reason": "Fine", "lastTransitionTime": at(9)},
    ],
    "startTime": at(1000),
    "replicas": 7,
    "world": {"round": 5, "replicas": 6, "workers": 12},
    "progress": {"step": 70, "steps": 100, "loss": 2.5, "tokensPerSecond": 900.0, "mfu": 0.4, "at": at(3)},
    "lastCheckpoint": {"step": 60, "uri": "s3://b/x", "at": at(120)},
    "restarts": {
        "budget": 7,
        "total": 9,
        "recent": [
            {"at": at(10), "replica": "a", "reason": reason} for reason in ("NodeLost", "NodeLost", "OutOfMemory")
        ],
    },
    "avoidedNodes": [{"node": "a", "until": at(-60)}, {"node": "b", "until": at(60)}],
    "rounds": 5,
    "stepsReplayed": 3,
    "goodput": {
        "percent": 80.0,
        "productiveSeconds": 800.0,
        "recoverySeconds": 150.0,
        "waitingSeconds": 50.0,
        "at": at(1000),
    },
}


def job(name: str = "j", status: dict[str, Any] | None = None, spec: dict[str, Any] = SPEC) -> JobView:
    metadata = {"name": name, "namespace": "n", "uid": f"uid-{name}", "creationTimestamp": at(2000), "generation": 1}
    return job_view({"metadata": metadata, "spec": spec, "status": STATUS if status is None else status})


def series(*jobs: JobView, now: float = NOW) -> dict[tuple[str, ...], float]:
    """Return values by name and by the values of the labels other than the namespace.

    The job comes first, and the other labels are in the order of their names.
    """
    collector = JobCollector(jobs, now)
    text = generate_latest(collector).decode()  # type: ignore[arg-type]
    found = {}
    for family in parse(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("namespace") == "n"
            name = sample.name.removeprefix("concertina_trainingjob_")
            found[name, labels.pop("trainingjob"), *(labels[key] for key in sorted(labels))] = sample.value
    return found


def test_a_job_is_told_of_by_its_status() -> None:
    values = series(job())
    times = {key[2]: value for key, value in values.items() if key[0] == "time_seconds_total"}
    assert times.keys() == {name.removesuffix("_seconds") for name in Goodput.model_fields if name.endswith("_seconds")}
    assert {name: value for name, value in times.items() if value} == {
        "productive": 800.0,
        "recovery": 150.0,
        "waiting": 50.0,
    }
    rest = {(name, *labels): value for (name, _, *labels), value in values.items() if name != "time_seconds_total"}
    assert rest == {
        ("info", "Agent", "command", "uid-j"): 1,
        ("phase", "Training"): 1,
        ("condition", "True", "Ready"): 1,
        ("condition", "False", "Stalled"): 1,
        ("wanted_replicas",): 8,
        ("min_replicas",): 2,
        ("replicas",): 7,
        ("ready_replicas",): 6,
        ("standby_replicas_ready",): 0,
        ("world_size",): 12,
        ("rounds_total",): 5,
        ("failures_total",): 9,
        ("failures_in_window", "NodeLost"): 2,
        ("failures_in_window", "OutOfMemory"): 1,
        ("restarts_remaining",): 7,
        ("goodput_ratio",): 0.8,
        ("step",): 70,
        ("steps",): 100,
        ("steps_replayed_total",): 3,
        ("loss",): 2.5,
        ("tokens_per_second",): 900,
        ("mfu_ratio",): 0.4,
        ("progress_age_seconds",): 3,
        ("checkpoint_age_seconds",): 120,
        ("checkpoint_waited_seconds",): 120,
        ("checkpoint_step",): 60,
        ("stragglers",): 0,
        ("avoided_nodes",): 1,
    }


def test_an_unknown_goodput_has_no_series() -> None:
    spent = {"unknownSeconds": 900.0, "recoverySeconds": 50.0, "at": at(1000)}
    values = series(job(status={**STATUS, "goodput": spent}))
    assert values["time_seconds_total", "j", "unknown"] == 900
    assert ("goodput_ratio", "j") not in values


@pytest.mark.parametrize(
    ("every", "seconds"),
    [
        pytest.param({"everySteps": 50}, 20, id="steps since"),
        pytest.param({"everySteps": 50, "everySeconds": 90}, 7200, id="the clock comes first"),
        pytest.param({"everySteps": 50, "everySeconds": 110}, 20, id="steps come first"),
        pytest.param({"everySeconds": 300}, 7200, id="the clock alone"),
    ],
)
def test_what_counts_towards_the_next_checkpoint(every: dict[str, Any], seconds: float) -> None:
    """The job was suspended for two hours after a checkpoint, and has trained ten steps since."""
    spec = {**SPEC, "checkpoint": {"uri": "s3://bucket/run", **every}}
    last = {"step": 60, "uri": "s3://bucket/run/x", "at": at(7200)}
    told = {"lastCheckpoint": last, "progress": {"step": 70, "stepSeconds": 2.0, "at": at(3)}}
    assert series(job(status=told, spec=spec))["checkpoint_waited_seconds", "j"] == seconds


@pytest.mark.parametrize(
    ("checkpoint", "status", "seconds"),
    [
        ({"everySeconds": 300}, {}, 300),
        ({"everySteps": 50}, {"progress": {"step": 1, "stepSeconds": 2.0, "at": at(3)}}, 100),
        ({"everySteps": 500}, {"progress": {"step": 1, "stepSeconds": 2.0, "at": at(3)}}, 600),
        ({"everySeconds": "Auto"}, {"checkpointInterval": {"seconds": 77.0, "suggestedSeconds": 77.0}}, 77),
        ({"everySeconds": "Auto"}, {}, None),
        (None, {"progress": {"step": 1, "stepSeconds": 2.0, "at": at(3)}}, None),
    ],
)
def test_the_interval_of_checkpoints_is_the_shorter_of_clock_and_steps(
    checkpoint: dict[str, Any] | None, status: dict[str, Any], seconds: float | None
) -> None:
    spec = SPEC if checkpoint is None else {**SPEC, "checkpoint": {"uri": "s3://bucket/x", **checkpoint}}
    assert series(job(status=status, spec=spec)).get(("checkpoint_interval_seconds", "j")) == seconds


def test_a_job_that_stands_still_says_why_and_one_with_a_price_what_it_costs() -> None:
    stalled = {"type": "Stalled", "status": "True", "reason": "StorageUnavailable", "lastTransitionTime": at(9)}
    recovery = [{"cause": "NodeLost", "times": 2, "seconds": 100.0}, {"cause": "Growing", "seconds": 50.0}]
    cost = {"currency": "EUR", "total": 12.5, "perMillionTokens": 0.25}
    status = {**STATUS, "conditions": [stalled], "goodput": {**STATUS["goodput"], "recovery": recovery}, "cost": cost}
    values = series(job(status=status))
    assert values["stalled", "j", "StorageUnavailable"] == 1
    assert values["recovery_seconds_total", "j", "NodeLost"] == 100
    assert values["recovery_seconds_total", "j", "Growing"] == 50
    assert values["cost", "j", "EUR"] == 12.5
    assert values["cost_per_million_tokens", "j", "EUR"] == 0.25
    without_tokens = series(job(status={**STATUS, "cost": {"currency": "EUR", "total": 12.5}}))
    assert ("cost", "j", "EUR") in without_tokens
    assert ("cost_per_million_tokens", "j", "EUR") not in without_tokens


def test_a_tracker_that_takes_nothing_is_told_of_where_there_is_one() -> None:
    spec = {**SPEC, "tracking": {"backend": "MLflow", "uri": "http://m:5000"}}
    key = ("tracker_unreachable", "j")
    assert series(job(spec=spec))[key] == 0
    assert series(job(spec=spec, status={**STATUS, "tracking": "it is gone"}))[key] == 1
    assert key not in series(job())


def test_of_a_job_that_has_not_begun_there_is_no_number_that_nobody_knows() -> None:
    names = {key[0]: value for key, value in series(job(status={})).items()}
    assert names["phase"] == 1
    assert names.keys().isdisjoint({"step", "loss", "checkpoint_age_seconds", "time_seconds_total", "mfu_ratio"})


def test_a_spec_that_can_not_be_read_has_no_wanted_replicas_and_the_rest() -> None:
    names = {key[0] for key in series(job(spec={"replicas": "x"}))}
    assert "wanted_replicas" not in names
    assert {"info", "phase", "rounds_total"} <= names


def test_reasons_are_bounded() -> None:
    recent = [{"at": at(1), "replica": "a", "reason": f"r{number}"} for number in range(100)]
    values = series(job(status={"restarts": {"recent": [*recent, *recent[:1]]}}))
    reasons = {key[2]: value for key, value in values.items() if key[0] == "failures_in_window"}
    assert len(reasons) == MOST_REASONS + 1
    assert (reasons["r0"], sum(reasons.values())) == (2, 101)


def test_a_time_that_nobody_can_read_costs_that_series_alone() -> None:
    strange = {**STATUS, "lastCheckpoint": {**STATUS["lastCheckpoint"], "at": "soon"}}
    assert JobStatus.model_validate(strange).last_checkpoint is not None
    values = series(job("good"), job("bad", strange))
    assert ("checkpoint_age_seconds", "good") in values
    assert ("checkpoint_age_seconds", "bad") not in values
    assert values["step", "bad"] == 70


@pytest.mark.parametrize("openmetrics", [False, True])
def test_a_scrape_has_the_jobs_of_that_moment(openmetrics: bool) -> None:
    (port,) = processes.free_ports("127.0.0.1", 1)
    jobs = [job("a"), job("b")]
    environment = {"CONCERTINA_NAMESPACE": "n", "CONCERTINA_MASTER_KEY_SECRET": "s", "CONCERTINA_IMAGE_AGENT": "i"}
    settings = from_environment({**environment, "CONCERTINA_METRICS": f"127.0.0.1:{port}"})

    async def ask() -> set[str]:
        accepts = {"Accept": "application/openmetrics-text; version=1.0.0"} if openmetrics else {}
        async with (
            aiohttp.ClientSession(headers=accepts) as session,
            session.get(f"http://127.0.0.1:{port}/metrics") as a,
        ):
            families = (parse_openmetrics if openmetrics else parse)(await a.text())
            samples = [sample for family in families for sample in family.samples]
        assert "process_cpu_seconds_total" in {sample.name for sample in samples}
        return {sample.labels["trainingjob"] for sample in samples if "trainingjob" in sample.labels}

    async def scenario() -> None:
        async with serving.endpoints(settings, [lambda: JobCollector(tuple(jobs))]):
            assert await ask() == {"a", "b"}
            del jobs[0]
            assert await ask() == {"b"}

    asyncio.run(scenario())
