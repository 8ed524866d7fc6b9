"""Memory that the operator keeps for TrainingJobs of any size, measured in bytes that stay allocated."""

from __future__ import annotations

import gc
import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from builders.manifests import job
from concertina.controller.cache.cluster_cache import ClusterCache
from concertina.kube.parse.views import job_view
from concertina.kube.resources import Raw
from concertina.kube.watch.trainingjobs import strip

JOBS = 2
MOST_BYTES = 600_000
"""Maximum number of bytes of each job: 300 jobs stay within 180 MiB."""


def with_junk(entries: int, **metadata: Any) -> Raw:
    """Return a job with empty lists, which take the most memory for their size."""
    container = {"name": "trainer", "image": "i", "command": ["x"]}
    obj = job({"suspend": True, "template": {"spec": {"containers": [container], "junk": [[]] * entries}}})
    return {**obj, "metadata": {**obj["metadata"], **metadata}}


@pytest.mark.parametrize("entries", [9_900, 100_000], ids=["most that are accepted", "refused"])
def test_a_job_of_any_size_takes_little_memory(entries: int) -> None:
    cache = ClusterCache(lambda uid: None, lambda uid: {})
    text = json.dumps(with_junk(entries, labels={f"l{number}": "" for number in range(1000)}))
    kept_by_kopf: list[Raw] = []

    def take(number: int) -> None:
        obj = json.loads(text)
        obj["metadata"] |= {"uid": f"uid-{number}", "name": f"job-{number}", "resourceVersion": "1"}
        cache.on_job(obj)
        strip(obj)
        kept_by_kopf.append(obj)

    take(0)  # Objects that are created once do not count.
    tracemalloc.start()
    try:
        for number in range(1, JOBS + 1):
            take(number)
        gc.collect()
        each = tracemalloc.get_traced_memory()[0] / JOBS
    finally:
        tracemalloc.stop()
    assert each < MOST_BYTES
    assert len(list(cache.jobs())) == JOBS + 1
    errors = {cached.view.spec_error for cached in cache.jobs()}
    assert errors == {""} if entries < 10_000 else "KiB as JSON, more than 256 KiB" in errors.pop()


def wrong_in_many_places() -> Raw:
    container = {"name": "trainer", "image": "i", "command": ["x"], "ports": [1] * 2000}
    return job({"suspend": True, "template": {"spec": {"containers": [container]}}})


def with_unknown_fields() -> Raw:
    container = {"name": "trainer", "image": "i", "command": ["x"]}
    fields = {f"field{number}": 0 for number in range(1000)}
    return job({"suspend": True, "template": {"spec": {"containers": [container]}}, **fields})


def held_by_many_finalizers() -> Raw:
    obj = with_junk(0)
    return {**obj, "metadata": {**obj["metadata"], "finalizers": [f"a/{number}" for number in range(100_000)]}}


@pytest.mark.parametrize("made", [wrong_in_many_places, with_unknown_fields, held_by_many_finalizers])
def test_what_is_wrong_with_a_job_is_kept_in_few_words(made: Callable[[], Raw]) -> None:
    view = job_view(made())
    texts = "".join((view.spec_error, *view.ignored, *view.finalizers))
    assert 0 < len(texts) < 10_000


def test_the_problems_that_are_not_named_are_counted() -> None:
    assert job_view(wrong_in_many_places()).spec_error.endswith("; and 1984 more")
