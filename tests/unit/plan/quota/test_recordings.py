"""Model of Kueue for tests of the operator: it decides as the real Kueue did in the recordings."""

from __future__ import annotations

import asyncio
import copy
import random
import re
from typing import Any

import pytest

from builders.cluster.kueue_scenarios import NAMESPACE, recorded
from builders.cluster.protocol import state
from builders.queueing import FakeApi, FakeKueue
from concertina.kube.resources import WORKLOADS

Object = dict[str, Any]
COHORT = "reclaim_in_cohort"
"""Scenario that the model leaves out, because it has one ClusterQueue."""
QUOTA = 4
STEPS = 300
"""Number of steps of the model after each write. In each step, Kueue does one of the things that it may do."""
LACKING = re.compile(r"(\d+) more needed")
VICTIMS = re.compile(r"preemption of (\d+) workload")
TRUE = ("QuotaReserved", "Admitted", "Evicted", "Finished")


def decided(workload: Object) -> Object:
    """Return what the operator acts on: counts, quota, true conditions, and missing quota."""
    conditions = workload["conditions"]
    true = {kind: conditions[kind]["reason"] for kind in TRUE if conditions.get(kind, {}).get("status") == "True"}
    message = conditions.get("QuotaReserved", {}).get("message", "") if not workload["admission"] else ""
    lacking, victims = LACKING.search(message), VICTIMS.search(message)
    return {
        "counts": workload["counts"],
        "admitted": {name: entry["count"] for name, entry in workload["admission"].items()},
        "conditions": true,
        "lacking": lacking and lacking[1],
        "victims": victims and victims[1],
    }


class Model:
    """API server and Kueue of the model, in which each write is answered before the next one."""

    def __init__(self, seed: int) -> None:
        self.time = 1_800_000_000.0
        self.api = FakeApi(random.Random(seed), lambda: self.time, slow=0)
        self.kueue = FakeKueue(self.api, QUOTA)

    def write(self, write: Object) -> None:
        method, name, body = write["method"], write["workload"], copy.deepcopy(write["body"])
        if method == "POST":
            self.api.put_new(WORKLOADS.plural, body)
        elif method == "PATCH":
            asyncio.run(self.api.patch(WORKLOADS, NAMESPACE, name, body, write["subresource"]))
        else:
            asyncio.run(self.api.delete(WORKLOADS, NAMESPACE, name))
        self.time += 1.0
        for _ in range(STEPS):
            self.kueue.step()

    def decided(self) -> dict[str, Object]:
        workloads = self.api.objects[WORKLOADS.plural]
        return {name: decided(state(workload)) for name, workload in workloads.items()}


@pytest.mark.parametrize("name", [name for name in recorded() if name != COHORT])
def test_the_model_decides_as_kueue_did(name: str) -> None:
    model = Model(seed=0)
    newest: dict[str, Object] = {}
    for number, step in enumerate(recorded()[name]):
        for answer in step["answers"]:
            if "deleted" in answer:
                newest.pop(answer["deleted"], None)
            else:
                newest[answer["workload"]] = decided(answer)
        model.write(step["write"])
        write = step["write"]
        assert model.decided() == newest, f"step {number}: {write['method']} {write['workload']} {write['subresource']}"
