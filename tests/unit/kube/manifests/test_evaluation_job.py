"""The Job that is made from a PodTemplate."""

from __future__ import annotations

from builders.manifests import job
from concertina.api.spec import EvaluationJob
from concertina.api.status import EvaluationJobState
from concertina.kube.manifests.evaluation_job import evaluation_job_manifest
from concertina.kube.manifests.names import JOB_UID, labels
from concertina.kube.parse.evaluation_jobs import evaluation_job_view
from concertina.kube.parse.views import job_view
from concertina.plan.actions import CreateEvaluationJob
from concertina.plan.observed import EvaluationJobView

VIEW = job_view(job({"template": {"spec": {"containers": [{"name": "trainer", "image": "i", "command": ["x"]}]}}}))
CREATE = CreateEvaluationJob("j-1-2", "s3://bucket/run/2", 2)


def test_its_pods_have_the_checkpoint_and_are_not_taken_for_pods_that_train() -> None:
    container = {
        "name": "a",
        "image": "i",
        "env": [{"name": "CONCERTINA_CHECKPOINT_STEP", "value": "7"}, {"name": "X"}],
    }
    template = {
        "metadata": {
            "name": "score",
            "labels": {"kueue.x-k8s.io/queue-name": "tests", JOB_UID: "another"},
            "annotations": {"a": "b"},
        },
        "template": {
            "metadata": {"labels": {"app": "a", "app.kubernetes.io/managed-by": "concertina"}},
            "spec": {"restartPolicy": "Always", "containers": [container], "initContainers": [{"name": "b"}]},
        },
    }
    made = evaluation_job_manifest(VIEW, EvaluationJob(pod_template="score", backoff_limit=2), template, CREATE)
    pod = made["spec"]["template"]
    variables = [
        {"name": "CONCERTINA_CHECKPOINT_URI", "value": "s3://bucket/run/2"},
        {"name": "CONCERTINA_CHECKPOINT_STEP", "value": "2"},
    ]
    assert pod["spec"]["containers"] == [{**container, "env": [*variables, {"name": "X"}]}]
    assert pod["spec"]["initContainers"] == [{"name": "b", "env": variables}]
    assert pod["spec"]["restartPolicy"] == "Never", "Always is the default of PodTemplates, and no Job may have it"
    assert pod["metadata"]["labels"] == {"app": "a", "concertina.dev/evaluates": VIEW.name}
    assert made["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "tests", **labels(VIEW)}
    assert made["metadata"]["ownerReferences"][0]["uid"] == VIEW.uid
    assert made["spec"]["backoffLimit"] == 2
    assert "activeDeadlineSeconds" not in made["spec"]


def test_its_result_is_that_of_its_conditions() -> None:
    def ended(**conditions: str) -> EvaluationJobView:
        listed = [
            {"type": kind, "status": status, "reason": "R", "message": "m"} for kind, status in conditions.items()
        ]
        return evaluation_job_view({"status": {"conditions": listed}})

    assert evaluation_job_view({}).state is EvaluationJobState.RUNNING
    assert ended(Failed="False", SuccessCriteriaMet="True").state is EvaluationJobState.RUNNING
    assert ended(SuccessCriteriaMet="True", Complete="True").state is EvaluationJobState.SUCCEEDED
    assert ended(Failed="True").message == "R: m"
