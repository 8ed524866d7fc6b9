"""Logs of the operator and of a job's pods: they contain no secret, whatever happens in the run."""

from __future__ import annotations

from pathlib import Path

from builders.cluster.operator_process import Jobs, Operator
from builders.until import until

ENV, ARGUMENT, SECRET, ANNOTATION, TEMPLATE = (f"planted-{name}-c0ffee" for name in ("env", "arg", "s3", "job", "pod"))
SCRIPT = "import sys; sys.exit('the worker fails')"


def test_no_secret_is_in_any_log_of_a_run_that_fails(jobs: Jobs, operator: Operator, tmp_path: Path) -> None:
    secret = {"metadata": {"name": "s3"}, "stringData": {"AWS_ACCESS_KEY_ID": SECRET, "AWS_SECRET_ACCESS_KEY": SECRET}}
    jobs.cluster.api.call("POST", f"/api/v1/namespaces/{jobs.namespace}/secrets", secret)
    container = {
        "name": "trainer", "image": "concertina/trainer:test", "command": ["python3", "-c", SCRIPT, ARGUMENT],
        "env": [{"name": "TOKEN", "value": ENV}],
    }  # fmt: skip
    template = {"metadata": {"annotations": {"note": TEMPLATE}}, "spec": {"containers": [container]}}
    checkpoint = {"uri": "s3://nowhere/a", "everySteps": 1, "secretName": "s3"}
    job = jobs.create("a", template=template, checkpoint=checkpoint, failurePolicy={"maxRestarts": 0})
    assert job["metadata"]["uid"]
    jobs.cluster.kubectl("annotate", "tj", "a", f"note={ANNOTATION}", "-n", jobs.namespace)
    jobs.wait_true("a", "Failed")
    logs = until(lambda: _logs(jobs), "logs of the pods")
    assert "the worker fails" in logs, "these are the logs of this run"
    assert operator.lines("status", f"{jobs.namespace}/a") or f"{jobs.namespace}/a" in operator.text()
    events = jobs.cluster.kubectl("get", "events", "-n", jobs.namespace, "-o", "json")
    for planted in (ENV, ARGUMENT, SECRET, ANNOTATION, TEMPLATE):
        assert planted not in logs
        assert planted not in operator.text()
        assert planted not in events
        assert planted not in str(jobs.get("a")["status"])


def _logs(jobs: Jobs) -> str:
    pods = jobs.pods("a")
    return "".join(jobs.cluster.kubectl("logs", pod["metadata"]["name"], "-n", jobs.namespace) for pod in pods)
