"""Tracking of a run on an MLflow server. The run is found by a tag with the job's uid.

MLflow cannot delete logged values. If a step is trained again, its first values remain.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # the caller sends the records again after an error

from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from concertina_protocol.tracking.tracking_records import Checkpointed, RunOutcome, StepDone
from concertina_tracking.about import About
from concertina_tracking.settings import TrackingSettings

UID = "concertina.uid"
"""Tag that identifies the run: its value is the job's uid."""
MARKER = "round"
"""Name of a metric that each step has. Its values on the server show which steps are logged."""
MOST_METRICS, MOST_PARAMETERS, MOST_TAG = 1000, 100, 5000
"""Limits of MLflow: metrics and parameters in a request, and characters in a tag."""
STATUS = {RunOutcome.SUCCEEDED: "FINISHED", RunOutcome.STOPPED: "KILLED"}


class MlflowRun:
    """Run that is tracked on an MLflow server."""

    def __init__(self, settings: TrackingSettings, about: About) -> None:
        """Find or create the run on the MLflow server, and log its parameters and tags.

        Raises:
            MlflowException: If the server refuses a request or cannot be reached.
        """
        self._client = MlflowClient(settings.uri)
        run = self._find_or_create(settings)
        self._id, self._status = run.info.run_id, run.info.status
        self._describe(run.data.params, about)

    def go_on(self, step: int, *, latest: bool) -> Collection[int]:
        if latest and self._status != "RUNNING":
            self._set_status("RUNNING")
        history = self._client.get_metric_history(self._id, MARKER)
        return frozenset(metric.step for metric in history if metric.step > step)

    def log(self, steps: Sequence[StepDone]) -> None:
        for batch in _batches(steps):
            self._client.log_batch(self._id, metrics=batch)

    def annotate(self, name: str, text: str) -> None:
        self._client.set_tag(self._id, _name(f"concertina.{name}"), text[:MOST_TAG])

    def reference(self, checkpoint: Checkpointed, made_of: Mapping[str, str]) -> None:
        name = f"checkpoint.{checkpoint.step}"
        self.annotate(name, checkpoint.uri)
        if made_of:
            self.annotate(f"{name}.made_of", json.dumps(made_of))

    def end(self, outcome: RunOutcome) -> None:
        self._set_status(STATUS.get(outcome, "KILLED"))

    def close(self) -> None:
        """Do nothing, because no request is pending."""

    def _set_status(self, status: str) -> None:
        if status == "RUNNING":
            self._client.update_run(self._id, status=status)
        else:
            self._client.set_terminated(self._id, status)
        self._status = status

    def _find_or_create(self, settings: TrackingSettings) -> Run:
        experiment = self._experiment(settings.experiment)
        if (run := self._oldest(experiment, settings.run_id)) is None:
            tags = {**settings.tags, UID: settings.run_id, "concertina.job": settings.job}
            created_run = self._client.create_run(experiment, tags=tags, run_name=settings.run_name)
            run = self._oldest(experiment, settings.run_id) or created_run
            if run.info.run_id != created_run.info.run_id:  # another replica created a run first: use that one
                self._client.delete_run(created_run.info.run_id)
        return run

    def _experiment(self, name: str) -> str:
        if (experiment := self._client.get_experiment_by_name(name)) is not None:
            return str(experiment.experiment_id)
        try:
            return str(self._client.create_experiment(name))
        except MlflowException:
            if (experiment := self._client.get_experiment_by_name(name)) is None:
                raise
            return str(experiment.experiment_id)

    def _oldest(self, experiment: str, uid: str) -> Run | None:
        order = ["attributes.start_time ASC", "attributes.run_id ASC"]
        runs = self._client.search_runs([experiment], f"tags.`{UID}` = '{uid}'", max_results=1, order_by=order)
        return runs[0] if runs else None

    def _describe(self, logged_parameters: Mapping[str, str], about: About) -> None:
        """Log the parameters and tags of the run.

        MLflow does not allow a parameter to change. If the run has already logged another value of a parameter, a tag
        records the new value.
        """
        parameters = {_name(name): value for name, value in about.parameters.items()}
        new = [Param(name, value) for name, value in parameters.items() if name not in logged_parameters]
        for begin in range(0, len(new), MOST_PARAMETERS):
            self._client.log_batch(self._id, params=new[begin : begin + MOST_PARAMETERS])
        changed = {
            f"changed.{name}": value
            for name, value in parameters.items()
            if logged_parameters.get(name, value) != value
        }
        code = {f"concertina.{name}": value for name, value in about.code.items()}
        if "commit" in about.code:
            code["mlflow.source.git.commit"] = about.code["commit"]
        tags = [RunTag(name, value) for name, value in {**code, **changed}.items()]
        for begin in range(0, len(tags), MOST_PARAMETERS):
            self._client.log_batch(self._id, tags=tags[begin : begin + MOST_PARAMETERS])


def _batches(steps: Sequence[StepDone]) -> Iterator[list[Metric]]:
    """Yield the metrics of the steps in batches. A batch never splits a step.

    The last metric of each step is a marker, which shows that the step is complete.
    """
    batch: list[Metric] = []
    for step in steps:
        values = sorted(step.metrics.items(), key=lambda item: item[0] == MARKER)
        metrics = [Metric(_name(name), value, int(step.at * 1000), step.step) for name, value in values]
        if batch and len(batch) + len(metrics) > MOST_METRICS:
            yield batch
            batch = []
        batch += metrics
    if batch:
        yield batch


def _name(text: str) -> str:
    """Return the text in a form that MLflow accepts as a name.

    MLflow treats names as paths, and refuses empty parts and parts such as `..`. A single refused name would prevent
    all later records from being sent.
    """
    parts = re.sub(r"[^\w\-. /:]", "_", text)[:250].split("/")
    return "/".join("_" if part in ("", ".", "..") else part for part in parts)
