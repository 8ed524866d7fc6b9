"""Names of pods: parsing is the inverse of making them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from concertina.api.pod_names import PodName, parse, pod_name, rendezvous_name

JOBS = st.from_regex("[a-z]([-a-z0-9]{0,20}[a-z0-9])?", fullmatch=True) | st.just("a-rendezvous-1-2")


@given(JOBS, st.integers(0, 10**9 - 1), st.integers(0, 10**9 - 1))
def test_what_is_made_is_read(job: str, index: int, attempt: int) -> None:
    assert parse(pod_name(job, index, attempt)) == PodName(job, index, attempt)
    assert parse(rendezvous_name(job, attempt)) == PodName(job, None, attempt)


@pytest.mark.parametrize("name", ["", "a", "a-1", "-1-2", "a-x-1", "a-1-2x", "a-4000000000-0", "rendezvous-1"])
def test_other_names_are_no_jobs_pods(name: str) -> None:
    assert parse(name) is None
