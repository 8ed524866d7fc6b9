"""Figures from the text of agents' metrics."""

from __future__ import annotations

import pytest

from concertina.diagnosis.agents import figures
from concertina_agent.metrics import families as f
from concertina_agent.metrics.exposition import MetricSample, render


def test_what_an_agent_serves_is_read() -> None:
    """For two workers with metrics of their own, the figure is the sum."""
    samples = [MetricSample(f.WORKER_MEMORY, 5, more=(("local_rank", str(rank)),)) for rank in (0, 1)]
    gpus = [MetricSample(f.GPU_UTILIZATION, 0.25 * n, (str(n), f"GPU-{n}", "", "H100", "node")) for n in (1, 2)]
    others = [MetricSample(f.LOSS, float("nan")), MetricSample(f.STORAGE_FAILURES, 2)]
    text = render([*samples, *gpus, *others], (("replica", "a"),)).decode()
    agent_figures = figures("a", 1.0, text)
    assert (agent_figures.worker_bytes, agent_figures.finite_loss, agent_figures.storage_failures) == (10, False, 2)
    assert agent_figures.gpu_utilization == (0.25, 0.5)


def test_what_is_not_served_is_not_known() -> None:
    agent_figures = figures("a", 1.0, "# nothing\n")
    assert (agent_figures.worker_bytes, agent_figures.finite_loss, agent_figures.storage_failures) == (None, None, None)


def test_what_is_no_such_text_is_refused() -> None:
    with pytest.raises(ValueError, match="could not convert"):
        figures("a", 1.0, "concertina_training_loss{ 3")
