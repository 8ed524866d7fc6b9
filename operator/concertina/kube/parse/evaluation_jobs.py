"""Results of the Kubernetes Jobs that evaluate checkpoints (`spec.evaluationJob`). All functions are pure."""

from __future__ import annotations

from concertina.api.status import EvaluationJobState
from concertina.kube.resources import Raw
from concertina.plan.observed import EvaluationJobView

CONDITIONS = {"Complete": EvaluationJobState.SUCCEEDED, "Failed": EvaluationJobState.FAILED}


def evaluation_job_view(job: Raw) -> EvaluationJobView:
    """Return the fields of a Kubernetes Job that plan() needs."""
    for condition in (job.get("status") or {}).get("conditions") or ():
        state = CONDITIONS.get(condition.get("type", ""))
        if state is not None and condition.get("status") == "True":
            failed = state is EvaluationJobState.FAILED
            message = f"{condition.get('reason', '')}: {condition.get('message', '')}" if failed else ""
            return EvaluationJobView(state, message)
    return EvaluationJobView(EvaluationJobState.RUNNING)
