"""A user's object, of which the operator writes nothing but the status."""

from __future__ import annotations

from typing import Any

import pytest

from builders.cluster.operator_process import Jobs

pytestmark = pytest.mark.usefixtures("operator")
Object = dict[str, Any]
OF_EACH_WRITE = {"resourceVersion", "managedFields"}


def written(job: Object) -> Object:
    """Return what the user has written, as the API server has stored it."""
    metadata = {name: value for name, value in job["metadata"].items() if name not in OF_EACH_WRITE}
    return {**job, "metadata": metadata, "status": None}


def fields(job: Object, subresource: str = "") -> list[Object]:
    """Return the fields that each manager has set."""
    return [each for each in job["metadata"]["managedFields"] if each.get("subresource", "") == subresource]


@pytest.mark.long(law="tests/cluster/operator/lifecycle/test_jobs.py::test_a_job_runs_to_its_end")
def test_a_whole_life_of_a_job_leaves_the_users_object_as_it_was(jobs: Jobs) -> None:
    body = {
        "apiVersion": "concertina.dev/v1beta1",
        "kind": "TrainingJob",
        "metadata": {"name": "a", "labels": {"team": "x"}, "annotations": {"owner": "y"}},
        "spec": {
            "replicas": 2,
            "template": {
                "spec": {"containers": [{"name": "trainer", "image": "concertina/trainer:test", "command": ["true"]}]}
            },
        },
    }
    created = jobs.cluster.api.call("POST", jobs.path, body)
    ended = jobs.wait_true("a", "Complete")
    assert written(ended) == written(created)
    assert fields(ended) == fields(created)
    assert [sorted(each["fieldsV1"]) for each in fields(ended, "status")] == [["f:status"]]
    assert fields(created, "status") == []

    jobs.cluster.api.call("DELETE", f"{jobs.path}/a")
    assert "a" not in {job["metadata"]["name"] for job in jobs.cluster.api.call("GET", jobs.path)["items"]}
    groups = {group["name"] for group in jobs.cluster.api.call("GET", "/apis")["groups"]}
    assert not groups & {"kopf.dev", "zalando.org"}, "peering objects"
    events = jobs.cluster.api.call("GET", f"/api/v1/namespaces/{jobs.namespace}/events")["items"]
    assert not [event for event in events if "kopf" in event["metadata"]["name"]]
