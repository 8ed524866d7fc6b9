"""Values from an agent's metrics that a job's status does not contain."""

from __future__ import annotations

import math

from prometheus_client.parser import text_string_to_metric_families

from concertina.diagnosis.evidence import AgentFigures

MEMORY = "concertina_worker_resident_memory_bytes"
LOSS = "concertina_training_loss"
FAILURES = "concertina_checkpoint_storage_failures_total"
UTILIZATION = "concertina_gpu_utilization_ratio"


def figures(replica: str, at: float, text: str) -> AgentFigures:
    """Return the values that a diagnosis needs from an agent's metrics.

    Args:
        replica: Name of the replica.
        at: Unix time of the reading in seconds.
        text: Metrics as GET /metrics returns them.

    Raises:
        ValueError: When the text can't be parsed.
    """
    sums: dict[str, float] = {}
    utilization: list[float] = []
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in (MEMORY, LOSS, FAILURES):
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
            elif sample.name == UTILIZATION:
                utilization.append(sample.value)
    loss = sums.get(LOSS)
    return AgentFigures(
        replica=replica,
        at=at,
        worker_bytes=sums.get(MEMORY),
        finite_loss=None if loss is None else math.isfinite(loss),
        gpu_utilization=tuple(utilization),
        storage_failures=sums.get(FAILURES),
    )
