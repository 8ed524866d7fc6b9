"""Operator's lists of notice taints and of conditions of faulty nodes, from its environment."""

from __future__ import annotations

import pytest

from concertina.controller.settings import CONDITIONS, TAINTS, from_environment
from concertina.kube.parse.fault_conditions import FAULT_CONDITIONS
from concertina.kube.parse.notice_taints import NOTICE_TAINTS


@pytest.mark.parametrize(
    ("value", "taints"),
    [
        (None, NOTICE_TAINTS),
        ("", ()),
        ("mine/going, karpenter.sh/disruption=disrupting,", ("mine/going", "karpenter.sh/disruption=disrupting")),
    ],
)
def test_absent_is_the_well_known_empty_is_none(value: str | None, taints: tuple[str, ...]) -> None:
    environment = {
        "CONCERTINA_NAMESPACE": "system",
        "CONCERTINA_MASTER_KEY_SECRET": "key",
        "CONCERTINA_IMAGE_AGENT": "agent:1",
    }
    assert from_environment(environment | ({} if value is None else {TAINTS: value})).notice_taints == taints
    conditions = from_environment(environment | ({} if value is None else {CONDITIONS: value})).fault_conditions
    assert conditions == (FAULT_CONDITIONS if value is None else taints)
